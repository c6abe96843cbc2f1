"""PJM's commands by what they are asked and what they answer, in the recorded forms of the manuals and of sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.schedulers.commands import CommandTimeout
from fugaku_gpt.jobs.schedulers.pjm import PjmScheduler
from fugaku_gpt.jobs.schedulers.protocol import Overtaken, Refused, Submission, Uncertain
from fugaku_gpt.records.job import ENDED, LOST, QUEUED, RUNNING, UNKNOWN, JobStatus
from tests.jobs.schedulers.fake import Commands, Reply, said

HEADER = "H,JOB_ID,ST,EC,PC,SN,REASON,RSC_GRP\n"
NOTHING = said(HEADER)


def pjm(*replies: Reply) -> Any:
    """A scheduler and the commands that it runs."""
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
def test_the_job_id_is_found_in_every_form_of_answer(tmp_path: Path, out: str, job_id: str) -> None:
    scheduler, commands = pjm(said(out))
    assert scheduler.submit(submission(tmp_path, tag="t-1")) == job_id
    assert commands.asked == [["pjsub", "-z", "jid", "--comment", "t-1", "job.sh"]]


def test_an_older_pjsub_is_asked_without_the_option_that_it_does_not_know(tmp_path: Path) -> None:
    unknown = said(err="[ERR.] PJM 0001 pjsub Invalid option: -z\n", code=1)
    scheduler, commands = pjm(unknown, said("[INFO] PJM 0000 pjsub Job 12 submitted.\n"))
    assert scheduler.submit(submission(tmp_path)) == "12"
    assert commands.asked[1] == ["pjsub", "job.sh"]


def test_a_chain_is_a_step_job_whose_links_are_cancelled_unless_the_last_wants_to_be_resumed(tmp_path: Path) -> None:
    scheduler, commands = pjm(said("64856_0\n"), said("64856_1\n"), said("64856\n"))
    first = scheduler.submit(submission(tmp_path, chain=3))
    second = scheduler.submit(submission(tmp_path, chain=3, link=2, after=first))
    third = scheduler.submit(submission(tmp_path, chain=3, link=3, after=second))
    assert (first, second, third) == ("64856_0", "64856_1", "64856_2")
    assert [words[3:-1] for words in commands.asked] == [
        ["--step", "--sparam", "sn=0"],
        ["--step", "--sparam", "jid=64856,sn=1,sd=ec!=75:all"],
        ["--step", "--sparam", "jid=64856,sn=2,sd=ec!=75:all"],
    ]


def test_a_link_whose_step_job_is_over_is_told_apart(tmp_path: Path) -> None:
    gone = said(err="[ERR.] PJM 0012 pjsub Job 64856 does not exist.\n", code=1)
    with pytest.raises(Overtaken):
        pjm(gone)[0].submit(submission(tmp_path, chain=2, link=2, after="64856_0"))


def test_a_refusal_has_pjm_s_words_their_meaning_and_advice(tmp_path: Path) -> None:
    words = "[ERR.] PJM 0071 pjsub Group not authorized to submit a job: group(59999)\n"
    scheduler, commands = pjm(said(err=words, code=1))
    with pytest.raises(Refused, match=r"PJM 0071 pjsub Group not authorized[\s\S]*group"):
        scheduler.submit(submission(tmp_path))
    assert len(commands.asked) == 1


def test_a_refusal_with_exit_code_0_is_one_all_the_same(tmp_path: Path) -> None:
    scheduler, _ = pjm(said(err="[ERR.] PJM 0058 pjsub rscgrp=none does not exist.\n"))
    with pytest.raises(Refused, match="does not exist"):
        scheduler.submit(submission(tmp_path))


@pytest.mark.parametrize("code", ["0068", "0072"])
def test_what_pjm_asks_to_try_later_is_tried_again(tmp_path: Path, code: str) -> None:
    later = said(err=f"[ERR.] PJM {code} pjsub Something.\n", code=1)
    scheduler, commands = pjm(later, later, said("77\n"))
    assert scheduler.submit(submission(tmp_path, tag="t")) == "77"
    assert commands.slept == [2.0, 4.0]


def test_after_all_tries_it_is_refused(tmp_path: Path) -> None:
    later = said(err="[ERR.] PJM 0072 pjsub The number of accepted jobs is over.\n", code=1)
    scheduler, commands = pjm(*[later] * 4)
    with pytest.raises(Refused, match="0072"):
        scheduler.submit(submission(tmp_path))
    assert commands.slept == [2.0, 4.0, 8.0]


@pytest.mark.parametrize("code", ["0090", "0091"])
def test_a_job_that_was_taken_amid_an_internal_error_is_not_handed_in_twice(tmp_path: Path, code: str) -> None:
    error = said(err=f"[ERR.] PJM {code} pjsub Internal Error.\n", code=1)
    scheduler, commands = pjm(error, said("H,JOB_ID,COMMENT\n,55,t-9\n,54,other\n"))
    assert scheduler.submit(submission(tmp_path, tag="t-9")) == "55"
    assert [words[0] for words in commands.asked] == ["pjsub", "pjstat"]


@pytest.mark.parametrize("reply", [said("and nothing else\n"), CommandTimeout("pjsub: no answer")])
def test_an_answer_that_names_no_job_leaves_it_open(tmp_path: Path, reply: Reply) -> None:
    scheduler, _ = pjm(reply)
    with pytest.raises(Uncertain):
        scheduler.submit(submission(tmp_path))


def test_one_query_tells_of_all_jobs_and_one_more_of_those_that_are_gone() -> None:
    now = said(HEADER + ",238,RUN,0,0,0,-,small\n,240,QUE,0,0,0,-,small\n")
    past = said(HEADER + ",237,EXT,0,11,24,ELAPSE LIMIT EXC,small\n")
    scheduler, commands = pjm(now, past)
    statuses = scheduler.poll(["238", "240", "237", "236"])
    assert {job_id: status.state for job_id, status in statuses.items()} == {
        "238": RUNNING,
        "240": QUEUED,
        "237": ENDED,
        "236": LOST,
    }
    assert statuses["237"] == JobStatus("237", ENDED, "EXT", 0, 24, 11, "ELAPSE LIMIT EXC", "small")
    columns = ["-E", "--data", "--choose", "jid,st,ec,pc,sn,ermsg,rscg"]
    assert commands.asked == [
        ["pjstat", *columns, "236", "237", "238", "240"],
        ["pjstat", "-H", "day=90", *columns, "236", "237"],
    ]


def test_columns_are_read_by_name_whatever_their_order() -> None:
    out = "[INFO] PJM 0281 pjstat Data loading...\nH,RSC_GRP,ST,JOB_ID,SN,EC,PC,REASON\n,large,RUN,5,0,0,0,-\n"
    scheduler, _ = pjm(said(out))
    assert scheduler.poll(["5"])["5"] == JobStatus("5", RUNNING, "RUN", 0, None, 0, "", "large")


def test_a_bulk_job_is_as_bad_as_its_worst_sub_job() -> None:
    rows = ",239,EXT,-,-,-,-,small\n,239[0],EXT,0,0,0,-,small\n,239[1],EXT,0,12,9,-,small\n,239[2],EXT,0,0,0,-,small\n"
    scheduler, _ = pjm(NOTHING, said(HEADER + rows))
    status = scheduler.poll(["239"])["239"]
    assert (status.state, status.code, status.signal, status.raw) == (ENDED, 12, 9, "EXT:3")


def test_the_first_sub_job_that_failed_counts_whatever_the_order_of_the_rows() -> None:
    rows = ",239[10],EXT,4,0,0,-,small\n,239[2],EXT,3,0,0,-,small\n,239[1],EXT,0,0,0,-,small\n"
    scheduler, _ = pjm(NOTHING, said(HEADER + rows))
    assert scheduler.poll(["239"])["239"].exit_code == 3


def test_a_bulk_job_runs_until_all_its_sub_jobs_have_ended() -> None:
    scheduler, _ = pjm(said(HEADER + ",239[0],EXT,0,0,0,-,small\n,239[1],QUE,-,-,-,-,small\n"))
    statuses = scheduler.poll(["239"])
    assert statuses["239"].state == RUNNING and statuses["239[0]"].state == ENDED


def test_a_link_that_has_ended_while_the_next_one_runs_is_not_lost() -> None:
    """PJM tells of ended sub-jobs when the whole job has ended."""
    scheduler, _ = pjm(said(HEADER + ",64856_1,RUN,0,0,0,-,small\n"))
    statuses = scheduler.poll(["64856_0", "64856_1"])
    assert statuses["64856_0"].state == UNKNOWN and "64856" in statuses["64856_0"].reason
    assert statuses["64856_1"].state == RUNNING


def test_a_silent_pjstat_makes_no_job_lost() -> None:
    failed = said(err="[ERR.] PJM 0290 pjstat The daemon is not present.\n", code=1)
    scheduler, commands = pjm(*[failed] * 4)
    status = scheduler.poll(["1"])["1"]
    assert status.state == UNKNOWN and "0290" in status.reason and "\n" not in status.reason
    assert commands.slept == [2.0, 4.0, 8.0]
    scheduler, _ = pjm(CommandTimeout("pjstat: no answer within 60 s"))
    assert scheduler.poll(["1"])["1"].state == UNKNOWN


def test_a_nonsensical_answer_makes_no_job_lost() -> None:
    scheduler, commands = pjm(*[said("%%% pjstat: truncat\n")] * 4)
    status = scheduler.poll(["1"])["1"]
    assert status.state == UNKNOWN and "not understood" in status.reason and len(commands.asked) == 4
    scheduler, _ = pjm(said("[INFO] PJM 0281 pjstat Data loading...\n"), said(""))
    assert scheduler.poll(["1"])["1"].state == LOST


def test_a_history_that_fails_leaves_what_was_seen() -> None:
    failed = said(err="[ERR.] PJM 0291 pjstat Internal Error.\n", code=1)
    scheduler, _ = pjm(said(HEADER + ",2,RUN,0,0,0,-,small\n"), *[failed] * 4)
    statuses = scheduler.poll(["1", "2"])
    assert (statuses["1"].state, statuses["2"].state) == (UNKNOWN, RUNNING)


def test_an_unknown_state_stays_unknown() -> None:
    scheduler, _ = pjm(said(HEADER + ",1,ZZZ,0,0,0,-,small\n"))
    assert scheduler.poll(["1"])["1"] == JobStatus("1", UNKNOWN, "ZZZ", 0, None, 0, "", "small")


def test_a_text_that_is_no_job_id_is_not_asked_for() -> None:
    scheduler, commands = pjm()
    with pytest.raises(UsageError, match="not a job id"):
        scheduler.poll(["238; rm"])
    assert commands.asked == []


def test_each_job_is_told_whether_its_end_was_accepted() -> None:
    answer = said(
        "[INFO] PJM 0100 pjdel Accepted job 123.\n[INFO] PJM 0100 pjdel Accepted job 64856_1.\n",
        "[ERR.] PJM 0112 pjdel Job 124 does not exist.\n",
        1,
    )
    scheduler, commands = pjm(answer)
    told = scheduler.cancel(["123", "64856_1", "124", "125"])
    assert (told["123"], told["64856_1"]) == ("", "")
    assert "does not exist" in told["124"] and told["125"] != ""
    assert commands.asked == [["pjdel", "123", "64856_1", "124", "125"]]


def test_hold_and_release_have_commands_of_their_own() -> None:
    scheduler, commands = pjm(said("[INFO] PJM 0500 pjhold Accepted job 7.\n"), said(""))
    assert (scheduler.hold(["7"]), scheduler.release(["7"])) == ({"7": ""}, {"7": ""})
    assert commands.asked == [["pjhold", "7"], ["pjrls", "7"]]


def test_output_is_the_script_s_own_and_the_ranks_in_their_order(tmp_path: Path) -> None:
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
