"""Tests of jobs on a real Slurm, Debian's, on this machine: submitted, followed, cancelled, held, in arrays and chains,
stopped at their time limit."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Dict, Iterator

import pytest

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.outcome import Outcome
from fugaku_gpt.jobs.poll import poll_runs, watch_runs
from fugaku_gpt.jobs.schedulers.protocol import Refused, Submission
from fugaku_gpt.jobs.schedulers.slurm import SlurmScheduler
from fugaku_gpt.jobs.submission import submit
from fugaku_gpt.records.job import (
    CANCELLED,
    ENDED,
    LOST,
    ON_HOLD,
    OVER,
    RUNNING,
    JobStatus,
    append_event,
    read_history,
)
from fugaku_gpt.records.run import RunDirectory
from tests.support.slurm import missing, slurm_cluster
from tests.support.waiting import until_state

REASON = missing()

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(bool(REASON), reason=f"no real Slurm on this machine: {REASON}"),
]

# as in the job templates: an exit record at the stop signal, and again at the end
RECORD = """
started=$(date +%s) told='' child=''
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; id=${id:-$SLURM_JOB_ID}
record() {
  mkdir -p exit
  printf '{"version": 1, "job_id": "%s", "sub_job": "%s", "exit_code": %d, "signal": "%s", ' \
    "$SLURM_JOB_ID" "$id" "$1" "$told" > "exit/.$id.tmp"
  printf '"started": %d, "ended": %d, "host": "x"}' "$started" "$(date +%s)" >> "exit/.$id.tmp"
  mv "exit/.$id.tmp" "exit/$id.json"
}
trap 'record "$?"' EXIT
trap 'told=TERM; record 143; kill "$child"; exit 75' TERM
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmScheduler]:
    with slurm_cluster():
        yield SlurmScheduler()


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: SlurmScheduler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that runs into its time limit, of a minute at least: it does so beside the other tests."""
    directory = tmp_path_factory.mktemp("limited")
    write(directory, "sleep 600", "--time=1")
    write_config(directory)
    submit(directory, slurm)
    return directory


def write(directory: Path, body: str, *directives: str) -> Submission:
    """A script in a folder of its own."""
    directory.mkdir(exist_ok=True)
    lines = "".join(f"#SBATCH {line}\n" for line in directives)
    (directory / "job.sh").write_text(f"#!/bin/bash\n{lines}{body}\n", encoding="utf-8")
    return Submission("job.sh", directory, "test")


def until_over(slurm: SlurmScheduler, job_id: str) -> JobStatus:
    return until_state(slurm, job_id, *OVER)


def test_two_ranks_on_two_nodes_run_and_the_outcome_is_read(slurm: SlurmScheduler, tmp_path: Path) -> None:
    body = "srun --kill-on-bad-exit=1 bash -c 'echo rank $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME'; exit 3"
    job_id = slurm.submit(write(tmp_path, body, "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"))
    status = until_over(slurm, job_id)
    assert (status.state, status.raw, status.exit_code, status.group) == (ENDED, "FAILED", 3, "all")
    files = slurm.output_files(tmp_path, job_id)
    assert [path.name for path in files] == [f"slurm-{job_id}.out"]
    printed = sorted(files[0].read_text(encoding="utf-8").splitlines())
    assert [line for line in printed if line.startswith("rank")] == ["rank 0 of 2 on n1", "rank 1 of 2 on n2"]
    measured = slurm.accounting(tmp_path, job_id)
    assert measured is not None and measured.nodes == 2


def test_a_running_job_is_cancelled(slurm: SlurmScheduler, tmp_path: Path) -> None:
    job_id = slurm.submit(write(tmp_path, "sleep 600"))
    until_state(slurm, job_id, RUNNING)
    assert slurm.cancel([job_id]) == {job_id: ""}
    assert until_over(slurm, job_id).state == CANCELLED
    assert slurm.cancel([job_id])[job_id] != ""


def test_a_job_is_put_on_hold_and_released(slurm: SlurmScheduler, tmp_path: Path) -> None:
    blocker = slurm.submit(write(tmp_path / "blocker", "sleep 600"))
    submission = write(tmp_path / "held", "true", f"--dependency=afterany:{blocker}")
    job_id = slurm.submit(submission)
    assert slurm.hold([job_id]) == {job_id: ""}
    slurm.cancel([blocker])
    until_over(slurm, blocker)
    assert slurm.poll([job_id])[job_id].state == ON_HOLD
    assert slurm.release([job_id]) == {job_id: ""}
    assert until_over(slurm, job_id) == JobStatus(job_id, ENDED, "COMPLETED", exit_code=0, group="all")


def test_an_array_has_the_exit_code_of_the_worst_task(slurm: SlurmScheduler, tmp_path: Path) -> None:
    job_id = slurm.submit(write(tmp_path, "exit $((SLURM_ARRAY_TASK_ID * 4))", "--array=0-2"))
    status = until_over(slurm, job_id)
    assert (status.state, status.exit_code) == (ENDED, 4)
    tasks = slurm.poll([job_id, f"{job_id}_2"])
    assert [tasks[f"{job_id}_{number}"].exit_code for number in range(3)] == [0, 4, 8]
    assert len(slurm.output_files(tmp_path, job_id)) == 3


@pytest.mark.parametrize(("code", "ran"), [(75, True), (0, False)])
def test_a_link_of_a_chain_runs_only_after_a_link_to_be_resumed(
    slurm: SlurmScheduler, tmp_path: Path, code: int, ran: bool
) -> None:
    first = slurm.submit(write(tmp_path / "first", f"sleep 2; exit {code}"))
    second = write(tmp_path / "second", "echo ${SLURM_JOB_DEPENDENCY##*:}", "--export=NONE")
    job_id = slurm.submit(Submission("job.sh", second.directory, "test", after=first, link=2, chain=2))
    status = until_over(slurm, job_id)
    assert status.state == (ENDED if ran else CANCELLED)
    printed = [path.read_text(encoding="utf-8").strip() for path in slurm.output_files(second.directory, job_id)]
    assert printed == ([first] if ran else [])


def test_many_jobs_are_polled_at_once_with_unknown_ids(slurm: SlurmScheduler, tmp_path: Path) -> None:
    ids = [slurm.submit(write(tmp_path / str(number), f"exit {number}")) for number in range(5)]
    for job_id in ids:
        until_over(slurm, job_id)
    statuses = slurm.poll([*ids, "999999"])
    assert [statuses[job_id].exit_code for job_id in ids] == [0, 1, 2, 3, 4]
    assert statuses["999999"].state == LOST
    assert slurm.poll(["999999"])["999999"].state == LOST


def test_a_refusal_has_the_text_of_slurm_and_advice(slurm: SlurmScheduler, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="invalid partition[\\s\\S]*job.resource_group"):
        slurm.submit(write(tmp_path, "true", "--partition=none"))
    with pytest.raises(Refused, match="job.nodes"):
        slurm.submit(write(tmp_path, "true", "--nodes=99"))


def test_a_job_without_recorded_id_is_recovered_by_tag(slurm: SlurmScheduler, tmp_path: Path) -> None:
    """The submitter was killed between Slurm's answer and the record of it: intent and job exist, but no job id."""
    submission = write(tmp_path, RECORD + "sleep 1")
    tag = f"fugaku-gpt-{os.getpid()}-{time.time()}"
    append_event(tmp_path, "intent", time.time(), scheduler="slurm", tag=tag, link=1, chain=1, bulk="")
    job_id = slurm.submit(Submission("job.sh", submission.directory, "test", tag=tag))
    assert slurm.find([tag, "fugaku-gpt-none"]) == {tag: job_id}
    assert poll_runs([tmp_path])[0].job_id == job_id
    assert [job.job_id for job in read_history(tmp_path).jobs] == [job_id]
    with pytest.raises(UsageError, match=f"holds job {job_id}|job {job_id} is"):
        write_config(tmp_path)
        submit(tmp_path, slurm)


def test_a_job_stopped_before_the_time_limit_records_that_it_can_be_resumed(
    slurm: SlurmScheduler, tmp_path: Path
) -> None:
    body = RECORD + "sleep 600 & child=$!; wait"
    followed = follow_scripts(slurm, {tmp_path: write(tmp_path, body, "--time=2", "--signal=B:TERM@110")})
    verdict = followed[tmp_path]
    assert (verdict.status, verdict.retry) == ("interrupted", "resume")
    assert "can be resumed" in verdict.cause
    record = json.loads(next((tmp_path / "exit").glob("*.json")).read_text(encoding="utf-8"))
    assert (record["exit_code"], record["signal"]) == (75, "TERM")


def test_a_killed_script_is_no_success(slurm: SlurmScheduler, tmp_path: Path) -> None:
    followed = follow_scripts(slurm, {tmp_path: write(tmp_path, RECORD + "kill -9 $$; exit 0")})
    assert followed[tmp_path].status == "failed" and "signal 9" in followed[tmp_path].cause


def write_config(directory: Path) -> None:
    """Write the configuration that a run directory has beside its script."""
    config = load_run_config(preset="tiny", overrides=["job.scheduler=slurm"])
    (directory / "config.yaml").write_text(dump_run_config(config), encoding="utf-8")


def follow_scripts(slurm: SlurmScheduler, submissions: Dict[Path, Submission]) -> Dict[Path, Outcome]:
    """Submit run directories with these scripts, and follow them to their ends."""
    for directory in submissions:
        write_config(directory)
        submit(directory, slurm)
    *_, last = watch_runs(list(submissions), max_wait=5.0)
    return {polled.directory: polled.outcome for polled in last}


def test_a_job_at_the_time_limit_without_a_record_is_a_timeout(limited: Path) -> None:
    *_, (followed,) = watch_runs([limited], max_wait=5.0)
    verdict = followed.outcome
    assert (verdict.status, verdict.retry) == ("timeout", "resume") and "time limit" in verdict.cause
    result = RunDirectory(limited).result()
    assert result is not None and (result.status, result.judged) == ("timeout", True)
