"""Measures tokens per second of our trainer on several ranks and on one, and of DistributedDataParallel over gloo.

    .venv/bin/python benchmarks/peers.py                                 # two cores: ddp=2, dp=2, and ZeRO 1
    .venv/bin/python benchmarks/peers.py dp=1 tp=2 pp=2 pp=2,schedule=interleaved,chunks=2,split=3+3+6+0
    .venv/bin/python benchmarks/peers.py ddp=4 dp=4 dp=2,tp=2 --cores 8 --bf16

A contestant is a layout, ``key=value`` joined by commas (``split=3+3+6+0``), or ``ddp=N``: N processes with the
textbook model in DistributedDataParallel, which sums gradients only in the last backward pass of a step (``no_sync``
before); ``fsdp=N`` is the same model under PyTorch's FSDP2, and ``deepspeed=N`` under DeepSpeed with ZeRO 1. Its ranks
share ``--cores`` cores, or have ``threads=N`` threads each. Contestants take turns (``turns.py``) of one step each:
``--micro-batches`` forward and backward passes of each replica, clipping of the norm, and AdamW. Figures are medians
over the turns with the smallest and the largest; each pair is compared within the turns. ``hidden`` is the share of the
replicas' communication that is hidden by computation, as ``overlap.py`` explains.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from contestants import plain_step, textbook, threads
from turns import Lacking, Several, Turn, Unit, Work, first_steps, middle, serve, take_turns, write_samples

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.machine.local import processor_name, usable_cores
from fugaku_gpt.machine.rank import launched_rank

OTHERS = ("ddp", "fsdp", "deepspeed")  # trainers of others
DEFAULT = ("ddp=2", "dp=2", "dp=2,zero=1")


def config_of(name: str, options: argparse.Namespace) -> RunConfig:
    """The run that a contestant's name stands for."""
    dtype = "bfloat16" if options.bf16 else "float32"
    settings = [f"training.dtype={dtype}"]
    for word in name.split(","):
        key = word.split("=")[0]
        section = "node.threads_per_rank" + word[len(key) :] if key == "threads" else f"layout.{word}"
        if key == "split":
            section = f"layout.split=[{word[len(key) + 1 :].replace('+', ',')}]"
        for other in OTHERS:
            section = section.replace(f"layout.{other}=", "layout.dp=")
        settings.append(section)
    seq_len, micro_batch = (int(part) for part in options.shape.split("x"))
    settings += [f"model.seq_len={seq_len}", f"training.micro_batch={micro_batch}", *options.settings]
    replicas = next((int(word.split("=")[1]) for word in name.split(",") if word.split("=")[0] in ("dp", *OTHERS)), 1)
    config = load_run_config(
        preset=options.preset,
        overrides=[*settings, f"training.global_batch={replicas * micro_batch * options.micro_batches}"],
    )
    if replicas != config.layout.dp:
        raise UsageError(f"{name}: --set layout.dp changes what a contestant is")
    if config.training.dtype != dtype:
        raise UsageError(f"{name}: --set training.dtype would change ours alone: use --bf16")
    return config


def ours(config: RunConfig) -> Work:
    """This rank's work in a step of this package, which returns its loss and, if it is known, the hidden share."""
    import torch

    from fugaku_gpt import compat
    from fugaku_gpt.comm import ProcessGrid, open_world
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    if not compat.can_train(getattr(torch, config.training.dtype)):
        raise Lacking(f"this build cannot train in {config.training.dtype}")
    prepare_process(threads())
    world = open_world(threads=threads())
    trainer = Trainer(config, ProcessGrid(world, config.layout, kv_copies=config.kv_copies), RandomSamples(config))
    for _ in range(
        2
    ):  # a cold one, and one that times communication alone; the next does so too, and is not counted either
        trainer.step()

    def step() -> Dict[str, Any]:
        before = time.perf_counter()
        loss = trainer.step().loss
        return {"seconds": time.perf_counter() - before, "loss": loss, "hidden": trainer.reducer.overlap.read()}

    return step


def distributed(config: RunConfig, bf16: bool, rank: int, meeting: Path) -> Work:
    """This rank's work in a step of the textbook model in DistributedDataParallel.

    Args:
        meeting: path of a file that does not exist yet, where the processes meet.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(threads())
    torch.distributed.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=config.layout.dp)
    model = DistributedDataParallel(textbook(config))
    work = plain_step(model, config, bf16, rank, model.no_sync)
    work()
    return lambda: {"loss": work(), "hidden": None}


def start(several: Several, name: str, options: argparse.Namespace, program: Sequence[str]) -> RunConfig:
    """Starts one contestant's ranks; returns its run's configuration."""
    from fugaku_gpt.cli.train import thread_variables

    config = config_of(name, options)
    launcher, ranks = find_launcher(), config.layout.ranks
    each = config.node.threads_per_rank or max(1, options.cores // ranks)
    python = options.peers_python if name.startswith("deepspeed=") else sys.executable
    argv = [*launcher.command_prefix(ranks), python, os.path.abspath(__file__), *program, "--worker", name]
    several.start(name, argv, {**thread_variables(each), **launcher.environment}, ranks)
    return config


def worker_arguments(options: argparse.Namespace) -> List[str]:
    """The options that a worker needs."""
    arguments = ["--preset", options.preset, "--shape", options.shape, "--micro-batches", str(options.micro_batches)]
    arguments += ["--bf16"] if options.bf16 else []
    return arguments + [word for setting in options.settings for word in ("--set", setting)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of :func:`worker_arguments`."""
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--shape", default="1024x1", metavar="SxB", help="Sequence length x micro-batch.")
    parser.add_argument("--micro-batches", type=int, default=4, help="Micro-batches of each replica in a step.")
    parser.add_argument("--bf16", action="store_true", help="Train in bfloat16; DistributedDataParallel by autocast.")
    parser.add_argument("--peers-python", default=sys.executable, help="Interpreter of `make peers`, for deepspeed.")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")


def speed(config: RunConfig, unit: Unit) -> float:
    """Tokens per second of one step."""
    return config.training.global_batch * config.model.seq_len / unit.seconds


def title(config: RunConfig, options: argparse.Namespace) -> str:
    """A line that describes the run."""
    return (
        f"{size_name(config.model)}, sequence {config.model.seq_len}, micro-batch {config.training.micro_batch} x "
        f"{options.micro_batches} for each replica and step, {config.training.dtype}, {processor_name()}"
    )


def table(configs: Dict[str, RunConfig], turns: List[Turn], cores: int) -> List[str]:
    """A line for each contestant and for each pair of them."""
    names = list(turns[0])
    width = max(map(len, names)) + 2
    head = f"{'':{width}}{'ranks x threads':>16}{'sec/step':>24}{'tokens/s':>28}{'RSS of a rank':>15}{'hidden':>24}"
    lines = [head]
    for name in names:
        config, units = configs[name], [turn[name] for turn in turns]
        hidden = [unit.value["hidden"] for unit in units if unit.value["hidden"] is not None]
        ranks = config.layout.ranks
        lines.append(
            f"{name:{width}}{f'{ranks} x {config.node.threads_per_rank or max(1, cores // ranks)}':>16}"
            f"{middle([unit.seconds for unit in units]):>24}{middle([speed(config, unit) for unit in units], 1):>28}"
            f"{max(units[-1].peak_bytes) / 2**20:11.0f} MiB{middle(hidden) if hidden else '-':>24}"
        )
    for second, other in enumerate(names):
        for name in names[:second]:
            ratios = [speed(configs[other], turn[other]) / speed(configs[name], turn[name]) for turn in turns]
            lines.append(f"{other} has {middle(ratios)} x the tokens/s of {name}")
    return lines


def main(arguments: Optional[List[str]] = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "contestants", nargs="*", help=f"Layouts, or ddp=N, fsdp=N, deepspeed=N; default: {' '.join(DEFAULT)}."
    )
    add_options(parser)
    parser.add_argument(
        "--cores",
        type=int,
        default=min(2, len(usable_cores())),
        help="Number of cores that a contestant's ranks share.",
    )
    parser.add_argument("--turns", type=int, default=5, help="Number of counted turns, after one warm-up turn.")
    parser.add_argument("--samples", type=Path, help="File for the figures of every turn, as JSON.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        name, path = options.worker
        config, launched = config_of(name, options), launched_rank()
        rank = launched.rank if launched is not None else 0
        if name.split("=")[0] in OTHERS:
            from other_trainers import deepspeed_zero, fully_sharded

            trainer = {"ddp": distributed, "fsdp": fully_sharded, "deepspeed": deepspeed_zero}[name.split("=")[0]]
            meeting = Path(path).with_name("meeting")
            serve(path, lambda: trainer(config, options.bf16, rank, meeting), rank)
        else:
            serve(path, lambda: ours(config), rank)
        return
    names = list(dict.fromkeys(options.contestants)) or list(DEFAULT)
    try:
        for name in names:
            config_of(name, options)
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    with Several() as several:
        configs = {name: start(several, name, options, worker_arguments(options)) for name in names}
        turns = take_turns(several.workers, options.turns) if several.workers else []
        started = first_steps(several.workers)
    print(title(configs[names[0]], options) + f", {len(turns)} turns")
    for name, why in several.lacking.items():
        print(f"{name}: not on this build: {why}")
    if turns:
        print("\n".join(table(configs, turns, options.cores)))
        print(started)
    write_samples(options.samples, {"contestants": names, "words": worker_arguments(options)}, turns)


if __name__ == "__main__":
    main()
