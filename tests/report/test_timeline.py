"""Tests of the timelines of traces: what ranks did when, and what it adds up to."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.report.timeline import (
    BACKWARD,
    BEGINNING,
    FORWARD,
    GATHER,
    MESSAGE_IN,
    OPTIMISER,
    SUM,
    SUMS,
    WAITING,
    timeline_of_run,
)
from tests.report.traces import FIRST_RANK, write_rank, write_two_ranks


def test_phases_without_waits_and_waits_add_up_to_the_iterations(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    timeline = timeline_of_run(tmp_path)
    first, second = timeline.rows
    seconds = first.seconds_by_kind()
    assert {kind: value for kind, value in seconds.items() if value} == pytest.approx(
        {BEGINNING: 1.0, FORWARD: 3.0, BACKWARD: 3.0, SUMS: 0.5, OPTIMISER: 1.0, WAITING: 1.5}, abs=1e-5
    )
    assert sum(seconds.values()) == pytest.approx(10.0, abs=1e-6)
    assert [(span.label, round(span.seconds, 5)) for span in first.iterations] == [
        ("iteration 4", 5.0),
        ("iteration 5", 5.0),
    ]
    assert second.seconds_by_kind()[WAITING] == 0.0


def test_clocks_are_aligned_and_their_error_is_noted(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    timeline = timeline_of_run(tmp_path)
    starts = [row.phases[0].start for row in timeline.rows]
    assert starts == pytest.approx([0.0, 1.0], abs=1e-5) and timeline.end == pytest.approx(11.0, abs=1e-5)
    assert timeline.notes == ("clocks of nodes were compared to within 2 us",)
    assert [row.name for row in timeline.rows] == ["rank 0 (dp 0 pp 0 tp 0) node-0", "rank 1 (dp 0 pp 1 tp 0) node-1"]


def test_communication_is_hidden_where_the_rank_does_not_wait_for_it(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    row = timeline_of_run(tmp_path).rows[0]
    # 0 to 1, 1 to 3.5 and 3.5 to 4.5, and the gather from 9.75 on, which is cut at the end
    under_way, hidden = row.communication_seconds()
    assert under_way == pytest.approx(4.75, abs=1e-5) and hidden == pytest.approx(4.75 - 1.5, abs=1e-5)
    kinds = [(span.kind, round(span.start, 4), round(span.end, 4)) for span in row.communications]
    assert kinds[0] == (GATHER, 0.0, 1.0) and kinds[-1] == (GATHER, 9.75, 10.0)
    assert kinds[1] == (MESSAGE_IN, 1.0, 3.0) and kinds[3] == (SUM, 3.5, 4.25)
    received = row.communications[1]
    assert received.label == "receive pp from 1" and received.details == {
        "shape": [8],
        "type": "torch.float32",
        "number": 2,
        "line": "parallel/pipeline.py:1",
        "micro_batch": 0,
    }
    assert [wait.label for wait in row.waits] == [
        "wait: receive pp from 1",
        "wait: all_reduce_sum dp",
        "wait: all_reduce_sum world",
    ]


def test_chosen_ranks_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no traces: train with --set training.trace_iterations=5-7"):
        timeline_of_run(tmp_path)
    write_two_ranks(tmp_path)
    timeline = timeline_of_run(tmp_path, [1])
    assert len(timeline.rows) == 1 and "1 of 2 ranks" in timeline.notes
    with pytest.raises(UsageError, match="no trace of rank 2-3, 7; there are those of 0-1"):
        timeline_of_run(tmp_path, [0, 2, 3, 7])


def test_a_trace_that_was_cut_is_noted_and_clocks_that_step_back_make_no_negative_span(tmp_path: Path) -> None:
    backwards = [(-1.0, "forward", 4, -1), *FIRST_RANK[1:4], (3.0, "optimiser", 4, -1), *FIRST_RANK[5:]]
    write_rank(tmp_path, 0, backwards, [("receive", "pp", 2.0, 2.0, 1.0)], is_cut=True)
    timeline = timeline_of_run(tmp_path)
    assert "the memory for the trace was full before its end on rank 0" in timeline.notes
    row = timeline.rows[0]
    assert row.phases[0].start == 0.0
    assert min(span.seconds for span in (*row.phases, *row.waits, *row.communications)) >= 0.0
    assert sum(row.seconds_by_kind().values()) == pytest.approx(10.0, abs=1e-6)


def test_a_trace_without_a_phase_is_a_row_without_time(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [])
    (row,) = timeline_of_run(tmp_path).rows
    assert (row.end, row.iterations, row.communication_seconds()) == (0.0, [], (0.0, 0.0))
