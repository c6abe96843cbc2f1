"""Puts measured rows beside rows of reference: the ratio of times, and whether it exceeds the spread of repeats."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.formulas.flops import tflops_per_node
from fugaku_gpt.records.run import OK
from fugaku_gpt.report.notes_table import (
    NO_VALUE,
    STATUS_LABELS,
    configuration_cells,
    heading,
    notes_cell,
    seconds_cell,
)
from fugaku_gpt.report.reference import ReferenceRow, settings_of_row
from fugaku_gpt.report.rows import ResultRow, raw_values

TITLES = (
    "Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Ref. Mem", "Mem", "Ref. Sec/it", "Sec/it", "Ratio", "Spread",
    "Ref. TFLOPs", "TFLOPs", "Notes",
)  # fmt: skip
ALIGNMENT = (
    "| ----: | ---: | -: | -: | -: | --: | --: | -------: | --: | ----------: | -----: | ----: | -----: "
    "| ----------: | -----: | ----: |"
)
SINGLE = "one run"
_COUNT = re.compile(r"\d+x")


@dataclass(frozen=True)
class Pair:
    """A row of reference and the measured row of its configuration; either may be missing.

    Attributes:
        seconds: seconds per iteration of each repeat that ended well, in order of size.
    """

    reference: Optional[ReferenceRow]
    measured: Optional[ResultRow]
    seconds: Tuple[float, ...] = ()

    @property
    def ratio(self) -> Optional[float]:
        """Measured seconds per iteration over those of the reference; None where either has none."""
        reference = self.reference.row.seconds_per_iteration if self.reference is not None else None
        measured = self.measured.seconds_per_iteration if self.measured is not None else None
        if not reference or measured is None or not self.seconds:  # of a run that failed, no time is compared
            return None
        return measured / reference

    @property
    def is_outside(self) -> Optional[bool]:
        """Whether the seconds of the reference, with their rounding, are outside of those of the repeats; None where
        there is no ratio, and for a single run, whose spread is unknown."""
        if self.ratio is None or self.reference is None or len(self.seconds) < 2:
            return None
        seconds, half = self.reference.row.seconds_per_iteration or 0.0, self.reference.seconds_digit
        return seconds + half < self.seconds[0] or seconds - half > self.seconds[-1]

    @property
    def tflops(self) -> Optional[float]:
        """TFLOPs of a node by the seconds of the measured row, counted as the reference counts them."""
        row = self.measured
        if row is None or row.seconds_per_iteration is None or not row.nodes:
            return None
        if self.reference is None or self.reference.flops is None:
            return row.tflops_notes
        return tflops_per_node(self.reference.flops, row.seconds_per_iteration, row.nodes)

    @property
    def row(self) -> ResultRow:
        """The row whose configuration both have: the measured one, which names further toggles, if there is one."""
        row = self.measured if self.measured is not None else self.reference.row if self.reference is not None else None
        assert row is not None
        return row


def put_beside(
    references: Sequence[ReferenceRow], merged: Sequence[ResultRow], runs: Sequence[ResultRow]
) -> List[Pair]:
    """Pair each row of reference with the measured rows that have its settings, in the order of the references.

    A row of reference that nothing matches stands alone, and so do, at the end, measured rows that match none.

    Args:
        merged, runs: measured rows, one for each configuration, and one for each run.
    """
    measured = [row for row in merged if not row.is_reference]
    settings = [settings_of_row(row) for row in measured]
    seconds_of_run = {
        row.runs[0]: row.seconds_per_iteration
        for row in runs
        if row.runs and row.status == OK and row.seconds_per_iteration is not None
    }
    seconds = [tuple(sorted(seconds_of_run[run] for run in row.runs if run in seconds_of_run)) for row in measured]
    with_batch: Dict[object, List[int]] = {}
    for number, row in enumerate(measured):
        with_batch.setdefault(row.global_batch, []).append(number)
    pairs: List[Pair] = []
    used = set()
    for reference in references:
        candidates = with_batch.get(reference.row.global_batch, [])
        matching = [number for number in candidates if reference.is_met_by(settings[number])]
        used.update(matching)
        pairs += [Pair(reference, measured[number], seconds[number]) for number in matching] or [Pair(reference, None)]
    pairs += [Pair(None, row, seconds[number]) for number, row in enumerate(measured) if number not in used]
    return pairs


def pairs_by_heading(pairs: Sequence[Pair]) -> List[Tuple[str, List[Pair]]]:
    """Group pairs under the headings of their references, in order of first appearance; those without one come last."""
    groups: Dict[str, List[Pair]] = {}
    for pair in pairs:
        row = pair.reference.row if pair.reference is not None else pair.row
        title = heading(row, row.torch)
        groups.setdefault(title if pair.reference is not None else f"{title}, without a reference", []).append(pair)
    return list(groups.items())


def cells_of(pair: Pair) -> List[str]:
    """The cells of a pair, in the order of ``TITLES``."""
    reference, measured = pair.reference, pair.measured
    stated = reference.row if reference is not None else None
    memory = measured.node_used_bytes if measured is not None else None
    return [
        *configuration_cells(pair.row),
        (reference.memory if reference is not None else "") or NO_VALUE,
        f"{memory / 2**20:.1f} MiB" if memory is not None else NO_VALUE,
        seconds_cell(stated.seconds_per_iteration if stated is not None else None),
        seconds_cell(measured.seconds_per_iteration if measured is not None else None),
        f"{pair.ratio:.3f}" if pair.ratio is not None else NO_VALUE,
        _spread_cell(pair),
        _tflops_cell(stated.tflops_notes if stated is not None else None),
        _tflops_cell(pair.tflops),
        _notes_of(pair),
    ]


def values_of(pair: Pair) -> Dict[str, Any]:
    """The raw values of a pair, for CSV and JSON: those of the configuration, of the reference, and of the runs."""
    reference, measured = pair.reference, pair.measured
    stated = reference.row if reference is not None else None
    shown = raw_values(pair.row)
    return {
        "model": pair.row.size,
        "layers": pair.row.layers,
        "hidden": pair.row.hidden,
        "heads": pair.row.heads,
        **{name: shown[name] for name in _CONFIGURATION},
        "reference": " ".join(reference.ids) if reference is not None else None,
        "reference_hardware": stated.hardware if stated is not None else None,
        "reference_status": stated.status if stated is not None else None,
        "reference_memory": (reference.memory or None) if reference is not None else None,
        "reference_seconds_per_iteration": stated.seconds_per_iteration if stated is not None else None,
        "reference_samples_per_second": stated.samples_rate if stated is not None else None,
        "reference_tflops": stated.tflops_notes if stated is not None else None,
        "hardware": measured.hardware if measured is not None else None,
        "status": measured.status if measured is not None else None,
        "reason": measured.reason if measured is not None else None,
        "node_used_bytes": measured.node_used_bytes if measured is not None else None,
        "seconds_per_iteration": measured.seconds_per_iteration if measured is not None else None,
        "samples_per_second": measured.samples_rate if measured is not None else None,
        "tflops": pair.tflops,
        "ratio": pair.ratio,
        "repeats": len(pair.seconds) if measured is not None else None,
        "least_seconds": pair.seconds[0] if pair.seconds else None,
        "most_seconds": pair.seconds[-1] if pair.seconds else None,
        "is_outside_of_spread": pair.is_outside,
        "not_applied": "; ".join(measured.not_applied) if measured is not None else None,
        "runs": " ".join(measured.runs) if measured is not None else None,
    }


_CONFIGURATION = (
    "sequence_length_tokens", "activation_checkpointing", "torch", "dtype",
    "nodes", "ranks_per_node", "dp", "tp", "pp", "micro_batch_sequences", "global_batch_sequences",
    "freq_mhz_applied", "tcmalloc_applied", "retention_state_applied",
)  # fmt: skip


def _spread_cell(pair: Pair) -> str:
    if not pair.seconds or pair.ratio is None:
        return NO_VALUE
    if pair.is_outside is None:
        return SINGLE
    word = "outside" if pair.is_outside else "inside"
    return f"{word} {seconds_cell(pair.seconds[0])} to {seconds_cell(pair.seconds[-1])}"


def _tflops_cell(tflops: Optional[float]) -> str:
    return f"{tflops:.2f}" if tflops is not None else NO_VALUE


def _notes_of(pair: Pair) -> str:
    """The names of the row of reference and how it ended, then the notes of the measured row and its processor, where
    that is another one."""
    notes: List[str] = []
    stated = pair.reference.row if pair.reference is not None else None
    if pair.reference is not None and stated is not None:
        status = STATUS_LABELS.get(stated.status, stated.status)
        notes.append(" ".join(pair.reference.ids) + (f": {status}" if stated.status != OK else ""))
        notes += [f"reference: {', '.join(stated.remarks)}"] if stated.remarks else []
    if pair.measured is not None:
        notes.append(notes_cell(pair.measured))
        hardware = pair.measured.hardware
        if hardware and (stated is None or not is_same_processor(stated.hardware, hardware)):
            notes.append(f"on {hardware}")
    return "; ".join(note for note in notes if note) or NO_VALUE


def is_same_processor(stated: str, processor: str) -> bool:
    """Whether a machine that a row of reference names has the processor of a run.

    A model's number decides, such as A64FX or 7763, where the row names one, and else every word: ``A64FX Fugaku`` is
    ``Fujitsu A64FX``, and ``AMD EPYC`` is no ``AMD Ryzen``. A count of devices, ``4x``, names none.
    """
    terms = [term for term in _terms_of(stated) if not _COUNT.fullmatch(term)]
    numbered = [term for term in terms if any(character.isdecimal() for character in term)]
    return bool(terms) and set(numbered or terms) <= set(_terms_of(processor))


def _terms_of(text: str) -> List[str]:
    return re.findall(r"[a-z0-9.]+(?:-[a-z0-9.]+)*", re.sub(r"\((?:r|tm|c)\)", " ", text.lower()))
