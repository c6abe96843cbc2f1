"""Tests that evaluation files have the same losses in every layout of a training."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import numpy as np
import pytest

from fugaku_gpt.comm import Communicator
from fugaku_gpt.data.scored_text import ScoredText
from fugaku_gpt.training.eval_files import EvalFiles
from tests.mpi.trained import trainer_of
from tests.support.text import VOCABULARY
from tests.support.tiny import tiny_config

COMMON = ("training.dtype=float64", "model.layers=4")
LLAMA = ("model.norm=rmsnorm", "model.positions=rope", "model.mlp=swiglu", "model.kv_heads=2", "model.biases=none")
FAMILIES: Dict[str, Tuple[str, ...]] = {"gpt2": (), "llama": (*LLAMA, "model.tied_embeddings=false")}
INTERLEAVED = ("layout.schedule=interleaved", "layout.chunks=2")
LAYOUTS: Dict[int, Sequence[Tuple[str, ...]]] = {
    1: [("training.micro_batch=4",)],
    2: [
        ("layout.tp=2", "layout.sequence_parallel=true"),
        ("layout.pp=2", *INTERLEAVED),
        ("layout.dp=2", "layout.zero=1"),
    ],
    4: [
        ("layout.tp=2", "layout.pp=2", "layout.sequence_parallel=true", "layout.schedule=zero_bubble"),
        ("layout.tp=4", "layout.sequence_parallel=true"),
        ("layout.dp=2", "layout.pp=2", "layout.zero=1", "training.recompute=full"),
    ],
    8: [("layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1", "layout.sequence_parallel=true")],
}
# of lengths that no number of ranks divides, with one that takes several windows
TEXTS = [
    [ScoredText("", np.arange(length) * 7 % VOCABULARY, 1, 3 * length) for length in lengths]
    for lengths in ((8, 60, 9), (25,), (3, 2))
]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_losses_of_files_are_those_of_a_single_rank(world: Communicator, family: str) -> None:
    settings = (*COMMON, *FAMILIES[family])
    expected = _losses(None, settings)
    for layout in LAYOUTS[world.size]:
        losses = _losses(world, (*settings, *layout))
        assert [(name, tokens, size) for name, tokens, size, _ in losses] == [
            ("a", 74, 231), ("b", 24, 75), ("c", 3, 15),
        ]  # fmt: skip
        assert [loss for *_, loss in losses] == pytest.approx([loss for *_, loss in expected], rel=1e-9)


def _losses(world: "Communicator | None", settings: Tuple[str, ...]) -> List[Tuple[str, int, int, float]]:
    """The losses after a step, behind one before it, which must not change what the step does."""
    trainer = trainer_of(world, tiny_config(*settings))
    files = EvalFiles(("a", "b", "c"), TEXTS)
    before = files.losses(trainer)
    trainer.step()
    after = files.losses(trainer)
    trainer.finish()
    assert all(one.nats != other.nats for one, other in zip(before, after))
    return [(loss.name, loss.tokens, loss.bytes or 0, loss.nats) for loss in after]
