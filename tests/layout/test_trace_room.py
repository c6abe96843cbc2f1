"""Tests of the room that a trace has for its records."""

from __future__ import annotations

import pytest

from fugaku_gpt.layout.trace_room import MORE_RECORDS, records_of_iteration, trace_room
from fugaku_gpt.limits import TRACED_CALLS
from tests.support.tiny import tiny_config

NO_VALIDATION = "training.eval_interval=null"


def test_a_trace_has_room_for_the_iterations_and_more_records() -> None:
    config = tiny_config("layout.dp=2", NO_VALIDATION)
    calls, phases = records_of_iteration(config, 0)
    assert calls > 0 and phases > 0
    assert trace_room(config, 0, 3) == (3 * calls + MORE_RECORDS, 3 * phases + MORE_RECORDS)
    assert trace_room(config, 0, 10**9) == (TRACED_CALLS.value, TRACED_CALLS.value)


@pytest.mark.parametrize(("interval", "measurements"), [(5, 4), (4, 4), (6, 3)])
def test_validations_before_after_and_between_the_iterations_are_recorded_too(interval: int, measurements: int) -> None:
    config = tiny_config(
        "layout.dp=2",
        "training.micro_batch=1",
        "training.global_batch=8",
        f"training.eval_interval={interval}",
        "training.eval_batches=3",
    )
    calls, phases = records_of_iteration(config, 0)
    assert trace_room(config, 0, 10) == (
        10 * calls + measurements * 3 * calls + MORE_RECORDS,
        10 * phases + measurements * 3 * phases + MORE_RECORDS,
    )
    per_batch = -(-calls // config.micro_batches)  # a pass over a batch is that of one of four micro-batches
    assert config.micro_batches == 4
    more_calls, more_phases = (
        with_files - without
        for with_files, without in zip(trace_room(config, 0, 10, batches_of_files=7), trace_room(config, 0, 10))
    )
    assert (more_calls, more_phases) == (measurements * 4 * per_batch, measurements * 7)  # 4 of 7 on the first replica
