"""Rows of reference, which others have measured, and the settings by which measured runs are put beside them.

They come from a CSV with the columns of ``benchmarks/reference/measurements.csv``, or from a folder into which sheets
of bullets were imported. A run matches a row if it has every setting that the row states; hardware takes no part. Rows
of a CSV are of GPT-2s; their vocabularies are with padding, without, or rounded.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import ModelConfig, RunConfig, coerce_setting, dotted_settings
from fugaku_gpt.config.schema import NODE_KNOBS, SHORT_DTYPES
from fugaku_gpt.config.tree import Scalar, parse_override
from fugaku_gpt.config.values import BadValue
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.formulas.flops import notes_flops
from fugaku_gpt.harmless import harmless
from fugaku_gpt.limits import cut
from fugaku_gpt.planner.tables.rows import (
    MEASURED_ORDER,
    ConfigRow,
    Measurement,
    parse_measurement,
    parse_row,
    read_table,
)
from fugaku_gpt.records.bullet_form import half_digit, pair_of, setting_key
from fugaku_gpt.records.run import FAILED, HUNG, OK, OUT_OF_MEMORY
from fugaku_gpt.report.bullets import Bullet
from fugaku_gpt.report.imported import PLAIN_GPT
from fugaku_gpt.report.notes_table import NO_VALUE
from fugaku_gpt.report.rows import ResultRow
from fugaku_gpt.report.sheet import is_sheet, rows_with_bullets

_PADDING = 0.01  # share by which vocabularies differ by padding and rounding, as 50257, 50304 and 50688 do
_DEFAULT_RETENTION = next(knob.default for knob in NODE_KNOBS if knob.name == "retention_state")
DEFAULT_MHZ = 2000  # clock of Fugaku's nodes when the tables were written, and of jobs that ask for none
IsSelected = Callable[[ConfigRow], bool]
_UNMATCHED = "settings that no run states"
_FLAGS = ("tcmalloc", "sequence_parallel")  # settings of runs that bullets state as name=value
_NUMBERS = ("zero", "chunks", "freq_mhz", "retention_state")
_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}
_STATUSES = {"fail": FAILED, "hang": HUNG, "oom": OUT_OF_MEMORY}  # of the tables; others are shown as they are


@dataclass(frozen=True)
class ReferenceRow:
    """A row of reference.

    Attributes:
        row: its cells, as a row of tables.
        stated: (name → value) of the settings that it states, as :func:`settings_of_row` names them.
        ids: its names, several if tables show one measurement more than once.
        memory: used memory as it is written, with its unit; empty if unknown.
        seconds_digit: half a unit of the last digit of its seconds, which are rounded to it.
        flops: FLOPs of an iteration by the formula of the notes; None if the model is unknown.
        vocab: size of its vocabulary; None if it states none.
    """

    row: ResultRow
    stated: Mapping[str, object]
    ids: Tuple[str, ...]
    memory: str = ""
    seconds_digit: float = 0.0
    flops: Optional[float] = None
    vocab: Optional[int] = None

    def is_met_by(self, settings: Mapping[str, object]) -> bool:
        """True if a run with these settings has every setting that the row states."""
        return _is_like(self.vocab, settings.get("vocab")) and all(
            settings.get(name, _UNMATCHED) == value for name, value in self.stated.items()
        )


def settings_of_row(row: ResultRow) -> Dict[str, object]:
    """The settings of a measured row by which it is put beside rows of reference.

    The order of ranks of another trainer is Megatron's, which most logs are of; its vocabulary is not in the row.
    Layers that are recomputed in part, or by a budget of memory, are neither recomputed nor not.
    """
    changed = dict(row.settings)
    fields: Dict[str, object] = {} if row.trainer else {**_default_settings(), **changed}
    defaults = RunConfig()
    layout = defaults.layout
    return {
        **fields,
        "model": row.size.lower(),
        **_shape(row.layers, row.hidden, row.heads, row.seq_len),
        "unlike_gpt2": tuple(remark for remark in row.remarks if remark.startswith(PLAIN_GPT)),
        **(_kind_of_model(fields) if fields else {}),
        **_counts(row),
        "order": _order(MEASURED_ORDER if row.trainer else str(changed.get("layout.order", layout.order)), row),
        "zero": changed.get("layout.zero", layout.zero),
        "chunks": changed.get("layout.chunks", layout.chunks),
        "sequence_parallel": row.tp != 1 and changed.get("layout.sequence_parallel", layout.sequence_parallel),
        "recompute": row.recompute if row.trainer else _recompute(changed),
        "torch": row.torch,
        "dtype": row.dtype,
        "freq_mhz": row.freq_mhz or DEFAULT_MHZ,
        "tcmalloc": row.tcmalloc,
        "retention_state": _retention(row.retention_state),
    }


def read_reference(path: Path, is_selected: IsSelected = lambda _: True) -> Tuple[List[ReferenceRow], Tuple[str, ...]]:
    """Read rows of reference; returns (rows, lines about rows that are left out).

    Args:
        path: a CSV, or a folder with an imported sheet.
        is_selected: selects rows of a CSV.

    Raises:
        UsageError: the file cannot be read, or no row of it is left.
    """
    if path.is_dir():
        if not is_sheet(path):
            raise UsageError(
                f"{path}: no imported sheet in it; give a CSV, or a folder of `report import --form bullets`"
            )
        return [
            ReferenceRow(
                row,
                _stated_by_bullet(row, bullet),
                (Path(row.runs[0]).name,),
                seconds_digit=(row.seconds_per_iteration or 0.0) * bullet.rounding / (bullet.rate or 1.0),
            )
            for row, bullet in rows_with_bullets(path)
        ], ()
    rows: List[ReferenceRow] = []
    refused: List[str] = []
    for cells in read_table(path):
        config = parse_row(cells)
        if isinstance(config, ConfigRow):
            if is_selected(config):
                rows.append(_row_of_cells(config, parse_measurement(cells), cells))
        else:
            refused.append(config.id)
    if not rows:
        raise UsageError(f"{path}: no row of it is left; see its columns, and the conditions after its name")
    distinct = _without_duplicates(rows)
    if not refused:
        return distinct, ()
    return distinct, (
        f"{path}: rows that are no whole configuration are left out: {len(refused)}, such as {cut(refused[0])}",
    )


def _row_of_cells(config: ConfigRow, measurement: Measurement, cells: Mapping[str, str]) -> ReferenceRow:
    mhz = round(config.freq_ghz * 1000) or DEFAULT_MHZ
    dtype = _DTYPES.get(config.dtype, config.dtype)
    row = ResultRow(
        size=cells.get("model", "").strip() or NO_VALUE,
        seq_len=config.seq_len,
        nodes=config.nodes,
        dp=config.dp,
        tp=config.tp,
        pp=config.pp,
        micro_batch=config.micro_batch,
        global_batch=config.global_batch,
        ranks_per_node=config.ranks_per_node,
        recompute=config.recompute,
        torch=config.torch,
        dtype=dtype,
        freq_mhz=mhz if mhz != DEFAULT_MHZ else None,
        tcmalloc=config.tcmalloc,
        retention_state=config.retention,
        seconds_per_iteration=measurement.seconds,
        tflops_notes=_positive(cells.get("tflops", "")),
        status=_STATUSES.get(measurement.status.lower(), measurement.status.lower() or OK),
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        hardware=config.hardware,
        is_reference=True,
    )
    stated = {
        **_shape(config.layers, config.hidden, config.heads, config.seq_len),
        "unlike_gpt2": (),
        **_counts(row),
        "order": _order(config.order, row),
        "zero": config.zero,
        "chunks": config.chunks,
        "sequence_parallel": config.sequence_parallel,
        "recompute": config.recompute,
        "freq_mhz": mhz,
        "tcmalloc": config.tcmalloc,
        "retention_state": _retention(config.retention),
        **({"torch": config.torch} if config.torch else {}),
        **({"dtype": dtype} if dtype else {}),
    }
    model = ModelConfig(layers=config.layers, hidden=config.hidden, heads=config.heads, seq_len=config.seq_len)
    return ReferenceRow(
        row,
        stated,
        (config.id,),
        _memory_text(cells),
        half_digit(cells.get("sec_per_it", "")),
        notes_flops(model, config.global_batch, config.vocab, config.recompute),
        config.vocab or None,
    )


def _stated_by_bullet(row: ResultRow, bullet: Bullet) -> Dict[str, object]:
    """The settings that a bullet states."""
    stated: Dict[str, object] = {
        "model": row.size.lower() if row.size != NO_VALUE else None,
        "seq_len": row.seq_len,
        **{**_counts(row), "ranks_per_node": bullet.ranks_per_node},
        "dtype": row.dtype or None,
        "recompute": {"full": True, "none": False}.get(bullet.recompute or "", bullet.recompute),
    }
    settings = {name: value for name, value in stated.items() if value is not None}
    return {**settings, **dict(_further_setting(text) for text in bullet.more)}


def _further_setting(text: str) -> Tuple[str, object]:
    """(name, value) of a bullet's further setting: one of tables, or a field of a run file by its dotted key; one that
    no run has is matched by none."""
    name, value = pair_of(text) or ("", "")
    if name in _FLAGS and value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    if name in _NUMBERS and value.isdecimal():
        return name, int(value)
    key = setting_key(name)
    if key is None:
        return text, text
    try:
        is_list = value.startswith("[")
        return key, coerce_setting(key, parse_override(f"{key}={value}")[1] if is_list else Scalar(value, False, text))
    except (BadValue, ConfigError):
        return text, text


@lru_cache(maxsize=1)
def _default_settings() -> Mapping[str, object]:
    return dotted_settings(asdict(RunConfig()))


def _without_duplicates(rows: Sequence[ReferenceRow]) -> List[ReferenceRow]:
    """One row for each measurement, which several tables may show: of one configuration, with equal figures."""
    first: Dict[Tuple[object, ...], int] = {}
    distinct: List[ReferenceRow] = []
    for row in rows:
        figures = (row.row.seconds_per_iteration, row.row.tflops_notes, row.memory, row.row.status, row.row.hardware)
        key = (*sorted((name, str(value)) for name, value in row.stated.items()), *figures)
        if key in first:
            number = first[key]
            distinct[number] = replace(distinct[number], ids=(*distinct[number].ids, *row.ids))
        else:
            first[key] = len(distinct)
            distinct.append(row)
    return distinct


def _shape(
    layers: Optional[int], hidden: Optional[int], heads: Optional[int], seq_len: Optional[int]
) -> Dict[str, object]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "seq_len": seq_len}


def _counts(row: ResultRow) -> Dict[str, object]:
    names = ("nodes", "ranks_per_node", "dp", "tp", "pp", "micro_batch", "global_batch")
    return {name: getattr(row, name) for name in names}


def _kind_of_model(fields: Mapping[str, object]) -> Dict[str, object]:
    """The fields that make it another model than a GPT-2 of its layers, hidden size and heads, and its vocabulary."""
    values = {key[len("model.") :]: value for key, value in fields.items() if key.startswith("model.")}
    try:
        model = ModelConfig(**values)  # type: ignore[arg-type]  # names and types of the fields
        unlike = model.settings_unlike_gpt2
        unlike += (f"model.ffn_hidden {model.ffn_size}",) if model.ffn_size != 4 * model.hidden else ()
        return {"unlike_gpt2": unlike, "vocab": model.padded_vocab(tp=1)}
    except (TypeError, ValueError, ZeroDivisionError):  # of a refused run, whose settings are as they were written
        return {"unlike_gpt2": None}


def _is_like(stated: Optional[int], vocab: object) -> bool:
    """Whether two vocabularies may be one, padded or rounded in different ways; one that is unknown may be any."""
    return stated is None or not isinstance(vocab, int) or math.isclose(stated, vocab, rel_tol=_PADDING)


def _retention(state: Optional[int]) -> object:
    """The state of a node; that of a job that asks for none, where a row does not say."""
    return _DEFAULT_RETENTION if state is None else state


def _order(order: str, row: ResultRow) -> str:
    """The order of the axes along which there is more than one rank."""
    sizes = {"dp": row.dp, "tp": row.tp, "pp": row.pp}
    return ",".join(axis for axis in order.split(",") if sizes[axis] != 1)


def _recompute(changed: Mapping[str, object]) -> object:
    """True for all layers, False for none; another value for some of them, or for attention's masks alone."""
    kind = changed.get("training.recompute", RunConfig().training.recompute)
    if kind == "full" and any(f"training.recompute_{name}" in changed for name in ("layers", "budget_mib")):
        return "some layers"
    return {"full": True, "none": False}.get(str(kind), kind)


def _memory_text(cells: Mapping[str, str]) -> str:
    value, unit = cells.get("mem_value", "").strip(), cells.get("mem_unit", "").strip().partition(" ")[0]
    return harmless(f"{value} {unit}".strip()) if value else ""


def _positive(text: str) -> Optional[float]:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
