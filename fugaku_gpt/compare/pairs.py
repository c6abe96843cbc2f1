"""Writes and reads the files of a live comparison.

``OUT/comparison.json`` describes what is compared. Each pair is a folder ``OUT/pair-NNN`` with two run directories,
``a`` and ``b``, each with ``noise.json`` beside its own files, and ``pair.json``, which is written last: a pair without
it was interrupted and does not count. All figures are computed from these files, so a report can be made again at any
time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from fugaku_gpt.compare.noise import Noise
from fugaku_gpt.compare.samples import NOT_RUN, JobSample, read_job, unapplied_settings
from fugaku_gpt.compare.statistics import check_tolerance
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.records.run import OK
from fugaku_gpt.typed_json import record_of, value_of
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 1
COMPARISON_FILE = "comparison.json"
PAIR_FILE = "pair.json"
NOISE_FILE = "noise.json"
ENDING_FILE = "ending.json"
A_FIRST, B_FIRST = "AB", "BA"


@dataclass(frozen=True)
class SidePlan:
    """One side of a live comparison.

    Attributes:
        text: the side as it was written.
        environment: name or file of the build; empty for the Python that ran the comparison.
        settings: ``key=value`` changes of the run.
        config: the complete run, section → key → value.
        build: the settings of the environment's file that affect how ranks are started.
    """

    text: str
    environment: str
    settings: Tuple[str, ...]
    config: Dict[str, Dict[str, Any]]
    build: Dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparisonPlan:
    """The two sides of a comparison, and how one job is timed.

    Attributes:
        warm_up: number of iterations at the beginning of each job that do not count.
        tolerance: share within which the sides count as the same.
        load: share of other processes above which a job counts as disturbed.
        commit: git commit of the checkout; empty where it is unknown.
    """

    a: SidePlan
    b: SidePlan
    warm_up: int
    tolerance: float
    load: float
    commit: str = ""
    version: int = VERSION

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)
        if self.warm_up < 0:
            raise ValueError(f"warm_up {self.warm_up}: valid: at least 0")

    @property
    def sides(self) -> Tuple[SidePlan, SidePlan]:
        """A and B."""
        return self.a, self.b

    @property
    def differing_keys(self) -> List[str]:
        """Keys in which the sides' settings differ: the subject of the comparison."""
        a, b = ({text.partition("=")[0]: text for text in side.settings} for side in self.sides)
        return sorted(key for key in {**a, **b} if a.get(key) != b.get(key))


@dataclass(frozen=True)
class Pair:
    """One pair of jobs.

    Attributes:
        name: name of its folder.
        order: ``AB`` or ``BA``: which side ran first.
        a, b: the jobs.
        noise_a, noise_b: the noise during each job; None where it was not measured.
        disturbed: reasons why it does not count; empty where it counts.
        seconds: duration of the pair, an estimate for the next one.
    """

    name: str
    order: str
    a: JobSample
    b: JobSample
    noise_a: Optional[Noise]
    noise_b: Optional[Noise]
    disturbed: Tuple[str, ...]
    seconds: float

    @property
    def has_both_times(self) -> bool:
        """True if both jobs ended well and were timed."""
        return self.a.is_usable and self.b.is_usable

    @property
    def is_counted(self) -> bool:
        """True if both jobs were timed and neither was disturbed."""
        return self.has_both_times and not self.disturbed


@dataclass(frozen=True)
class ComparisonRecord:
    """A live comparison as recorded on disk.

    Attributes:
        pairs: the finished pairs, in their order.
        unfinished: names of the pairs that were interrupted.
        stop_reason: why no more pairs were run; empty while it runs, or where it was killed.
    """

    plan: ComparisonPlan
    pairs: Tuple[Pair, ...]
    unfinished: Tuple[str, ...]
    stop_reason: str = ""

    @property
    def counted(self) -> List[Pair]:
        """The pairs that enter the statistics."""
        return [pair for pair in self.pairs if pair.is_counted]

    @property
    def seconds(self) -> Tuple[List[float], List[float]]:
        """Seconds per iteration of A's jobs and of B's, for the pairs that count."""
        pair_seconds = [(pair.a.seconds, pair.b.seconds) for pair in self.counted]
        timed_pairs = [(a, b) for a, b in pair_seconds if a is not None and b is not None]
        return [a for a, _ in timed_pairs], [b for _, b in timed_pairs]

    @property
    def disturbed(self) -> List[Pair]:
        """The pairs that are left out because a job was disturbed."""
        return [pair for pair in self.pairs if pair.has_both_times and pair.disturbed]

    def troubles(self) -> List[str]:
        """Reasons why there can be no verdict: a side failed, or a setting was not applied."""
        return self.failures() + self.not_applied()

    def failures(self) -> List[str]:
        """Reasons why the last pair does not have two times."""
        reasons: List[str] = []
        for last_pair in self.pairs[-1:]:
            for name, job in (("A", last_pair.a), ("B", last_pair.b)):
                if job.status not in (OK, NOT_RUN):
                    reasons.append(f"{name} did not run ({last_pair.name}): {job.status}: {job.reason}")
                elif job.status == OK and job.seconds is None:
                    reasons.append(f"{name} has no iteration after the warm-up ({last_pair.name})")
        return reasons

    def not_applied(self) -> List[str]:
        """Lines about settings under comparison that were not applied, or that were applied on one side alone."""
        unapplied = [
            {key: remark for job in jobs for key, remark in unapplied_settings(job).items()}
            for jobs in ([pair.a for pair in self.pairs], [pair.b for pair in self.pairs])
        ]
        return [
            f"{name}: {key}{remark}: a verdict would be about something else; mend it and take another --out"
            for name, own_settings, other_settings in (
                ("A", unapplied[0], unapplied[1]),
                ("B", unapplied[1], unapplied[0]),
            )
            for key, remark in own_settings.items()
            if key in self.plan.differing_keys or key not in other_settings
        ]


def write_plan(out: Path, plan: ComparisonPlan) -> None:
    """Records what is compared."""
    write_json_atomically(out / COMPARISON_FILE, asdict(plan))


def write_ending(out: Path, stop_reason: str) -> None:
    """Records why no more pairs were run."""
    write_json_atomically(out / ENDING_FILE, {"version": VERSION, "why": stop_reason})


def read_plan(out: Path) -> Optional[ComparisonPlan]:
    """Reads the plan of a comparison's folder; None where it holds no comparison.

    Raises:
        UsageError: the file is not of this format.
    """
    return read_versioned_json(
        out / COMPARISON_FILE, "a comparison's plan", (VERSION,), _plan_of, mend="choose another --out"
    )


def _plan_of(values: Mapping[str, Any]) -> ComparisonPlan:
    return record_of(ComparisonPlan, values)


def write_noise(directory: Path, noise: Noise) -> None:
    """Records the noise during a job in its run directory."""
    write_json_atomically(directory / NOISE_FILE, {"version": VERSION, **asdict(noise)})


def write_pair(folder: Path, order: str, disturbed: List[str], seconds: float) -> None:
    """Records that a pair has been run to its end."""
    write_json_atomically(
        folder / PAIR_FILE, {"version": VERSION, "order": order, "disturbed": disturbed, "seconds": seconds}
    )


def read_comparison(out: Path) -> ComparisonRecord:
    """Reads a live comparison from its folder.

    Raises:
        UsageError: the folder holds no comparison, or a file in it is damaged.
    """
    plan = read_plan(out)
    if plan is None:
        raise UsageError(f"{out}: holds no comparison ({COMPARISON_FILE} is not there); give two sides to make one")
    pairs, unfinished = [], []
    for folder in pair_folders(out):
        pair = _read_pair(folder, plan.warm_up)
        if pair is None:
            unfinished.append(folder.name)
        else:
            pairs.append(pair)
    stop_reason = read_versioned_json(
        out / ENDING_FILE,
        "a record of why a comparison ended",
        (VERSION,),
        lambda values: str(values["why"]),
        mend="remove it",
    )
    return ComparisonRecord(plan, tuple(pairs), tuple(unfinished), stop_reason or "")


def _pair_record_of(values: Mapping[str, Any]) -> Tuple[str, Tuple[str, ...], float]:
    """Order, disturbances and duration of a pair."""
    order, seconds = value_of(str, values["order"], "order"), value_of(float, values["seconds"], "seconds")
    return order, value_of(Tuple[str, ...], values["disturbed"], "disturbed"), float(seconds)


def _read_pair(folder: Path, warm_up: int) -> Optional[Pair]:
    """Reads a pair with both of its jobs; None where it was not run to its end."""

    record = read_versioned_json(
        folder / PAIR_FILE,
        "a pair's record",
        (VERSION,),
        _pair_record_of,
        mend=f"remove {folder} to have it left out",
    )
    if record is None:
        return None
    order, disturbed, seconds = record
    a, b = (read_job(folder / side, warm_up) for side in ("a", "b"))
    noise_a, noise_b = (_read_noise(folder / side / NOISE_FILE) for side in ("a", "b"))
    return Pair(folder.name, order, a, b, noise_a, noise_b, disturbed, seconds)


def pair_folders(out: Path) -> List[Path]:
    """Folders of the pairs, in their order."""
    numbered = [(path.name[len("pair-") :], path) for path in out.glob("pair-*") if path.is_dir()]
    return [path for _, path in sorted((int(text), path) for text, path in numbered if text.isdecimal())]


def next_pair_folder(out: Path) -> Path:
    """Path of the next pair's folder."""
    folders = pair_folders(out)
    number = int(folders[-1].name[len("pair-") :]) + 1 if folders else 1
    return out / f"pair-{number:03d}"


def _read_noise(path: Path) -> Optional[Noise]:
    return read_versioned_json(
        path,
        "a record of a job's noise",
        (VERSION,),
        lambda values: record_of(Noise, values),
        mend="remove it to have it counted as unknown",
    )
