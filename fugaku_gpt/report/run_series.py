"""The metrics of a run as columns of numbers, which grow line by line, without what a resumed run has superseded."""

from __future__ import annotations

import math
import sys
from array import array
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

from fugaku_gpt.limits import cut
from fugaku_gpt.records.metrics import (
    CHECKPOINT,
    EVALUATION,
    ITERATION,
    LEFT_OUT,
    RESUMED,
    VALIDATION,
    last_valid_iteration,
)
from fugaku_gpt.typed_json import is_number

_MOST_EVENTS = 10_000  # the newest are what a reader looks for
_MOST_COLUMNS = 200  # ours have thirty: a damaged or hostile file cannot fill the memory with names


class Event(NamedTuple):
    """Something that has happened at an iteration.

    Attributes:
        iteration: its number.
        kind: ``resumed``, ``left_out`` or ``checkpoint``.
        text: on one line; of a checkpoint that could not be written, its error.
    """

    iteration: int
    kind: str
    text: str


class Columns:
    """Columns of the lines of one kind.

    Attributes:
        numbers: values by name, NaN where a line has none, or null; 200 names at most, ``iteration`` among them. All
            have the same length.
        texts: the same of texts, such as ``compute_max_node``; empty where a line has none.
        lowest_length: the smallest number of lines since :meth:`mark` was called: lines below it are unchanged.
    """

    def __init__(self) -> None:
        self.numbers: Dict[str, "array[float]"] = {"iteration": array("d")}
        self.texts: Dict[str, List[str]] = {}
        self.lowest_length = self._marked_length = 0

    def __len__(self) -> int:
        return len(self.numbers["iteration"])

    @property
    def iterations(self) -> "array[float]":
        """The iteration of each line."""
        return self.numbers["iteration"]

    def newest(self, name: str) -> Optional[float]:
        """The value of the newest line that has a number of this name; None if none has."""
        return next((value for value in reversed(self.numbers.get(name, array("d"))) if value == value), None)

    def mark(self) -> None:
        """Remember this state as that which a reader has seen (see ``lowest_length``)."""
        self.lowest_length = self._marked_length = len(self)

    @property
    def is_changed(self) -> bool:
        """Whether lines were added or dropped since :meth:`mark` was called."""
        return not len(self) == self.lowest_length == self._marked_length

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line: its numbers, and its texts but ``kind`` and ``name``."""
        length = len(self)
        for name, value in line.items():
            is_new = name not in self.numbers and name not in self.texts
            if is_new and len(self.numbers) + len(self.texts) == _MOST_COLUMNS:
                continue
            if is_number(value) and name not in self.texts:
                if is_new:
                    self.numbers[name] = array("d", [math.nan]) * length
                self.numbers[name].append(float(value))
            elif isinstance(value, str) and name not in ("kind", "name") and name not in self.numbers:
                self.texts.setdefault(name, [""] * length).append(sys.intern(cut(value)))
        for values in self.numbers.values():
            if len(values) == length:
                values.append(math.nan)
        for texts in self.texts.values():
            if len(texts) == length:
                texts.append("")

    def drop_after(self, iteration: int) -> None:
        """Remove the lines of later iterations."""
        old = self.iterations
        rows = [row for row, value in enumerate(old) if value <= iteration]
        if len(rows) == len(old):
            return
        self.lowest_length = min(self.lowest_length, next((i for i, row in enumerate(rows) if i != row), len(rows)))
        self.numbers = {name: array("d", (values[row] for row in rows)) for name, values in self.numbers.items()}
        self.texts = {name: [texts[row] for row in rows] for name, texts in self.texts.items()}


class RunSeries:
    """The measurements of a run so far.

    Attributes:
        iterations: columns of the lines of kind ``iteration``.
        validation: columns of the lines of kind ``validation``.
        evaluations: the same of kind ``evaluation``, by the name of the evaluated file.
        events: what happened when: resumptions, iterations that were left out, checkpoints; the newest 10,000.
    """

    def __init__(self) -> None:
        self.iterations, self.validation = Columns(), Columns()
        self.evaluations: Dict[str, Columns] = {}
        self.events: List[Event] = []
        self._have_events_changed = False

    def add(self, line: Dict[str, Any]) -> None:
        """Add a line that :mod:`fugaku_gpt.report.run_follower` or another reader of sound lines has returned."""
        kind, iteration = line.get("kind"), line.get("iteration", 0)
        if not isinstance(iteration, int) or not is_number(iteration):
            return  # no such line is of a kind that readers check
        if kind == RESUMED:
            self._drop_after(last_valid_iteration(line))
        elif kind == ITERATION:
            self.iterations.append(line)
        elif kind == VALIDATION:
            self.validation.append({**line, "iteration": iteration})
        elif kind == EVALUATION:
            name = cut(str(line.get("name", "")))
            if name in self.evaluations or len(self.evaluations) < _MOST_COLUMNS:
                self.evaluations.setdefault(name, Columns()).append(line)
        if kind in (RESUMED, LEFT_OUT, CHECKPOINT):
            self.events.append(Event(iteration, str(kind), _text_of(line)))
            del self.events[:-_MOST_EVENTS]
            self._have_events_changed = True

    def mark(self) -> None:
        """Remember this state as that which a reader has seen (see :class:`Columns`)."""
        for columns in self._columns():
            columns.mark()
        self._have_events_changed = False

    @property
    def is_changed(self) -> bool:
        """Whether lines or events were added or dropped since :meth:`mark` was called."""
        return self._have_events_changed or any(columns.is_changed for columns in self._columns())

    def _columns(self) -> List[Columns]:
        return [self.iterations, self.validation, *self.evaluations.values()]

    def _drop_after(self, iteration: int) -> None:
        for columns in self._columns():
            columns.drop_after(iteration)
        self.events = [event for event in self.events if event.iteration <= iteration]


def _text_of(line: Mapping[str, Any]) -> str:
    """The text of an event."""
    if line["kind"] == RESUMED:
        checkpoint = line.get("checkpoint")
        return "begun anew" if checkpoint is None else cut(f"resumed from {checkpoint}")
    if line["kind"] == LEFT_OUT:
        return cut(f"left out: {line.get('why')}")
    return cut(f"not written: {line['error']}" if line.get("error") else str(line.get("name", "")))
