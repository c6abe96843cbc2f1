"""Tests of parsing the output of PJM's commands."""

from __future__ import annotations

import re
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.pjm.catalogue import ERROR_MEANINGS, RETRY, SITE, USER
from fugaku_gpt.pjm.jobids import ID_PATTERN, PjmJobId, expand_job_ids, parse_job_id
from fugaku_gpt.pjm.limits import INTERACTIVE, LimitUsage, parse_acl, parse_limit_usage
from fugaku_gpt.pjm.messages import (
    PjmMessage,
    WaitResult,
    first_refusal,
    operation_results,
    parse_messages,
    parse_refusals,
    parse_wait_results,
    submitted_ids,
)
from fugaku_gpt.pjm.pjstat import parse_data, parse_seconds, parse_table, statuses_of


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("[INFO] PJM 0000 pjsub Job 9714 submitted.\n", ["9714"]),
        ("[INFO.] PJM 0000 pjsub Job 64856_0 submitted.\n", ["64856_0"]),
        ("[INFO] PJM 0000 pjsub Job 239[1] submitted.", ["239[1]"]),
        (
            "warn: specification of core retention is invalid because job size is too large.\r\n"
            "[INFO] PJM 0000 pjsub Job 238 submitted.\r\n[INFO] PJM 0000 pjsub Job 239 submitted.\r\n"
            "Have a nice day 12\n",
            ["238", "239"],
        ),
        ("9714\n", ["9714"]),
        ("Notice of 2026:\n 64856_0 \n64856_1\n", ["64856_0", "64856_1"]),
        ("238 239\n", ["238", "239"]),
        ("[WARN] PJM 0024 pjsub Too many options in line.\n[INFO] PJM 0000 pjsub Job 5 submitted.\n", ["5"]),
        ("[ERR.] PJM 0071 pjsub Group not authorized to submit a job: group(59999)\n", []),
        ("[INFO] PJM 0080 pjsub Interactive job 9 submitted before was canceled.\n", []),
        ("", []),
    ],
)
def test_ids_of_submitted_jobs(text: str, ids: List[str]) -> None:
    assert submitted_ids(text) == ids


@pytest.mark.parametrize(
    ("text", "code", "remedy", "advice"),
    [
        ("[ERR.] PJM 0071 pjsub Group not authorized to submit a job: group(59999)", "0071", USER, "-g"),
        ("[ERR.] PJM 0054 pjsub node=1 is less than the lower limit (385).", "0054", USER, "pjacl"),
        ("[ERR.] PJM 0057 pjsub elapse=18000 is greater than the upper limit (14400).", "0057", USER, "pjacl"),
        ("[ERR.] PJM 0070 pjsub No execute permission: pjsub-bulk.", "0070", SITE, "site"),
        ("[ERR.] PJM 0072 pjsub accept limit", "0072", RETRY, "wait"),
        ("[ERR.] PJM 0090 pjsub daemon", "0090", RETRY, "ten minutes"),
        ("[ERR.] PJM 0079 pjsub group is not active (ACC->QUE).", "0079", SITE, "renew"),
        ("[ERR.] PJM 0079 pjsub Node is too many (ACC->QUE).", "0079", USER, "fewer nodes"),
        ("[ERR.] PJM 0079 pjsub requeue, remaining resource shortage [group] (QUE->SIN).", "0079", RETRY, "wait"),
        ("[ERR.] PJM 0079 pjsub something new.", "0079", SITE, "text"),
        ("[ERR.] PJM 0999 pjsub something new.", "0999", SITE, "manual"),
        (
            "The current directory is not a data area. (directory: /vol0004/g/u)\n"
            "Specify --no-check-directory option if you want to submit jobs outside the data area.",
            "",
            USER,
            "data area",
        ),
        (
            "If you use Spack, set PJM_LLIO_GFSCACHE to /vol0004.(ex. pjsub -x PJM_LLIO_GFSCACHE=/vol0004)",
            "",
            USER,
            "/vol0004",
        ),
        (
            "The current directory is contained in vol0003, so set PJM_LLIO_GFSCACHE to vol0003.(ex. pjsub)",
            "",
            USER,
            "PJM_LLIO_GFSCACHE",
        ),
    ],
)
def test_a_refusal_of_pjsub_has_a_remedy_and_advice(text: str, code: str, remedy: str, advice: str) -> None:
    refusal = first_refusal(f"some banner\n{text}\n")
    assert refusal is not None
    assert (refusal.code, refusal.remedy) == (code, remedy)
    assert advice in refusal.advice
    assert refusal.text in text
    assert refusal.meaning


def test_a_numbered_refusal_comes_first_and_none_is_repeated() -> None:
    text = "The current directory is not a data area.\n[ERR.] PJM 0001 pjsub x\n[ERR.] PJM 0001 pjsub x\n"
    assert [refusal.code for refusal in parse_refusals(text)] == ["", "0001"]
    refusal = first_refusal(text)
    assert refusal is not None and refusal.code == "0001"


def test_accepted_jobs_and_warnings_are_no_refusals() -> None:
    assert first_refusal("[INFO] PJM 0000 pjsub Job 1 submitted.\n[WARN] PJM 0029 pjsub x\n") is None


def test_every_number_of_the_catalogue_is_explained() -> None:
    for code, meaning in ERROR_MEANINGS.items():
        assert re.fullmatch(r"\d{4}", code)
        assert meaning.meaning and meaning.advice
        assert meaning.remedy in (USER, SITE, RETRY)


def test_messages_have_a_level_a_number_and_a_command() -> None:
    text = "x [INFO] PJM 0081 .connected.\n[ERR.] PJM 0112 pjdel Job 9 does not exist.\n[WARN] PLE 0605 plexec x\n"
    assert parse_messages(text) == [
        PjmMessage("INFO", "0081", "", ".connected."),
        PjmMessage("ERR", "0112", "pjdel", "Job 9 does not exist."),
    ]


def test_results_of_pjdel() -> None:
    text = (
        "[INFO] PJM 0100 pjdel Accepted job 12345678_0.\n[INFO] PJM 0100 pjdel Accepted job 12345678_1.\n"
        "[INFO] PJM 0100 pjdel Accepted job 1363254[0-2].\n[INFO] PJM 0119 pjdel Already accepted job 7.\n"
        "[ERR.] PJM 0112 pjdel Job 999 does not exist.\n[ERR.] PJM 0113 pjdel Job 5 is not in a state.\n"
        "[ERR.] PJM 0112 pjdel Job 7 does not exist.\n[INFO] PJM 0300 pjhold Accepted job 8.\n"
    )
    assert operation_results(text) == {
        "12345678_0": "",
        "12345678_1": "",
        "1363254[0]": "",
        "1363254[1]": "",
        "1363254[2]": "",
        "7": "",
        "999": "Job 999 does not exist.",
        "5": "Job 5 is not in a state.",
        "8": "",
    }


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("[WARN] PJM 0112 pjdel Job 9 may take a while.\n", {}),
        ("[ERR.] PJM 0001 pjdel no such option.\n", {}),  # it names no job
        ("[INFO] PJM 0300 pjhold Job 9 is looked for.\n", {}),
        ("[ERR.] PJM 0112 pjdel Job 9[3-1] does not exist.\n", {"9[3-1]": "Job 9[3-1] does not exist."}),
        ("[ERR.] PJM 0100 pjdel Accepted job 9.\n", {"9": "Accepted job 9."}),
        ("[ERR.] PJM 0112 pjdel Job 9 a.\n[ERR.] PJM 0112 pjdel Job 9 b.\n", {"9": "Job 9 b."}),
        ("[ERR.] PJM 0112 pjdel Job 9 a.\n[INFO] PJM 0119 pjdel Accepted job 9.\n", {"9": ""}),
    ],
)
def test_only_answers_about_a_job_are_results(text: str, results: "dict[str, str]") -> None:
    assert operation_results(text) == results


def test_results_of_pjwait() -> None:
    assert parse_wait_results("waiting\n238 0 0 0\n239[1] 11 0 24\n240_0 X X X\n241 - - -\n242 E E E\nx 1 2 3\n") == [
        WaitResult("238", 0, 0, 0),
        WaitResult("239[1]", 11, 0, 24),
        WaitResult("240_0", None, None, None, "X"),
        WaitResult("241", None, None, None, "-"),
        WaitResult("242", None, None, None, "E"),
    ]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("238", ["238"]),
        ("239[1]", ["239[1]"]),
        ("240_0", ["240_0"]),
        ("239[1-3]", ["239[1]", "239[2]", "239[3]"]),
        ("240_0-2", ["240_0", "240_1", "240_2"]),
        ("238-240", ["238", "239", "240"]),
    ],
)
def test_ids_and_ranges(text: str, ids: List[str]) -> None:
    assert [str(job_id) for job_id in expand_job_ids(text)] == ids


def test_a_sub_job_has_a_parent_job() -> None:
    assert parse_job_id("239[1]").parent == parse_job_id("239_5").parent == PjmJobId(239)
    assert parse_job_id("239[1]") == PjmJobId(239, bulk=1)
    assert parse_job_id("239_5") == PjmJobId(239, step=5)


@pytest.mark.parametrize("text", ["", "x", "239[", "239[a]", "239[3-1]", "1-99999999", "240_", "1 2", "-1", "\u0663"])
def test_an_invalid_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand_job_ids(text)


@pytest.mark.slow
@given(st.from_regex(ID_PATTERN, fullmatch=True))
def test_ids_are_printed_as_they_are_written(text: str) -> None:
    assert str(parse_job_id(text)) == re.sub(r"(^|[\[_])0+(?=\d)", r"\1", text)


ACL = """\
  pjsub + allow g(ra000001)
  pjsub + deny g(fugaku)
pjsub option parameters
    (-L/--rsc-list)                         lower            upper            default
        (node=)                             1                384              1
        (elapse=)                           00:01:00         72:00:00         00:01:00
        (adaptive elapsed time min)         00:01:00         72:00:00         00:01:00  # minLimit for batch jobs
        (adaptive elapsed time max)         00:01:01         144:00:00        144:00:00 # maxLimit for batch jobs
        (node-mem=)                         1Mi              unlimited        28Gi
        (proc-openfd=)                      1                1048576
    (--interact -L)                         lower            upper            default
        (elapse=)                           00:00:10         06:00:00         00:00:10
        (adaptive elapsed time max)         2                48:00:00         02:00:00
"""


def test_limits_of_a_resource_group() -> None:
    limits = parse_acl(ACL)
    assert limits.seconds() == (60, 259200, 60)
    assert limits.seconds("adaptive elapsed time max") == (61, 518400, 518400)
    assert limits.seconds("elapse", INTERACTIVE) == (10, 21600, 10)
    assert limits.nodes() == (1, 384, 1)
    assert limits.sizes("node-mem") == (2**20, None, 28 * 2**30)
    assert limits.counts("proc-openfd") == (1, 1048576, None)
    assert limits.seconds("vnode") is None
    assert len(limits.rows) == 8


USAGE = """\
System Resource Information:
RSCUNIT: rscunit_ft01
USER: user1
 LIMIT-NAME                    LIMIT  ALLOC
 ru-accept                       100      7   #1
 ru-run-job                unlimited      0   #5
GROUP: group1
 LIMIT-NAME                    LIMIT  ALLOC
 ru-accept                 unlimited      0
ALL:
 LIMIT-NAME                    LIMIT  ALLOC
 ru-accept                     40000   3870
"""


def test_usage_of_limits() -> None:
    assert parse_limit_usage(USAGE) == [
        LimitUsage("rscunit_ft01", "USER", "user1", "ru-accept", 100, 7),
        LimitUsage("rscunit_ft01", "USER", "user1", "ru-run-job", None, 0),
        LimitUsage("rscunit_ft01", "GROUP", "group1", "ru-accept", None, 0),
        LimitUsage("rscunit_ft01", "ALL", "", "ru-accept", 40000, 3870),
    ]


_LINES = st.sampled_from(
    [*ACL.splitlines(), *USAGE.splitlines()]
    + ["[INFO] PJM 0000 pjsub Job 9 submitted.", "[ERR.] PJM 0079 pjsub x", "H,JOB_ID,ST", ",9[1],RUN", ',"9,RUN']
    + [
        "JOB_ID JOB_NAME MD ST USER START_DATE",
        "9 a NM RUN u 04/12 11:25:55 <",
        "9 0 0 0",
        "9714",
        "[INFO] PJM 0100 pjdel",
    ]
)


@pytest.mark.slow
@given(st.one_of(st.text(), st.lists(st.one_of(_LINES, st.text()), max_size=8).map("\n".join)), st.text(max_size=2))
def test_any_text_can_be_parsed(text: str, delimiter: str) -> None:
    for job_id in submitted_ids(text):
        assert str(parse_job_id(job_id))
    first_refusal(text)
    operation_results(text)
    parse_wait_results(text)
    limits = parse_acl(text)
    for row in limits.rows:
        limits.seconds(row.name, row.option)
        limits.nodes(row.name, row.option)
        limits.sizes(row.name, row.option)
        limits.counts(row.name, row.option)
    parse_limit_usage(text)
    statuses_of(parse_data(text))
    statuses_of(parse_data(text, delimiter or "|"))
    statuses_of(parse_table(text))
    parse_seconds(text)
