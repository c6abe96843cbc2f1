"""Rows of reference, which others have measured, and the settings by which measured runs are put beside them.

They come from a CSV with the columns of ``benchmarks/reference/measurements.csv``, or from a folder into which sheets
of bullets were imported. A run matches a row if it has every setting that the row states; hardware takes no part.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import ModelConfig, RunConfig, coerce_setting, dotted_settings
from fugaku_gpt.config.schema import SHORT_DTYPES
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
from fugaku_gpt.records.run import FAILED, HUNG, OK, OUT_OF_MEMORY
from fugaku_gpt.report.bullets import half_digit, pair_of, setting_key
from fugaku_gpt.report.notes_table import NO_VALUE
from fugaku_gpt.report.rows import ResultRow
from fugaku_gpt.report.sheet import is_sheet, rows_with_bullets

DEFAULT_MHZ = 2000  # clock of Fugaku's nodes when the tables were written, and of jobs that ask for none
IsSelected = Callable[[ConfigRow], bool]
_DEFAULT = "default"  # a knob that was left alone
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
    """

    row: ResultRow
    stated: Mapping[str, object]
    ids: Tuple[str, ...]
    memory: str = ""
    seconds_digit: float = 0.0
    flops: Optional[float] = None

    def is_met_by(self, settings: Mapping[str, object]) -> bool:
        """True if a run with these settings has every setting that the row states."""
        return all(settings.get(name, _UNMATCHED) == value for name, value in self.stated.items())


def settings_of_row(row: ResultRow) -> Dict[str, object]:
    """The settings of a measured row by which it is put beside rows of reference.

    The order of ranks of another trainer is Megatron's, which most logs are of. Layers that are recomputed in part, or
    by a budget of memory, are neither recomputed nor not.
    """
    changed = dict(row.settings)
    fields = {} if row.trainer else {**_default_settings(), **changed}
    defaults = RunConfig()
    layout = defaults.layout
    return {
        **fields,
        "model": row.size.lower(),
        **_shape(row.layers, row.hidden, row.heads, row.seq_len),
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
        "retention_state": _DEFAULT if row.retention_state is None else row.retention_state,
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
                _stated_by_bullet(row, bullet.recompute, bullet.more),
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
        **_counts(row),
        "order": _order(config.order, row),
        "zero": config.zero,
        "chunks": config.chunks,
        "sequence_parallel": config.sequence_parallel,
        "recompute": config.recompute,
        "freq_mhz": mhz,
        "tcmalloc": config.tcmalloc,
        "retention_state": _DEFAULT if config.retention is None else config.retention,
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
    )


def _stated_by_bullet(row: ResultRow, recompute: Optional[str], more: Sequence[str]) -> Dict[str, object]:
    """The settings that a bullet states."""
    stated: Dict[str, object] = {
        "model": row.size.lower() if row.size != NO_VALUE else None,
        "seq_len": row.seq_len,
        **{name: value for name, value in _counts(row).items() if name != "ranks_per_node"},
        "dtype": row.dtype or None,
        "recompute": {"full": True, "none": False}.get(recompute or "", recompute),
    }
    if row.ranks_per_node != 1:
        stated["ranks_per_node"] = row.ranks_per_node
    settings = {name: value for name, value in stated.items() if value is not None}
    return {**settings, **dict(_further_setting(text) for text in more)}


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
