"""Recorded runs as observations of toggles: at which level each was, and what else it was, which makes its block.

Of a design's own sweep, of any folder of run directories, or of a CSV's rows. Runs of one block differ by the toggles
alone, so a layout that varies besides is a block, and so is each repeat of a design. A run at neither level of a toggle
tells nothing of it and is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from fugaku_gpt.compare.effects import Observation
from fugaku_gpt.compare.factorial import HIGH, LOW, Design, Factor, parse, split_names
from fugaku_gpt.compare.recorded import Found, Measured, rows_of, runs_of, source_of
from fugaku_gpt.compare.samples import Job, not_applied
from fugaku_gpt.compare.sides import Condition, RecordedSide, parse_side
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import UsageError

# names of toggles → columns of a table and their two levels there
_COLUMNS: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "freq": ("freq_ghz", ("2.0", "2.2")),
    "tcmalloc": ("tcmalloc", ("false", "true")),
    "retention": ("retention", ("default", "0")),
    "ranks": ("ranks_per_node", ("1", "4")),
    "recompute": ("recompute", ("false", "true")),
    "zero": ("zero", ("0", "1")),
}
# columns that follow from a toggle: more ranks on the same nodes are more replicas
_FOLLOW = {"ranks_per_node": ("processes", "dp")}

Conditions = Tuple[Condition, ...]
_Value = Callable[[str], object]


@dataclass(frozen=True)
class Observed:
    """What :func:`fugaku_gpt.compare.effects.attribute` is given.

    Attributes:
        names: of the toggles.
        levels: texts of each one's low and high level.
        notes: about runs that are left out.
        failures: lines about runs that have failed, of a design's own, and about toggles that were not applied.
    """

    observations: Tuple[Observation, ...]
    names: Tuple[str, ...]
    levels: Tuple[Tuple[str, str], ...]
    notes: Tuple[str, ...]
    failures: Tuple[str, ...] = ()


@dataclass(frozen=True)
class _Toggle:
    name: str
    texts: Tuple[str, str]
    low: Conditions
    high: Conditions

    def level(self, value: _Value) -> Optional[int]:
        """At which level a run was; None: at neither."""
        for level, conditions in ((LOW, self.low), (HIGH, self.high)):
            if all(one.holds(value(one.key)) for one in conditions):
                return level
        return None


def of_runs(folder: Path, wanted: Union[str, Design], warm_up: int) -> Observed:
    """Run directories of a folder.

    Args:
        wanted: the design whose sweep has made them, or the names of toggles.
        warm_up: iterations at the beginning of each run whose times do not count.

    Raises:
        UsageError: there is no run, or a name means no toggle.
        RunFailed: all runs have failed.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    found = runs_of(RecordedSide(str(folder), folder), warm_up)
    configs = [job.config for job in found.jobs if job.config is not None]
    factors = wanted.factors if isinstance(wanted, Design) else parse(wanted, configs[0])
    toggles = [_of_factor(factor) for factor in factors]
    labels = wanted.labels() if isinstance(wanted, Design) else {}

    def block_of(run: Measured) -> str:
        row = run.name.rpartition("-r")[0]  # a run of a sweep is its row and the repeat
        return f"block {labels[row][0]}, " if row in labels else ""

    values = [_value_of(config) for config in configs]
    without = _not_applied(toggles, found.jobs)
    # of any other folder, what has failed may be of another day and question
    failed = list(found.failed) if isinstance(wanted, Design) else []
    return _observed(found, toggles, values, block_of, [*failed, *without])


def of_table(path: Path, text: str) -> Observed:
    """Rows of a CSV with the columns of ``benchmarks/reference/measurements.csv``. Rows whose names begin unlike, up to
    the first point, are of different blocks.

    Args:
        text: toggles joined by commas; of names that do not tell their levels, ``column=low|high``.

    Raises:
        UsageError: no such file or column, no row has ended well, or a toggle has no two levels.
    """
    toggles = [_of_column(path, name, levels, text) for name, levels in split_names(text)]
    found = rows_of(RecordedSide(str(path), path))
    values = [run.configuration.__getitem__ for run in found.runs]
    return _observed(found, toggles, values, _source_of, ())


def _source_of(run: Measured) -> str:
    """The notes that a row is from: others are of other days and of other code."""
    source = source_of(run.name)
    return f"{source}, " if source else ""


def _of_factor(factor: Factor) -> _Toggle:
    """What both levels set alike is no part of the toggle: it is what the runs of a block have in common."""
    moving = [key for (key, low), (_, high) in zip(factor.low.settings, factor.high.settings) if low != high]
    low, high = (
        tuple(Condition(key, "=", value) for key, value in level.settings if key in moving)
        for level in (factor.low, factor.high)
    )
    return _Toggle(factor.name, (factor.low.text, factor.high.text), low, high)


def _of_column(path: Path, name: str, levels: Optional[Sequence[str]], text: str) -> _Toggle:
    column, usual = _COLUMNS.get(name.rpartition(".")[2], (name, ()))
    found = list(usual if levels is None else levels)
    if len(found) != 2 or not all(found) or found[0] == found[1]:
        raise UsageError(f"--factorial {text}: {name}: two levels are needed, such as {name}=LOW|HIGH")
    low, high = (_condition(path, column, level) for level in found)
    return _Toggle(name, (found[0], found[1]), (low,), (high,))


def _condition(path: Path, column: str, level: str) -> Condition:
    side = parse_side(f"{path}:{column}={level}", lambda _: False)
    if not isinstance(side, RecordedSide):
        raise UsageError(f"{path}: is no table; valid: a CSV with the columns of benchmarks/reference/measurements.csv")
    return side.conditions[0]


def _value_of(config: RunConfig) -> _Value:
    def value(key: str) -> object:
        section, _, leaf = key.partition(".")
        return getattr(getattr(config, section), leaf)

    return value


def _observed(
    found: Found,
    toggles: Sequence[_Toggle],
    values: Sequence[_Value],
    block_of: Callable[[Measured], str],
    failures: Sequence[str],
) -> Observed:
    keys = _keys_of(toggles)
    neither: "Counter[str]" = Counter()
    observations = []
    own = {one.key for toggle in toggles for one in toggle.low}
    for run, value in zip(found.runs, values):
        if own & set(run.not_applied):  # at which level it was is not what it asked for
            continue
        levels = [toggle.level(value) for toggle in toggles]
        known = tuple(level for level in levels if level is not None)
        if len(known) < len(toggles):
            neither.update(toggle.name for toggle, level in zip(toggles, levels) if level is None)
            continue
        block = block_of(run) + _rest(run.configuration, keys)
        block += "".join(f", {key} not applied" for key in run.not_applied)
        observations.append(Observation(run.name, known, block, run.seconds))
    left_out = [*found.left_out]
    for toggle in toggles:
        if neither[toggle.name]:
            runs = "1 run" if neither[toggle.name] == 1 else f"{neither[toggle.name]} runs"
            left_out.append(f"{runs} at neither level of {toggle.name} ({' | '.join(toggle.texts)})")
    notes = [f"left out: {'; '.join(left_out)}"] if left_out else []
    return Observed(
        tuple(observations),
        tuple(toggle.name for toggle in toggles),
        tuple(toggle.texts for toggle in toggles),
        (*notes, *failures),
        tuple(failures),
    )


def _keys_of(toggles: Sequence[_Toggle]) -> Set[str]:
    keys = {one.key for toggle in toggles for one in toggle.low}
    return keys | {key for one in keys for key in _FOLLOW.get(one, ())}


def _rest(configuration: Mapping[str, object], keys: Set[str]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in sorted(configuration.items()) if key not in keys)


def _not_applied(toggles: Sequence[_Toggle], jobs: Sequence[Job]) -> List[str]:
    """Runs, left out, whose toggles were not as they were asked for: what they took is no effect of these."""
    keys = {one.key for toggle in toggles for one in toggle.low}
    return [
        f"left out: {job.name}: {key}{text}" for job in jobs for key, text in not_applied(job).items() if key in keys
    ]
