"""Runs that were made before, each with its like: rows of a CSV, or run directories.

Runs of a comparison differ in what it asks about and in nothing else. So A's and B's are matched by all the rest of
their configuration, and each matched configuration gives one ratio, between the geometric means of its runs (a blocked
comparison). What has no partner is told and left out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from fugaku_gpt.compare.samples import Job, expect_runs, not_applied, read_job
from fugaku_gpt.compare.sides import RecordedSide, refuse_unlike, work_of
from fugaku_gpt.compare.statistics import Comparison, compare_groups, compare_pairs
from fugaku_gpt.config import RunConfig, changed_settings
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.planner.tables.rows import Refused, Row, parse_measured, parse_row, read_table, torch_build

# of a row, what is no configuration: one table rounds the vocabulary that another gives in full
_NO_CONFIGURATION = ("id", "vocab", "mem_unit", "dtype")
# of a run, how it was handled, and settings that change what is recorded, not how long an iteration takes
_WORK = ("layers", "hidden", "heads", "seq_len", "global_batch")  # of a row
_HANDLING = ("job.", "checkpoint.", "data.", "training.iterations", "training.profile_operators")


@dataclass(frozen=True)
class Measured:
    """One recorded run: its name, what it was, what it gave, and which of its settings were not applied.

    Attributes:
        key: of no other run: its directory, or its table and place there; names may recur.
        work: what makes the work of an iteration.
    """

    key: str
    name: str
    work: Mapping[str, object]
    configuration: Mapping[str, object]
    words: str
    seconds: float
    memory: Optional[float] = None
    memory_unit: str = ""
    not_applied: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """One configuration that both sides have.

    Attributes:
        words: the configuration in short.
        a, b: the runs of each side, at least one.
        comparison: of these runs; None where a side has one alone: between the two, what a repeat would have changed
            is not known.
    """

    words: str
    a: Tuple[Measured, ...]
    b: Tuple[Measured, ...]
    comparison: Optional[Comparison]

    @property
    def seconds(self) -> Tuple[float, float]:
        """Geometric means of the sides' seconds per iteration."""
        return _geometric([run.seconds for run in self.a]), _geometric([run.seconds for run in self.b])

    @property
    def ratio(self) -> float:
        """B over A."""
        a, b = self.seconds
        return b / a

    @property
    def memory_ratio(self) -> Optional[float]:
        """B over A, of readings of the same kind; None where there are none."""
        if len({run.memory_unit for run in (*self.a, *self.b)}) != 1:
            return None
        a, b = ([run.memory for run in runs if run.memory is not None] for runs in (self.a, self.b))
        return max(b) / max(a) if a and b else None


@dataclass(frozen=True)
class Recorded:
    """Two sides of recorded runs.

    Attributes:
        blocks: the configurations that both have.
        comparison: over all of them; None where there is none.
        left_out: lines about what was not used, for each side.
        jobs_a, jobs_b: run directories that were used; empty for rows of a table.
    """

    blocks: Tuple[Block, ...]
    comparison: Optional[Comparison]
    left_out: Tuple[str, ...]
    jobs_a: Tuple[Job, ...] = ()
    jobs_b: Tuple[Job, ...] = ()


@dataclass(frozen=True)
class Found:
    """The runs of a side, and lines about what was not used.

    Attributes:
        jobs: of run directories, in the order of ``runs``; empty for rows of a table.
        failed: of runs that meet the conditions and have not ended well, how each ended.
    """

    runs: Tuple[Measured, ...]
    left_out: Tuple[str, ...]
    jobs: Tuple[Job, ...] = ()
    failed: Tuple[str, ...] = ()


def compare_recorded(a: RecordedSide, b: RecordedSide, warm_up: int, tolerance: float) -> Recorded:
    """Match the runs of both sides and compare them.

    Args:
        warm_up: iterations of each run directory that do not count.
        tolerance: within which a ratio is the same.

    Raises:
        UsageError: a side has no run, both have some of the same ones, or their iterations are not the same work.
        RunFailed: all runs of a side have failed.
    """
    if a.is_table != b.is_table:
        raise UsageError(f"{a.text} and {b.text}: rows of a table and run directories have no columns in common")
    if (a.path.resolve(), a.conditions) == (b.path.resolve(), b.conditions):
        raise UsageError(f"{a.text} and {b.text}: are the same runs; add what tells them apart, such as :torch=1.7")
    first, second = (rows_of(side) if side.is_table else runs_of(side, warm_up) for side in (a, b))
    _refuse_overlap(a, b, first, second)
    asked = {one.key for one in set(a.conditions) ^ set(b.conditions)}
    if asked & {"nodes", "ranks_per_node", "ranks"}:  # with these the number of replicas changes
        asked |= {"processes", "dp", "layout.dp"}
    pairs = _matched(first.runs, second.runs, asked)
    if not pairs and not a.is_table and all(len(_groups(one.runs, asked)) == 1 for one in (first, second)):
        # two folders, one configuration each: they differ in what was meant to differ
        pairs = [(first.runs, second.runs)]
    for x, y in pairs:
        refuse_unlike(x[0].work, y[0].work)
    applied = [(_applied(x, y), _applied(y, x)) for x, y in pairs]
    blocks = tuple(Block(x[0].words, x, y, _within(x, y, tolerance)) for x, y in applied if x and y)
    used_a, used_b = ({run.key for runs in side for run in runs} for side in _sides_of(blocks))
    return Recorded(
        blocks,
        _over(blocks, tolerance),
        tuple(
            f"{name}: {line}"
            for name, one, used in (("A", first, used_a), ("B", second, used_b))
            for line in (*one.left_out, *_not_applied(one.runs, used), *_without_partner(one.runs, used))
        ),
        _jobs_of(first, used_a),
        _jobs_of(second, used_b),
    )


def _refuse_overlap(a: RecordedSide, b: RecordedSide, first: "Found", second: "Found") -> None:
    there = {run.key for run in second.runs}
    both = [run.name for run in first.runs if run.key in there]
    if both:
        raise UsageError(
            f"{a.text} and {b.text}: {_some(both)} on both sides: are the same runs there; add conditions that tell "
            "the sides apart, such as :torch=1.7 and :torch=1.10"
        )


def _sides_of(blocks: Sequence[Block]) -> "Tuple[List[Runs], List[Runs]]":
    return [block.a for block in blocks], [block.b for block in blocks]


def _jobs_of(found: "Found", used: Set[str]) -> Tuple[Job, ...]:
    return tuple(job for run, job in zip(found.runs, found.jobs) if run.key in used)


def _over(blocks: Sequence[Block], tolerance: float) -> Optional[Comparison]:
    if not blocks:
        return None
    if len(blocks) == 1:
        (block,) = blocks
        a, b = ([run.seconds for run in runs] for runs in (block.a, block.b))
        return compare_groups(a, b, tolerance)
    seconds = [block.seconds for block in blocks]
    return compare_pairs([one for one, _ in seconds], [other for _, other in seconds], tolerance)


def _within(a: Sequence[Measured], b: Sequence[Measured], tolerance: float) -> Optional[Comparison]:
    if min(len(a), len(b)) < 2:
        return None
    return compare_groups([run.seconds for run in a], [run.seconds for run in b], tolerance)


Runs = Tuple[Measured, ...]


def _matched(a: Sequence[Measured], b: Sequence[Measured], asked: Set[str]) -> List[Tuple[Runs, Runs]]:
    ours, theirs = _groups(a, asked), _groups(b, asked)
    return [(tuple(ours[key]), tuple(theirs[key])) for key in ours if key in theirs]


def _groups(runs: Sequence[Measured], asked: Set[str]) -> Dict[Tuple[Tuple[str, str], ...], List[Measured]]:
    groups: Dict[Tuple[Tuple[str, str], ...], List[Measured]] = {}
    for run in runs:
        key = tuple(sorted((name, repr(value)) for name, value in run.configuration.items() if name not in asked))
        groups.setdefault(key, []).append(run)
    return groups


def _applied(runs: Runs, others: Runs) -> Runs:
    """The runs that have really run with what tells them from the others. What both sides ask for and no run of
    either has got is the same for all."""
    there = others[0].configuration
    nowhere = set.intersection(*(set(run.not_applied) for run in (*runs, *others)))
    return tuple(
        run
        for run in runs
        if all(key in nowhere and run.configuration.get(key) == there.get(key) for key in run.not_applied)
    )


def _not_applied(runs: Sequence[Measured], used: Set[str]) -> List[str]:
    left = [run for run in runs if run.key not in used and run.not_applied]
    return [f"{run.name}: {', '.join(run.not_applied)} was not applied, by its own record" for run in left]


def _without_partner(runs: Sequence[Measured], used: Set[str]) -> List[str]:
    left = [run.name for run in runs if run.key not in used and not run.not_applied]
    if not left:
        return []
    runs_ = "run" if len(left) == 1 else "runs"
    return [f"{len(left)} {runs_} of configurations that the other side lacks: {_some(left)}"]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def rows_of(side: RecordedSide) -> Found:
    """The rows of a CSV that meet a side's conditions and have ended well.

    Raises:
        UsageError: there is none.
    """
    found: List[Measured] = []
    ends: Counter[str] = Counter()
    seen: Dict[Tuple[object, ...], Tuple[str, Optional[float]]] = {}  # → the table that showed it first, memory
    file = str(side.path.resolve())
    for number, cells in enumerate(read_table(side.path)):
        row = parse_row(cells)
        if not all(one.holds(_cell(row, cells, one.key)) for one in side.conditions):
            continue
        if isinstance(row, Refused):
            ends["which are no configuration"] += 1
            continue
        measured = parse_measured(cells)
        if measured.status.lower() != "ok" or measured.seconds is None:
            ends[f"with status {measured.status or 'unknown'}" if measured.status != "ok" else "without seconds"] += 1
            continue
        configuration = {
            spec.name: getattr(row, spec.name) for spec in fields(row) if spec.name not in _NO_CONFIGURATION
        }
        # a repeat in the same table may well take as long, to the digits that are given, but not hold as much, too
        same, table = (*configuration.values(), measured.seconds), row.id.rpartition(".")[0]
        first = seen.get(same)
        if first is not None and (first[0] != table or measured.memory is not None and first[1] == measured.memory):
            ends["that another table shows too: counted once"] += 1
            continue
        seen.setdefault(same, (table, measured.memory))
        found.append(
            Measured(
                f"{file}:{number}",
                row.id,
                {name: configuration[name] for name in _WORK},
                configuration,
                _words_of_row(row),
                measured.seconds,
                measured.memory,
                row.mem_unit,
            )
        )
    if not found:
        raise UsageError(f"{side.text}: no row with status ok and seconds meets this; see its columns and conditions")
    return Found(tuple(found), _counted(ends, "row"))


def source_of(name: str) -> str:
    """The notes that a row is from, as its name begins up to the first point; empty where there is none."""
    source, point, _ = name.partition(".")
    return source if point else ""


def runs_of(side: RecordedSide, warm_up: int) -> Found:
    """The run directories that meet a side's conditions and have ended well.

    Raises:
        UsageError: there is none.
        RunFailed: all that meet the conditions have failed.
    """
    found: List[Measured] = []
    jobs: List[Job] = []
    failed: List[str] = []
    ends: Counter[str] = Counter()
    for directory in expect_runs(side.path):
        job = read_job(directory, warm_up)
        config = job.config
        if config is None:
            ends["that were refused"] += 1
            continue
        if not all(one.holds(_setting(config, one.key)) for one in side.conditions):
            continue
        if not job.usable or job.seconds is None:
            ends[f"with status {job.status}" if job.status != "ok" else "of no more iterations than the warm-up"] += 1
            failed += [f"{job.name}: {job.status}: {job.reason}"] if job.status != "ok" else []
            continue
        configuration = {key: value for key, value in changed_settings(config).items() if not key.startswith(_HANDLING)}
        # of a condition's key the default counts too, so that "not asked for" and "false" are one
        configuration.update({one.key: _setting(config, one.key) for one in side.conditions})
        memory = float(job.node_used_bytes) if job.node_used_bytes is not None else None
        words, missing = _words_of_config(config), tuple(not_applied(job))
        key, work, unit = str(directory.resolve()), work_of(config), "bytes of the node"
        found.append(Measured(key, job.name, work, configuration, words, job.seconds, memory, unit, missing))
        jobs.append(job)
    if not found:
        left = "; ".join(_counted(ends, "run"))
        said = f"{side.text}: no run that has ended well and meets this" + (f" ({left})" if left else "")
        raise RunFailed("\n".join([said, *failed])) if failed else UsageError(said)
    return Found(tuple(found), _counted(ends, "run"), tuple(jobs), tuple(failed))


def _counted(ends: Mapping[str, int], noun: str) -> Tuple[str, ...]:
    return tuple(f"{count} {noun}{'' if count == 1 else 's'} {what}" for what, count in sorted(ends.items()))


def _cell(row: "Row | Refused", cells: Mapping[str, str], key: str) -> object:
    """A value that a condition is about; of a row that is no configuration, as it stands."""
    if isinstance(row, Row):
        return getattr(row, key)
    return torch_build(cells.get(key, "")) if key == "torch" else cells.get(key, "")


def _setting(config: RunConfig, key: str) -> object:
    if key == "ranks":
        return config.layout.ranks
    section, _, leaf = key.partition(".")
    return getattr(getattr(config, section), leaf)


def _words_of_row(row: Row) -> str:
    words = [
        f"{row.layers}x{row.hidden}",
        f"seq {row.seq_len}",
        f"{row.nodes} x {row.ranks_per_node}",
        f"dp {row.dp} tp {row.tp} pp {row.pp}",
        f"mbs {row.micro_batch} gbs {row.global_batch}",
    ]
    more: Sequence[Tuple[bool, str]] = (
        (row.recompute, "recompute"),
        (row.zero > 0, f"zero {row.zero}"),
        (row.freq_ghz not in (0, 2.0), f"{row.freq_ghz:g} GHz"),
        (row.tcmalloc, "tcmalloc"),
        (row.retention is not None, f"retention {row.retention}"),
    )
    return ", ".join([*words, *(text for holds, text in more if holds)])


def _words_of_config(config: RunConfig) -> str:
    layout, training = config.layout, config.training
    return ", ".join(
        [
            size_name(config.model),
            f"seq {config.model.seq_len}",
            f"dp {layout.dp} tp {layout.tp} pp {layout.pp}",
            f"mbs {training.micro_batch} gbs {training.global_batch}",
        ]
    )


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
