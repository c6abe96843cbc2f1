"""One number of ranks of ``fugaku-gpt plan probe``: measures what steps are made of, on all of these ranks at once.

    mpirun -n 2 python -m fugaku_gpt.training.probe --threads 1 --seconds 10

It stands in this room because it times the trainer's own operations and steps, which need torch and MPI; the planner,
which reads what it has found, has neither. Rank 0 prints lines of JSON: ``{"progress": ...}`` and in the end
``{"probed": ...}``, the section of a machine file (``machine/probed.py``).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator, ProcessGrid, mpi_facts, open_world
from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.random_samples import RandomSamples
from fugaku_gpt.errors import EXIT_OK, FugakuGptError, UsageError
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND
from fugaku_gpt.machine import local
from fugaku_gpt.machine.probed import (
    NARROW_ALL_REDUCE,
    MessageTiming,
    PassTiming,
    ProbeResults,
    ProductTiming,
    StepTiming,
    probe_to_data,
)
from fugaku_gpt.training.probe_calls import (
    Call,
    Pool,
    bandwidth_calls,
    layer_calls,
    pass_calls,
    product_call,
    shapes,
    step_calls,
)
from fugaku_gpt.training.startup import agree_on_kernels, prepare_process
from fugaku_gpt.training.trainer import Trainer

_LEAST, _MOST = 3, 100  # timings of one figure
_TIMING = 5e-5  # seconds that one timing takes at least
_SHARES = {"products": 0.4, "passes": 0.16, "messages": 0.14, "steps": 0.3}
_MESSAGE_BYTES = (2**16, 2**10, 2**20, 2**23, 2**25, 2**18, 2**13)
_BUCKET_BYTES = 2**25  # from here on only gradients travel, and parameters
_QUIET = 0.85  # share of its cores that a rank has where nothing else runs
_BANDWIDTH_ELEMENTS = 2**24
# samples of a micro-batch, and of the global batch where that many replicas share it evenly
_SMALL = ("model.layers=2", "model.hidden=256", "model.heads=4", "model.seq_len=128", "model.vocab_size=2048")
_WIDE = ("model.layers=2", "model.hidden=512", "model.heads=8", "model.seq_len=128", "model.vocab_size=8192")
_TINY = ("model.layers=2", "model.hidden=64", "model.heads=2", "model.seq_len=32", "model.vocab_size=256")
_BATCHES: Dict[Tuple[str, ...], Tuple[int, int]] = {_SMALL: (2, 8), _WIDE: (1, 4), _TINY: (1, 8)}


class Clock:
    """Times calls that all ranks make as often: how often, and what is left of the time, they agree on."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._share, self._started = math.inf, 0.0

    def begin(self, seconds: float) -> None:
        """A part of the probe that may take so long."""
        self._share, self._started = seconds, time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds of the part; what the rank that is latest has left. Collective."""
        return -self._agree([time.perf_counter() - self._started - self._share], "max")[0]

    def measure(self, call: Call, seconds: float) -> Tuple[float, float]:
        """Median seconds of a call and spread of their logarithm, the mean over the ranks. Collective.

        Args:
            seconds: that all of it should take; a few calls are timed however long they take.
        """
        before = time.perf_counter()
        call()
        first = self._agree([time.perf_counter() - before], "max")[0]
        before = time.perf_counter()
        call()  # warm
        once = self._agree([time.perf_counter() - before], "max")[0]
        at_once = max(1, int(_TIMING / once))
        count = max(_LEAST, min(_MOST, int((seconds - first) / (once * at_once))))
        self._world.barrier()
        times = []
        for _ in range(count):
            before = time.perf_counter()
            for _ in range(at_once):
                call()
            times.append((time.perf_counter() - before) / at_once)
        found = self._agree([statistics.median(times), spread_of(times)], "sum")
        return found[0] / self._world.size, found[1] / self._world.size

    def _agree(self, numbers: Sequence[float], operation: str) -> List[float]:
        found = torch.tensor(numbers, dtype=torch.float64)
        self._world.all_reduce(found, operation)
        return [float(one) for one in found]


def spread_of(times: Sequence[float]) -> float:
    """Standard deviation of the logarithm, by the middle half of the times: a few that were disturbed do not count."""
    logs = sorted(math.log(max(one, 1e-9)) for one in times)
    quarter = (len(logs) - 1) / 4
    low, high = (logs[round(quarter)], logs[round(3 * quarter)])
    return (high - low) / 1.349


class Probe:
    """The measurements of this number of ranks."""

    def __init__(self, world: Communicator, threads: int, seconds: float, say: Callable[[str], None]) -> None:
        self._world, self._threads, self._say = world, threads, say
        self._clock = Clock(world)
        self._seconds = seconds
        self.cores = len(local.usable_cores())
        # where ranks share cores, operations are what they are without that; the planner knows the number of cores
        self.has_cores = world.size * threads <= self.cores
        self._shares = {
            name: share for name, share in _SHARES.items() if self.has_cores or name in ("messages", "steps")
        }
        if world.size == 1:
            del self._shares["messages"]

    def run(self, dtypes: Sequence[str]) -> ProbeResults:
        """All of it. Collective."""
        found = ProbeResults(self.cores, {self._world.size: self._threads}, self._facts())
        parts: Dict[str, Callable[[], ProbeResults]] = {
            "products": lambda: self._products(dtypes),
            "passes": lambda: self._passes(dtypes),
            "messages": self._messages,
            "steps": lambda: self._steps(dtypes),
        }
        for name, share in self._shares.items():
            seconds = self._seconds * share / sum(self._shares.values())
            self._say(f"{name}, {seconds:.1f} s")
            self._clock.begin(seconds)
            before = time.process_time(), time.perf_counter()
            found = found.merged_with(parts[name]())
            if name == "products":  # nobody waits for anybody in these
                had = (time.process_time() - before[0]) / (time.perf_counter() - before[1]) / self._threads
                found = replace(found, facts={**found.facts, f"share of cores {self._world.size}": f"{had:.2f}"})
                if had < _QUIET:
                    self._say(f"other work runs here, and leaves {100 * had:.0f} % of a core: times mean little")
        return found

    def _empty(self, **tables: Any) -> ProbeResults:
        return ProbeResults(self.cores, {self._world.size: self._threads}, **tables)

    def _facts(self) -> Dict[str, str]:
        build, mpi = compat.build_facts(), mpi_facts()
        return {
            "processor": local.processor_name(),
            "torch": str(build["torch"]),
            "blas": str(build["blas"]),
            "mpi": str(mpi["library"]),
            "allocator": local.allocator_in_use(),
        }

    def _products(self, dtypes: Sequence[str]) -> ProbeResults:
        found, rate = [], 0.0
        wide = Pool(torch.float32)
        share = self._clock.left
        for place, name in enumerate(dtypes):
            dtype = getattr(torch, name)
            agree_on_kernels(load_run_config(overrides=[f"training.dtype={name}"]), self._world)
            pool = wide if dtype == torch.float32 else Pool(dtype)
            narrow = torch.empty(0, dtype=ops.attention_dtype(dtype)).element_size() == 2
            compiled = ops.has_native_attention(torch.empty(1, self._threads, 1, 3, 1, 1, dtype=dtype))
            asked = list(shapes(narrow, self._threads, compiled))
            kinds = set()
            end = share * (1.0 if place == len(dtypes) - 1 else 0.6)  # of one type most, as runs are of one
            slice_ = (end if not place else 0.4 * end) / len(asked)
            for shape in asked:
                late = self._clock.left < share - end
                long = rate and (_LEAST + 2) * shape.flops / rate > 4 * slice_
                if shape.kind in kinds and (late or long):  # one of each kind there must be
                    continue
                kinds.add(shape.kind)
                seconds, spread = self._clock.measure(product_call(shape, pool, wide), slice_)
                rate = max(rate, shape.flops / seconds)
                found.append(
                    ProductTiming(
                        shape.kind,
                        name,
                        self._world.size,
                        shape.batch,
                        shape.rows,
                        shape.inner,
                        shape.columns,
                        seconds,
                        spread,
                    )
                )
        return self._empty(products=tuple(found))

    def _passes(self, dtypes: Sequence[str]) -> ProbeResults:
        found: List[PassTiming] = []
        ranks = self._world.size
        bandwidth = {}
        share = self._clock.left
        slice_ = share / (40 * len(dtypes) + 20)
        for name, moved, call in bandwidth_calls(_BANDWIDTH_ELEMENTS):
            bandwidth[f"{name} {ranks}"] = ranks * moved / self._clock.measure(call, 4 * slice_)[0]
        for name, elements, call in step_calls():
            found.append(PassTiming(name, "float32", ranks, elements, *self._clock.measure(call, slice_)))
        for dtype in dtypes:
            tokens, forward, both = layer_calls(dtype)
            seconds, spread = self._clock.measure(forward, 2 * slice_)
            whole, _ = self._clock.measure(both, 2 * slice_)
            found.append(PassTiming("layer", dtype, ranks, tokens, seconds, spread))
            found.append(PassTiming("layer_backward", dtype, ranks, tokens, max(whole - seconds, 0.1 * whole), spread))
            pool = Pool(getattr(torch, dtype))
            seen: Dict[str, int] = {}
            for name, elements, call in pass_calls(getattr(torch, dtype), pool):
                if self._clock.left < 0 and seen.get(name, 0) > 1:
                    continue  # two sizes of each are there
                seen[name] = seen.get(name, 0) + 1
                found.append(PassTiming(name, dtype, ranks, elements, *self._clock.measure(call, slice_)))
        return self._empty(passes=tuple(found), bandwidth=bandwidth)

    def _messages(self) -> ProbeResults:
        world, found = self._world, []
        sizes = [group for group in range(2, world.size + 1) if world.size % group == 0]
        sizes = sorted({sizes[0], sizes[-1], sizes[len(sizes) // 2]}, reverse=True)
        slice_ = self._clock.left / (len(sizes) * 4 * len(_MESSAGE_BYTES))
        for group in sizes:
            part = world.split(world.rank // group, world.rank, f"probe of {group}")
            for count, size in enumerate(_MESSAGE_BYTES):
                if count > 1 and self._clock.left < 0:
                    break
                whole = torch.zeros(-(-size // 4 // group) * group)
                narrow = torch.zeros(-(-size // 2 // group) * group, dtype=torch.bfloat16)
                calls: List[Tuple[str, Call]] = [
                    (ALL_REDUCE, _all_reduce(part, whole)),
                    (REDUCE_SCATTER, _waited(part.start_reduce_scatter, whole)),
                    (ALL_GATHER, _waited(part.start_all_gather, whole)),
                ]
                if size < _BUCKET_BYTES:
                    calls.append((NARROW_ALL_REDUCE, _all_reduce(part, narrow)))
                if size < _BUCKET_BYTES and group == sizes[-1]:
                    calls.append((SEND, _send_round(part, whole)))
                for name, call in calls:
                    seconds, spread = self._clock.measure(call, slice_)
                    rounds = 2 if name == SEND else 1  # there and back
                    found.append(MessageTiming(name, world.size, group, size, seconds / rounds, spread))
        return self._empty(messages=tuple(found))

    def _steps(self, dtypes: Sequence[str]) -> ProbeResults:
        found = []
        runs = small_runs(self._world.size, self._threads, dtypes)
        for count, (name, settings) in enumerate(runs):
            left = self._clock.left
            if count > 1 and left < 0:
                break
            config = load_run_config(overrides=settings)
            trainer = Trainer(config, ProcessGrid(self._world, config.layout), RandomSamples(config))
            trainer.step()  # replicas communicate alone in the second, which is not counted either
            seconds, spread = self._clock.measure(trainer.step, left / (len(runs) - count))
            trainer.finish()
            found.append(StepTiming(name, tuple(settings), seconds, spread))
        return self._empty(steps=tuple(found))


def _all_reduce(group: Communicator, tensor: torch.Tensor) -> Call:
    return lambda: group.all_reduce(tensor)


def _waited(start: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Call:
    return lambda: start(tensor).wait()


def _send_round(group: Communicator, tensor: torch.Tensor) -> Call:
    """A message from the first rank to the second and back; others of the group do nothing."""

    def there_and_back() -> None:
        if group.rank == 0:
            group.start_send(tensor, 1).wait()
            group.start_receive(tensor, 1).wait()
        elif group.rank == 1:
            group.start_receive(tensor, 0).wait()
            group.start_send(tensor, 0).wait()

    return there_and_back


def small_runs(ranks: int, threads: int, dtypes: Sequence[str]) -> List[Tuple[str, List[str]]]:
    """(name, settings) of runs in which the trainer itself is timed, those that tell most first."""
    layouts: Dict[str, Tuple[int, List[str]]] = {"dp": (ranks, [])}
    if ranks > 1 and ranks % 2 == 0:
        layouts.update({"tp": (ranks // 2, ["layout.tp=2"]), "pp": (ranks // 2, ["layout.pp=2"])})
    found = []

    def add(size: str, model: Tuple[str, ...], layout: str, *more: str) -> None:
        replicas, settings = layouts[layout]
        micro, batch = _BATCHES[model]
        batch = batch if batch % (micro * replicas) == 0 else micro * replicas
        sizes = [f"layout.dp={replicas}", f"training.micro_batch={micro}", f"training.global_batch={batch}"]
        sizes += [f"training.dtype={dtypes[0]}"]
        found.append(
            (f"{size} {layout} {ranks}", [*model, *settings, *sizes, f"node.threads_per_rank={threads}", *more])
        )

    for layout in layouts:
        add("small", _SMALL, layout)
        if layout == "dp":
            add("tiny", _TINY, layout)
    for dtype in dtypes[1:]:
        add(f"small {dtype}", _SMALL, "dp", f"training.dtype={dtype}")
    if ranks == 1:
        add("small recompute", _SMALL, "dp", "training.recompute=full")
    add("wide", _WIDE, "dp")
    for layout in list(layouts)[1:]:
        add("tiny", _TINY, layout)
    if "tp" in layouts:
        add("wide", _WIDE, "tp")
    return found


def main(arguments: Optional[List[str]] = None) -> int:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dtypes", nargs="+", required=True)
    options = parser.parse_args(arguments)
    prepare_process(options.threads)
    world = open_world(threads=options.threads)

    def say(text: str) -> None:
        if world.rank == 0:
            print(json.dumps({"progress": text}), flush=True)

    dtypes = [name for name in options.dtypes if compat.can_train(getattr(torch, name))]
    try:
        if not dtypes:
            raise UsageError(f"--dtype {' '.join(options.dtypes)}: this build of PyTorch cannot train in it")
        probed = Probe(world, options.threads, options.seconds, say).run(dtypes)
    except FugakuGptError as error:
        print(f"fugaku-gpt: rank {world.rank}: {error}", file=sys.stderr, flush=True)
        world.abort(1)
        return 1
    if world.rank == 0:
        print(json.dumps({"probed": probe_to_data(probed)}), flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
