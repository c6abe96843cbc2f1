"""Tests of the memory benchmark: the formula's prediction of each pair, and a pair of real runs."""

from __future__ import annotations

import pytest

from benchmarks.memory import BASE, PAIRS, predicted_bytes
from fugaku_gpt.config import load_run_config
from tests.benchmarks.programs import printed_lines


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_second_of_each_pair_is_predicted_to_need_less(pair: object) -> None:
    predictions = [
        predicted_bytes(load_run_config(overrides=[*BASE, *pair.common, *more]))  # type: ignore[attr-defined]
        for _, more in (pair.plain, pair.saving)  # type: ignore[attr-defined]
    ]
    # attention scores are never saved: selective saves one byte of each, the flag of its dropout
    assert predictions[1] < (0.99 if pair.name == "selective" else 0.95) * predictions[0]  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_pair_is_measured_on_real_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["model.layers=4", "model.hidden=128", "model.seq_len=128"]
    arguments = [argument for setting in small for argument in ("--set", setting)]
    lines = printed_lines(capfd, "memory", "--only", "full", *arguments)
    assert [line[:16].strip() for line in lines[2:]] == ["recompute none", "recompute full", "saved"]
    none, full, saved = (float(line[34:].split()[0]) for line in lines[2:])
    assert none > full > 0 and saved == pytest.approx(none - full, abs=0.2)
