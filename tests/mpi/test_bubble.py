"""The idle time of a real pipeline is what its schedule promises; layers are sleeps, so cores do not matter."""

from __future__ import annotations

import pytest

from benchmarks.bubble import WARM_UP_SECONDS, measured_bubble
from fugaku_gpt.comm import Communicator
from fugaku_gpt.layout.schedule_times import ideal_bubble

MICRO_BATCHES = 8
PASS_SECONDS = 0.15
TRIES = 6
TOLERANCE = 0.1  # of the bubble


@pytest.mark.parametrize("kind, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_step_idles_as_long_as_the_schedule_promises(world: Communicator, kind: str, chunks: int) -> None:
    if world.size != 4:
        pytest.skip("four stages")
    told = ideal_bubble(kind, world.size, MICRO_BATCHES, chunks)
    assert told == 3 / 8 / chunks
    measured_bubble(world, kind, MICRO_BATCHES, chunks, WARM_UP_SECONDS)
    # a busy machine only adds time: the least of a few tries counts, and the first good one is enough
    measured = []
    while len(measured) < TRIES and (not measured or min(measured) > (1.0 + TOLERANCE) * told):
        measured.append(measured_bubble(world, kind, MICRO_BATCHES, chunks, PASS_SECONDS))
    if world.rank == 0:
        print(f"\nbubble of {kind}, {chunks} chunks: {min(measured):.4f}, promised {told:.4f}, {len(measured)} tries")
    assert (1.0 - TOLERANCE) * told <= min(measured) <= (1.0 + TOLERANCE) * told, measured
