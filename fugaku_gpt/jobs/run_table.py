"""The runs of a store as a table: their columns and settings by name, conditions on them, and their order."""

from __future__ import annotations

import difflib
import math
from operator import attrgetter
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from fugaku_gpt.config import RunConfig, valid_keys
from fugaku_gpt.config.differences import differing_settings
from fugaku_gpt.config.expression import parse_expression
from fugaku_gpt.config.expression_tokens import Value
from fugaku_gpt.config.values import BadValue, parse_duration
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.store import FIGURES, UNFINISHED, RunRecord, list_runs
from fugaku_gpt.launch.lost_run import conclude_lost_runs

RANKS = "layout.ranks"
NOTES = "notes"
# the columns that are shown unless others are named
SHOWN = (
    "run", "status", "size", "job.nodes", "layout.dp", "layout.tp", "layout.pp", "training.global_batch", "iterations",
    "seconds_per_iteration", "tflops_notes", "last_loss", "started", "job", "notes", "reason",
)  # fmt: skip
RUN_COLUMNS = (
    "run", "status", "reason", "sweep", "row", "variant", "repeat", "attempt", "digest", "size", "iterations",
    "started", "ended", "scheduler", "job", "torch", "git_commit", "problem", NOTES, *FIGURES,
)  # fmt: skip
IMAGES = "images_per_second"  # shown where a run has it: of classifiers of grids
_DURATIONS = ("job.elapse", "job.elapse_min", "job.stop_margin")


def valid_run_names() -> List[str]:
    """The names that conditions, orders and columns of runs may use: the columns, and every setting of a run."""
    return [*RUN_COLUMNS, *valid_keys(), RANKS]


def listed_runs(store: Path, *, is_read_only: bool = False) -> List[RunRecord]:
    """All runs in a store and their attempts. The end of a run of this user's whose processes on this machine are all
    gone, and which has no result, is recorded first.

    Args:
        is_read_only: whether nothing is written: no index, and no end of a run, which then is ``UNFINISHED``.

    Raises:
        UsageError: there is no such folder.
    """
    if is_read_only:
        return list_runs(store, is_read_only=True).runs
    records = list_runs(store).runs
    if conclude_lost_runs(store / record.run for record in records if record.status == UNFINISHED):
        records = list_runs(store).runs
    return records


def chosen_runs(
    records: Sequence[RunRecord], condition: Optional[str], ordering: Sequence[str], shown: Sequence[str]
) -> List[RunRecord]:
    """The runs that meet a condition, in order.

    Args:
        condition: an expression over :func:`valid_run_names`, or None.
        ordering: names to sort by, the first decides; ``-NAME`` sorts the largest first.
        shown: the columns that are shown beside the notes.

    Raises:
        ConfigError: the condition is no expression over these names.
    """
    chosen = list(records)
    values = RunValues(chosen, list(shown))
    if condition is not None:
        expression = parse_expression(condition, "--where", valid_run_names())
        chosen = [record for record in chosen if expression.holds(values.lookup(record), record.run)]
        values = RunValues(chosen, list(shown))
    for key in reversed(ordering):
        chosen = _sorted(chosen, key, values)
    return chosen


def _notes_of(records: List[RunRecord], shown: List[str]) -> Dict[str, str]:
    """Path of each run → the settings in which it differs from another run of its model, and that no column shows."""
    models: Dict[str, List[RunRecord]] = {}
    size_of_sweep = {record.sweep: record.size for record in records if record.sweep and record.size}
    for record in records:  # a refused run has no size of its own
        models.setdefault(record.size or size_of_sweep.get(record.sweep, ""), []).append(record)
    notes: Dict[str, str] = {}
    for members in models.values():
        distinct = {id(record.settings): record.settings for record in members}  # runs of one configuration share them
        named = differing_settings(list(distinct.values()), {*shown, "model.name"})
        text_of = dict(zip(distinct, map(", ".join, named)))
        notes.update((record.run, text_of[id(record.settings)]) for record in members)
    return notes


class RunValues:
    """Values of runs by the names of expressions and columns; the notes are made if they are asked for."""

    def __init__(self, records: List[RunRecord], shown: List[str]) -> None:
        self._records = records
        self._shown = shown
        self._notes: Optional[Dict[str, str]] = None
        self._functions: Dict[str, Callable[[RunRecord], Value]] = {}

    def lookup(self, record: RunRecord) -> Callable[[str], Value]:
        """The function that returns the value of a name for one run."""
        return lambda name: self.of(name)(record)

    def of(self, name: str) -> Callable[[RunRecord], Value]:
        """The function that returns the value of one name for a run."""
        if name not in self._functions:
            self._functions[name] = self._function(name)
        return self._functions[name]

    def _function(self, name: str) -> Callable[[RunRecord], Value]:
        if name == RANKS:
            axes = [self.of(f"layout.{axis}") for axis in ("dp", "tp", "pp")]
            return lambda record: math.prod(size for size in (of(record) for of in axes) if isinstance(size, int))
        if name == NOTES:
            return self._note
        if name in FIGURES:
            return lambda record: record.figures.get(name)
        if "." not in name:
            return attrgetter(name)
        section, _, leaf = name.partition(".")
        default = getattr(getattr(_DEFAULTS, section), leaf)
        if name in _DURATIONS:
            return lambda record: _duration(record.settings.get(name, default))
        return lambda record: _hashable(record.settings.get(name, default))

    def _note(self, record: RunRecord) -> str:
        if self._notes is None:
            self._notes = _notes_of(self._records, self._shown)
        return self._notes.get(record.run, "")


def _hashable(value: Any) -> Value:
    return tuple(value) if isinstance(value, list) else value


def _duration(value: Any) -> Value:
    return _seconds(value) if isinstance(value, str) else value


_DEFAULTS = RunConfig()


def run_names(text: str, option: str, *, is_order: bool = False) -> List[str]:
    """The names of columns and settings in a text, separated by commas.

    Args:
        option: what the text was given for, for messages.
        is_order: whether a name may have a ``-`` before it, as in :func:`chosen_runs`.

    Raises:
        UsageError: a name is unknown.
    """
    valid_names = valid_run_names()
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        plain = name.lstrip("-") if is_order else name
        if plain not in valid_names:
            close_matches = difflib.get_close_matches(plain, valid_names, n=1)
            hint = (
                f"did you mean {close_matches[0]}?"
                if close_matches
                else f"valid: {', '.join(RUN_COLUMNS)}, and settings such as layout.dp"
            )
            raise UsageError(f"{option} {name}: unknown name; {hint}")
    return names


def _sorted(records: List[RunRecord], key: str, values_of: RunValues) -> List[RunRecord]:
    """Sort runs by one name, stably; runs without a value come last."""
    name = key.lstrip("-")
    of_name = values_of.of(name)
    values = [(of_name(record), record) for record in records]
    with_value = [(value, record) for value, record in values if value is not None and value != ""]
    numbers = all(isinstance(value, (int, float)) for value, _ in with_value)
    with_value.sort(key=lambda item: item[0] if numbers else str(item[0]), reverse=key.startswith("-"))
    return [record for _, record in with_value] + [record for value, record in values if value is None or value == ""]


def _seconds(text: str) -> Optional[float]:
    try:
        return parse_duration(text)
    except BadValue:
        return None
