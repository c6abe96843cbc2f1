"""Tests of the sentence that explains why a layout is the faster of two."""

from __future__ import annotations

import pytest

from fugaku_gpt.planner.intervals import Estimate
from fugaku_gpt.planner.search.best import compare_components, explain_ranking
from fugaku_gpt.planner.tables.predict import Prediction
from fugaku_gpt.planner.tables.seconds import TIME_COMPONENTS
from tests.planner.samples import row


def predicted(seconds: "dict[str, float]", batch: int, interval: float = 1.0) -> Prediction:
    """A prediction of components, whose 80 % interval is a factor to both sides."""
    components = {name: Estimate.from_log_width(seconds.get(name, 0.0), 0.0) for name in TIME_COMPONENTS}
    total = sum(seconds.values())
    estimate = Estimate(total, total / interval, total * interval)
    return Prediction(row(global_batch=batch), estimate, components, 1.0, 1.0, "GB", True, ())


FIRST, SECOND = list(TIME_COMPONENTS)[:2]


def test_gains_and_losses_are_those_of_a_sequence_where_batches_differ() -> None:
    fast, slow = predicted({FIRST: 6.0, SECOND: 2.0}, 512), predicted({FIRST: 8.0, SECOND: 0.5}, 256)
    text = explain_ranking(fast, slow)
    assert text == f"1 takes 52.9% less than 2: gains in {FIRST} +10 s; loses in {SECOND} -1 s"
    differences = {line["part"]: line["difference"] for line in compare_components(fast, slow)}
    assert (differences[FIRST], differences[SECOND], differences["iteration"]) == (-2.0, 1.5, -0.5)


@pytest.mark.parametrize(
    ("interval", "batch", "is_close"), [(1.05, 512, False), (1.2, 512, True), (1.2, 256, False), (1.8, 256, True)]
)
def test_a_lead_within_the_intervals_asks_for_a_measurement(interval: float, batch: int, is_close: bool) -> None:
    text = explain_ranking(predicted({FIRST: 8.0}, 512, interval), predicted({FIRST: 10.0}, batch, interval))
    assert ("their 80 % intervals overlap: measure both" in text) == is_close
