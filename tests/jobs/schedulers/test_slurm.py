"""Tests of Slurm's command lines and of how its answers are read; ``tests/test_slurm.py`` uses a real Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fugaku_gpt.errors import Uncertain, UsageError
from fugaku_gpt.jobs.schedulers.commands import CommandTimeout
from fugaku_gpt.jobs.schedulers.protocol import Refused, Submission
from fugaku_gpt.jobs.schedulers.slurm import SlurmScheduler
from fugaku_gpt.jobs.submission import INTENT_SECONDS, resolve_intents
from fugaku_gpt.records.job import (
    CANCELLED,
    ENDED,
    LOST,
    ON_HOLD,
    QUEUED,
    RUNNING,
    UNKNOWN,
    JobStatus,
    append_event,
    read_events,
)
from tests.jobs.schedulers.fake import Commands, Reply, command_result

NO_ACCOUNTING = command_result(err="Slurm accounting storage is disabled\n", code=1)
ACCOUNTING_IS_DOWN = command_result(err="sacct: error: slurmdbd: Connection refused\n", code=1)
INVALID = command_result(err="slurm_load_jobs error: Invalid job id specified\n", code=1)


def slurm(*replies: Reply) -> Any:
    """Return a scheduler and its fake commands."""
    commands = Commands(*replies)
    return SlurmScheduler(commands, commands.slept.append), commands


def submission(directory: Path, **more: Any) -> Submission:
    return Submission("job.sh", directory, "gpt", **more)


@pytest.mark.parametrize("out", ["123\n", "123;cluster\n", "sbatch: a site's greeting\n123\n"])
def test_the_job_id_is_read_from_every_form_of_answer(tmp_path: Path, out: str) -> None:
    scheduler, commands = slurm(command_result(out))
    assert scheduler.submit(submission(tmp_path, tag="t-1", after="122", link=2, chain=2)) == "123"
    assert commands.calls == [
        ["sbatch", "--parsable", "--comment=t-1", "--dependency=afternotok:122", "--kill-on-invalid-dep=yes", "job.sh"]
    ]


def test_nodes_that_a_job_must_not_get_are_options_of_sbatch(tmp_path: Path) -> None:
    scheduler, commands = slurm(command_result("123\n"))
    scheduler.submit(submission(tmp_path, excluded_nodes=("node7", "rack[1-3]")))
    assert commands.calls == [["sbatch", "--parsable", "--exclude=node7,rack[1-3]", "job.sh"]]


def test_an_unreachable_controller_is_retried(tmp_path: Path) -> None:
    unreachable = command_result(
        err="sbatch: error: Batch job submission failed: Unable to contact slurm controller\n", code=1
    )
    scheduler, commands = slurm(unreachable, unreachable, command_result("9\n"))
    assert scheduler.submit(submission(tmp_path)) == "9"
    assert commands.slept == [2.0, 4.0]
    scheduler, commands = slurm(*[unreachable] * 4)
    with pytest.raises(Refused, match="Unable to contact"):
        scheduler.submit(submission(tmp_path))


@pytest.mark.parametrize(
    "reply",
    [
        command_result("what?\n"),
        CommandTimeout("sbatch: no answer"),
        command_result(code=1),
        command_result(code=-9),
        command_result(err="sbatch: error: writing\n", code=-13),
        command_result("Submitted batch job 77\n", err="sbatch: error: lost connection\n", code=1),
        command_result("77\n", err="sbatch: error: lost connection\n", code=1),
        command_result(
            err="sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n", code=1
        ),
    ],
)
def test_a_missing_answer_leaves_the_submission_uncertain(tmp_path: Path, reply: Reply) -> None:
    scheduler, commands = slurm(reply)
    with pytest.raises(Uncertain):
        scheduler.submit(submission(tmp_path))
    assert len(commands.calls) == 1


def test_waiting_on_hold_and_running_jobs_are_distinguished() -> None:
    rows = (
        "1|PENDING|all|Priority\n2|PENDING|all|JobHeldUser\n3|RUNNING|all|None\n4|COMPLETING|all|None\n"
        "5|NEW_WORD|all|None\n6|PENDING|all|(Nodes required for job are DOWN, DRAINED | reserved)\n"
    )
    scheduler, commands = slurm(command_result(rows))
    statuses = scheduler.poll(["1", "2", "3", "4", "5", "6"])
    states = [statuses[str(number)].state for number in range(1, 7)]
    assert states == [QUEUED, ON_HOLD, RUNNING, RUNNING, UNKNOWN, QUEUED]
    assert statuses["6"].reason == "(Nodes required for job are DOWN, DRAINED | reserved)"
    assert commands.calls == [
        ["squeue", "--noheader", "--array", "--states=all", "--jobs=1,2,3,4,5,6", "--format=%i|%T|%P|%r"]
    ]


def test_finished_jobs_come_from_the_accounting() -> None:
    accounting_rows = (
        "1|COMPLETED|0:0|all\n2|CANCELLED by 1000|0:15|all\n3|OUT_OF_MEMORY|0:125|all\n4|TIMEOUT|75:0|all\n"
    )
    scheduler, commands = slurm(INVALID, command_result(accounting_rows))
    statuses = scheduler.poll(["1", "2", "3", "4", "5"])
    assert statuses["1"] == JobStatus("1", ENDED, "COMPLETED", 0, group="all")
    assert statuses["2"] == JobStatus("2", CANCELLED, "CANCELLED", 0, 15, group="all")
    assert (statuses["3"].raw, statuses["4"].exit_code) == ("OUT_OF_MEMORY", 75)
    assert statuses["5"].state == LOST
    assert commands.calls[1][:6] == ["sacct", "-n", "-P", "-X", "-j", "1,2,3,4,5"]


def test_the_state_of_squeue_overrides_lagging_accounting() -> None:
    scheduler, _ = slurm(command_result("1|FAILED|all|NonZeroExitCode\n"), command_result("1|RUNNING|0:0|all\n"))
    status = scheduler.poll(["1"])["1"]
    assert (status.state, status.raw, status.exit_code) == (ENDED, "FAILED", None)


def test_a_vanished_job_that_the_accounting_still_calls_running_runs() -> None:
    scheduler, _ = slurm(INVALID, command_result("1|RUNNING|0:0|all\n"))
    assert scheduler.poll(["1"])["1"].state == RUNNING


SCONTROL_ROWS = (
    "JobId=1 JobName=a b JobState=x UserId=root(0) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) "
    "ExitCode=3:0 RunTime=00:00:05 NumNodes=2 Partition=all\n"
    "JobId=10 ArrayJobId=6 ArrayTaskId=1 JobName=c JobState=COMPLETED Reason=None Dependency=(null) "
    "ExitCode=0:0 RunTime=1-00:00:03 NumNodes=1 Partition=all\n"
    "JobId=6 ArrayJobId=6 ArrayTaskId=2-5%1 JobName=c JobState=PENDING Reason=JobArrayTaskLimit Dependency=(null) "
    "ExitCode=0:0 RunTime=00:00:00 NumNodes=1 Partition=all\n"
)


def test_without_accounting_the_controller_s_memory_is_queried() -> None:
    scheduler, commands = slurm(INVALID, NO_ACCOUNTING, command_result(SCONTROL_ROWS))
    statuses = scheduler.poll(["6_1", "7"])
    assert statuses["6_1"] == JobStatus("6_1", ENDED, "COMPLETED", 0, group="all")
    assert statuses["7"].state == LOST
    assert commands.calls[-1] == ["scontrol", "-o", "show", "job"]


def test_the_first_task_that_failed_counts_whatever_the_order_of_the_rows() -> None:
    rows = "6_10|FAILED|4:0|all\n6_2|FAILED|3:0|all\n6_1|COMPLETED|0:0|all\n"
    scheduler, _ = slurm(INVALID, command_result(rows))
    assert scheduler.poll(["6"])["6"].exit_code == 3


def test_a_waiting_array_is_recovered_by_comment() -> None:
    scheduler, _ = slurm(command_result(""), command_result("92_[1-3%1]|t-1\n93_4|t-2\n94|t-3\n"))
    assert scheduler.find(["t-1", "t-2", "t-3"]) == {"t-1": "92", "t-2": "93", "t-3": "94"}


def test_a_machine_without_sacct_is_no_error() -> None:
    scheduler, _ = slurm(INVALID, UsageError("sacct: no such command"), INVALID)
    assert scheduler.poll(["7"])["7"].state == LOST


@pytest.mark.parametrize(
    "replies",
    [
        [CommandTimeout("squeue: no answer")],
        [command_result(err="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)],
        [INVALID, ACCOUNTING_IS_DOWN, INVALID],
        [INVALID, CommandTimeout("sacct: no answer"), INVALID],
        [INVALID, NO_ACCOUNTING, command_result(err="slurm_load_jobs error: Zero Bytes were transmitted\n", code=1)],
    ],
)
def test_no_job_is_lost_to_a_scheduler_that_does_not_answer(replies: Any) -> None:
    scheduler, _ = slurm(*replies)
    status = scheduler.poll(["1"])["1"]
    assert status.state == UNKNOWN and status.reason


@pytest.mark.parametrize("text", ["1;rm", "--help", "1_", "x", ""])
def test_a_text_that_is_no_job_id_is_refused_without_a_query(text: str) -> None:
    scheduler, commands = slurm()
    with pytest.raises(UsageError, match="not a job id of Slurm"):
        scheduler.poll([text])
    assert commands.calls == []


def test_cancel_reports_each_job() -> None:
    err = "scancel: Terminating job 1\nscancel: error: Kill job error on job id 2: Invalid job id specified\n"
    scheduler, _ = slurm(command_result(err=err))
    assert scheduler.cancel(["1", "2"]) == {"1": "", "2": "Invalid job id specified"}
    scheduler, _ = slurm(command_result(err="scancel: error: Unable to contact slurm controller\n", code=1))
    refusal = scheduler.cancel(["1"])["1"]
    assert "Unable to contact" in refusal and not scheduler.is_gone(refusal)
    assert scheduler.is_gone("Invalid job id specified")
    assert not scheduler.is_gone("Job/step already completing or completed")


def test_jobs_are_looked_up_by_comment() -> None:
    scheduler, commands = slurm(command_result("7|t-1\n8|other\n"), command_result("5_3|t-0\n"))
    assert scheduler.find(["t-1", "t-0", "t-2"]) == {"t-1": "7", "t-0": "5"}
    scheduler, _ = slurm(command_result(err="squeue: error: away\n", code=1))
    with pytest.raises(UsageError, match="away"):
        scheduler.find(["t"])


def test_jobs_are_looked_up_by_comment_without_sacct() -> None:
    scheduler, _ = slurm(command_result("7|t-1\n"), UsageError("sacct: no such command"))
    assert scheduler.find(["t-1", "t-2"]) == {"t-1": "7"}
    scheduler, _ = slurm(command_result("7|t-1\n"), NO_ACCOUNTING)
    assert scheduler.find(["t-1", "t-2"]) == {"t-1": "7"}


@pytest.mark.parametrize(
    ("reply", "message"),
    [(CommandTimeout("sacct: no answer"), "no answer"), (ACCOUNTING_IS_DOWN, "sacct: .*Connection refused")],
)
def test_a_job_that_the_accounting_may_know_is_not_reported_as_missing(reply: Reply, message: str) -> None:
    scheduler, _ = slurm(command_result(), reply)
    with pytest.raises(UsageError, match=message):
        scheduler.find(["t-2"])


def test_a_submission_is_not_abandoned_while_the_accounting_is_down(tmp_path: Path) -> None:
    append_event(tmp_path, "intent", 0.0, scheduler="slurm", tag="t-1", link=1, chain=1, bulk="")
    scheduler, _ = slurm(command_result(), ACCOUNTING_IS_DOWN)
    with pytest.raises(UsageError, match="Connection refused"):
        resolve_intents(tmp_path, scheduler, 10 * INTENT_SECONDS)
    assert [event.kind for event in read_events(tmp_path)] == ["intent"]


def test_energy_comes_from_the_job_or_the_steps(tmp_path: Path) -> None:
    accounting_rows = "7|120|4|0|||\n7.batch|120|1|0|5M||\n7.0|118|4|36000|7M|2.2G|2200000\n"
    scheduler, _ = slurm(command_result(accounting_rows))
    measured = scheduler.accounting(tmp_path, "7")
    assert measured is not None
    assert (measured.elapsed_seconds, measured.nodes) == (120, 4)
    assert (measured.energy_joules, measured.power_watts) == (36000, 300)
    assert measured.values["AveCPUFreq"] == "2.2G"


def test_without_accounting_time_and_nodes_come_from_the_controller(tmp_path: Path) -> None:
    scheduler, _ = slurm(NO_ACCOUNTING, command_result(SCONTROL_ROWS.splitlines()[1]))
    measured = scheduler.accounting(tmp_path, "6_1")
    assert measured is not None and (measured.elapsed_seconds, measured.nodes) == (86403, 1)
    scheduler, _ = slurm(NO_ACCOUNTING, INVALID)
    assert scheduler.accounting(tmp_path, "6") is None
