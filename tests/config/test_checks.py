"""Tests of the rules between fields: each refusal names the line, the key, the value and the valid values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterator, List

import pytest

from fugaku_gpt.config import checks, load_run_config
from fugaku_gpt.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  heads: 5",
            "run.yaml:2: model.heads: 5: must divide model.hidden 128; valid: 1, 2, 4, 8, 16, 32, 64, 128, "
            "or give model.head_dim",
        ),
        (
            "model:\n  kv_heads: 3",
            "run.yaml:2: model.kv_heads: 3: must divide model.heads 4; valid: 1, 2, 4",
        ),
        (
            "layout.tp: 4\nmodel.heads: 12\nmodel.hidden: 48\nmodel.kv_heads: 6",
            "run.yaml:1: layout.tp: 4: must divide model.kv_heads 6 or be a multiple of it; valid: 1, 2, 3, 6, 12",
        ),
        (
            "model: {positions: rope, head_dim: 5}",
            "run.yaml:1: model.positions: rope: needs heads of an even width, not 5",
        ),
        (
            "model: {rope_factor: 2}",
            "run.yaml:1: model.rope_factor: 2.0: needs model.rope_scaling; valid with none: 1",
        ),
        (
            "model: {positions: rope, rope_scaling: linear}",
            "model.rope_factor: 1.0: needs a value above 1 with model.rope_scaling linear",
        ),
        (
            "model: {rope_scaling: linear, rope_factor: 2}",
            "run.yaml:1: model.rope_scaling: linear: needs model.positions rope; valid: none",
        ),
        (
            "model: {positions: rope, rope_scaling: llama3, rope_factor: 8}",
            "run.yaml:1: model.rope_scaling: llama3: needs model.rope_original_seq_len",
        ),
        (
            "model: {positions: rope, rope_scaling: llama3, rope_factor: 8, rope_original_seq_len: 8, "
            "rope_low_freq_factor: 4}",
            "run.yaml:1: model.rope_low_freq_factor: 4.0: must be less than model.rope_high_freq_factor 4",
        ),
        (
            "layout:\n  tp: 3\nmodel.ffn_hidden: 3\nmodel.vocab_multiple: 1",
            "run.yaml:2: layout.tp: 3: must divide model.heads 4; valid: 1, 2, 4",
        ),
        (
            "layout.tp: 4\nmodel:\n  ffn_hidden: 6",
            "run.yaml:1: layout.tp: 4: must divide model.ffn_hidden 6; valid: 1, 2, 3, 6",
        ),
        (
            "layout.tp: 4\nmodel:\n  padded_vocab_size: 2050",
            "run.yaml:3: model.padded_vocab_size: 2050: must be a multiple of layout.tp 4; "
            "valid: 2052, or leave it out",
        ),
        (
            "model.padded_vocab_size: 2047",
            "run.yaml:1: model.padded_vocab_size: 2047: must be at least model.vocab_size 2048, or leave it out",
        ),
        (
            "model.dropout: 1e-6",
            "run.yaml:1: model.dropout: 1e-06: is 0 or 1 to 16 bits; valid: 0, or from 2e-5 to 0.9999",
        ),
        (
            "model.attention_dropout: 0.999999",
            "run.yaml:1: model.attention_dropout: 0.999999: is 0 or 1 to 16 bits; valid: 0, or from 2e-5 to 0.9999",
        ),
        ("layout.pp: 5", "run.yaml:1: layout.pp: 5: times layout.chunks 1 is more than model.layers 4"),
        (
            "training.ramp_start: 3\ntraining.ramp_increment: 4\ntraining.ramp_samples: 9\nlayout.dp: 2",
            "run.yaml:1: training.ramp_start: 3: must be a multiple of training.micro_batch 1 * layout.dp 2 = 2, "
            "at most training.global_batch 8; valid: 2, 4",
        ),
        (
            "checkpoint.keep_every: 250\ncheckpoint.interval: 100",
            "run.yaml:1: checkpoint.keep_every: 250: must be a multiple of checkpoint.interval 100; valid: 200 or 300",
        ),
        (
            "checkpoint.keep_every: 250",
            "run.yaml:1: checkpoint.keep_every: 250: needs checkpoint.interval, which it is a multiple of",
        ),
        (
            "training.eval_files: [a/news.jsonl, b/news]\ntraining.eval_interval: 2",
            "run.yaml:1: training.eval_files: b/news: another file has the same name, news; rename one",
        ),
        (
            "training.eval_files: [validation.txt]\ntraining.eval_interval: 2",
            "run.yaml:1: training.eval_files: validation.txt: its name would be 'validation'; "
            "valid: another one than validation, so give the file one",
        ),
        (
            "training.eval_files: [news.txt]",
            "run.yaml:1: training.eval_files: ['news.txt']: needs training.eval_interval, the iterations between "
            "evaluations",
        ),
        (
            "checkpoint.keep_best: news\ncheckpoint.interval: 4\ntraining.eval_interval: 2",
            "run.yaml:1: checkpoint.keep_best: news: names no loss that this run measures; valid: validation",
        ),
        (
            "checkpoint.keep_best: validation\ntraining.eval_files: [a/news.md]\ntraining.eval_interval: 2\n"
            "checkpoint.interval: 2\ndata.split: [1, 0, 0]",
            "run.yaml:1: checkpoint.keep_best: validation: names no loss that this run measures; valid: news",
        ),
        (
            "checkpoint.keep_best: validation\ntraining.eval_interval: 2",
            "run.yaml:1: checkpoint.keep_best: validation: needs checkpoint.interval and training.eval_interval, at "
            "which checkpoints are written and measured",
        ),
        (
            "checkpoint.keep_best: validation\ntraining.eval_interval: 4\ncheckpoint.interval: 6",
            "run.yaml:3: checkpoint.interval: 6: so that each is measured, must be a multiple of "
            "training.eval_interval 4 with checkpoint.keep_best; valid: 4 or 8",
        ),
        (
            "training.trace_iterations: 9-3",
            "run.yaml:1: training.trace_iterations: 9-3: must go from the lower to the higher number; valid: 3-9",
        ),
        (
            "training.trace_iterations: 0-3",
            "run.yaml:1: training.trace_iterations: 0-3: must lie within training.iterations; valid: 1-100",
        ),
        (
            "training.trace_iterations: 98-101",
            "run.yaml:1: training.trace_iterations: 98-101: must lie within training.iterations; valid: 1-100",
        ),
        (
            "training.trace_iterations: 50-150\ntraining.iterations: 1000",
            "run.yaml:1: training.trace_iterations: 50-150: at most 100 iterations; valid: 50-149",
        ),
        (
            "training.trace_iterations: 5\nnode.flight_recorder: false\nnode.hang_timeout: null",
            "run.yaml:1: training.trace_iterations: 5: needs node.flight_recorder, whose records it keeps; valid: true",
        ),
        (
            "training.skip_samples: [9-3]",
            "run.yaml:1: training.skip_samples: 9-3: must go from the lower to the higher number; valid: 3-9",
        ),
        (
            "layout.tp: 4\nlayout.sequence_parallel: true\nmodel.seq_len: 30",
            "run.yaml:1: layout.tp: 4: must divide model.seq_len 30 with layout.sequence_parallel; "
            "valid: 1, 2, 3, 5, 6, 10, 15, 30",
        ),
        (
            "training.recompute_budget_mib: 64",
            "run.yaml:1: training.recompute_budget_mib: 64: needs training.recompute, the most that may be recomputed; "
            "valid: selective, full",
        ),
        (
            "training:\n  recompute: full\n  recompute_layers: 2\n  recompute_budget_mib: 64",
            "run.yaml:3: training.recompute_layers: 2: is chosen by training.recompute_budget_mib; "
            "valid: one of the two",
        ),
        (
            "training.recompute_layers: 2",
            "run.yaml:1: training.recompute_layers: 2: needs training.recompute; valid: selective, full",
        ),
        (
            "layout.dp: 4\njob.nodes: 3",
            "run.yaml:2: job.nodes: 3: must divide layout.dp 4 * layout.tp 1 * layout.pp 1 = 4 ranks; valid: 1, 2, 4",
        ),
        (
            "layout.dp: 4\njob.nodes: 2\nnode.ranks_per_node: 4",
            "run.yaml:3: node.ranks_per_node: 4: times job.nodes 2 must be "
            "layout.dp 4 * layout.tp 1 * layout.pp 1 = 4 ranks; valid: 2",
        ),
        (
            "layout.dp: 4\njob.nodes: 3\nnode.ranks_per_node: 1",
            "run.yaml:3: node.ranks_per_node: 1: times job.nodes 3 must be "
            "layout.dp 4 * layout.tp 1 * layout.pp 1 = 4 ranks; change the layout or job.nodes",
        ),
        (
            "training:\n  micro_batch: 3\n  global_batch: 10",
            "run.yaml:3: training.global_batch: 10: must be a multiple of "
            "training.micro_batch 3 * layout.dp 1 = 3; valid: 9 or 12",
        ),
        (
            "layout.dp: 2\ntraining:\n  micro_batch: 4\n  global_batch: 1",
            "run.yaml:4: training.global_batch: 1: must be a multiple of "
            "training.micro_batch 4 * layout.dp 2 = 8; valid: 8",
        ),
        ("training.min_lr: 1e-3", "run.yaml:1: training.min_lr: 0.001: must be at most training.lr 0.0006"),
        (
            "training:\n  decay_iterations: 5\n  warmup_iterations: 5",
            "run.yaml:3: training.warmup_iterations: 5: must be below training.decay_iterations 5",
        ),
        (
            "data:\n  paths: [a, b]\n  weights: [1]",
            "run.yaml:3: data.weights: [1.0]: must have one weight for each of the 2 data.paths",
        ),
        (
            "data:\n  split: [0, 1, 1]",
            "run.yaml:2: data.split: [0.0, 1.0, 1.0]: must be three shares (train, valid, test), train above 0, "
            "such as [969, 30, 1]",
        ),
        (
            "data:\n  reset_positions: true",
            "run.yaml:2: data.reset_positions: True: needs data.document_mask; valid: false, or "
            "data.document_mask=true",
        ),
        (
            "data:\n  document_mask: false\n  loss_across_documents: true",
            "run.yaml:3: data.loss_across_documents: True: needs data.document_mask; valid: false, or "
            "data.document_mask=true",
        ),
    ],
)
def test_a_broken_rule_is_reported_in_a_single_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_run_config(file)
    assert str(caught.value).replace(f"{tmp_path}/", "") == message


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(overrides=["model.heads=3", "training.micro_batch=3", "data.split=[1]", "training.min_lr=1"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    for line, rule in zip(lines, ("model.heads: 3", "training.global_batch: 8", "training.min_lr: 1.0", "data.split:")):
        assert rule in line


@pytest.mark.parametrize("path", ["texts/my news.txt", "ニュース.txt", "-x.jsonl"])
def test_the_best_can_be_that_of_any_file_that_can_be_evaluated(path: str) -> None:
    settings = ["checkpoint.interval=2", "training.eval_interval=2", f"training.eval_files=['{path}']"]
    (name,) = load_run_config(overrides=settings).training.eval_names
    assert load_run_config(overrides=[*settings, f"checkpoint.keep_best={name}"]).checkpoint.keep_best == name


def test_a_default_that_breaks_a_rule_is_reported_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^training\.global_batch: 8: must be a multiple of "):
        load_run_config(overrides=["training.micro_batch=3"])


def test_a_number_with_too_many_zeros_is_refused_after_few_divisions(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited_range(*limits: int) -> Iterator[int]:
        for number in range(*limits):
            assert number <= 100_000, "further numbers are not tried"
            yield number

    monkeypatch.setattr(checks, "range", limited_range, raising=False)
    with pytest.raises(ConfigError, match=r"job\.nodes: 1001: must divide .* valid: 1, 2, 4, .*, 100000, \.\.\.$"):
        load_run_config(overrides=["layout.dp=1e6", "job.nodes=1001", "training.global_batch=1e6"])


@pytest.mark.parametrize(
    "setting",
    ["model.hidden=3072", "model.ffn_hidden=516", "layout.tp=4", "job.nodes=4", "node.ranks_per_node=2",
     "training.global_batch=16", "training.min_lr=6e-4", "data.split=[1, 0, 0]", "model.padded_vocab_size=2048",
     "model.dropout=2e-5", "model.attention_dropout=0.9999", "model.dropout=0"],
)  # fmt: skip
def test_values_at_the_edge_of_a_rule_are_accepted(setting: str) -> None:
    layout = ["layout.dp=4", "training.micro_batch=2"]
    nodes = ["job.nodes=2"] if "ranks_per_node" in setting else []
    assert load_run_config(overrides=[*layout, *nodes, setting]).micro_batches >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.layers=1000000000"], "a whole number, at least 1 and at most 4096"),
        (["layout.dp=1000000000"], "a whole number, at least 1 and at most 1048576"),
        (
            ["layout.dp=65536", "layout.pp=32", "model.layers=32"],
            "layout.dp * tp * pp is 2097152; valid: at most 1048576",
        ),
        (
            ["layout.dp=4096", "training.global_batch=4096"],
            "4096 ranks (layout.dp * layout.tp * layout.pp) are 4096 on each; valid: at most 1024 on each",
        ),
        (["training.global_batch=16777216"], "makes 4194304 micro-batches for each replica; valid: at most 65536"),
        (
            ["training.ramp_start=4", "training.ramp_increment=4", "training.ramp_samples=4000004"],
            "takes more than 1000000 iterations of training.ramp_start 4",
        ),
    ],
)
def test_sizes_beyond_any_machine_are_refused(settings: List[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_run_config(preset="tiny", overrides=settings)
