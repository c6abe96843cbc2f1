"""What the probe measures: enough of each kind for a plan of whatever was asked for."""

from __future__ import annotations

import itertools

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.machine.probed import PRODUCTS
from fugaku_gpt.training.probe import small_runs, spread_of
from fugaku_gpt.training.probe_calls import shapes


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtypes", [["bfloat16"], ["float32", "bfloat16"]])
def test_small_runs_are_of_the_types_and_ranks_that_are_measured(ranks: int, dtypes: "list[str]") -> None:
    runs = small_runs(ranks, 1, dtypes)
    configs = [load_run_config(overrides=settings) for _, settings in runs]
    assert {config.training.dtype for config in configs} == set(dtypes)
    assert {config.layout.ranks for config in configs} == {ranks}
    assert len({name for name, _ in runs}) == len(runs)


def test_however_short_the_time_there_is_a_product_of_each_kind() -> None:
    for narrow in (False, True):
        first = itertools.islice(shapes(narrow, 1), len(PRODUCTS))
        assert {shape.kind for shape in first} == set(PRODUCTS)


def test_a_few_disturbed_timings_do_not_widen_the_spread() -> None:
    quiet = [1.0 + 0.01 * (step % 5) for step in range(20)]
    assert spread_of([*quiet, 50.0]) < 0.03 < spread_of([1.0, 2.0, 3.0, 4.0])
