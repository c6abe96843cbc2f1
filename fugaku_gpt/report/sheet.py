"""Sheets of bullets as rows of reference: imported into a folder that tables treat like a run's, ``reference.json``.

Such a row has what the sheet says and no more: it names its hardware, and stands in a table of its own beside those of
measured runs, since nobody here ran it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from fugaku_gpt.config.schema import SHORT_DTYPES
from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.limits import TABLE_TEXT
from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.records.run import STATUSES, RunDirectory
from fugaku_gpt.records.sweep import digest_of
from fugaku_gpt.report.bullets import Bullet, is_rate, marks_of, read_bullets
from fugaku_gpt.report.imported import is_imported
from fugaku_gpt.report.notes_table import NO_VALUE
from fugaku_gpt.report.rows import ResultRow
from fugaku_gpt.typed_json import record_of
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 1
FILE = "reference.json"
_TRAINER = "unknown"  # a sheet does not say


def import_bullets(sheets: Sequence[Path], out: Path, given: Sequence[str] = ()) -> List[ResultRow]:
    """Read sheets of bullets, leave ``reference.json`` in ``out``, and return the rows.

    Args:
        given: ``key=value`` settings that hold where the sheets say nothing.

    Raises:
        UsageError: a sheet cannot be read, two have one name, or ``out`` holds a run.
    """
    earlier: Dict[str, Path] = {}
    for path in sheets:
        if path.name in earlier:
            raise UsageError(
                f"{earlier[path.name]}, {path}: rows are named by the name of their sheet, and these have one name; "
                "rename one, or import each into an --out of its own"
            )
        earlier[path.name] = path
    read = [(path, read_bullets(_text_of(path), str(path), given)) for path in sheets]
    if is_imported(out) or RunDirectory(out).config_file.exists():
        raise UsageError(f"{out}: already holds a run; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json_atomically(
            out / FILE,
            {
                "version": VERSION,
                "sheets": [
                    {"file": path.name, "bullets": [asdict(bullet) for bullet in bullets]} for path, bullets in read
                ],
                "imported": time.time(),
            },
        )
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}; choose another --out") from None
    return sheet_rows(out)


def is_sheet(path: Path) -> bool:
    """True if a folder holds the file of :func:`import_bullets`."""
    return (path / FILE).is_file()


def sheets_in(path: Path) -> List[Path]:
    """The folder itself, or the folders right below it, that hold imported sheets."""
    if is_sheet(path):
        return [path]
    return [child for child in sorted(path.iterdir()) if is_sheet(child)] if path.is_dir() else []


def sheet_rows(path: Path) -> List[ResultRow]:
    """The rows of an imported sheet, in its order.

    Raises:
        UsageError: the file is missing, or not of this format.
    """
    return [row for row, _ in rows_with_bullets(path)]


def rows_with_bullets(path: Path) -> List[Tuple[ResultRow, Bullet]]:
    """The rows of an imported sheet, each with the bullet that it is of.

    Raises:
        UsageError: the file is missing, or not of this format.
    """
    pairs: List[Tuple[ResultRow, Bullet]] = []
    for file, bullets in _read(path).items():
        rows = (_row_of(bullet, marks, f"{path}/{file}") for bullet, marks in zip(bullets, marks_of(bullets)))
        pairs += zip(rows, bullets)
    return pairs


def _row_of(bullet: Bullet, marks: Sequence[str], file: str) -> ResultRow:
    """A bullet as a row of reference; ``file`` is the sheet that it is from."""
    rate, tokens = bullet.rate, bullet.tokens
    if tokens is None and rate is not None and bullet.seq_len is not None:
        tokens = rate * bullet.seq_len
    remarks = [
        SHORT_DTYPES.get(bullet.dtype or "", ""),
        "recompute=selective" if bullet.recompute == "selective" else "",
    ]
    remarks += [*bullet.more, f"{rate:.15g} {bullet.sample}/s" if rate is not None else "", bullet.remark, *marks]
    return ResultRow(
        size=bullet.model or NO_VALUE,
        seq_len=bullet.seq_len,
        nodes=bullet.nodes,
        dp=bullet.dp,
        tp=bullet.tp,
        pp=bullet.pp,
        micro_batch=bullet.micro_batch,
        global_batch=bullet.global_batch,
        ranks_per_node=bullet.ranks_per_node or 1,
        recompute=bullet.recompute == "full",
        dtype=bullet.dtype or "",
        seconds_per_iteration=bullet.global_batch / rate if rate is not None else None,
        tokens_per_second=tokens,
        samples_per_second=rate,
        status=bullet.status,
        remarks=tuple(remark for remark in remarks if remark),
        digest=digest_of(json.dumps([file, asdict(bullet)], sort_keys=True)),
        runs=(f"{file}:{bullet.line}",),
        trainer=_TRAINER,
        hardware=bullet.hardware,
        is_reference=True,
    )


def _text_of(path: Path) -> str:
    try:
        return read_text(path, TABLE_TEXT, errors="replace", encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _read(path: Path) -> Dict[str, List[Bullet]]:
    read = read_versioned_json(path / FILE, "an imported sheet", (VERSION,), _checked, mend="import it again")
    if read is None:
        raise UsageError(f"{path / FILE}: no such file; import the sheet again")
    return read


def _checked(values: Dict[str, Any]) -> Dict[str, List[Bullet]]:
    """Sheet → its bullets.

    Raises:
        KeyError, TypeError, ValueError: a value is missing or not of its type.
    """
    bullets_of_file: Dict[str, List[Bullet]] = {}
    for sheet in values["sheets"]:
        bullets = [record_of(Bullet, bullet) for bullet in sheet["bullets"]]
        for bullet in bullets:
            is_rounded = 0 <= bullet.rounding <= max(1.0, bullet.rate or 0.0)
            has_figures = (
                is_rounded
                and bullet.global_batch >= 1
                and all(rate is None or is_rate(rate) for rate in (bullet.rate, bullet.tokens))
            )
            if bullet.status not in STATUSES or not has_figures:
                raise ValueError(f"line {bullet.line} of {sheet['file']} is no row")
        bullets_of_file.setdefault(str(sheet["file"]), []).extend(bullets)
    if not any(bullets_of_file.values()):
        raise ValueError("it has no row")
    return bullets_of_file
