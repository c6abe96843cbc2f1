"""Writes rows as the Markdown tables that people otherwise write by hand, byte for byte."""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.config.knobs import is_requested
from fugaku_gpt.config.schema import NODE_KNOBS
from fugaku_gpt.formulas.flops import aggregate_petaflops
from fugaku_gpt.harmless import markdown_cell
from fugaku_gpt.records.run import FAILED, HUNG, INTERRUPTED, OK, OUT_OF_MEMORY, REFUSED, TIMEOUT
from fugaku_gpt.report.rows import COLUMN_KNOBS, NO_STATUS, UNFINISHED, ResultRow

COLUMNS = (
    "Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Est. Aggr. PetaFLOPs", "Notes",
)  # fmt: skip
NO_VALUE = "-"
_ALIGNMENT = "| ----: | ---: | -: | -: | -: | --: | --: | --: | -----: | -----: | -------------------: | ----: |"
ENERGY_COLUMNS = ("W/node", "J/it", "J/token")  # on request, last before the notes
_ENERGY_ALIGNMENT = "| -----: | ---: | ------: "
VALIDATION_COLUMN = "Validation loss"  # where a run has one, before the notes
_VALIDATION_ALIGNMENT = "| --------------: "
SAMPLES_COLUMN = "Samples/s"  # where a sheet states rates, before the notes
_SAMPLES_ALIGNMENT = "| --------: "
IMAGES_COLUMN = "images/s"  # where a run classifies grids, before the validation loss
_IMAGES_ALIGNMENT = "| -------: "
_REASON_LENGTH = 80
_KNOBS = {knob.name: knob for knob in NODE_KNOBS}
STATUS_LABELS = {
    OUT_OF_MEMORY: "OOM",
    TIMEOUT: "timeout",
    REFUSED: "refused",
    FAILED: "failed",
    HUNG: "hang",
    INTERRUPTED: "interrupted",
    UNFINISHED: "unfinished",
}


def notes_tables(rows: Sequence[ResultRow], si: bool = False, energy: bool = False) -> str:
    """Write one table, under its heading, for each model, sequence length, activation checkpointing and PyTorch build.

    Args:
        si: whether aggregate petaFLOP/s are TFLOPs * nodes / 1000, not / 1024.
        energy: whether to add ``ENERGY_COLUMNS``, which the notes do not have.
    """
    tables: List[str] = []
    columns = columns_of(rows, energy)
    notes = _ALIGNMENT.rindex("| ----")
    more = "".join(
        alignment
        for alignment, is_shown in (
            (_SAMPLES_ALIGNMENT, columns.samples),
            (_IMAGES_ALIGNMENT, columns.images),
            (_VALIDATION_ALIGNMENT, columns.validation),
            (_ENERGY_ALIGNMENT, columns.energy),
        )
        if is_shown
    )
    alignment = _ALIGNMENT[:notes] + more + _ALIGNMENT[notes:]
    for title, members in rows_by_heading(rows):
        lines = [
            markdown_title(title),
            "| " + " | ".join(column_titles(columns)) + " |",
            alignment,
        ]
        for row in members:
            cells = row_cells(row, columns, si)
            lines.append("| " + " | ".join(map(markdown_cell, cells)) + " |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def markdown_title(title: str) -> str:
    """A title of a table as a line of Markdown, in which a bar separates nothing."""
    return markdown_cell(title).replace("\\|", "|")


def rows_by_heading(rows: Sequence[ResultRow]) -> List[Tuple[str, List[ResultRow]]]:
    """Group rows under their headings, in order of first appearance."""
    builds = {row.torch for row in rows if row.torch}
    only = builds.pop() if len(builds) == 1 else ""  # a row that never started joins the one build that the others ran
    groups: Dict[str, List[ResultRow]] = {}
    for row in rows:
        groups.setdefault(heading(row, row.torch or ("" if row.is_reference else only)), []).append(row)
    return list(groups.items())


def has_validation(rows: Sequence[ResultRow]) -> bool:
    """True if a row has a validation loss, and so the tables a column for it."""
    return any(row.last_validation_loss is not None or row.evaluations for row in rows)


class OptionalColumns(NamedTuple):
    """The columns of a table that the notes do not have.

    Attributes:
        samples: samples per second, where a sheet states rates.
        images: images per second, where a run classifies grids.
        validation: the last validation loss.
        energy: those of ``ENERGY_COLUMNS``.
    """

    samples: bool = False
    images: bool = False
    validation: bool = False
    energy: bool = False


NO_COLUMNS = OptionalColumns()


def columns_of(rows: Sequence[ResultRow], energy: bool = False) -> OptionalColumns:
    """The optional columns for which a row has a figure, and those of energy if they are wanted."""
    return OptionalColumns(
        samples=any(row.samples_per_second is not None for row in rows),
        images=any(row.images_per_second is not None for row in rows),
        validation=has_validation(rows),
        energy=energy,
    )


def column_titles(columns: OptionalColumns = NO_COLUMNS) -> Tuple[str, ...]:
    """Titles of a table's columns."""
    return (
        *COLUMNS[:-1],
        *((SAMPLES_COLUMN,) if columns.samples else ()),
        *((IMAGES_COLUMN,) if columns.images else ()),
        *((VALIDATION_COLUMN,) if columns.validation else ()),
        *(ENERGY_COLUMNS if columns.energy else ()),
        COLUMNS[-1],
    )


def row_cells(row: ResultRow, columns: OptionalColumns = NO_COLUMNS, si: bool = False) -> List[str]:
    """The cells of one row, in the order of :func:`column_titles`."""
    has_aggregate = row.tflops_notes is not None and row.nodes is not None
    aggregate = aggregate_petaflops(row.tflops_notes or 0.0, row.nodes or 0, si) if has_aggregate else None
    memory = row.node_used_bytes
    return [
        *configuration_cells(row),
        f"{memory / 2**20:.1f} MiB" if memory is not None else NO_VALUE,
        seconds_cell(row.seconds_per_iteration),
        f"{row.tflops_notes:.2f}" if row.tflops_notes is not None else NO_VALUE,
        f"{aggregate:.3f}" if aggregate is not None else NO_VALUE,
        *((_samples_cell(row),) if columns.samples else ()),
        *((_images_cell(row),) if columns.images else ()),
        *((validation_cell(row),) if columns.validation else ()),
        *(_energy_cells(row) if columns.energy else ()),
        notes_cell(row) or NO_VALUE,
    ]


def configuration_cells(row: ResultRow) -> List[str]:
    """The cells of the first seven columns: what was run."""
    counts = (row.dp, row.tp, row.pp, row.micro_batch, row.global_batch)
    return [nodes_cell(row), row.size, *map(_integer_cell, counts)]


def nodes_cell(row: ResultRow) -> str:
    """The number of nodes, then the applied toggles that differ from the default, in the notes' order."""
    toggles = [f"max-proc-per-node={row.ranks_per_node}"] if row.ranks_per_node != 1 else []
    applied = [(knob.name, getattr(row, knob.name)) for knob in COLUMN_KNOBS]
    for name, value in [*applied, *row.knobs]:
        if is_requested(value):
            text = toggle_text(name, value)
            toggles.append(text if _has_short_form(name) else f'"{text}"')
    return f"{_integer_cell(row.nodes)} ({', '.join(toggles)})" if toggles else _integer_cell(row.nodes)


def toggle_text(name: str, value: object) -> str:
    """A toggle as tables write it: 2.2GHz, LD_PRELOAD=libtcmalloc.so, retention_state=0. A hand-written table may have
    knobs that this program does not have, and a refused run values that no knob has."""
    if isinstance(value, (list, tuple)):
        return f"{name}={':'.join(map(str, value))}"
    is_written = isinstance(value, str) and name in _KNOBS and _KNOBS[name].short_form is not None
    return _KNOBS[name].format_for_tables(value) if name in _KNOBS and not is_written else f"{name}={value}"


def _has_short_form(name: str) -> bool:
    return name in _KNOBS and _KNOBS[name].short_form is not None


def validation_cell(row: ResultRow) -> str:
    """The first and the last validation loss, or the only one; and those of evaluation files, behind their names."""
    validation = _first_to_last(row.first_validation_loss, row.last_validation_loss)
    evaluations = [f"{name} {_first_to_last(first, last)}" for name, first, last in row.evaluations]
    return ", ".join([*filter(None, [validation]), *evaluations]) or NO_VALUE


def _first_to_last(*losses: Optional[float]) -> str:
    return " to ".join(dict.fromkeys(f"{loss:.3f}" for loss in losses if loss is not None))


def seconds_cell(seconds: Optional[float]) -> str:
    """Seconds with three significant digits, and at least one decimal; from 1 s up the last zero is left out."""
    if seconds is None:
        return NO_VALUE
    exponent = int(f"{seconds:.2e}".partition("e")[2])  # after rounding: 0.9996 is 1.0, not 1.000
    if exponent < 0:
        return f"{float(f'{seconds:.2e}'):.{2 - exponent}f}"
    text = f"{seconds:.{2 if exponent == 0 else 1}f}"
    return text[:-1] if exponent == 0 and text.endswith("0") else text


def notes_cell(row: ResultRow) -> str:
    """Date, job, remarks, how the run failed, and toggles that were requested but not applied."""
    notes = [row.date, row.job_id, *row.remarks]
    if row.status not in (OK, NO_STATUS):
        word = STATUS_LABELS.get(row.status, row.status)
        has_reason = row.reason and (row.status in (REFUSED, FAILED) or row.status not in STATUS_LABELS)
        notes.append(f"{word}: {short_reason(row.reason)}" if has_reason else word)
    if row.not_applied:
        notes.append("not applied: " + ", ".join(row.not_applied))
    return ", ".join(note for note in notes if note)


def short_reason(reason: str) -> str:
    """Shorten a reason to fit a cell: one line without the file it came from, cut with an ellipsis."""
    text = re.sub(r"\s+", " ", re.sub(r"^(?:\S+:\d+|preset \S+:\d+|--set \S+): ", "", reason)).strip()
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1].rstrip() + "…"


def _energy_cells(row: ResultRow) -> List[str]:
    """Energy figures with four significant digits, which exceeds the accuracy of power sampling."""
    if row.watts_per_node is None:
        return [row.energy_basis or NO_VALUE, NO_VALUE, NO_VALUE]
    return [
        f"{value:.4g}" if value is not None else NO_VALUE
        for value in (row.watts_per_node, row.joules_per_iteration, row.joules_per_token)
    ]


def _samples_cell(row: ResultRow) -> str:
    rate = row.samples_rate
    return NO_VALUE if rate is None else f"{rate:.4g}" if rate < 1000 else f"{rate:.0f}"


def heading(row: ResultRow, torch: str) -> str:
    """The title of the table of a row: model, sequence length, activation checkpointing and PyTorch build; a row of
    reference is named so, with its machine."""
    phrases = [f"{row.size} model", f"Sequence Length={row.seq_len if row.seq_len is not None else NO_VALUE}"]
    if row.recompute:
        phrases.append("Activation Checkpointing")
    phrases.append(f"PyTorch {torch or 'unknown'}")
    if row.is_reference:  # what it does not say stays unsaid
        phrases[0] += f" on {row.hardware or 'unknown hardware'} (reference)"
        unknown = {phrases[1]: row.seq_len is None, phrases[-1]: not torch}
        phrases = [phrase for phrase in phrases if not unknown.get(phrase)]
    return "### " + ", ".join(phrases)


def _integer_cell(value: Optional[int]) -> str:
    return str(value) if value is not None else NO_VALUE


def _images_cell(row: ResultRow) -> str:
    return f"{row.images_per_second:.4g}" if row.images_per_second is not None else NO_VALUE
