"""Tests of the settings of a run that are derived from the arguments in another trainer's log."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from fugaku_gpt.report.logged_run import LoggedRun, complete_settings, model_of

GRID = {"data_parallel_size": "2", "tensor_model_parallel_size": "4", "pipeline_model_parallel_size": "3"}


def settings(arguments: Dict[str, str], *batches: int, **given: Any) -> LoggedRun:
    return complete_settings(arguments, LoggedRun(**given), [{"global_batch": batch} for batch in batches])


def test_the_global_batch_is_the_last_of_a_schedule() -> None:
    assert settings({"global_batch_size": "64"}, 16, 32, 48).global_batch == 48
    assert settings({"global_batch_size": "64"}).global_batch == 64
    assert settings({}, 16, 0).global_batch == 16
    assert settings({}, 16, 32, global_batch=8).global_batch == 8


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        (GRID, {}, {"ranks": 24, "dp": 2, "nodes": None}),
        (GRID, {"ranks_per_node": 4}, {"ranks": 24, "nodes": 6}),
        (GRID, {"nodes": 3}, {"ranks": 24, "ranks_per_node": 8}),
        (GRID, {"nodes": 5}, {"ranks_per_node": None}),
        (GRID, {"ranks_per_node": 5}, {"nodes": None}),
        ({}, {"nodes": 3, "ranks_per_node": 8, "tp": 4, "pp": 3}, {"ranks": 24, "dp": 2}),
        ({"world_size": "25"}, {"tp": 4, "pp": 3}, {"dp": None}),
        ({"world_size": "24"}, {"tp": 4, "pp": 3}, {"dp": 2}),
        ({"global_num_gpus": "8", "model_parallel_size": "0", "pipe_parallel_size": "2"}, {}, {"tp": 1, "dp": 4}),
        ({"vocab_size": "50257", "make_vocab_size_divisible_by": "128"}, {"tp": 4}, {"padded_vocab": 50688}),
        ({"vocab_size": "50257", "make_vocab_size_divisible_by": "0"}, {"tp": 4}, {"padded_vocab": None}),
        ({"padded_vocab_size": "50304"}, {}, {"vocab_size": 50304}),
        ({"num_layers": "0"}, {}, {"layers": None}),
        ({"num_layers": str(2**53)}, {}, {"layers": None}),
        ({"num_layers": str(2**53 - 1)}, {}, {"layers": 2**53 - 1}),
        ({"checkpoint_activations": "True", "recompute_granularity": "selective"}, {}, {"recompute": True}),
        ({"checkpoint_activations": "False"}, {}, {"recompute": False}),
        ({"recompute_granularity": "full"}, {}, {"recompute": True}),
        ({"recompute_granularity": "selective"}, {}, {"recompute": False}),
        ({}, {}, {"recompute": None, "dtype": None}),
        ({"bf16": "True", "fp16": "True"}, {}, {"dtype": "bfloat16"}),
        ({"bf16": "False", "fp16": "True"}, {}, {"dtype": "float16"}),
        ({"params_dtype": "torch.float32"}, {}, {"dtype": "float32"}),
    ],
)  # fmt: skip
def test_settings_follow_from_the_arguments(
    arguments: Dict[str, str], given: Dict[str, Any], expected: Dict[str, Any]
) -> None:
    run = settings(arguments, **given)
    assert {name: getattr(run, name) for name in expected} == expected


def test_the_model_needs_layers_hidden_size_and_sequence_length() -> None:
    shape = {"layers": 2, "hidden": 8, "seq_len": 16}
    model = model_of(LoggedRun(**shape))
    assert model is not None and (model.layers, model.hidden, model.seq_len) == (2, 8, 16)
    assert (model.heads, model.vocab_size, model.ffn_size) == (1, 2, 32)
    for name in shape:
        assert model_of(LoggedRun(**{key: value for key, value in shape.items() if key != name})) is None


def test_the_sequence_length_of_all_lines_is_that_of_the_run_unless_arguments_state_another() -> None:
    lines = [{"actual_seq_len": 2048}, {"actual_seq_len": 2048}]
    assert complete_settings({}, LoggedRun(), lines).seq_len == 2048
    assert complete_settings({"seq_length": "4096"}, LoggedRun(), lines).seq_len == 4096
    assert complete_settings({}, LoggedRun(seq_len=1024), lines).seq_len == 1024
    assert complete_settings({}, LoggedRun(), [*lines, {"actual_seq_len": 1024}]).seq_len is None
