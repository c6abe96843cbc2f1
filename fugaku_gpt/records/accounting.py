"""``accounting.json`` of a run directory: the schedulers' measurements of the run's jobs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Mapping, Optional, Tuple

from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.typed_json import record_of
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 1
FILE = "accounting.json"

SAMPLING_SECONDS = 60.0  # sampling interval of PJM's power counters: energy and power of shorter jobs mean nothing
ENERGY_FORMULA = "average power of all nodes over the run's jobs, start-up included, times seconds per iteration"
SIMULATED = "simulated"
_SUPPLEMENT = "SUPPLEMENTARY INFORMATION"  # key under which our simulator of PJM states that nothing was measured
TOO_SHORT = "too short to tell"


@dataclass(frozen=True)
class Knob:
    """One power knob: the values requested, granted and used, as the scheduler writes them; None if not stated."""

    require: Optional[str] = None
    alloc: Optional[str] = None
    use: Optional[str] = None


@dataclass(frozen=True)
class JobAccount:
    """Measurements of one job, over all its nodes together.

    Attributes:
        scheduler: pjm, slurm or local.
        job_id: id of the job; the sub-job id for bulk and step jobs.
        elapsed_seconds: time from start to end.
        nodes: number of allocated nodes.
        energy_joules, power_watts: measured; None if unknown.
        energy_joules_ideal, power_watts_ideal: the scheduler's normalised estimate, without assistant cores and optics.
        knobs: name (freq, eco_state, ...) → :class:`Knob`.
        capped: time when power was capped; empty if it was not.
        max_memory_bytes: largest use of a node.
        exit_code, signal: how the job script ended.
        code: the PJM code.
        reason: reason as stated by the scheduler.
        source: file or command that the figures are from.
        values: all values as stated by the scheduler, key → text.
    """

    scheduler: str
    job_id: str
    elapsed_seconds: Optional[float] = None
    nodes: Optional[int] = None
    energy_joules: Optional[float] = None
    energy_joules_ideal: Optional[float] = None
    power_watts: Optional[float] = None
    power_watts_ideal: Optional[float] = None
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    capped: str = ""
    max_memory_bytes: Optional[float] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    code: Optional[int] = None
    reason: str = ""
    source: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Energy:
    """Energy that a run's jobs have drawn together.

    Attributes:
        joules: energy of all nodes, from start to end; None if unknown, or if the jobs were too short to be sampled.
        watts: average power of all nodes together.
        nodes: number of nodes; None if it differs between jobs.
        basis: ``measured``, ``ideal``, ``simulated``, or why there is no energy; empty if nothing was measured.
    """

    joules: Optional[float] = None
    watts: Optional[float] = None
    nodes: Optional[int] = None
    basis: str = ""


def write_accounting(directory: Path, jobs: Tuple[JobAccount, ...]) -> None:
    """Write the accounts of a run's jobs into its directory, atomically."""
    write_json_atomically(directory / FILE, {"version": VERSION, "jobs": [asdict(job) for job in jobs]})


def read_accounting(directory: Path) -> Tuple[JobAccount, ...]:
    """Read the accounts of a run's jobs; empty if none were collected.

    Raises:
        UsageError: the file is not of this format.
    """
    accounts = read_versioned_json(
        directory / FILE,
        "an accounting file",
        (VERSION,),
        lambda values: tuple(record_of(JobAccount, job) for job in values["jobs"]),
        mend="remove it and run `job collect` again",
    )
    return accounts or ()


def energy_of(jobs: Tuple[JobAccount, ...]) -> Energy:
    """Sum the energy of all jobs of a run. Measurements take precedence over estimates, and are never added to them."""
    jobs_with_energy = [job for job in jobs if job.energy_joules is not None or job.energy_joules_ideal is not None]
    sampled_jobs = [
        job for job in jobs_with_energy if job.elapsed_seconds is not None and job.elapsed_seconds >= SAMPLING_SECONDS
    ]
    if not sampled_jobs:
        sampled = [job.elapsed_seconds for job in jobs if job.scheduler != "local"]  # this machine counts no energy
        short = any(seconds is not None and seconds < SAMPLING_SECONDS for seconds in sampled)
        return Energy(basis=TOO_SHORT if short else "")
    measured = all(job.energy_joules is not None for job in sampled_jobs)
    joules = sum((job.energy_joules if measured else job.energy_joules_ideal) or 0.0 for job in sampled_jobs)
    if not measured and any(job.energy_joules_ideal is None for job in sampled_jobs):
        return Energy(basis="some jobs measured, others estimated")
    seconds = sum(job.elapsed_seconds or 0.0 for job in sampled_jobs)
    nodes = {job.nodes for job in sampled_jobs}
    same = nodes.pop() if len(nodes) == 1 else None
    simulated = any(job.values.get(_SUPPLEMENT, "").upper().startswith("SIMULATED") for job in sampled_jobs)
    basis = SIMULATED if simulated else "measured" if measured else "ideal"
    return Energy(joules, joules / seconds, same, basis)
