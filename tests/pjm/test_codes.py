"""PJM's states and codes in our words."""

from __future__ import annotations

import pytest

from fugaku_gpt.pjm.codes import ENDINGS, NEVER, RESUME, RETRY, STATES, WAIT, ending_of, state_of
from fugaku_gpt.records.job import CANCELLED, ENDED, ON_HOLD, OVER, QUEUED, REJECTED, RUNNING, SUSPENDED, UNKNOWN
from fugaku_gpt.records.job import STATES as OURS

ALL = "ACC QUE RNA RNP RUN RNE RNO EXT CCL RJT HLD ERR SPP SPD RSM"


def test_every_state_of_the_manual_has_one_of_ours() -> None:
    assert set(STATES) == set(ALL.split())
    assert set(STATES.values()) <= set(OURS)
    assert [state_of(word) for word in ALL.split()] == [
        *(QUEUED, QUEUED, QUEUED, RUNNING, RUNNING, RUNNING, RUNNING, ENDED, CANCELLED, REJECTED, ON_HOLD, ON_HOLD),
        *(SUSPENDED, SUSPENDED, RUNNING),
    ]
    assert {word for word in STATES if STATES[word] in OVER} == {"EXT", "CCL", "RJT"}


@pytest.mark.parametrize("word", ["", "SIN", "RUNNING", "-", "\x00"])
def test_any_other_word_is_unknown(word: str) -> None:
    assert state_of(word) == UNKNOWN


@pytest.mark.parametrize(
    ("codes", "retry"),
    [
        ((7, 9, 11, 18), RESUME),
        ((20, 22, 25, 26, 28, 100, 120, 140, 160, 180), RETRY),
        ((0, 1, 2, 3, 6, 8, 12, 13, 16, 21, 23, 29), NEVER),
        ((4, 14), WAIT),
    ],
)
def test_what_to_do_about_an_ending(codes: "tuple[int, ...]", retry: str) -> None:
    for code in codes:
        ending = ending_of(code)
        assert ending is not None
        assert (ending.code, ending.retry) == (code, retry)
        assert ending.cause


def test_every_bad_ending_that_needs_a_hand_has_advice() -> None:
    assert all(ending.advice for code, ending in ENDINGS.items() if code not in (0, 1, 14))


def test_codes_that_are_not_known() -> None:
    internal, strange = ending_of(150), ending_of(77)
    assert internal is not None and internal.retry == RETRY
    assert strange is not None and strange.retry == NEVER and "77" in strange.cause
    assert ending_of(None) is None


def test_a_reason_speaks_where_there_is_no_code() -> None:
    for reason, code in (("ELAPSE LIMIT EXC", 11), ("ANOTHER JOB STARTED", 18), ("ANOTHER JOB STAR", 18)):
        ending = ending_of(None, reason)
        assert ending is not None and ending.code == code
    assert ending_of(None, "WAIT SCHED") is None
    assert ending_of(None, "E") is None
