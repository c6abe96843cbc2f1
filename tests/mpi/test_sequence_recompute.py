"""Tests of what recompute and sequence parallelism save and repeat, with every other way of cutting a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Tuple

import pytest
import torch

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.layout.memory import (
    deferred_weight_grad_bytes,
    embedding_and_head_bytes,
    peak_activation_bytes,
    pipeline_states,
)
from fugaku_gpt.layout.stages import chunks_of
from fugaku_gpt.model import recompute_of
from fugaku_gpt.parallel import tensor as tensor_parallel
from fugaku_gpt.parallel.gradient_path import add_weight_grad
from fugaku_gpt.planner.trainer.run_memory import memory_of_run
from fugaku_gpt.training.trainer import Trainer
from tests.mpi.cases import MEANINGS
from tests.support.kept import HAS_HOOKS, counting
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

STEPS = 3
MICRO_BATCHES = 4  # more than a pipeline of two stages keeps at once
MODEL = ("training.dtype=float64", "training.micro_batch=2", "model.layers=4")


@dataclass(frozen=True)
class Case:
    """A layout and what it recomputes."""

    grid: Tuple[int, int, int]  # dp, tp, pp
    recompute: str
    sequence_parallel: bool = True
    zero: int = 0
    schedule: str = "1f1b"
    layers: str = "null"
    attention_dropout: float = 0.1
    is_llama: bool = False

    def __str__(self) -> str:
        fields = [f"dp{self.grid[0]}-tp{self.grid[1]}-pp{self.grid[2]}", self.recompute, self.schedule]
        fields += ["sp"] * self.sequence_parallel + [f"zero{self.zero}", self.layers, f"{self.attention_dropout:g}"]
        fields += ["llama"] * self.is_llama
        return "-".join(fields)

    def config(self, *more: str) -> RunConfig:
        """Returns the configuration of this case's tiny run."""
        dp, tp, pp = self.grid
        return tiny_config(
            *MODEL,
            f"training.global_batch={2 * MICRO_BATCHES * dp}",
            f"layout.dp={dp}",
            f"layout.tp={tp}",
            f"layout.pp={pp}",
            f"layout.zero={self.zero}",
            f"layout.schedule={self.schedule}",
            f"layout.chunks={2 if self.schedule == 'interleaved' else 1}",
            f"layout.sequence_parallel={self.sequence_parallel}",
            f"training.recompute={self.recompute}",
            f"training.recompute_layers={self.layers}",
            f"model.attention_dropout={self.attention_dropout}",
            *(MEANINGS["llama"] if self.is_llama else ()),
            *more,
        )


CASES = [
    Case((1, 1, 1), "full", zero=1),
    Case((1, 1, 1), "selective", schedule="interleaved"),
    # two ranks: every kind with and without sequence parallelism, and with each of the other cuts
    Case((1, 2, 1), "none"),
    Case((1, 2, 1), "selective"),
    Case((1, 2, 1), "full"),
    Case((1, 2, 1), "full", layers="1"),
    Case((1, 2, 1), "full", attention_dropout=0.0),
    Case((1, 2, 1), "selective", sequence_parallel=False),
    Case((1, 2, 1), "full", sequence_parallel=False),
    Case((2, 1, 1), "full", zero=1),
    Case((2, 1, 1), "selective"),
    Case((1, 1, 2), "full"),
    Case((1, 1, 2), "selective", schedule="interleaved"),
    Case((1, 1, 2), "full", schedule="gpipe"),
    Case((1, 2, 1), "none", is_llama=True),
    Case((1, 2, 1), "selective", sequence_parallel=False, is_llama=True),
    Case((1, 1, 2), "full", schedule="interleaved", is_llama=True),
    # four
    Case((1, 4, 1), "none"),
    Case((1, 4, 1), "selective"),
    Case((1, 4, 1), "full"),
    Case((1, 4, 1), "full", sequence_parallel=False),
    Case((1, 4, 1), "selective", is_llama=True),  # of two heads of keys, two copies each
    Case((2, 2, 1), "none", zero=1),
    Case((2, 2, 1), "full", zero=1),
    Case((2, 2, 1), "selective"),
    Case((1, 2, 2), "none"),
    Case((1, 2, 2), "full", schedule="interleaved"),
    Case((1, 2, 2), "selective", schedule="gpipe"),
    Case((1, 2, 2), "full", sequence_parallel=False, layers="1"),
    Case((2, 1, 2), "full", zero=1),
    Case((2, 1, 2), "selective", zero=1, schedule="interleaved"),
    # eight: all three axes at once
    Case((2, 2, 2), "none", zero=1),
    Case((2, 2, 2), "full", zero=1, schedule="interleaved"),
    Case((2, 2, 2), "selective", zero=0, schedule="gpipe"),
    Case((1, 4, 2), "full"),
    Case((2, 4, 1), "selective", zero=1),
]


def trainer_of(grid: ProcessGrid, config: RunConfig) -> Trainer:
    samples = ByteSamples(config.model.seq_len)
    return Trainer(config, grid, samples, samples)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_interleaved_bfloat16_is_recomputed_to_the_last_bit(world: Communicator, sequence_parallel: bool) -> None:
    if world.size not in (2, 4) or not compat.can_train(torch.bfloat16):
        pytest.skip("another number of ranks, or a PyTorch that cannot train in bfloat16")
    curves = []
    for recompute in ("none", "selective", "full"):
        case = Case((1, world.size // 2, 2), recompute, sequence_parallel, schedule="interleaved")
        config = case.config("training.dtype=bfloat16")
        trainer = trainer_of(ProcessGrid(world, config.layout, kv_copies=config.kv_copies), config)
        curves.append([(step.loss, step.grad_norm) for step in (trainer.step() for _ in range(STEPS))])
    assert curves[0] == curves[1] == curves[2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_of_a_stage_matches_the_formula(world: Communicator, case: Case) -> None:
    config = case.config()
    if config.layout.ranks != world.size:
        pytest.skip("another number of ranks")
    if not HAS_HOOKS:
        pytest.skip("this PyTorch does not show what it saves")
    trainer = trainer_of(ProcessGrid(world, config.layout, kv_copies=config.kv_copies), config)
    with counting(list(trainer.model_chunks.values())) as counter:
        trainer.step()
    chunks, stage = chunks_of(config), trainer.grid.coordinates.pp
    stage_chunks = [chunk for chunk in chunks if chunk.stage == stage]
    kinds = dict(enumerate(recompute_of(config, chunks)))
    states = pipeline_states(config, stage)
    formula = peak_activation_bytes(
        config, stage_chunks, {layer: kinds[layer] for c in stage_chunks for layer in c.layers}, states
    )
    # autograd does not count what the pipeline and the loss hold: a chunk's output, the gradients made with the loss
    uncounted = max(
        sum(n * embedding_and_head_bytes(config, c) for n, c in zip(counts, stage_chunks)) for counts, _, _ in states
    )
    print(
        f"\nstage {stage} of {case}: kept {counter.peak_bytes} bytes, formula {formula}, "
        f"of them elsewhere up to {uncounted}"
    )
    predicted, actual = memory_of_run(config).stages[stage], trainer.memory_by_category()
    assert (predicted["weights"], predicted["gradients"]) == (actual["weights"], actual["gradients"])
    # shards of padding alone are not in the optimiser
    assert (
        0.95 * predicted["optimiser"] <= actual["optimiser"] <= predicted["optimiser"]
        and predicted["activations"] == formula
    )
    assert counter.current_bytes == 0
    assert counter.peak_bytes <= 1.01 * formula and formula <= 1.01 * (counter.peak_bytes + uncounted)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_memory_of_deferred_products_matches_the_formula(
    world: Communicator, sequence_parallel: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size not in (2, 4):
        pytest.skip("another number of ranks")
    case = Case((1, world.size // 2, 2), "none", sequence_parallel, schedule="zero_bubble")
    config = case.config(f"model.kv_heads={kv_heads}")
    trainer = trainer_of(ProcessGrid(world, config.layout, kv_copies=config.kv_copies), config)
    deferrals, saved = trainer.reducer.deferrals, []

    def add(parameter: torch.Tensor, product: Any) -> None:
        if deferrals.recording is not None:
            saved.extend(product.args[1:])  # the main_grad to which they are added is there anyway
        add_weight_grad(parameter, product)

    monkeypatch.setattr(tensor_parallel, "add_weight_grad", add)
    trainer.step()
    storages = {tensor.storage().data_ptr(): tensor.storage().size() * tensor.element_size() for tensor in saved}
    # the first stage defers nothing
    layers = sum(len(chunk.layers) for chunk in chunks_of(config) if chunk.stage == trainer.grid.coordinates.pp > 0)
    assert sum(storages.values()) == config.micro_batches * layers * deferred_weight_grad_bytes(config)
    assert not deferrals._products and not any(slot.deferred_products for slot in trainer.reducer._slots)
