"""Tests of the lines of the log and of the records in the metrics file."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest

from fugaku_gpt.data.scored_text import TextLoss
from fugaku_gpt.formulas.flops import exact_flops, notes_flops
from fugaku_gpt.layout.communications import chunk_times, plan_of, schedule_of
from fugaku_gpt.layout.schedule_times import simulate
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.training.log import IntervalMeasurements, TrainingLog
from fugaku_gpt.training.log_lines import Pace, short_line
from fugaku_gpt.training.meter import pack_time_and_rank, unpack_time_and_rank
from fugaku_gpt.training.run import _metrics_writer
from fugaku_gpt.training.trainer import Step
from tests.support.tiny import tiny_config

MEGATRON = "training.log_format=megatron"
CONFIG = tiny_config("training.iterations=1000", "job.nodes=2", "layout.dp=2", MEGATRON)
STEP = Step(loss=2.345678901, grad_norm=0.98765, lr=6e-4, samples=8, seq_len=CONFIG.model.seq_len)
CONSUMED = (56, 56 * CONFIG.model.seq_len)


@pytest.fixture
def opened(tmp_path: Path) -> Tuple[TrainingLog, io.StringIO, Path]:
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    return TrainingLog(CONFIG, MetricsWriter(file), stream), stream, file


def records(file: Path) -> List[Dict[str, Any]]:
    """The records of the file, whose last line must be complete."""
    text = file.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_an_iteration_is_a_single_line_with_all_fields_in_order(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, stream, _ = opened
    log.iteration(7, [STEP], CONSUMED, 0, IntervalMeasurements(0.25, 300 * 2**20, 2 * 2**30))
    fields = [field.strip() for field in stream.getvalue().rstrip("\n").split(" | ")]
    tokens = 8 * CONFIG.model.seq_len
    notes = notes_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.25 / 2 / 1e12
    exact = exact_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.25 / 2 / 1e12
    assert fields == [
        "iteration    7/1000",
        "consumed samples: 56",
        f"consumed tokens: {7 * tokens}",
        "elapsed time per iteration (s): 0.250",
        "learning rate: 6.000E-04",
        "global batch size: 8",
        "lm loss: 2.345679",
        "grad norm: 0.988",
        "samples per second: 32.00",
        f"tokens per second: {tokens * 4}",
        f"TFLOPs: {notes:.3f} (exact {exact:.3f})",
        "rank RSS: 300 MiB",
        "node used: 2048 MiB |",
    ]


def test_the_default_line_has_the_watched_figures(tmp_path: Path) -> None:
    config = tiny_config("training.iterations=1000", "job.nodes=2", "layout.dp=2")
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    log = TrainingLog(config, MetricsWriter(file), stream)
    log.iteration(7, [STEP], CONSUMED, 0, IntervalMeasurements(0.25, 300 * 2**20, 2 * 2**30))
    tokens = 8 * CONFIG.model.seq_len
    notes = notes_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.25 / 2 / 1e12
    line, eta = stream.getvalue().rstrip("\n").rsplit(" | ", 1)
    assert line == (
        "iteration    7/1000 | loss: 2.34568 | lr: 6.00E-04 | grad norm: 0.9877 | s/it: 0.2500 | "
        f"tok/s: {tokens * 4:#.4g} | TFLOPs: {notes:#.4g} | RSS: 0.293 GiB"
    )
    assert re.fullmatch(r"ETA: \d+:\d\d:\d\d", eta)
    (record,) = records(file)
    assert record["consumed_tokens"] == CONSUMED[1] and record["node_used_bytes"] == 2 * 2**30


def test_a_short_line_fits_160_columns() -> None:
    values = {
        "iteration": 1_000_000, "loss": 1234.56789, "lr": 1.234e-10, "grad_norm": 123456.789, "seconds": 1234.5,
        "tokens_per_second": 123456789.0, "tflops_notes": 123.456, "rss_max_bytes": 2**37,
    }  # fmt: skip
    line = short_line(values, 1_000_000, 10 * 86400)
    assert len(line) <= 160 and line.endswith("| RSS: 128 GiB | ETA: 240:00:00")


def test_the_remaining_time_is_that_of_the_last_lines_with_all_that_lay_between() -> None:
    times = iter([100.0, 100.0, 104.0, *(104.0 + 10 * n for n in range(1, 101))])
    pace = Pace(lambda: next(times))
    pace.add(tokens=10, seconds=2.0)
    assert pace.seconds_for(50) == 10.0  # of the first line alone
    pace.add(tokens=10, seconds=1.0)  # after a validation of 3 seconds
    assert pace.seconds_for(40) == 12.0
    for _ in range(100):  # each takes 10 seconds for 10 tokens; the first lines are forgotten
        pace.add(tokens=10, seconds=10.0)
    assert pace.seconds_for(7) == 7.0


def test_the_record_of_an_iteration_has_unrounded_values(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, _, file = opened
    log.iteration(7, [STEP], CONSUMED, 0, IntervalMeasurements(0.25, 300, 4000))
    (record,) = records(file)
    assert record == {
        "kind": "iteration",
        "iteration": 7,
        "consumed_samples": 56,
        "consumed_tokens": 56 * CONFIG.model.seq_len,
        "seconds": 0.25,
        "lr": 6e-4,
        "global_batch": 8,
        "loss": 2.345678901,
        "grad_norm": 0.98765,
        "samples_per_second": 32.0,
        "tokens_per_second": 32.0 * CONFIG.model.seq_len,
        "tflops_notes": pytest.approx(notes_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.5e12),
        "tflops_exact": pytest.approx(exact_flops(CONFIG.model, 8, CONFIG.padded_vocab) / 0.5e12),
        "rss_max_bytes": 300,
        "node_used_bytes": 4000,
    }


def test_validations_report_the_change_from_the_previous_loss(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, stream, file = opened
    log.validation(0, 5.5, 192, None, consumed_tokens=0)
    log.validation(10, 5.25, 192, 5.5, consumed_tokens=640)
    assert stream.getvalue().splitlines() == [
        "validation at iteration 0 | lm loss: 5.500000 | tokens: 192 |",
        "validation at iteration 10 | lm loss: 5.250000 | tokens: 192 | change: -0.250000 |",
    ]
    assert records(file) == [
        {"kind": "validation", "iteration": 0, "loss": 5.5, "tokens": 192, "consumed_tokens": 0},
        {"kind": "validation", "iteration": 10, "loss": 5.25, "tokens": 192, "consumed_tokens": 640},
    ]


@pytest.mark.parametrize("is_on", [False, True])
def test_event_files_are_written_only_where_they_were_asked_for(tmp_path: Path, is_on: bool) -> None:
    directory = RunDirectory(tmp_path)
    writer = _metrics_writer(tiny_config(f"training.tensorboard={str(is_on).lower()}"), directory)
    log = TrainingLog(CONFIG, writer, io.StringIO())
    log.iteration(1, [STEP], CONSUMED, 0, IntervalMeasurements(1.0, 1, 1))
    writer.close()
    assert (type(writer) is MetricsWriter) != is_on
    assert len(records(directory.metrics_file)) == 1 and directory.events_dir.exists() == is_on


def test_a_number_that_json_cannot_hold_is_null(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, _, file = opened
    log.validation(1, math.nan, 1, None, consumed_tokens=64)
    log.validation(2, math.inf, 1, None, consumed_tokens=128)
    assert [record["loss"] for record in records(file)] == [None, None]


def test_each_record_is_on_disk_when_the_line_is_printed(opened: Tuple[TrainingLog, io.StringIO, Path]) -> None:
    log, _, file = opened
    for iteration in range(1, 4):
        log.iteration(iteration, [STEP], CONSUMED, 0, IntervalMeasurements(1.0, 1, 1))
        assert len(records(file)) == iteration


def opened_for(tmp_path: Path, *overrides: str) -> Tuple[TrainingLog, io.StringIO, Path]:
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    return TrainingLog(tiny_config(MEGATRON, *overrides), MetricsWriter(file), stream), stream, file


def test_rates_are_those_of_the_batches_that_were_really_used(tmp_path: Path) -> None:
    ramp = ("training.ramp_start=2", "training.ramp_increment=2", "training.ramp_samples=40")
    lengths = ("training.seq_ramp_start=8", "training.seq_ramp_increment=8", "training.seq_ramp_iterations=20")
    log, stream, file = opened_for(tmp_path, *ramp, *lengths, "training.log_interval=2")
    steps = [replace(STEP, samples=4, seq_len=8), replace(STEP, samples=6, seq_len=16)]
    log.iteration(8, steps, (30, 250), 0, IntervalMeasurements(0.5, 1, 1))
    (record,) = records(file)
    assert (record["global_batch"], record["actual_seq_len"], record["consumed_samples"]) == (6, 16, 30)
    assert record["samples_per_second"] == 10.0 and record["tokens_per_second"] == 4 * 8 + 6 * 16
    config = tiny_config()
    flops = [
        exact_flops(replace(config.model, seq_len=seq_len), samples, config.padded_vocab)
        for samples, seq_len in ((4, 8), (6, 16))
    ]
    assert record["tflops_exact"] == pytest.approx(sum(flops) / 1e12)
    assert "| global batch size: 6 | actual seqlen: 16 | lm loss:" in stream.getvalue()


def test_the_pipeline_bubble_and_hidden_communication_are_reported(tmp_path: Path) -> None:
    log, stream, file = opened_for(tmp_path, "layout.pp=2", "layout.dp=2")
    log.iteration(1, [STEP], CONSUMED, 0, IntervalMeasurements(0.5, 1, 1, (0.25, 0.75), 0.875))
    (record,) = records(file)
    assert (record["bubble"], record["bubble_max"], record["hidden_communication"]) == (0.5, 0.75, 0.875)
    assert record["bubble_ideal"] == (2 - 1) / 4  # 8 samples are 4 micro-batches of each replica
    plan = replace(plan_of(tiny_config("layout.pp=2", "layout.dp=2")), micro_batches=4)
    times = simulate([schedule_of(plan, stage) for stage in range(2)], chunk_times(plan))
    assert record["bubble_predicted"] == times.mean_bubble
    prediction = f"predicted {times.mean_bubble:.3f}, with equal stages 0.250"
    fields = f"| pipeline bubble: 0.500 (most 0.750, {prediction}) | hidden communication: 0.88 | rank RSS:"
    assert fields in stream.getvalue()


def test_a_single_bubble_is_predicted_if_stages_have_equal_work(tmp_path: Path) -> None:
    small_vocabulary = ("model.vocab_size=2", "model.padded_vocab_size=2", "model.layers=6", "model.ffn_hidden=3200")
    log, stream, file = opened_for(tmp_path, *small_vocabulary, "layout.pp=3", "layout.hierarchical_sum=true")
    log.iteration(1, [STEP], CONSUMED, 0, IntervalMeasurements(0.5, 1, 1, (0.25, 0.75, 0.5)))
    log.iteration(2, [STEP], CONSUMED, 0, IntervalMeasurements(0.5, 1, 1, (0.25, 0.75, 0.5)))
    assert stream.getvalue().count("pipeline bubble: 0.500 (most 0.750, predicted 0.250) | ") == 2
    assert [record["bubble_ideal"] for record in records(file)] == [2 / 8] * 2


def test_skipped_steps_are_reported_and_counted(tmp_path: Path) -> None:
    log, stream, file = opened_for(tmp_path, "training.non_finite=skip")
    bad = replace(STEP, loss=math.nan, skip_reason="not finite", lost_samples="48-55")
    log.skipped_step(7, bad)
    log.iteration(7, [bad], CONSUMED, 1, IntervalMeasurements(0.5, 1, 1))
    log.skipped_step(9, replace(STEP, loss=9.5, skip_reason="spike", lost_samples="40-71", returned_to=5))
    skipped, line, returned = stream.getvalue().splitlines()
    assert skipped == "iteration 7 was skipped: not finite: loss nan, gradient norm 0.98765; samples lost: 48-55"
    assert "| lm loss: nan | grad norm: 0.988 | number of skipped iterations: 1 | samples per second" in line
    assert returned.endswith("; weights are those after iteration 5 again; samples lost: 40-71")
    first, iteration, second = records(file)
    assert (first["kind"], first["why"], first["loss"], first["samples"]) == ("left_out", "not finite", None, "48-55")
    assert (iteration["loss"], iteration["skipped_iterations"]) == (None, 1)
    assert (second["why"], second["loss"], second["returned_to"]) == ("spike", 9.5, 5)


def test_the_slowest_and_the_fastest_rank_are_named_with_their_nodes(tmp_path: Path) -> None:
    stream, file = io.StringIO(), tmp_path / "metrics.jsonl"
    log = TrainingLog(CONFIG, MetricsWriter(file), stream, ["n1", "n1", "n2", "n2"])
    log.iteration(7, [STEP], CONSUMED, 0, IntervalMeasurements(0.6, 300, 4000, computing=((0.5123, 3), (0.25, 0))))
    assert "| computing per iteration (s): 0.512 (rank 3, n2) to 0.250 (rank 0, n1) |" in stream.getvalue()
    (record,) = records(file)
    named = {key: value for key, value in record.items() if key.startswith("compute_")}
    assert named == {
        "compute_max": 0.5123, "compute_max_rank": 3, "compute_max_node": "n2",
        "compute_min": 0.25, "compute_min_rank": 0, "compute_min_node": "n1",
    }  # fmt: skip


def test_a_time_and_a_rank_are_packed_into_a_single_number() -> None:
    times = [(0.0, 5), (1e-6, 2**20 - 1), (0.731204, 0), (0.731204, 9), (3599.999999, 331775)]
    numbers = [pack_time_and_rank(*time_and_rank) for time_and_rank in times]
    assert numbers == sorted(numbers)
    assert [unpack_time_and_rank(number)[1] for number in numbers] == [rank for _, rank in times]
    assert [unpack_time_and_rank(number)[0] for number in numbers] == pytest.approx([seconds for seconds, _ in times])


@pytest.mark.parametrize(("size", "bits"), [(4, "2.164043"), (None, "-"), (0, "-")])
def test_bits_for_each_byte_are_shown_where_there_are_bytes(
    opened: Tuple[TrainingLog, io.StringIO, Path], size: Optional[int], bits: str
) -> None:
    log, stream, _ = opened
    log.evaluation(7, TextLoss("news", 6.0, 3, size), 448)
    assert stream.getvalue() == f"news after 7 iterations: loss 2.000000, {bits} bits per byte, 3 tokens\n"
