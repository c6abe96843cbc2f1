"""Tests of the translation of PJM's states and codes to those of the package."""

from __future__ import annotations

import pytest

from fugaku_gpt.pjm.codes import ENDINGS, NEVER, RESUME, RETRY, STATES, WAIT, ending_of, state_of
from fugaku_gpt.records.job import CANCELLED, ENDED, ON_HOLD, OVER, QUEUED, REJECTED, RUNNING, SUSPENDED, UNKNOWN
from fugaku_gpt.records.job import STATES as PACKAGE_STATES

ALL = "ACC QUE RNA RNP RUN RNE RNO EXT CCL RJT HLD ERR SPP SPD RSM"


def test_every_state_of_the_manual_has_a_state_of_the_package() -> None:
    assert set(STATES) == set(ALL.split())
    assert set(STATES.values()) <= set(PACKAGE_STATES)
    assert [state_of(state) for state in ALL.split()] == [
        *(QUEUED, QUEUED, QUEUED, RUNNING, RUNNING, RUNNING, RUNNING, ENDED, CANCELLED, REJECTED, ON_HOLD, ON_HOLD),
        *(SUSPENDED, SUSPENDED, RUNNING),
    ]
    assert {state for state in STATES if STATES[state] in OVER} == {"EXT", "CCL", "RJT"}


@pytest.mark.parametrize("state", ["", "SIN", "RUNNING", "-", "\x00"])
def test_any_other_state_is_unknown(state: str) -> None:
    assert state_of(state) == UNKNOWN


@pytest.mark.parametrize(
    ("codes", "retry"),
    [
        ((7, 9, 11, 18), RESUME),
        ((20, 22, 25, 26, 28, 100, 120, 140, 160, 180), RETRY),
        ((0, 1, 2, 3, 6, 8, 12, 13, 16, 21, 23, 29), NEVER),
        ((4, 14), WAIT),
    ],
)
def test_each_ending_has_a_retry_action(codes: "tuple[int, ...]", retry: str) -> None:
    for code in codes:
        ending = ending_of(code)
        assert ending is not None
        assert (ending.code, ending.retry) == (code, retry)
        assert ending.cause


def test_the_table_has_the_codes_of_the_manual() -> None:
    internal = {100, 120, 140, 160, 180}
    assert set(ENDINGS) == {*range(5), *range(6, 10), 11, 12, 13, 14, 16, 18, *range(20, 24), *range(25, 31), *internal}
    assert all(code == ending.code for code, ending in ENDINGS.items())
    terms = {
        2: "rejected",
        11: "time",
        12: "memory",
        13: "disk",
        14: "bulk",
        20: "node down",
        23: "memory",
        29: "jobenv",
    }
    for code, term in terms.items():
        assert term in ENDINGS[code].cause + ENDINGS[code].advice


@pytest.mark.parametrize("code", [99, 101, 119, 199, 200])
def test_internal_errors_have_numbers_from_100_below_200(code: int) -> None:
    ending = ending_of(code)
    assert ending is not None and ending.cause.startswith("internal error") == (100 <= code < 200)


def test_every_failure_that_needs_the_user_has_advice() -> None:
    assert all(ending.advice for code, ending in ENDINGS.items() if code not in (0, 1, 14))


def test_codes_outside_the_table_have_an_ending() -> None:
    internal, unlisted = ending_of(150), ending_of(77)
    assert internal is not None and internal.retry == RETRY
    assert unlisted is not None and unlisted.retry == NEVER and "77" in unlisted.cause
    assert ending_of(None) is None


def test_without_a_code_the_ending_is_that_of_the_reason() -> None:
    for reason, code in (("ELAPSE LIMIT EXC", 11), ("ANOTHER JOB STARTED", 18), ("ANOTHER JOB STAR", 18)):
        ending = ending_of(None, reason)
        assert ending is not None and ending.code == code
    assert ending_of(None, "WAIT SCHED") is None
    assert ending_of(None, "E") is None
