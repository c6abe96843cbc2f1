"""Tests of the diagnosis of an ended job: our exit record first, then the codes; EXT alone is no success."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import pytest

from fugaku_gpt.jobs.outcome import NEVER, RESUME, RETRY, WAIT, Outcome, deciding_job, job_outcome, record_result
from fugaku_gpt.records import job as jobs
from fugaku_gpt.records import run as runs
from fugaku_gpt.records.job import JobStatus, append_event, append_status, exit_records, read_history
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import RunDirectory
from tests.jobs.records import submitted_run, write_result
from tests.support.job_records import SUBMITTED, write_exit_record

JUDGED = SUBMITTED + 100.0


def iterations(directory: Path, last: int) -> None:
    writer = MetricsWriter(RunDirectory(directory).metrics_file)
    for number in range(1, last + 1):
        figures = {"iteration": number, "seconds": 0.5, "loss": 6.0, "rss_max_bytes": 3 * 2**30}
        writer.write("iteration", {**figures, "node_used_bytes": 9 * 2**30})
    writer.close()


def status(
    state: str = jobs.ENDED,
    raw: str = "EXT",
    exit_code: Optional[int] = None,
    signal: Optional[int] = None,
    code: Optional[int] = None,
    reason: str = "",
) -> JobStatus:
    return JobStatus("7", state, raw, exit_code, signal, code, reason, "small")


def short(outcome: Outcome) -> Any:
    return outcome.status, outcome.state, outcome.retry


def test_a_directory_without_a_submission_is_reported(tmp_path: Path) -> None:
    assert short(job_outcome(tmp_path)) == ("", "", RETRY)
    append_event(tmp_path, "intent", 1.0, scheduler="pjm", tag="t-1", link=1, chain=1, bulk="")
    outcome = job_outcome(tmp_path)
    assert short(outcome) == ("", jobs.UNKNOWN, WAIT) and "t-1" in outcome.advice
    append_event(tmp_path, "refused", 2.0, tag="t-1", reason="PJM 0071 no group\nadvice")
    assert job_outcome(tmp_path).cause == "not submitted: PJM 0071 no group"


@pytest.mark.parametrize("state", [jobs.QUEUED, jobs.ON_HOLD, jobs.RUNNING, jobs.SUSPENDED, jobs.UNKNOWN])
def test_an_unfinished_job_is_waited_for(tmp_path: Path, state: str) -> None:
    submitted_run(tmp_path)
    outcome = job_outcome(tmp_path, status(state, "", reason="because"))
    assert short(outcome) == ("", state, WAIT) and outcome.cause == "because"
    assert record_result(tmp_path, outcome, JUDGED) is None and RunDirectory(tmp_path).result() is None


def test_a_job_in_error_is_to_be_cancelled(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    assert "cancel it" in job_outcome(tmp_path, status(jobs.ON_HOLD, "ERR")).advice
    assert "release" in job_outcome(tmp_path, status(jobs.ON_HOLD, "HLD")).advice


def test_success_is_our_exit_record_and_the_ranks_result(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 0)
    write_result(tmp_path, runs.OK)
    for job_status in (status(code=0, exit_code=0), status(), status(jobs.LOST, ""), status(jobs.RUNNING, "RNE")):
        assert job_outcome(tmp_path, job_status).status == runs.OK
    assert record_result(tmp_path, job_outcome(tmp_path, status()), JUDGED) is None


def test_ext_alone_is_no_success(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    outcome = job_outcome(tmp_path, status())
    assert short(outcome) == (runs.FAILED, jobs.ENDED, RETRY) and "EXT" in outcome.cause


def test_codes_of_0_need_the_ranks_result(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    job_status = status(exit_code=0, code=0)
    assert (
        job_outcome(tmp_path, job_status).status == runs.FAILED
        and "no result" in job_outcome(tmp_path, job_status).cause
    )
    write_result(tmp_path, runs.OK)
    assert job_outcome(tmp_path, job_status).status == runs.OK


def test_exit_code_0_without_a_result_is_no_success(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 0)
    (tmp_path / "gpt.7.err").write_text("lines\nRuntimeError: the ranks did not start\n", encoding="utf-8")
    outcome = job_outcome(tmp_path, status(exit_code=0, code=0))
    assert outcome.status == runs.FAILED and "the ranks did not start" in outcome.cause


def test_our_exit_record_overrides_the_scheduler(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 3)
    outcome = job_outcome(tmp_path, status(exit_code=0, code=0))
    assert short(outcome) == (runs.FAILED, jobs.ENDED, NEVER) and "exit code 3" in outcome.cause


def test_the_elapse_limit_is_a_timeout_that_can_be_resumed(tmp_path: Path) -> None:
    """A real answer of pjstat: ST=EXT EC=0 PC=11 SN=24."""
    submitted_run(tmp_path)
    iterations(tmp_path, 4)
    outcome = job_outcome(tmp_path, status(exit_code=0, signal=24, code=11, reason="ELAPSE LIMIT EXC"))
    assert short(outcome) == (runs.TIMEOUT, jobs.ENDED, RESUME)
    assert "PJM code 11" in outcome.cause and "4 of 10 iterations" in outcome.cause and "1:00:00" in outcome.advice
    assert "begins anew" in outcome.advice  # and does not continue: there is no checkpoint
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest.json").write_text('{"version": 1, "name": "step-00000003"}', encoding="utf-8")
    stopped = job_outcome(tmp_path, status(exit_code=0, signal=24, code=11))
    assert stopped.advice == "`fugaku-gpt job resume` continues from step-00000003"
    written = record_result(tmp_path, outcome, JUDGED)
    assert written is not None and RunDirectory(tmp_path).result() == written
    assert (written.status, written.judged, written.iterations, written.started) == (runs.TIMEOUT, True, 4, SUBMITTED)
    assert written.summary["seconds_per_iteration"] == 0.5
    assert job_outcome(tmp_path, status(exit_code=0, signal=24, code=11)).status == runs.TIMEOUT
    assert record_result(tmp_path, outcome, JUDGED + 100.0) is None and RunDirectory(tmp_path).result() == written


def test_a_script_that_was_signalled_to_stop_is_ending(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 143, signal="TERM")
    assert job_outcome(tmp_path, status(jobs.RUNNING, "RNE")).retry == WAIT
    outcome = job_outcome(tmp_path, status(exit_code=0, signal=24, code=11))
    assert short(outcome) == (runs.TIMEOUT, jobs.ENDED, RESUME)
    outcome = job_outcome(tmp_path, status())
    assert short(outcome) == (runs.INTERRUPTED, jobs.ENDED, RESUME) and "SIGTERM" in outcome.cause


def test_exit_code_75_is_to_be_resumed_whatever_stopped_it(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 75, signal="TERM")
    outcome = job_outcome(tmp_path, status(exit_code=75, code=11))
    assert short(outcome) == (runs.INTERRUPTED, jobs.ENDED, RESUME) and "time limit" in outcome.cause
    assert job_outcome(tmp_path, status(jobs.LOST, "")).retry == RESUME


@pytest.mark.parametrize(
    ("job_status", "expected"),
    [
        (status(exit_code=137, code=12), (runs.OUT_OF_MEMORY, jobs.ENDED, NEVER)),
        (status(exit_code=137, code=23), (runs.OUT_OF_MEMORY, jobs.ENDED, NEVER)),
        (status(exit_code=0, code=20), (runs.FAILED, jobs.ENDED, RETRY)),
        (status(exit_code=0, code=140), (runs.FAILED, jobs.ENDED, RETRY)),
        (status(exit_code=0, code=16), (runs.FAILED, jobs.ENDED, NEVER)),
        (status(jobs.CANCELLED, "CCL", 0, None, 1), (runs.INTERRUPTED, jobs.CANCELLED, RESUME)),
        (status(jobs.CANCELLED, "CCL", 0, 9, 18, "ANOTHER JOB STARTED"), (runs.INTERRUPTED, jobs.CANCELLED, RESUME)),
        (status(jobs.CANCELLED, "CCL", 0, None, 7), (runs.INTERRUPTED, jobs.CANCELLED, RESUME)),
        (status(jobs.REJECTED, "RJT", None, None, 2), (runs.REFUSED, jobs.REJECTED, NEVER)),
        (status(exit_code=1, code=0), (runs.FAILED, jobs.ENDED, NEVER)),
        (status(exit_code=0, signal=9, code=0), (runs.FAILED, jobs.ENDED, NEVER)),
        (status(exit_code=0, code=77), (runs.FAILED, jobs.ENDED, NEVER)),
    ],
)
def test_without_our_record_the_scheduler_s_codes_decide(tmp_path: Path, job_status: JobStatus, expected: Any) -> None:
    submitted_run(tmp_path)
    assert short(job_outcome(tmp_path, job_status)) == expected


@pytest.mark.parametrize(
    ("raw", "state", "expected"),
    [
        ("TIMEOUT", jobs.ENDED, (runs.TIMEOUT, RESUME)),
        ("OUT_OF_MEMORY", jobs.ENDED, (runs.OUT_OF_MEMORY, NEVER)),
        ("NODE_FAIL", jobs.ENDED, (runs.FAILED, RETRY)),
        ("PREEMPTED", jobs.ENDED, (runs.INTERRUPTED, RESUME)),
        ("CANCELLED", jobs.CANCELLED, (runs.INTERRUPTED, RESUME)),
        ("FAILED", jobs.ENDED, (runs.FAILED, NEVER)),
    ],
)
def test_the_states_of_slurm_and_of_this_machine_decide(tmp_path: Path, raw: str, state: str, expected: Any) -> None:
    for scheduler in ("slurm", "local"):
        directory = tmp_path / scheduler
        job_id = "7" if scheduler == "slurm" else "local-7"
        submitted_run(directory, job_id, scheduler)
        outcome = job_outcome(directory, JobStatus(job_id, state, raw, 1))
        assert (outcome.status, outcome.retry) == expected


@pytest.mark.parametrize(
    ("exit_code", "cause"), [(None, "signal 9"), (0, "signal 9"), (-1, "exit code -1"), (3, "exit code 3")]
)
def test_a_signal_is_named_unless_an_exit_code_says_more(tmp_path: Path, exit_code: Optional[int], cause: str) -> None:
    submitted_run(tmp_path)
    assert job_outcome(tmp_path, status(exit_code=exit_code, signal=9, code=0)).cause == cause


def test_out_of_memory_is_reported_with_the_memory_used(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    iterations(tmp_path, 2)
    outcome = job_outcome(tmp_path, status(exit_code=137, code=12))
    assert "largest rank 3.0 GiB, node 9.0 GiB" in outcome.cause and "layout.tp" in outcome.advice


def test_out_of_memory_is_recognised_in_the_output_of_the_ranks(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 1)
    ranks = tmp_path / "output.7" / "1" / "0"
    ranks.mkdir(parents=True)
    message = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 80 GB\n"
    (ranks / "stderr.1.3").write_text(message, encoding="utf-8")
    outcome = job_outcome(tmp_path, status(exit_code=1, code=0))
    assert short(outcome) == (runs.OUT_OF_MEMORY, jobs.ENDED, NEVER) and "80 GB" in outcome.cause


def test_a_refused_configuration_is_reported_with_the_error_message(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 2)
    (tmp_path / "gpt.7.err").write_text("fugaku-gpt: data.paths: none: no such corpus\n", encoding="utf-8")
    outcome = job_outcome(tmp_path, status(exit_code=2, code=0))
    assert (outcome.status, outcome.cause) == (runs.REFUSED, "data.paths: none: no such corpus")


def test_lost_stays_lost(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    outcome = job_outcome(tmp_path, status(jobs.LOST, "", reason="PJM knows no job 7"))
    assert short(outcome) == (runs.LOST, jobs.LOST, RETRY) and "PJM knows no job 7" in outcome.cause
    written = record_result(tmp_path, outcome, JUDGED)
    assert written is not None and written.status == runs.LOST
    assert job_outcome(tmp_path, status(jobs.LOST, "")).status == runs.LOST
    write_exit_record(tmp_path, 3)  # it turns up after all
    outcome = job_outcome(tmp_path, status(jobs.LOST, ""))
    assert outcome.status == runs.FAILED
    again = record_result(tmp_path, outcome, JUDGED + 100.0)
    assert again is not None and again.status == runs.FAILED


def test_the_ranks_own_result_stands_unless_the_job_knows_the_cause(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 1)
    write_result(tmp_path, runs.FAILED, "rank 3: ValueError: loss is not finite")
    outcome = job_outcome(tmp_path, status(exit_code=1, code=0))
    assert outcome.cause == "exit code 1: rank 3: ValueError: loss is not finite"
    assert record_result(tmp_path, outcome, JUDGED) is None
    outcome = job_outcome(tmp_path, status(exit_code=1, code=12))
    written = record_result(tmp_path, outcome, JUDGED)
    assert written is not None and (written.status, written.ended) == (runs.OUT_OF_MEMORY, SUBMITTED + 60.0)


def test_a_result_from_the_job_names_the_checkpoint_and_keeps_what_a_rank_has_recorded(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    write_exit_record(tmp_path, 1)
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}", encoding="utf-8")
    assert RunDirectory(tmp_path).last_checkpoint() == checkpoint.name
    outcome = job_outcome(tmp_path, status(exit_code=1, code=12))
    written = record_result(tmp_path, outcome, JUDGED)
    assert written is not None and written.last_checkpoint == checkpoint.name
    ranks = runs.Result(runs.FAILED, "rank 3: killed", 1.0, 2.0, 4, {}, False, 3, "node-3", "SIGKILL", "of-the-rank")
    RunDirectory(tmp_path).write_result(ranks)
    written = record_result(tmp_path, job_outcome(tmp_path, status(exit_code=1, code=12)), JUDGED)
    assert written is not None and written.status == runs.OUT_OF_MEMORY
    assert (written.rank, written.node, written.exception) == (3, "node-3", "SIGKILL")
    assert written.last_checkpoint == "of-the-rank"


def test_a_chain_is_decided_by_the_first_link_that_is_not_to_be_resumed(tmp_path: Path) -> None:
    for link in (1, 2, 3):
        submitted_run(tmp_path, f"64_{link - 1}", link=link, chain=3)

    def deciding() -> str:
        job = deciding_job(read_history(tmp_path), exit_records(tmp_path))
        assert job is not None
        return job.job_id

    assert deciding() == "64_0"
    write_exit_record(tmp_path, 75, sub_job="64_0")
    assert deciding() == "64_1"
    write_exit_record(tmp_path, 1, sub_job="64_1")
    write_exit_record(tmp_path, 0, sub_job="64_2")  # a link that found nothing to do
    assert deciding() == "64_1"
    append_status(tmp_path, 1.0, JobStatus("64_1", jobs.ENDED, "EXT", 1, None, 0))
    assert job_outcome(tmp_path).status == runs.FAILED
    write_exit_record(tmp_path, 75, sub_job="64_1")
    write_exit_record(tmp_path, 75, sub_job="64_2")
    append_status(tmp_path, 1.0, JobStatus("64_2", jobs.ENDED, "EXT", 75, None, 0))
    assert (deciding(), job_outcome(tmp_path).retry) == ("64_2", RESUME)


@pytest.mark.parametrize("state", [jobs.QUEUED, jobs.RUNNING])
def test_a_link_that_left_no_record_is_not_the_end_while_the_next_one_waits_or_runs(tmp_path: Path, state: str) -> None:
    for link in (1, 2):
        submitted_run(tmp_path, f"64_{link - 1}", link=link, chain=2)
    append_status(tmp_path, 1.0, JobStatus("64_0", jobs.ENDED, "EXT", 0, None, 20, "NODE DOWN"))
    assert job_outcome(tmp_path).status == runs.FAILED
    append_status(tmp_path, 1.0, JobStatus("64_1", state, "", 0, None, 0))
    outcome = job_outcome(tmp_path)
    assert short(outcome) == ("", state, WAIT) and record_result(tmp_path, outcome, JUDGED) is None
    append_status(tmp_path, 2.0, JobStatus("64_1", jobs.CANCELLED, "CCL", None, None, 4))  # it never began
    assert job_outcome(tmp_path).status == runs.FAILED


def test_a_bulk_job_has_the_status_of_the_worst_sub_job_and_each_has_a_result(tmp_path: Path) -> None:
    submitted_run(tmp_path, bulk="0-2")
    write_exit_record(tmp_path, 0, sub_job="7[0]")
    write_result(tmp_path, runs.OK, name="repeat-0")
    outcome = job_outcome(tmp_path, status(jobs.RUNNING, "RUN"))
    assert outcome.retry == WAIT and outcome.cause == "1 of 3 sub-jobs have ended"
    write_exit_record(tmp_path, 1, sub_job="7[1]")
    append_status(tmp_path, 1.0, JobStatus("7[2]", jobs.ENDED, "EXT", 0, 24, 11))
    job_status = status(exit_code=1, code=11)
    append_status(tmp_path, 1.0, job_status)
    outcome = job_outcome(tmp_path, job_status)
    assert outcome.status == runs.FAILED and outcome.cause.startswith("1 of 3 sub-jobs: ")
    assert record_result(tmp_path, outcome, JUDGED) is not None
    sub_results = [RunDirectory(tmp_path / f"repeat-{number}").result() for number in range(3)]
    assert [sub_result.status if sub_result else None for sub_result in sub_results] == [
        runs.OK,
        runs.FAILED,
        runs.TIMEOUT,
    ]
    assert RunDirectory(tmp_path).result() is None


def test_a_bulk_job_without_failures_is_a_success(tmp_path: Path) -> None:
    submitted_run(tmp_path, bulk="0-1")
    for number in (0, 1):
        write_exit_record(tmp_path, 0, sub_job=f"7[{number}]")
        write_result(tmp_path, runs.OK, name=f"repeat-{number}")
    assert short(job_outcome(tmp_path, status(code=0, exit_code=0))) == (runs.OK, jobs.ENDED, NEVER)


def test_a_job_that_could_not_be_started_has_the_reason(tmp_path: Path) -> None:
    submitted_run(tmp_path)
    outcome = job_outcome(tmp_path, status(raw="LAUNCH_FAILED", exit_code=127, reason="/x/local-1.out: No space left"))
    assert outcome.status == runs.FAILED and outcome.retry == RETRY
    assert outcome.cause == "it could not be started: /x/local-1.out: No space left"
    assert outcome.advice == "remove the cause, and submit it again"
    assert job_outcome(tmp_path, status(raw="LAUNCH_FAILED")).advice == "submit it again"
