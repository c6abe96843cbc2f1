"""Tests of planned timelines: their waits are the idle time that schedules are judged by."""

from __future__ import annotations

import jsonschema
import pytest

from fugaku_gpt.layout.communications import chunk_times, plan_of, program, schedule_of
from fugaku_gpt.layout.schedule_times import simulate
from fugaku_gpt.report.planned_timeline import UNIT, planned_timeline
from fugaku_gpt.report.timeline import WAITING, WEIGHTS
from fugaku_gpt.report.trace_events import trace_document
from tests.report.trace_event_schema import SCHEMA
from tests.support.tiny import tiny_config

SCHEDULES = ["gpipe", "1f1b", "zero_bubble", "interleaved"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_waiting_is_the_idle_time_of_the_simulated_schedule(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    settings = ("model.layers=8", "layout.pp=4", f"layout.schedule={schedule}", f"layout.chunks={chunks}")
    plan = plan_of(tiny_config(*settings))
    times = simulate([schedule_of(plan, stage) for stage in range(4)], chunk_times(plan))
    timeline = planned_timeline(plan)
    assert timeline.end == pytest.approx(times.makespan) and timeline.unit == UNIT
    for stage, row in enumerate(timeline.rows):
        seconds = row.seconds_by_kind()
        assert sum(seconds.values()) == pytest.approx(times.makespan)
        assert seconds[WAITING] == pytest.approx(times.idle_share[stage] * times.makespan)
        assert (seconds[WEIGHTS] > 0) == (schedule == "zero_bubble")
    jsonschema.validate(trace_document(timeline), SCHEMA)


def test_a_row_is_a_class_of_ranks_and_counts_their_communications() -> None:
    plan = plan_of(tiny_config("model.layers=4", "layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1"))
    timeline = planned_timeline(plan)
    assert [row.name for row in timeline.rows] == ["stage 0, 4 ranks: 0-1, 4-5", "stage 1, 4 ranks: 2-3, 6-7"]
    for stage, row in enumerate(timeline.rows):
        counted = 0
        for details in [row.iterations[0].details, *(phase.details for phase in row.phases)]:
            counted += sum(int(text.split()[0]) for kind, text in details.items() if " " in kind)
        transfers = [step for step in program(plan, stage) if hasattr(step, "exchange")]
        assert counted == len(program(plan, stage)) - len(transfers)


def test_a_step_of_one_stage_has_neither_waits_nor_messages() -> None:
    (row,) = planned_timeline(plan_of(tiny_config())).rows
    assert row.name == "stage 0, 1 rank: 0" and not row.waits and not row.communications and row.end > 0


def test_passes_are_named_by_their_micro_batch_and_by_their_chunk_where_there_are_several() -> None:
    plan = plan_of(tiny_config("model.layers=4", "layout.pp=2"))
    assert "forward 0" in {phase.label for row in planned_timeline(plan).rows for phase in row.phases}
    settings = ("model.layers=4", "layout.pp=2", "layout.schedule=interleaved", "layout.chunks=2")
    rows = planned_timeline(plan_of(tiny_config(*settings))).rows
    labels = {phase.label for row in rows for phase in row.phases}
    assert {"forward 0 chunk 0", "forward 0 chunk 1"} <= labels and "forward 0" not in labels
