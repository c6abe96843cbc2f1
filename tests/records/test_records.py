"""Tests of the summary of a run's records, and of numbers written as spans."""

from __future__ import annotations

from fugaku_gpt.config import load_run_config
from fugaku_gpt.records.summary import KEYS, summarise
from fugaku_gpt.records.text import spans
from tests.sweep.fake import iteration


def test_the_summary_leaves_out_the_first_samples() -> None:
    config = load_run_config(preset="tiny")
    lines = [iteration(number, seconds) for number, seconds in enumerate((9.0, 8.0, 1.0, 3.0, 2.0), start=1)]
    summary = summarise(config, lines, [{"loss": 7.0}, {"loss": 6.0}])
    assert (summary["seconds_per_iteration"], summary["samples"], summary["warmup_samples"]) == (2.0, 5, 2)
    assert (summary["first_loss"], summary["last_loss"]) == (7.0, 3.0)
    assert (summary["first_validation_loss"], summary["last_validation_loss"]) == (7.0, 6.0)
    assert summary["node_used_bytes"] == 2**30 + 5 * 2**20
    assert summary["tokens_per_second"] == 16 * 128 / 2.0
    short = summarise(config, lines[:2], [])
    assert short["seconds_per_iteration"] == 8.5 and "last_validation_loss" not in short
    assert "seconds_per_iteration" not in summarise(config, [], [])


def test_where_the_batch_grows_the_summary_s_rates_are_those_of_the_last_size() -> None:
    config = load_run_config(preset="tiny")
    sizes = [(4, 9.0), (4, 9.0), (8, 5.0), (8, 4.0), (8, 2.0), (8, 2.0)]
    lines = [
        {**iteration(number, seconds), "global_batch": batch, "actual_seq_len": 64}
        for number, (batch, seconds) in enumerate(sizes, start=1)
    ]
    summary = summarise(config, lines, [{"loss": 7.0}])
    keys = [key for key, meaning in KEYS.items() if not meaning.startswith("classifier of grids")]
    assert keys == sorted(summary, key=list(KEYS).index)  # each key has a meaning, and each meaning a key
    assert (summary["seconds_per_iteration"], summary["samples"], summary["warmup_samples"]) == (2.0, 6, 2)
    assert (summary["timed_batch"], summary["timed_seq_len"], summary["tokens_per_second"]) == (8, 64, 8 * 64 / 2.0)


def test_the_summary_s_losses_are_finite_ones() -> None:
    lines = [{**iteration(number), "loss": loss} for number, loss in enumerate((None, 7.0, 6.0, None), start=1)]
    summary = summarise(load_run_config(preset="tiny"), lines, [])
    assert (summary["first_loss"], summary["last_loss"]) == (7.0, 6.0)


def test_numbers_are_put_in_spans() -> None:
    assert spans([]) == "" and spans([4]) == "4" and spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
