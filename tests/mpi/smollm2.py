"""Compares an imported model in a layout with what ``transformers`` computed of the same weights.

    mpirun -n 3 python -m tests.mpi.smollm2 FOLDER training.dtype=float64 layout.tp=3

FOLDER holds ``imported``, a folder of checkpoints, and ``expected.pt``: tokens, logits, and losses and gradients of
three steps of AdamW. The largest differences of logits, losses and gradients are printed, relative to the
largest entry of each tensor; and the checkpoint that the layout saves before its first step, exported and imported
again, must have the imported weights to the bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import torch

from fugaku_gpt import ops
from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.hugging_face import export_model, import_model
from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.checkpoint.reader import open_checkpoint
from fugaku_gpt.comm import Communicator, open_world
from fugaku_gpt.config import ModelConfig, RunConfig, load_run_config
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.resume import load_checkpoint
from fugaku_gpt.training.trainer import Trainer
from tests.mpi.trained import largest_of_all, summed_gradients, trainer_of

STEPS, SEQUENCES, SEQ_LEN, LR, EPS = 3, 2, 48, 1e-4, 1e-5
SETTINGS = (
    f"training.global_batch={SEQUENCES}", f"training.lr={LR}", f"training.eps={EPS}", "training.lr_schedule=constant",
    "training.weight_decay=0", "training.clip_grad=0",
)  # fmt: skip


class FixedSamples:
    """Samples [n, s + 1], each as it is."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens.numpy()

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Token ids [count, s + 1] of the samples from ``first`` on."""
        return self._tokens[first : first + count]


def config_of(model: ModelConfig, settings: Tuple[str, ...]) -> RunConfig:
    """Returns a run of an imported model in a layout, with short sequences."""
    shape = {**dataclasses.asdict(model), "seq_len": SEQ_LEN}
    overrides = [f"model.{name}={json.dumps(value)}" for name, value in shape.items() if value not in (None, "")]
    return load_run_config(overrides=[*overrides, *SETTINGS, *settings])


def full_logits(trainer: Trainer, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits [b, s, V] of all stages, one after the other, on every rank of the last one. Collective."""
    grid, layout = trainer.grid, trainer.config.layout
    (chunk,) = trainer.model_chunks.values()
    x = torch.zeros(*tokens.shape, trainer.config.model.hidden, dtype=trainer.buffers.parameters.dtype)
    with torch.no_grad():
        for stage in range(layout.pp):
            if grid.coordinates.pp == stage:
                x = chunk.hidden_states(tokens if stage == 0 else x)
            grid.world.broadcast(x, stage * grid.tp.size)  # ranks of one stage are neighbours, and have the same
        if grid.coordinates.pp < layout.pp - 1:
            return torch.empty(0)
        slices = grid.tp.all_gather(ops.linear(x, chunk.output_weight))
        return torch.cat(list(slices), dim=-1)[..., : trainer.config.model.vocab_size]


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest entry."""
    difference = float((ours - expected).abs().max()) / float(expected.abs().max())
    assert math.isfinite(difference)
    return difference


def compare(world: Communicator, model: ModelConfig, settings: Tuple[str, ...], folder: Path) -> List[float]:
    """Returns the largest differences of logits, losses and gradients in a layout. Collective over its ranks."""
    expected: Dict[str, Any] = torch.load(folder / "expected.pt", mmap=True, weights_only=True)
    samples = FixedSamples(expected["tokens"])
    trainer = trainer_of(world if world.size > 1 else None, config_of(model, settings), samples)
    source = list_checkpoints(folder / "imported")[0].path
    assert load_checkpoint(trainer, source, read_manifest(source)) is None
    logits = full_logits(trainer, expected["tokens"][:SEQUENCES, :-1])
    worst = [relative(logits, expected["logits"]) if len(logits) else 0.0, 0.0, 0.0]
    save_and_compare(world, trainer, folder)
    summed: Dict[str, torch.Tensor] = {}
    finish = trainer.reducer.finish

    def finish_and_copy() -> None:
        finish()
        summed.update(summed_gradients(trainer))  # before the optimiser, which may divide them

    trainer.reducer.finish = finish_and_copy  # type: ignore[method-assign]
    for number in range(STEPS):
        step = trainer.step()
        worst[1] = max(worst[1], abs(step.loss / expected["losses"][number] - 1))
        for name, gradient in summed.items():
            mean = gradient / (SEQUENCES * SEQ_LEN)
            worst[2] = max(worst[2], relative(mean, expected["gradients"][number][name]))
    return largest_of_all(world, worst)


def save_and_compare(world: Communicator, trainer: Trainer, folder: Path) -> None:
    """Saves a checkpoint, exports and imports it, and asserts that its weights are the imported ones. Collective."""
    saver = CheckpointSaver(trainer, folder / "saved")
    saver.save({}, wait=True)
    if world.rank == 0:
        export_model(list_checkpoints(folder / "saved")[0].path, folder / "exported")
        back = import_model(folder / "exported", folder / "back").checkpoint
        with open_checkpoint(list_checkpoints(folder / "imported")[0].path) as before, open_checkpoint(back) as after:
            assert before.manifest.tensors.keys() == after.manifest.tensors.keys()
            for name in before.manifest.tensors:
                assert np.array_equal(before.tensor("weights", name), after.tensor("weights", name)), name
        for name in ("saved", "exported", "back"):
            shutil.rmtree(folder / name)
    world.barrier()


def main() -> None:
    """Compares the ranks' layout, and prints its differences."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = open_world()
    source = read_manifest(list_checkpoints(arguments.folder / "imported")[0].path)
    model = ModelConfig(**source.config["model"])
    try:
        differences = compare(world, model, tuple(arguments.settings), arguments.folder)
    except BaseException as error:
        print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
        world.abort(1)
        raise
    if world.rank == 0:
        print("differences", *differences, flush=True)


if __name__ == "__main__":
    main()
