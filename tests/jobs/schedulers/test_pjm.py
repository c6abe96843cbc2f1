"""Tests of PJM's command lines and of how answers recorded from manuals and sites are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fugaku_gpt.errors import EXIT_RUN_FAILED, Uncertain, UsageError
from fugaku_gpt.jobs.schedulers.commands import CommandTimeout
from fugaku_gpt.jobs.schedulers.pjm import PjmScheduler
from fugaku_gpt.jobs.schedulers.protocol import Overtaken, Refused, Submission
from fugaku_gpt.records.job import ENDED, LOST, QUEUED, RUNNING, UNKNOWN, JobStatus
from tests.jobs.schedulers.fake import Commands, Reply, command_result

HEADER = "H,JOB_ID,ST,EC,PC,SN,REASON,RSC_GRP\n"
NO_ROWS = command_result(HEADER)


def pjm(*replies: Reply) -> Any:
    """Return a scheduler and its fake commands."""
    commands = Commands(*replies)
    return PjmScheduler(commands, commands.slept.append), commands


def submission(directory: Path, **more: Any) -> Submission:
    return Submission("job.sh", directory, "gpt", **more)


@pytest.mark.parametrize(
    ("out", "job_id"),
    [
        ("9714\n", "9714"),
        ("[INFO] PJM 0000 pjsub Job 9714 submitted.\n", "9714"),
        ("[INFO.] PJM 0000 pjsub Job 64856_0 submitted.\n", "64856_0"),
        ("warn: specification of core retention is invalid because job size is too large.\n6291500\n", "6291500"),
    ],
)
def test_the_job_id_is_read_from_every_form_of_answer(tmp_path: Path, out: str, job_id: str) -> None:
    scheduler, commands = pjm(command_result(out))
    assert scheduler.submit(submission(tmp_path, tag="t-1")) == job_id
    assert commands.calls == [["pjsub", "-z", "jid", "--comment", "t-1", "job.sh"]]


def test_an_older_pjsub_is_called_without_an_option_that_it_rejects(tmp_path: Path) -> None:
    unknown = command_result(err="[ERR.] PJM 0001 pjsub Invalid option: -z\n", code=1)
    scheduler, commands = pjm(unknown, command_result("[INFO] PJM 0000 pjsub Job 12 submitted.\n"))
    assert scheduler.submit(submission(tmp_path)) == "12"
    assert commands.calls[1] == ["pjsub", "job.sh"]


def test_a_chain_is_a_step_job_whose_links_are_cancelled_if_the_previous_leaves_nothing_to_do(tmp_path: Path) -> None:
    scheduler, commands = pjm(command_result("64856_0\n"), command_result("64856_1\n"), command_result("64856\n"))
    first = scheduler.submit(submission(tmp_path, chain=3))
    second = scheduler.submit(submission(tmp_path, chain=3, link=2, after=first))
    third = scheduler.submit(submission(tmp_path, chain=3, link=3, after=second))
    assert (first, second, third) == ("64856_0", "64856_1", "64856_2")
    assert [argv[3:-1] for argv in commands.calls] == [
        ["--step", "--sparam", "sn=0"],
        ["--step", "--sparam", "jid=64856,sn=1,sd=ec==1,2,76:all"],
        ["--step", "--sparam", "jid=64856,sn=2,sd=ec==1,2,76:all"],
    ]


def test_a_link_whose_step_job_has_ended_is_overtaken(tmp_path: Path) -> None:
    gone = command_result(err="[ERR.] PJM 0012 pjsub Job 64856 does not exist.\n", code=1)
    with pytest.raises(Overtaken):
        pjm(gone)[0].submit(submission(tmp_path, chain=2, link=2, after="64856_0"))


def test_a_refusal_has_pjm_s_message_an_explanation_and_advice(tmp_path: Path) -> None:
    message = "[ERR.] PJM 0071 pjsub Group not authorized to submit a job: group(59999)\n"
    scheduler, commands = pjm(command_result(err=message, code=1))
    with pytest.raises(Refused, match=r"PJM 0071 pjsub Group not authorized[\s\S]*group"):
        scheduler.submit(submission(tmp_path))
    assert len(commands.calls) == 1


def test_an_error_message_with_exit_code_0_is_a_refusal(tmp_path: Path) -> None:
    scheduler, _ = pjm(command_result(err="[ERR.] PJM 0058 pjsub rscgrp=none does not exist.\n"))
    with pytest.raises(Refused, match="does not exist"):
        scheduler.submit(submission(tmp_path))


@pytest.mark.parametrize("code", ["0068", "0072"])
def test_a_temporary_refusal_is_retried(tmp_path: Path, code: str) -> None:
    refusal = command_result(err=f"[ERR.] PJM {code} pjsub Something.\n", code=1)
    scheduler, commands = pjm(refusal, refusal, command_result("77\n"))
    assert scheduler.submit(submission(tmp_path, tag="t")) == "77"
    assert commands.slept == [2.0, 4.0]


def test_a_temporary_refusal_is_final_after_all_retries(tmp_path: Path) -> None:
    refusal = command_result(err="[ERR.] PJM 0072 pjsub The number of accepted jobs is over.\n", code=1)
    scheduler, commands = pjm(*[refusal] * 4)
    with pytest.raises(Refused, match="0072"):
        scheduler.submit(submission(tmp_path))
    assert commands.slept == [2.0, 4.0, 8.0]


@pytest.mark.parametrize("code", ["0090", "0091"])
def test_a_job_accepted_amid_an_internal_error_is_not_submitted_twice(tmp_path: Path, code: str) -> None:
    error = command_result(err=f"[ERR.] PJM {code} pjsub Internal Error.\n", code=1)
    scheduler, commands = pjm(error, command_result("H,JOB_ID,COMMENT\n,55,t-9\n,54,other\n"))
    assert scheduler.submit(submission(tmp_path, tag="t-9")) == "55"
    assert [argv[0] for argv in commands.calls] == ["pjsub", "pjstat"]


def test_a_pjstat_that_cannot_say_leaves_an_unanswered_submission_uncertain(tmp_path: Path) -> None:
    error = command_result(err="[ERR.] PJM 0090 pjsub Job manager is not present.\n", code=1)
    down = command_result(err="[ERR.] PJM 0190 pjstat Job manager is not present.\n", code=1)
    scheduler, commands = pjm(error, *[down] * 4)
    with pytest.raises(Uncertain, match="0090") as raised:
        scheduler.submit(submission(tmp_path, tag="t-9"))
    assert [argv[0] for argv in commands.calls].count("pjsub") == 1
    assert not isinstance(raised.value, UsageError) and raised.value.exit_code == EXIT_RUN_FAILED


def test_the_last_unanswered_submission_is_looked_for_as_well(tmp_path: Path) -> None:
    error = command_result(err="[ERR.] PJM 0091 pjsub Internal Error.\n", code=1)
    absent = [command_result("H,JOB_ID,COMMENT\n")] * 2
    scheduler, commands = pjm(*[error, *absent] * 3, error, command_result("H,JOB_ID,COMMENT\n,57,t-9\n"))
    assert scheduler.submit(submission(tmp_path, tag="t-9")) == "57"
    scheduler, commands = pjm(*[error, *absent] * 4)
    with pytest.raises(Refused, match="0091"):
        scheduler.submit(submission(tmp_path, tag="t-9"))
    assert [argv[0] for argv in commands.calls].count("pjsub") == 4


@pytest.mark.parametrize(
    "reply",
    [
        command_result("and nothing else\n"),
        CommandTimeout("pjsub: no answer"),
        command_result(code=1),
        command_result("pjsub: writing\n", code=-9),
        command_result("[INFO] PJM 0000 pjsub Job 9714 submitted.\n", code=1),
        command_result("[INFO] PJM 0000 pjsub Job 9714 submitted.\n", "[ERR.] PJM 0090 pjsub No answer.\n", code=1),
    ],
)
def test_an_answer_that_names_no_job_leaves_the_submission_uncertain(tmp_path: Path, reply: Reply) -> None:
    scheduler, _ = pjm(reply)
    with pytest.raises(Uncertain):
        scheduler.submit(submission(tmp_path))


def test_a_single_query_covers_all_jobs_and_a_second_the_finished_jobs() -> None:
    current = command_result(HEADER + ",238,RUN,0,0,0,-,small\n,240,QUE,0,0,0,-,small\n")
    history = command_result(HEADER + ",237,EXT,0,11,24,ELAPSE LIMIT EXC,small\n")
    scheduler, commands = pjm(current, history)
    statuses = scheduler.poll(["238", "240", "237", "236"])
    assert {job_id: status.state for job_id, status in statuses.items()} == {
        "238": RUNNING,
        "240": QUEUED,
        "237": ENDED,
        "236": LOST,
    }
    assert statuses["237"] == JobStatus("237", ENDED, "EXT", 0, 24, 11, "ELAPSE LIMIT EXC", "small")
    columns = ["-E", "--data", "--choose", "jid,st,ec,pc,sn,ermsg,rscg"]
    assert commands.calls == [
        ["pjstat", *columns, "236", "237", "238", "240"],
        ["pjstat", "-H", "day=90", *columns, "236", "237"],
    ]


def test_columns_are_read_by_name_whatever_their_order() -> None:
    out = "[INFO] PJM 0281 pjstat Data loading...\nH,RSC_GRP,ST,JOB_ID,SN,EC,PC,REASON\n,large,RUN,5,0,0,0,-\n"
    scheduler, _ = pjm(command_result(out))
    assert scheduler.poll(["5"])["5"] == JobStatus("5", RUNNING, "RUN", 0, None, 0, "", "large")


def test_a_bulk_job_has_the_status_of_the_worst_sub_job() -> None:
    rows = ",239,EXT,-,-,-,-,small\n,239[0],EXT,0,0,0,-,small\n,239[1],EXT,0,12,9,-,small\n,239[2],EXT,0,0,0,-,small\n"
    scheduler, _ = pjm(NO_ROWS, command_result(HEADER + rows))
    status = scheduler.poll(["239"])["239"]
    assert (status.state, status.code, status.signal, status.raw) == (ENDED, 12, 9, "EXT:3")


def test_the_first_sub_job_that_failed_counts_whatever_the_order_of_the_rows() -> None:
    rows = ",239[10],EXT,4,0,0,-,small\n,239[2],EXT,3,0,0,-,small\n,239[1],EXT,0,0,0,-,small\n"
    scheduler, _ = pjm(NO_ROWS, command_result(HEADER + rows))
    assert scheduler.poll(["239"])["239"].exit_code == 3


def test_a_bulk_job_runs_until_all_sub_jobs_have_ended() -> None:
    scheduler, _ = pjm(command_result(HEADER + ",239[0],EXT,0,0,0,-,small\n,239[1],QUE,-,-,-,-,small\n"))
    statuses = scheduler.poll(["239"])
    assert statuses["239"].state == RUNNING and statuses["239[0]"].state == ENDED


def test_a_link_that_has_ended_while_the_next_link_runs_is_not_lost() -> None:
    """PJM reports ended sub-jobs only when the entire job has ended."""
    scheduler, _ = pjm(command_result(HEADER + ",64856_1,RUN,0,0,0,-,small\n"))
    statuses = scheduler.poll(["64856_0", "64856_1"])
    assert statuses["64856_0"].state == UNKNOWN and "64856" in statuses["64856_0"].reason
    assert statuses["64856_1"].state == RUNNING


def test_a_silent_pjstat_makes_no_job_lost() -> None:
    failed = command_result(err="[ERR.] PJM 0290 pjstat The daemon is not present.\n", code=1)
    scheduler, commands = pjm(*[failed] * 4)
    status = scheduler.poll(["1"])["1"]
    assert status.state == UNKNOWN and "0290" in status.reason and "\n" not in status.reason
    assert commands.slept == [2.0, 4.0, 8.0]
    scheduler, _ = pjm(CommandTimeout("pjstat: no answer within 60 s"))
    assert scheduler.poll(["1"])["1"].state == UNKNOWN


def test_a_nonsensical_answer_makes_no_job_lost() -> None:
    scheduler, commands = pjm(*[command_result("%%% pjstat: truncat\n")] * 4)
    status = scheduler.poll(["1"])["1"]
    assert status.state == UNKNOWN and "not understood" in status.reason and len(commands.calls) == 4
    scheduler, _ = pjm(command_result("[INFO] PJM 0281 pjstat Data loading...\n"), command_result(""))
    assert scheduler.poll(["1"])["1"].state == LOST


def test_a_failed_history_query_leaves_the_other_states() -> None:
    failed = command_result(err="[ERR.] PJM 0291 pjstat Internal Error.\n", code=1)
    scheduler, _ = pjm(command_result(HEADER + ",2,RUN,0,0,0,-,small\n"), *[failed] * 4)
    statuses = scheduler.poll(["1", "2"])
    assert (statuses["1"].state, statuses["2"].state) == (UNKNOWN, RUNNING)


def test_an_unknown_state_stays_unknown() -> None:
    scheduler, _ = pjm(command_result(HEADER + ",1,ZZZ,0,0,0,-,small\n"))
    assert scheduler.poll(["1"])["1"] == JobStatus("1", UNKNOWN, "ZZZ", 0, None, 0, "", "small")


def test_a_text_that_is_no_job_id_is_refused_without_a_query() -> None:
    scheduler, commands = pjm()
    with pytest.raises(UsageError, match="not a job id"):
        scheduler.poll(["238; rm"])
    assert commands.calls == []


def test_cancel_reports_each_job() -> None:
    answer = command_result(
        "[INFO] PJM 0100 pjdel Accepted job 123.\n[INFO] PJM 0100 pjdel Accepted job 64856_1.\n",
        "[ERR.] PJM 0112 pjdel Job 124 does not exist.\n",
        1,
    )
    scheduler, commands = pjm(answer)
    reasons = scheduler.cancel(["123", "64856_1", "124", "125"])
    assert (reasons["123"], reasons["64856_1"]) == ("", "")
    assert "does not exist" in reasons["124"] and reasons["125"] != ""
    assert scheduler.is_gone(reasons["124"])
    assert not scheduler.is_gone("Job 5 is in a state in which it cannot be deleted.")
    for other in ("rscunit=rscunit_ft01 does not exist.", "pjdel: the folder /var/spool/pjm does not exist"):
        assert not scheduler.is_gone(other)  # the job may run all the same
    assert commands.calls == [["pjdel", "123", "64856_1", "124", "125"]]


def test_hold_and_release_have_commands_of_their_own() -> None:
    scheduler, commands = pjm(command_result("[INFO] PJM 0500 pjhold Accepted job 7.\n"), command_result(""))
    assert (scheduler.hold(["7"]), scheduler.release(["7"])) == ({"7": ""}, {"7": ""})
    assert commands.calls == [["pjhold", "7"], ["pjrls", "7"]]


def test_output_files_are_the_script_s_and_then_the_ranks_in_order(tmp_path: Path) -> None:
    ranks = tmp_path / "output.31" / "1" / "0"
    ranks.mkdir(parents=True)
    for name in ("stdout.1.10", "stdout.1.2", "stderr.1.2"):
        (ranks / name).touch()
    for name in ("gpt.31.out", "gpt.31.err", "gpt.310.out", "gpt.31[1].out", "gpt.31.stats"):
        (tmp_path / name).touch()
    scheduler, _ = pjm()
    names = [path.name for path in scheduler.output_files(tmp_path, "31")]
    assert names == ["gpt.31.out", "gpt.31.err", "gpt.31[1].out", "stderr.1.2", "stdout.1.2", "stdout.1.10"]
    assert [path.name for path in scheduler.output_files(tmp_path, "31[1]")][0] == "gpt.31[1].out"


def test_the_statistics_file_is_the_accounting(tmp_path: Path) -> None:
    scheduler, _ = pjm()
    assert scheduler.accounting(tmp_path, "31") is None
    (tmp_path / "gpt.31.stats").write_text(
        " JOB ID                     : 31\n ELAPSE TIME (USE)          : 00:10:00 (600)\n"
        " NODE NUM (ALLOC)           : 16:4x4\n ENERGY CONSUMPTION OF NODE (MEASURED) : 100.000000\n"
        " AVG POWER CONSUMPTION OF NODE (MEASURED) : 600.000000\n",
        encoding="utf-8",
    )
    measured = scheduler.accounting(tmp_path, "31")
    assert measured is not None
    assert (measured.elapsed_seconds, measured.nodes) == (600, 16)
    assert (measured.energy_joules, measured.power_watts) == (360_000, 600)
