"""Tests that a model says the same in every layout of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Tuple

import pytest

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.data.scored_text import ScoredText
from fugaku_gpt.inference.continuation import GenerationLimits
from fugaku_gpt.inference.generation import Generator
from fugaku_gpt.inference.model_source import ModelSource, ReplicaLayout, find_model, inference_config
from fugaku_gpt.inference.replica import ModelReplica
from fugaku_gpt.inference.sampling import Sampling
from fugaku_gpt.training.text_losses import text_losses
from tests.support.checkpoints import save_model
from tests.support.models import model_of_kind

LAYOUTS: Dict[int, Sequence[Tuple[int, int]]] = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(2, 2), (2, 1)], 8: [(4, 2)]}
KINDS = ("gpt2", "qwen3-like")
PROMPTS = {0: [1, 2, 3], 1: [4], 2: list(range(5, 17)), 3: [3, 3]}
TEXTS = [ScoredText(f"{length}", [number % 97 for number in range(length)], 1, 10) for length in (8, 25, 60, 9)]


@pytest.fixture(scope="module", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSource]:
    """Each rank writes a checkpoint of its own, of the same weights."""
    folder: Path = tmp_path_factory.mktemp("run")
    yield find_model(save_model(folder, model_of_kind(request.param)))  # two heads of keys: with tp 4 they are copied


@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-12), ("float32", 1e-5)])
def test_texts_and_losses_are_those_of_a_single_rank(
    dtype: str, error: float, world: Communicator, source: ModelSource
) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=5)
    expected_texts, expected_losses = _use(_replica(source, ProcessGrid.alone(), 1, 1, dtype), sampling, PROMPTS)
    for tp, pp in LAYOUTS[world.size]:
        replicas = world.size // (tp * pp)
        grid = ProcessGrid(world, inference_config(source, ReplicaLayout(tp, pp), replicas).layout)
        own = {number: ids for number, ids in PROMPTS.items() if number % replicas == grid.coordinates.dp}
        texts, losses = _use(_replica(source, grid, tp, pp, dtype), sampling, own)
        assert texts == {number: expected_texts[number] for number in own}
        assert losses == pytest.approx(expected_losses, rel=error)


def _replica(source: ModelSource, grid: ProcessGrid, tp: int, pp: int, dtype: str) -> ModelReplica:
    config = inference_config(source, ReplicaLayout(tp, pp, dtype), grid.dp.size)
    replica = ModelReplica(config, grid)
    replica.load(source)
    return replica


def _use(
    replica: ModelReplica, sampling: Sampling, prompts: Dict[int, List[int]]
) -> Tuple[Dict[int, List[int]], List[float]]:
    texts = Generator(replica, lambda context, ids: "", sampling, GenerationLimits(6, slots=2)).run(prompts)
    losses = text_losses(replica, TEXTS, batch=2)
    assert [text.reason for text in texts.values()] == ["length"] * len(prompts)
    return {number: text.ids for number, text in texts.items()}, [loss.nats for loss in losses]
