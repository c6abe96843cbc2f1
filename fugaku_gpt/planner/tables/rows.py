"""Reads rows of measured, failed or planned configurations, and refuses rows that no run can have.

The columns are those of ``benchmarks/reference/measurements.csv``. A :class:`ConfigRow` holds only what is known before
a run; measured seconds, memory and status are in a :class:`Measurement`, which predictions never see.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.limits import CSV_TEXT, cut

OUT_OF_MEMORY_STATUSES = ("oom", "oom_after_first_iteration")
MEASURED_ORDER = "tp,dp,pp"  # axes of the grid, fastest first, as Megatron-LM has them
_NEEDED = ("layers", "hidden", "heads", "vocab", "seq_len", "nodes", "ranks_per_node", "dp", "tp", "pp")
_BATCH = ("micro_batch", "global_batch")
_MORE_CELLS = "cells beyond the header's"  # a key that no column has
_MAX_INTEGER = 2**31 - 1
_CLOCKS = (0.1, 10.0)  # GHz
_FLAGS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False, "1.0": True, "0.0": False}


@dataclass(frozen=True)
class ConfigRow:
    """One configuration, as far as it is known before it runs.

    ``processes`` is the number of ranks; ``zero`` is the ZeRO stage; ``freq_ghz`` is the clock, 0 if it is not given;
    ``retention`` is the retention state of Fugaku's cores, None if it was not set.
    """

    id: str
    hardware: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    nodes: int
    ranks_per_node: int
    processes: int
    dp: int
    tp: int
    pp: int
    micro_batch: int
    global_batch: int
    zero: int
    recompute: bool
    torch: str
    dtype: str
    freq_ghz: float
    tcmalloc: bool
    retention: Optional[int]
    mem_unit: str
    chunks: int = 1  # virtual stages of each pipeline stage; no table has this column or the following ones
    sequence_parallel: bool = False
    order: str = MEASURED_ORDER

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of one replica in one iteration."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def stage_stride(self) -> int:
        """Number of ranks from a stage to its neighbour."""
        sizes = {"tp": self.tp, "dp": self.dp}
        axes = self.order.split(",")
        return math.prod(sizes[axis] for axis in axes[: axes.index("pp")])

    @property
    def configuration_key(self) -> Tuple[object, ...]:
        """A key that is equal for rows of the same configuration in different tables.

        The vocabulary is left out, because one table rounds what another gives in full.
        """
        left_out = ("id", "vocab", "mem_unit", "dtype")
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in left_out)

    @property
    def run_key(self) -> Tuple[object, ...]:
        """The configuration without the kind of hardware: kinds of one machine differ in their memory alone."""
        return (*self.configuration_key[1:], self.hardware.partition("-")[0])


@dataclass(frozen=True)
class Measurement:
    """The result of a run: seconds per iteration, memory in the row's own unit, and the status at its end."""

    seconds: Optional[float]
    memory: Optional[float]
    status: str

    @property
    def out_of_memory(self) -> bool:
        return self.status.lower() in OUT_OF_MEMORY_STATUSES


@dataclass(frozen=True)
class RefusedRow:
    """A row that cannot be used, with the reason."""

    id: str
    reason: str


def read_table(path: Path) -> List[Dict[str, str]]:
    """The rows of a CSV with a header line, with unchanged values.

    Raises:
        UsageError: the file cannot be read, or columns are missing.
    """
    try:
        text = read_bytes(path, CSV_TEXT).decode("utf-8-sig")  # spreadsheets begin a file with a mark
        reader = csv.DictReader(io.StringIO(text, newline=""), restkey=_MORE_CELLS, restval="")
        header = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = header
        rows = list(reader)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: cannot be read as CSV: {error}") from None
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num + 1}: cannot be read as CSV: {error}") from None
    missing = [name for name in ("id", "hardware", *_NEEDED, *_BATCH) if name not in header]
    if missing:
        raise UsageError(
            f"{path}: columns are missing: {', '.join(missing)}; found: {cut(', '.join(header)) or 'none'}"
        )
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise UsageError(f"{path}: columns occur twice: {cut(', '.join(twice))}; keep one of each")
    return [{key: str(value) for key, value in row.items()} for row in rows]


def parse_row(cells: Mapping[str, str]) -> "ConfigRow | RefusedRow":
    """Parses one line of such a CSV as a configuration, or says why it is refused."""
    name = cells["id"].strip()
    if _MORE_CELLS in cells:
        return RefusedRow(name, "more cells than the header has columns: they may be shifted")
    try:
        numbers = {key: _integer(cells, key) for key in (*_NEEDED, *_BATCH)}
        optional = _optional(cells)
        nodes, per_node = numbers["nodes"], numbers["ranks_per_node"]
        processes = _integer(cells, "processes") if cells.get("processes", "").strip() else nodes * per_node
    except ValueError as error:
        return RefusedRow(name, str(error))
    row = ConfigRow(id=name, hardware=cells["hardware"].strip(), processes=processes, **numbers, **optional)  # type: ignore[arg-type]
    reason = invalid_reason(row)
    return RefusedRow(name, reason) if reason else row


def _integer(cells: Mapping[str, str], key: str) -> int:
    text = cells[key].strip()
    if not text:
        raise ValueError(f"{key} is not given")
    number = finite_number(text)
    if number is None or not 1 <= number <= _MAX_INTEGER or number != int(number):
        raise ValueError(f"{key} {text}: must be a whole number from 1 to {_MAX_INTEGER}")
    return int(number)


def finite_number(text: str) -> Optional[float]:
    """The finite number that a text holds, else None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _optional(cells: Mapping[str, str]) -> Dict[str, object]:
    def text(key: str) -> str:
        return cells.get(key, "").strip()

    def flag(key: str) -> bool:
        word = text(key).lower() or "false"
        if word not in _FLAGS:
            raise ValueError(f"{key} {text(key)}: must be True or False")
        return _FLAGS[word]

    zero = finite_number(text("zero_stage") or "0")
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage {text('zero_stage')}: must be 0, 1, 2 or 3")
    freq = finite_number(text("freq_ghz") or "0")
    if freq is None or (text("freq_ghz") and not _CLOCKS[0] <= freq <= _CLOCKS[1]):
        raise ValueError(f"freq_ghz {text('freq_ghz')}: must be a number from {_CLOCKS[0]:g} to {_CLOCKS[1]:g}")
    retention = finite_number(text("retention_state"))
    return {
        "zero": int(zero),
        "recompute": flag("recompute"),
        "torch": torch_series(text("torch")),
        "dtype": text("dtype").lower(),
        "freq_ghz": freq,
        "tcmalloc": flag("tcmalloc"),
        "retention": int(retention) if retention in (0, 1) else None,
        "mem_unit": text("mem_unit"),
    }


def torch_series(version: str) -> str:
    """The series of a PyTorch version, such as 1.10 for 1.10.2+cpu, by which rows are distinguished.

    A spreadsheet turns 1.10 into 1.1; nobody ran these trainers on PyTorch 1.1.
    """
    numbers = version.lower().lstrip("v").partition("+")[0].split(".")
    series = ".".join(numbers[:2])
    return "1.10" if series == "1.1" else series


def invalid_reason(row: ConfigRow) -> Optional[str]:
    """The reason why no run can have this shape; None if one can."""
    ranks = row.nodes * row.ranks_per_node
    if row.processes != ranks:
        return f"ranks {row.processes} are not nodes {row.nodes} * ranks per node {row.ranks_per_node} = {ranks}"
    grid = row.dp * row.tp * row.pp
    if grid != ranks:
        return f"dp {row.dp} * tp {row.tp} * pp {row.pp} = {grid} are not the {ranks} ranks"
    if row.layers % row.pp:
        return f"layers {row.layers} cannot be divided by pp {row.pp}"
    if row.heads % row.tp:
        return f"heads {row.heads} cannot be divided by tp {row.tp}"
    if row.hidden % row.heads:
        return f"hidden {row.hidden} cannot be divided by heads {row.heads}"
    share = row.dp * row.micro_batch
    if row.global_batch % share:
        product = f"dp {row.dp} * micro-batch {row.micro_batch} = {share}"
        return f"global batch {row.global_batch} cannot be divided by {product}"
    return None


def parse_measurement(cells: Mapping[str, str]) -> Measurement:
    """Parses the measured columns, which are for fitting and scoring alone."""

    def number(key: str) -> Optional[float]:
        value = finite_number(cells.get(key, "").strip())
        return value if value is not None and value > 0 else None

    return Measurement(number("sec_per_it"), number("mem_value"), cells.get("status", "").strip())


def table_name(identity: str) -> str:
    """The name of the table that a row is from: its id without the last component."""
    return identity.rpartition(".")[0] or identity


def parse_measured_rows(table: Sequence[Mapping[str, str]]) -> List[Tuple[ConfigRow, Measurement]]:
    """Parses the rows that are not refused, each with its measurement."""
    measured_rows = []
    for cells in table:
        row = parse_row(cells)
        if isinstance(row, ConfigRow):
            measured_rows.append((row, parse_measurement(cells)))
    return measured_rows
