"""Turns recorded runs into observations of toggles: the level of each toggle, and the block of all other settings.

The runs are those of a design's own sweep, of any folder of run directories, or the rows of a CSV. Runs of one block
(as in a randomised block design) differ by the toggles alone, so each layout is a block of its own, and so is each
repeat of a design. A run at neither level of a toggle is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from fugaku_gpt.compare.effects import Observation
from fugaku_gpt.compare.factorial import HIGH, LOW, Design, Factor, parse_factors, split_toggles
from fugaku_gpt.compare.recorded import RecordedRun, SelectedRuns, select_rows, select_runs, source_of
from fugaku_gpt.compare.samples import JobSample, unapplied_settings
from fugaku_gpt.compare.sides import Condition, RecordedSide, parse_side
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import UsageError

# name of a toggle → column of a table and its two levels there
_TOGGLE_COLUMNS: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "freq": ("freq_ghz", ("2.0", "2.2")),
    "tcmalloc": ("tcmalloc", ("false", "true")),
    "retention": ("retention", ("default", "0")),
    "ranks": ("ranks_per_node", ("1", "4")),
    "recompute": ("recompute", ("false", "true")),
    "zero": ("zero", ("0", "1")),
}
# columns that change with the column of a toggle: more ranks on the same nodes are more replicas
_DEPENDENT_COLUMNS = {"ranks_per_node": ("processes", "dp")}

Conditions = Tuple[Condition, ...]
_ValueOf = Callable[[str], object]


@dataclass(frozen=True)
class ToggleObservations:
    """The input of :func:`fugaku_gpt.compare.effects.estimate_effects`.

    Attributes:
        names: names of the toggles.
        levels: texts of each toggle's low and high level.
        notes: remarks about runs that are left out.
        failures: lines about failed runs of a design, and about toggles that were not applied.
    """

    observations: Tuple[Observation, ...]
    names: Tuple[str, ...]
    levels: Tuple[Tuple[str, str], ...]
    notes: Tuple[str, ...]
    failures: Tuple[str, ...] = ()


@dataclass(frozen=True)
class _Toggle:
    name: str
    level_texts: Tuple[str, str]
    low: Conditions
    high: Conditions

    def level_of(self, value: _ValueOf) -> Optional[int]:
        """The level at which a run was; None where it was at neither."""
        for level, conditions in ((LOW, self.low), (HIGH, self.high)):
            if all(condition.is_met_by(value(condition.key)) for condition in conditions):
                return level
        return None


def observe_runs(folder: Path, toggles_or_design: Union[str, Design], warm_up: int) -> ToggleObservations:
    """Reads the run directories of a folder.

    Args:
        toggles_or_design: the design whose sweep made them, or the names of toggles.
        warm_up: number of iterations at the beginning of each run whose times do not count.

    Raises:
        UsageError: there is no run, or a name is no toggle.
        RunFailed: all runs have failed.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    selected = select_runs(RecordedSide(str(folder), folder), warm_up)
    configs = [job.config for job in selected.jobs if job.config is not None]
    factors = (
        toggles_or_design.factors
        if isinstance(toggles_or_design, Design)
        else parse_factors(toggles_or_design, configs[0])
    )
    toggles = [_toggle_of_factor(factor) for factor in factors]
    labels = toggles_or_design.labels() if isinstance(toggles_or_design, Design) else {}

    def block_of(run: RecordedRun) -> str:
        row = run.name.rpartition("-r")[0]  # the name of a run in a sweep is its row and the repeat
        return f"block {labels[row][0]}, " if row in labels else ""

    values = [_value_of(config) for config in configs]
    unapplied = _unapplied_lines(toggles, selected.jobs)
    # failures in any other folder may be of another day and purpose
    failed = list(selected.failed) if isinstance(toggles_or_design, Design) else []
    return _observe(selected, toggles, values, block_of, [*failed, *unapplied])


def observe_table(path: Path, text: str) -> ToggleObservations:
    """Reads the rows of a CSV with the columns of ``benchmarks/reference/measurements.csv``.

    Rows whose names differ before the first point belong to different blocks.

    Args:
        text: toggles joined by commas; ``column=low|high`` where the name does not determine the levels.

    Raises:
        UsageError: no such file or column, no row with status ok, or a toggle does not have two levels.
    """
    toggles = [_toggle_of_column(path, name, levels, text) for name, levels in split_toggles(text)]
    selected = select_rows(RecordedSide(str(path), path))
    values = [run.configuration.__getitem__ for run in selected.runs]
    return _observe(selected, toggles, values, _source_of, ())


def _source_of(run: RecordedRun) -> str:
    """The notes that a row comes from, as part of its block: other notes are of other days and other code."""
    source = source_of(run.name)
    return f"{source}, " if source else ""


def _toggle_of_factor(factor: Factor) -> _Toggle:
    """A toggle of the settings that differ between the levels; runs of a block have the other settings in common."""
    differing_keys = [key for (key, low), (_, high) in zip(factor.low.settings, factor.high.settings) if low != high]
    low, high = (
        tuple(Condition(key, "=", value) for key, value in level.settings if key in differing_keys)
        for level in (factor.low, factor.high)
    )
    return _Toggle(factor.name, (factor.low.text, factor.high.text), low, high)


def _toggle_of_column(path: Path, name: str, levels: Optional[Sequence[str]], text: str) -> _Toggle:
    column, usual = _TOGGLE_COLUMNS.get(name.rpartition(".")[2], (name, ()))
    level_texts = list(usual if levels is None else levels)
    if len(level_texts) != 2 or not all(level_texts) or level_texts[0] == level_texts[1]:
        raise UsageError(f"--factorial {text}: {name}: two levels are needed, such as {name}=LOW|HIGH")
    low, high = (_condition(path, column, level) for level in level_texts)
    return _Toggle(name, (level_texts[0], level_texts[1]), (low,), (high,))


def _condition(path: Path, column: str, level: str) -> Condition:
    side = parse_side(f"{path}:{column}={level}", lambda _: False)
    if not isinstance(side, RecordedSide):
        raise UsageError(f"{path}: is no table; valid: a CSV with the columns of benchmarks/reference/measurements.csv")
    return side.conditions[0]


def _value_of(config: RunConfig) -> _ValueOf:
    def value(key: str) -> object:
        section, _, leaf = key.partition(".")
        return getattr(getattr(config, section), leaf)

    return value


def _observe(
    selected: SelectedRuns,
    toggles: Sequence[_Toggle],
    values: Sequence[_ValueOf],
    block_of: Callable[[RecordedRun], str],
    failures: Sequence[str],
) -> ToggleObservations:
    keys = _keys_of_toggles(toggles)
    neither_counts: "Counter[str]" = Counter()
    observations = []
    toggle_keys = {condition.key for toggle in toggles for condition in toggle.low}
    for run, value in zip(selected.runs, values):
        if toggle_keys & set(run.not_applied):  # it did not run at the level that it asked for
            continue
        levels = [toggle.level_of(value) for toggle in toggles]
        run_levels = tuple(level for level in levels if level is not None)
        if len(run_levels) < len(toggles):
            neither_counts.update(toggle.name for toggle, level in zip(toggles, levels) if level is None)
            continue
        block = block_of(run) + _other_settings_text(run.configuration, keys)
        block += "".join(f", {key} not applied" for key in run.not_applied)
        observations.append(Observation(run.name, run_levels, block, run.seconds))
    left_out = [*selected.left_out]
    for toggle in toggles:
        if neither_counts[toggle.name]:
            runs = "1 run" if neither_counts[toggle.name] == 1 else f"{neither_counts[toggle.name]} runs"
            left_out.append(f"{runs} at neither level of {toggle.name} ({' | '.join(toggle.level_texts)})")
    notes = [f"left out: {'; '.join(left_out)}"] if left_out else []
    return ToggleObservations(
        tuple(observations),
        tuple(toggle.name for toggle in toggles),
        tuple(toggle.level_texts for toggle in toggles),
        (*notes, *failures),
        tuple(failures),
    )


def _keys_of_toggles(toggles: Sequence[_Toggle]) -> Set[str]:
    keys = {condition.key for toggle in toggles for condition in toggle.low}
    return keys | {key for column in keys for key in _DEPENDENT_COLUMNS.get(column, ())}


def _other_settings_text(configuration: Mapping[str, object], keys: Set[str]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(configuration.items()) if key not in keys)


def _unapplied_lines(toggles: Sequence[_Toggle], jobs: Sequence[JobSample]) -> List[str]:
    """Lines about runs that are left out because a toggle was not applied: their times do not show its effect."""
    keys = {condition.key for toggle in toggles for condition in toggle.low}
    return [
        f"left out: {job.name}: {key}{text}"
        for job in jobs
        for key, text in unapplied_settings(job).items()
        if key in keys
    ]
