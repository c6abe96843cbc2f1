"""Tests of the planned memory of `generate` against the tensors that it really keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fugaku_gpt.config import LayoutConfig, RunConfig, load_run_config
from fugaku_gpt.layout.stages import chunks_of
from fugaku_gpt.machine.framework import Framework, framework_of
from fugaku_gpt.planner.trainer.generation_memory import (
    GENERATION_CATEGORIES,
    GenerationSize,
    bytes_of_node,
    evaluation_memory,
    generation_memory,
    loading_bytes,
)
from tests.support.models import MODELS, model_of_kind


@pytest.mark.torch
@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_cache_are_those_of_a_replica(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make install")
    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.inference.model_source import ReplicaLayout, find_model, inference_config
    from fugaku_gpt.inference.replica import ModelReplica
    from tests.support.checkpoints import save_model

    source = find_model(save_model(tmp_path, model_of_kind(kind)))
    config = inference_config(source, ReplicaLayout(), 1)
    replica = ModelReplica(config, ProcessGrid.alone())
    (planned,) = generation_memory(config, GenerationSize(3, 20), framework_of())
    assert planned["cache"] == replica.make_cache(3, 20).bytes
    assert planned["weights"] == sum(4 * p.numel() for p in replica._model.parameters())


@pytest.mark.torch
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_loading_is_the_largest_tensor_before_it_is_rounded(kind: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("torch.utils._python_dispatch", reason="older builds do not show their tensors")
    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.inference.model_source import ReplicaLayout, find_model, inference_config
    from fugaku_gpt.inference.replica import ModelReplica
    from tests.support.alive import AliveBytes
    from tests.support.checkpoints import save_model

    source = find_model(save_model(tmp_path, model_of_kind(kind)))
    config = inference_config(source, ReplicaLayout(dtype=dtype), 1)
    replica = ModelReplica(config, ProcessGrid.alone())
    with AliveBytes() as alive:
        replica.load(source)
    (chunk,) = chunks_of(config)
    assert loading_bytes(config, chunk) == alive.peak_bytes
    largest = 4 * max(p.numel() for p in replica._model.parameters())
    assert alive.peak_bytes == (largest if dtype == "bfloat16" else 0)
    (planned,) = generation_memory(config, GenerationSize(1, 1), framework_of())
    later = planned["cache"] + planned["workspace"] + planned["logits"]
    assert planned["loading"] == max(0, alive.peak_bytes - later) and (planned["loading"] > 0) == (dtype == "bfloat16")


def test_a_rank_reads_its_part_from_a_piece_of_all_ranks() -> None:
    run = RunConfig(model=model_of_kind("llama"))
    cut = replace(run, layout=LayoutConfig(tp=2))
    (chunk,), model = chunks_of(run), run.model
    assert loading_bytes(run, chunk) == 0
    assert loading_bytes(cut, chunk) == 4 * model.up_width * model.hidden
    narrow = replace(cut, training=replace(run.training, dtype="bfloat16"))
    assert loading_bytes(narrow, chunk) == 6 * model.up_width * model.hidden


def test_layers_and_heads_are_distributed_over_stages_and_ranks() -> None:
    run = RunConfig(model=model_of_kind("llama", "model.layers=4"))
    size = GenerationSize(2, 10)
    (alone,) = generation_memory(run, size, framework_of())
    stages = generation_memory(replace(run, layout=LayoutConfig(tp=2, pp=2)), size, framework_of())
    assert tuple(alone) == GENERATION_CATEGORIES and len(stages) == 2
    assert sum(stage["cache"] for stage in stages) * 2 == alone["cache"]
    assert stages[0]["logits"] == 0 < stages[1]["logits"]


def test_prompts_that_are_read_at_once_share_a_workspace_or_the_longest_has_it() -> None:
    run = load_run_config(preset="smollm2-135m")
    (one,), (four,), (many,), (long,) = (
        generation_memory(run, size, framework_of())
        for size in (GenerationSize(1, 128), GenerationSize(4, 128), GenerationSize(64, 128), GenerationSize(8, 2048))
    )
    assert four["workspace"] == 4 * one["workspace"] and many["workspace"] == 8 * one["workspace"]
    assert long["workspace"] == 16 * one["workspace"]


def test_the_bytes_of_a_stage_by_hand() -> None:
    model = ("model.layers=2", "model.hidden=8", "model.heads=2", "model.seq_len=16", "model.vocab_size=10")
    run = load_run_config(overrides=[*model, "model.vocab_multiple=4", "training.dtype=float32"])
    base = Framework(200, 100)
    (sizes,) = generation_memory(run, GenerationSize(3, 5), base)
    assert sizes["cache"] == 2 * 3 * 5 * 2 * 8 * 4  # layers, texts, tokens, keys and values
    assert sizes["logits"] == 3 * 12 * (4 + 4 + 8)  # of each text, as computed, sorted and numbered
    assert sizes["workspace"] == 15 * (3 * 8 + 4 * 8 + 2 * 32) * 4
    assert sizes["base"] == 300 and sizes["loading"] == 0
    (evaluated,) = evaluation_memory(run, 3, base)
    assert (evaluated["cache"], evaluated["logits"]) == (0, 3 * 16 * 12 * (4 + 4))
    assert evaluated["workspace"] == 48 * (3 * 8 + 4 * 8 + 2 * 32) * 4
    total = sum(sizes.values())
    assert bytes_of_node([sizes], [0, 0, 0], base) == 3 * total - 2 * base.shared_bytes
