"""Tests of submitting a sweep: missing runs are submitted, none twice, and the command does not wait for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Dict, List

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.job import ENDED, RUNNING, JobStatus, append_event, read_history
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import FAILED, RunDirectory
from fugaku_gpt.records.sweep import read_sweep_entry
from fugaku_gpt.sweep.lock import SweepLock
from fugaku_gpt.sweep.plan import SweepPlan, plan_of, read_plan
from fugaku_gpt.sweep.run import run_sweep
from fugaku_gpt.sweep.submit import (
    PlannedJob,
    RunStanding,
    SubmittedSweep,
    is_due,
    planned_jobs,
    run_standings,
    submit_sweep,
)
from tests.support.prepared_corpus import PREPARED
from tests.sweep import submit_kills
from tests.sweep.fake import FakeLaunch, QuietProgress, failing, leave_run
from tests.sweep.fake_scheduler import FakeScheduler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TEXT = f"""
preset: tiny
defaults: {{data.paths: [{PREPARED}], job.elapse: 0:30:00, job.nodes: 1, training.iterations: 40}}
matrix: {{layout.tp: [1, 2, 3], training.seed: [1, 2]}}
"""
RUNS = [f"dp1-tp{tp}-seed{seed}-r1" for tp in (1, 2) for seed in (1, 2)]


@pytest.fixture
def plan(tmp_path: Path) -> SweepPlan:
    file = tmp_path / "s.yaml"
    file.write_text(TEXT, encoding="utf-8")
    return plan_of(file, ("job.scheduler=slurm",))


@pytest.fixture
def scheduler(tmp_path: Path) -> FakeScheduler:
    return FakeScheduler(tmp_path / "queue")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def submit_missing(plan: SweepPlan, out: Path, scheduler: FakeScheduler, **options: object) -> SubmittedSweep:
    return submit_sweep(plan, out, scheduler_factory=lambda name: scheduler, **options)  # type: ignore[arg-type]


def is_missing_or_failed(standing: RunStanding) -> bool:
    return is_due(standing, resume=True)


def statuses(plan: SweepPlan, out: Path, scheduler: FakeScheduler) -> Dict[str, str]:
    return {standing.run.name: standing.status for standing in run_standings(plan.sweep(), out, lambda name: scheduler)}


def test_every_run_is_submitted_once_and_a_refused_row_is_a_row(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    reported: List[str] = []
    submission = submit_missing(
        plan, out, scheduler, on_job=lambda n, of, planned, outcome: reported.append(f"{n}/{of} {outcome}")
    )
    assert (
        list(submission.job_ids) == RUNS
        and submission.remaining == 0
        and not submission.refused
        and not submission.stop_reason
    )
    assert [job["run"] for job in scheduler.jobs()] == RUNS and reported[-1] == "4/4 job 103"
    refused = RunDirectory(out / "dp1-tp3-seed1-r1").result()
    assert refused is not None and "must divide model.heads 4" in refused.reason
    config = load_run_config(out / RUNS[0] / "config.yaml")
    assert config.job.name == "dp1-tp1-seed1-r1" and config.job.scheduler == "slurm"
    entry = read_sweep_entry(out / RUNS[0])
    assert entry is not None and entry.digest == plan.sweep().runs[0].digest and entry.sweep == "s"
    assert "#SBATCH" in (out / RUNS[0] / "job.sh").read_text()
    assert read_plan(out) == plan
    again = submit_missing(plan, out, scheduler)
    assert again.job_ids == {} and again.remaining == 0 and len(scheduler.jobs()) == 4
    assert len(scheduler.polls) == 1 and len(scheduler.polls[0]) == 4  # one poll for all jobs


def test_a_limit_of_jobs_in_flight_is_respected_and_the_next_call_continues(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    first = submit_missing(plan, out, scheduler, max_in_flight=3)
    assert list(first.job_ids) == RUNS[:3] and first.remaining == 1
    assert submit_missing(plan, out, scheduler, max_in_flight=3).job_ids == {}
    leave_run(out / RUNS[1], load_run_config(out / RUNS[1] / "config.yaml"))
    scheduler.states["101"] = JobStatus("101", ENDED, "COMPLETED", exit_code=0)
    last = submit_missing(plan, out, scheduler, max_in_flight=3)
    assert list(last.job_ids) == RUNS[3:] and last.remaining == 0


def test_every_run_has_a_standing_also_after_failures(plan: SweepPlan, out: Path, scheduler: FakeScheduler) -> None:
    assert set(statuses(plan, out, scheduler).values()) == {"missing", "refused"}
    submit_missing(plan, out, scheduler, max_in_flight=3)
    scheduler.states["100"] = JobStatus("100", RUNNING, "RUNNING")
    scheduler.states["101"] = JobStatus("101", ENDED, "OUT_OF_MEMORY")
    writer = MetricsWriter(out / RUNS[0] / "metrics.jsonl")
    writer.write("iteration", {"iteration": 17, "seconds": 0.25})
    standings = {standing.run.name: standing for standing in run_standings(plan.sweep(), out, lambda name: scheduler)}
    assert {name: standing.status for name, standing in standings.items()} == {
        RUNS[0]: "running",
        RUNS[1]: "oom",
        RUNS[2]: "queued",
        RUNS[3]: "missing",
        "dp1-tp3-seed1-r1": "refused",
        "dp1-tp3-seed2-r1": "refused",
    }
    assert (standings[RUNS[0]].iterations, standings[RUNS[0]].seconds_per_iteration, standings[RUNS[0]].job_id) == (
        17,
        0.25,
        "100",
    )
    assert "memory" in standings[RUNS[1]].reason and standings[RUNS[1]].advice
    assert [standings[name].in_flight for name in RUNS] == [True, False, True, False]
    polls_before = len(scheduler.polls)
    unqueried = {
        standing.run.name: standing.status
        for standing in run_standings(plan.sweep(), out, lambda name: scheduler, query_schedulers=False)
    }
    assert unqueried[RUNS[0]] == "running" and unqueried[RUNS[1]] == "oom" and len(scheduler.polls) == polls_before


def test_failed_runs_are_skipped_by_submit_and_submitted_again_by_resume(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    submit_missing(plan, out, scheduler)
    leave_run(out / RUNS[0], load_run_config(out / RUNS[0] / "config.yaml"))
    leave_run(out / RUNS[1], load_run_config(out / RUNS[1] / "config.yaml"), FAILED, "rank 1: ValueError: no")
    scheduler.states = {
        "100": JobStatus("100", ENDED, "COMPLETED", exit_code=0),
        "101": JobStatus("101", ENDED, "FAILED", exit_code=1),
        "102": JobStatus("102", ENDED, "NODE_FAIL"),
    }
    assert submit_missing(plan, out, scheduler).job_ids == {}
    resumed = submit_missing(plan, out, scheduler, is_chosen=is_missing_or_failed)
    assert resumed.job_ids == {RUNS[1]: ["104"], RUNS[2]: ["105"]}  # neither finished runs nor those in flight
    earlier_result = RunDirectory(out / "attempts" / RUNS[1] / "1").result()
    assert earlier_result is not None and earlier_result.reason.endswith("rank 1: ValueError: no")
    assert (out / "attempts" / RUNS[2] / "1" / "job.jsonl").exists()
    assert statuses(plan, out, scheduler)[RUNS[1]] == "queued"
    assert submit_missing(plan, out, scheduler, is_chosen=is_missing_or_failed).job_ids == {}


def test_a_run_lost_by_the_scheduler_is_lost_until_resumed(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    submit_missing(plan, out, scheduler)
    (scheduler.root / "jobs").write_text("".join(f'{{"id": "{n}", "tag": "", "run": ""}}\n' for n in (101, 102, 103)))
    assert statuses(plan, out, scheduler)[RUNS[0]] == "lost"
    assert submit_missing(plan, out, scheduler).job_ids == {}
    assert list(submit_missing(plan, out, scheduler, is_chosen=is_missing_or_failed).job_ids) == [RUNS[0]]


def test_refusals_are_reported_and_identical_refusals_stop_the_submission(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    scheduler.refuse = {RUNS[0]: "too many nodes", RUNS[1]: "queue is full", RUNS[2]: "queue is full"}
    submission = submit_missing(plan, out, scheduler)
    assert list(submission.refused) == RUNS[:3] and submission.job_ids == {} and submission.remaining == 1
    assert "rejects every job for the same reason: queue is full" in submission.stop_reason
    standings = {standing.run.name: standing for standing in run_standings(plan.sweep(), out, lambda name: scheduler)}
    assert standings[RUNS[0]].status == "missing" and "too many nodes" in standings[RUNS[0]].reason
    scheduler.refuse = {}
    assert list(submit_missing(plan, out, scheduler).job_ids) == RUNS


def test_an_uncertain_submission_is_looked_up_and_not_repeated(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    scheduler.uncertain = [RUNS[1]]
    submission = submit_missing(plan, out, scheduler)
    assert (
        list(submission.job_ids) == RUNS[:1]
        and "does not answer clearly" in submission.stop_reason
        and submission.remaining == 3
    )
    scheduler.uncertain = []
    again = submit_missing(plan, out, scheduler)
    assert list(again.job_ids) == RUNS[2:]
    assert read_history(out / RUNS[1]).jobs[0].job_id == "101"
    assert max(Counter(job["run"] for job in scheduler.jobs()).values()) == 1


def test_nothing_is_submitted_twice_wherever_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.sweep.submit_kills", str(tmp_path)]
    rows = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    assert [row["jobs"] for row in rows] == [dict.fromkeys(submit_kills.RUNS, 1)] * len(rows)
    # every change of a submission was its last once; of each run, the job was there and not yet recorded
    assert all(row["kills"] for row in rows[:-1]) and not rows[-1]["kills"]
    assert sum(row["unrecorded"] for row in rows) >= len(submit_kills.RUNS)


def test_a_dry_run_plans_all_jobs_and_writes_nothing(plan: SweepPlan, out: Path, scheduler: FakeScheduler) -> None:
    standings, planned = planned_jobs(plan.sweep(), out, plan, resume=False)
    assert [planned_job.run.name for planned_job in planned] == RUNS and len(standings) == 6 and not out.exists()
    assert all(
        planned_job.job is not None and planned_job.job.node_hours == 0.5 and "#SBATCH" in planned_job.job.text
        for planned_job in planned
    )
    submit_missing(plan, out, scheduler, max_in_flight=1)
    before = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*"))}
    _, planned = planned_jobs(plan.sweep(), out, plan, resume=True)
    assert [planned_job.run.name for planned_job in planned] == RUNS[1:]
    assert {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*"))} == before


def test_a_profile_is_looked_up_from_the_sweep_s_file(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweeps" / "env").mkdir(parents=True)
    file, profile = tmp_path / "sweeps" / "s.yaml", tmp_path / "sweeps" / "env" / "b.yaml"
    file.write_text("preset: tiny\ndefaults: {job.profile: env/b.yaml}\ninclude: [{label: small}]\n")
    profile.write_text("name: b\npython: /opt/b/python3\n")
    monkeypatch.chdir(tmp_path)
    plan = plan_of(Path("sweeps/s.yaml"), ("job.scheduler=slurm",))
    monkeypatch.chdir(tmp_path / "sweeps")  # the plan keeps the folder that it was made from
    (job,) = [planned_job.job for planned_job in planned_jobs(plan.sweep(), out, plan, resume=False)[1]]
    assert job is not None and job.config.job.profile == str(profile) and "python=/opt/b/python3\n" in job.text
    profile.unlink()
    (refused,) = planned_jobs(plan.sweep(), out, plan, resume=False)[1]
    assert refused.job is None and "job.profile: env/b.yaml: no such file" in refused.refusal


def test_nothing_is_written_without_confirmation(plan: SweepPlan, out: Path, scheduler: FakeScheduler) -> None:
    job_counts: List[int] = []

    def decline(planned: List[PlannedJob]) -> bool:
        job_counts.append(len(planned))
        return False

    submission = submit_missing(plan, out, scheduler, confirm=decline)
    assert job_counts == [4] and submission.remaining == 4 and scheduler.jobs() == []
    assert os.listdir(out) == [".sweep.lock"]


def test_a_run_that_the_scheduler_cannot_start_is_refused(tmp_path: Path, out: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        f"preset: tiny\ndefaults: {{data.paths: [{PREPARED}]}}\n"
        "include: [{label: big, layout.dp: 2, job.nodes: 2}, {label: small}]\n"
    )
    plan, scheduler = plan_of(file, ("job.scheduler=local",)), FakeScheduler(tmp_path / "queue")
    submission = submit_missing(plan, out, scheduler)
    assert list(submission.job_ids) == ["small-r1"] and "valid: 1" in submission.refused["big-r1"]
    result = RunDirectory(out / "big-r1").result()
    assert result is not None and result.status == "refused"
    assert list(submit_missing(plan, out, scheduler).refused) == ["big-r1"]  # cheap to ask again


def test_a_run_that_does_not_fit_on_the_nodes_is_refused(tmp_path: Path, out: Path, scheduler: FakeScheduler) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        f"preset: 124m\ndefaults: {{data.paths: [{PREPARED}]}}\n"
        "include: [{label: big, job.node_memory: 2Gi}, {label: small}]",
        encoding="utf-8",
    )
    plan = plan_of(file, ("job.scheduler=slurm",))
    dry = planned_jobs(plan.sweep(), out, plan, False)[1]
    assert [(planned_job.job is None, bool(planned_job.refusal)) for planned_job in dry] == [
        (True, True),
        (False, False),
    ]
    submission = submit_missing(plan, out, scheduler)
    assert list(submission.job_ids) == ["small-r1"] and list(submission.refused) == ["big-r1"]
    assert "(job.node_memory" in submission.refused["big-r1"] and "--set layout.tp=2" in submission.refused["big-r1"]
    assert statuses(plan, out, scheduler)["big-r1"] == "refused"


def test_concurrent_submissions_and_differing_runs_are_refused(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    with SweepLock(out), pytest.raises(UsageError, match="already running there"):
        submit_missing(plan, out, scheduler)
    submit_missing(plan, out, scheduler, max_in_flight=1)
    changed = SweepPlan(plan.file, plan.name, plan.text.replace("40", "50"), plan.overrides, plan.base)
    with pytest.raises(UsageError, match="training.iterations: 40 then, 50 now"):
        submit_missing(changed, out, scheduler)
    with pytest.raises(UsageError, match="was submitted as a job; see `fugaku-gpt sweep status"):
        run_sweep(plan.sweep(), out, FakeLaunch(), QuietProgress())


def test_a_longer_time_limit_is_not_another_run(plan: SweepPlan, out: Path, scheduler: FakeScheduler) -> None:
    submit_missing(plan, out, scheduler)
    scheduler.states["100"] = JobStatus("100", ENDED, "TIMEOUT")
    longer = SweepPlan(plan.file, plan.name, plan.text, (*plan.overrides, "job.elapse=2:00:00"), plan.base)
    assert submit_missing(longer, out, scheduler, is_chosen=is_missing_or_failed).job_ids == {RUNS[0]: ["104"]}
    assert load_run_config(out / RUNS[0] / "config.yaml").job.elapse == 7200


def test_a_finding_that_is_accepted_later_makes_no_other_run(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    accepted = SweepPlan(plan.file, plan.name, plan.text, (*plan.overrides, "job.accept_findings=[PJM032]"), plan.base)
    assert [run.digest for run in accepted.sweep().runs] == [run.digest for run in plan.sweep().runs]
    submit_missing(plan, out, scheduler)
    assert submit_missing(accepted, out, scheduler).job_ids == {}
    entry = out / RUNS[0] / "sweep.json"  # as if an earlier version had written it, with another digest
    values = json.loads(entry.read_text(encoding="utf-8"))
    entry.write_text(json.dumps({**values, "digest": "0" * 16}), encoding="utf-8")
    assert submit_missing(accepted, out, scheduler).job_ids == {}


def test_runs_that_this_machine_has_finished_are_not_submitted(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    run_sweep(plan.sweep(), out, FakeLaunch(dp1_tp2_seed1=failing), QuietProgress())
    assert submit_missing(plan, out, scheduler).job_ids == {}
    resumed = submit_missing(plan, out, scheduler, is_chosen=is_missing_or_failed)
    assert list(resumed.job_ids) == ["dp1-tp2-seed1-r1"]
    assert (out / "attempts" / "dp1-tp2-seed1-r1" / "1" / "metrics.jsonl").exists()


def test_an_open_intent_counts_as_in_flight_until_it_is_settled(
    plan: SweepPlan, out: Path, scheduler: FakeScheduler
) -> None:
    submit_missing(plan, out, scheduler, max_in_flight=1)
    intent_time = time.time() + 10_000
    (out / RUNS[1]).mkdir()
    (out / RUNS[1] / "sweep.json").write_text((out / RUNS[0] / "sweep.json").read_text())
    append_event(out / RUNS[1], "intent", intent_time, scheduler="slurm", tag="t", link=1, chain=1, bulk="")

    def standing(clock_time: float) -> RunStanding:
        standings = run_standings(plan.sweep(), out, lambda name: scheduler, lambda: clock_time)
        return next(candidate for candidate in standings if candidate.run.name == RUNS[1])

    assert standing(intent_time + 1).in_flight
    given_up = standing(intent_time + 10_000)
    assert not given_up.in_flight and given_up.status == "missing" and "no answer was recorded" in given_up.reason


def test_a_sweep_without_a_corpus_is_refused_before_anything_is_written(
    tmp_path: Path, out: Path, scheduler: FakeScheduler
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(TEXT.replace(f"data.paths: [{PREPARED}], ", ""), encoding="utf-8")
    with pytest.raises(UsageError, match="^data.paths: empty") as error:
        submit_missing(plan_of(file, ("job.scheduler=slurm",)), out, scheduler)
    assert len(str(error.value).splitlines()) == 1  # once, not for each of the four runs
    assert not scheduler.jobs() and [path.name for path in out.glob("*") if path.is_dir()] == []
