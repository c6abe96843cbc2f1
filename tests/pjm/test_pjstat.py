"""Tests of parsing the tables of pjstat by their header lines."""

from __future__ import annotations

from typing import Optional

import pytest

from fugaku_gpt.pjm.pjstat import clean_value, parse_data, parse_seconds, parse_table, status_of, statuses_of
from fugaku_gpt.records.job import CANCELLED, ENDED, ON_HOLD, QUEUED, RUNNING, UNKNOWN, JobStatus

VERBOSE_HEADER = (
    "JOB_ID     JOB_NAME   MD ST  USER     GROUP    START_DATE      ELAPSE_TIM ELAPSE_LIM            NODE_REQUIRE    "
    "VNODE  CORE V_MEM        V_POL E_POL RANK      LST EC  PC  SN PRI ACCEPT         RSC_GRP  REASON\n"
)
RUNNING_ROW = (
    "6291500    job1.sh    NM RUN u00000   g0000000 04/12 11:25:55  0000:00:07 0000:01:00            12              "
    "-      -    -            -     -     bychip    RNA 0   0   0  127 04/12 11:25:50 small    -\n"
)
ENDED_ROW = (
    "49047939   job2.sh    NM EXT u00000   g0000000 06/01 15:22:46  0000:15:02 0000:15:00            1               "
    "-      -    -            -     -     bychip    RNO 0   11  24 127 06/01 15:22:16 small    ELAPSE LIMIT EXC\n"
)


def test_data_are_read_by_name_in_any_order() -> None:
    text = (
        "[INFO] PJM 0281 pjstat Data loading...\n"
        "H,ST,RSC_GRP,JOB_ID,SN,PC,EC,REASON\n"
        ",RUN,small,34703955[1],0,0,0,-\n"
        ",EXT,small,238,24,11,0,ELAPSE LIMIT EXCEEDED\n"
        ",QUE,large,240_0,-,-,-,-\n"
    )
    assert statuses_of(parse_data(text)) == {
        "34703955[1]": JobStatus("34703955[1]", RUNNING, "RUN", 0, None, 0, "", "small"),
        "238": JobStatus("238", ENDED, "EXT", 0, 24, 11, "ELAPSE LIMIT EXCEEDED", "small"),
        "240_0": JobStatus("240_0", QUEUED, "QUE", None, None, None, "", "large"),
    }


def test_data_with_another_delimiter_quotes_and_several_headers() -> None:
    text = 'H|JOB_ID|ST\n|1|HLD\nH|ST|JOB_ID\n|ERR|2\n|"CCL"|"3"\n'
    assert {key: status.state for key, status in statuses_of(parse_data(text, "|")).items()} == {
        "1": ON_HOLD,
        "2": ON_HOLD,
        "3": CANCELLED,
    }


def test_a_reason_may_contain_the_delimiter_and_a_short_row_lacks_the_last_columns() -> None:
    rows = parse_data("H,JOB_ID,REASON,ST\n,1,a, b,c,RUN\n,2,x\n")
    assert rows == [{"JOB_ID": "1", "REASON": "a,b,c", "ST": "RUN"}, {"JOB_ID": "2", "REASON": "x"}]


def test_the_long_column_names_of_option_s_are_supported() -> None:
    rows = parse_data("H,JOB ID,STATE,PJM CODE,EXIT CODE,SIGNAL NO,PRIORITY\n,238,EXT,0,1,0,127 <DEFAULT>\n")
    assert status_of(rows[0]) == JobStatus("238", ENDED, "EXT", 1, None, 0)
    assert clean_value(rows[0]["PRIORITY"]) == "127"


def test_an_unknown_state_stays_unknown() -> None:
    assert status_of({"JOB_ID": "1", "ST": "SIN"}) == JobStatus("1", UNKNOWN, "SIN")


def test_a_row_without_a_job_id_is_no_job() -> None:
    assert status_of({"ST": "RUN"}) is None
    assert status_of({"JOB_ID": "-", "ST": "RUN"}) is None


def test_verbose_rows() -> None:
    rows = parse_table(VERBOSE_HEADER + RUNNING_ROW + ENDED_ROW)
    assert rows[0]["START_DATE"] == "04/12 11:25:55"
    assert (rows[0]["ELAPSE_LIM"], rows[0]["NODE_REQUIRE"], rows[0]["ACCEPT"]) == ("0000:01:00", "12", "04/12 11:25:50")
    assert rows[1]["REASON"] == "ELAPSE LIMIT EXC"
    assert statuses_of(rows)["49047939"] == JobStatus("49047939", ENDED, "EXT", 0, 24, 11, "ELAPSE LIMIT EXC", "small")


def test_rows_without_a_header_are_read_by_the_usual_columns() -> None:
    assert parse_table(RUNNING_ROW) == parse_table(VERBOSE_HEADER + RUNNING_ROW)
    assert parse_table("9 a NM QUE u - 0001:00:00 12 - - -\n")[0]["NODE_REQUIRE"] == "12"


HEADER = "JOB_ID     JOB_NAME   MD ST  USER     START_DATE      ELAPSE_LIM NODE_REQUIRE    VNODE  CORE V_MEM\n"


@pytest.mark.parametrize(
    "date",
    ["-", "04/12 11:25:55", "04/12 11:25:55<", "(04/12 11:25)", "(04/12 11:25)<", "(04/12 11:25)@", "(04/12 11:25) #"],
)
def test_a_start_date_has_up_to_three_fields(date: str) -> None:
    text = HEADER + f"240_0      a_long_na  ST QUE u0000000 {date}  0001:00:00 12:2x3x2        -      -    -\n"
    (row,) = parse_table(text)
    assert row["START_DATE"] == date
    assert (row["ELAPSE_LIM"], row["NODE_REQUIRE"], row["V_MEM"]) == ("0001:00:00", "12:2x3x2", "-")


def test_a_summary_above_the_table_is_no_job() -> None:
    text = (
        "  ACCEPT QUEUED RUNING RUNOUT   HOLD  ERROR REJECT   EXIT CANCEL   TOTAL\n"
        "       0      1      0      0      0      0      0      0      0       1\n"
        "s      0      1      0      0      0      0      0      0      0       1\n\n"
    )
    rows = parse_table(text + HEADER + "5 my job  NM HLD u - 0000:01:00-0002:00:00 1 - - -\n")
    assert [row["JOB_ID"] for row in rows] == ["5"]
    assert (rows[0]["JOB_NAME"], rows[0]["ELAPSE_LIM"]) == ("my job", "0000:01:00-0002:00:00")


def test_a_reason_need_not_be_the_last_column() -> None:
    (row,) = parse_table("JOB_ID ST REASON RSC_GRP\n7 CCL ANOTHER JOB STARTED spot-small\n")
    assert row == {"JOB_ID": "7", "ST": "CCL", "REASON": "ANOTHER JOB STARTED", "RSC_GRP": "spot-small"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("1 00:00:00 (86400)", 86400), ("00:01:30 (90) <DEFAULT>", 90), ("0001:00:00", 3600), ("2 01:00:00", 176400)),
        *(("-", None), ("", None), ("soon", None), ("1:00", None)),
    ],
)
def test_times(text: str, seconds: Optional[int]) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("7 a NM", ("a", "NM", "")),  # the line was cut
        ("7 a NM RUN", ("a", "NM", "RUN")),
        ("7 a b c NM RUN", ("a b c", "NM", "RUN")),
        ("7 NM NM RUN", ("NM", "NM", "RUN")),
        ("7 a NM b NM QUE", ("a NM b", "NM", "QUE")),
        ("7 1 2 3 4 5 6 7 8 9 10 11 NM RUN", ("1 2 3 4 5 6 7 8 9 10 11", "NM", "RUN")),
    ],
)
def test_a_job_name_may_hold_blanks(line: str, expected: "tuple[str, ...]") -> None:
    (row,) = parse_table(f"JOB_ID JOB_NAME MD ST\n{line}\n")
    assert (row["JOB_NAME"], row["MD"], row["ST"]) == expected
