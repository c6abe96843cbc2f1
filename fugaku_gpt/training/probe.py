"""Runs ``fugaku-gpt plan probe`` on one number of ranks: times what steps are made of, on all of these ranks at once.

    mpirun -n 2 python -m fugaku_gpt.training.probe --threads 1 --seconds 10

It is in this folder because it times the trainer's own operations and steps, which need torch and MPI; the planner,
which reads its results, uses neither. Rank 0 prints lines of JSON: ``{"progress": ...}`` and at the end
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
from fugaku_gpt.harmless import harmless
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
    NumberPool,
    Operation,
    bandwidth_calls,
    layer_calls,
    pass_calls,
    product_call,
    product_shapes,
    step_calls,
)
from fugaku_gpt.training.startup import agree_on_kernels, prepare_process
from fugaku_gpt.training.trainer import Trainer

_MIN_TIMINGS, _MAX_TIMINGS = 3, 100  # timings per figure
_MIN_TIMING_SECONDS = 5e-5  # shorter calls are repeated within one timing
_SHARES = {"products": 0.4, "passes": 0.16, "messages": 0.14, "steps": 0.3}
_MESSAGE_BYTES = (2**16, 2**10, 2**20, 2**23, 2**25, 2**18, 2**13)
_BUCKET_BYTES = 2**25  # messages of this size or more carry only gradients and parameters
_QUIET_CORE_SHARE = 0.85  # minimum share of its cores that a rank gets on an idle node
_BANDWIDTH_ELEMENTS = 2**24
# models of the runs in which the trainer is timed
_SMALL = ("model.layers=2", "model.hidden=256", "model.heads=4", "model.seq_len=128", "model.vocab_size=2048")
_WIDE = ("model.layers=2", "model.hidden=512", "model.heads=8", "model.seq_len=128", "model.vocab_size=8192")
_TINY = ("model.layers=2", "model.hidden=64", "model.heads=2", "model.seq_len=32", "model.vocab_size=256")
# samples of a micro-batch, and of the global batch if the replicas can share it evenly
_BATCHES: Dict[Tuple[str, ...], Tuple[int, int]] = {_SMALL: (2, 8), _WIDE: (1, 4), _TINY: (1, 8)}


class Clock:
    """Times calls on all ranks, which agree on how often to call and on how much time remains."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._limit, self._started = math.inf, 0.0

    def begin(self, seconds: float) -> None:
        """Begin a section of the probe that may take ``seconds``."""
        self._limit, self._started = seconds, time.perf_counter()

    @property
    def remaining_seconds(self) -> float:
        """Seconds left of this section, on the rank that has the least. Collective."""
        return -self._reduce([time.perf_counter() - self._started - self._limit], "max")[0]

    def measure(self, call: Operation, seconds: float) -> Tuple[float, float]:
        """Return the median seconds of a call and the spread of their logarithm, as means over the ranks. Collective.

        Args:
            seconds: how long the measurement should take; a few calls are timed however long they take.
        """
        before = time.perf_counter()
        call()
        first = self._reduce([time.perf_counter() - before], "max")[0]
        before = time.perf_counter()
        call()  # warm
        once = self._reduce([time.perf_counter() - before], "max")[0]
        calls_per_timing = max(1, int(_MIN_TIMING_SECONDS / once))
        count = max(_MIN_TIMINGS, min(_MAX_TIMINGS, int((seconds - first) / (once * calls_per_timing))))
        self._world.barrier()
        times = []
        for _ in range(count):
            before = time.perf_counter()
            for _ in range(calls_per_timing):
                call()
            times.append((time.perf_counter() - before) / calls_per_timing)
        sums = self._reduce([statistics.median(times), spread_of(times)], "sum")
        return sums[0] / self._world.size, sums[1] / self._world.size

    def _reduce(self, numbers: Sequence[float], operation: str) -> List[float]:
        reduced = torch.tensor(numbers, dtype=torch.float64)
        self._world.all_reduce(reduced, operation)
        return [float(number) for number in reduced]


def spread_of(times: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm, estimated from the middle half of the times, so that a few
    disturbed ones do not count."""
    logs = sorted(math.log(max(seconds, 1e-9)) for seconds in times)
    quarter = (len(logs) - 1) / 4
    low, high = (logs[round(quarter)], logs[round(3 * quarter)])
    return (high - low) / 1.349


class Probe:
    """The measurements on this number of ranks."""

    def __init__(self, world: Communicator, threads: int, seconds: float, on_progress: Callable[[str], None]) -> None:
        self._world, self._threads, self._on_progress = world, threads, on_progress
        self._clock = Clock(world)
        self._seconds = seconds
        self.cores = len(local.usable_cores())
        # when ranks share cores, operations are not measured: the planner derives their times from the number of cores
        self.has_cores = world.size * threads <= self.cores
        self._shares = {
            name: share for name, share in _SHARES.items() if self.has_cores or name in ("messages", "steps")
        }
        if world.size == 1:
            del self._shares["messages"]

    def run(self, dtypes: Sequence[str]) -> ProbeResults:
        """Measure everything. Collective."""
        results = ProbeResults(self.cores, {self._world.size: self._threads}, self._facts())
        measurements: Dict[str, Callable[[], ProbeResults]] = {
            "products": lambda: self._products(dtypes),
            "passes": lambda: self._passes(dtypes),
            "messages": self._messages,
            "steps": lambda: self._steps(dtypes),
        }
        for name, share in self._shares.items():
            seconds = self._seconds * share / sum(self._shares.values())
            self._on_progress(f"{name}, {seconds:.1f} s")
            self._clock.begin(seconds)
            before = time.process_time(), time.perf_counter()
            results = results.merged_with(measurements[name]())
            if name == "products":  # in these no rank waits for another
                core_share = (time.process_time() - before[0]) / (time.perf_counter() - before[1]) / self._threads
                results = replace(
                    results, facts={**results.facts, f"share of cores {self._world.size}": f"{core_share:.2f}"}
                )
                if core_share < _QUIET_CORE_SHARE:
                    self._on_progress(
                        f"other work runs here, and leaves {100 * core_share:.0f} % of a core: times mean little"
                    )
        return results

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
        timings, rate = [], 0.0
        wide = NumberPool(torch.float32)
        share = self._clock.remaining_seconds
        for index, name in enumerate(dtypes):
            dtype = getattr(torch, name)
            agree_on_kernels(load_run_config(overrides=[f"training.dtype={name}"]), self._world)
            pool = wide if dtype == torch.float32 else NumberPool(dtype)
            narrow = torch.empty(0, dtype=ops.attention_dtype(dtype)).element_size() == 2
            compiled = ops.has_native_attention(torch.empty(1, self._threads, 1, 3, 1, dtype=dtype), 1)
            requested = list(product_shapes(narrow, self._threads, compiled))
            kinds = set()
            end = share * (
                1.0 if index == len(dtypes) - 1 else 0.6
            )  # the first type gets most time, as a run has one type
            seconds_per_shape = (end if not index else 0.4 * end) / len(requested)
            for shape in requested:
                is_time_up = self._clock.remaining_seconds < share - end
                is_long = rate and (_MIN_TIMINGS + 2) * shape.flops / rate > 4 * seconds_per_shape
                if shape.kind in kinds and (is_time_up or is_long):  # at least one shape of each kind is measured
                    continue
                kinds.add(shape.kind)
                seconds, spread = self._clock.measure(product_call(shape, pool, wide), seconds_per_shape)
                rate = max(rate, shape.flops / seconds)
                timings.append(
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
        return self._empty(products=tuple(timings))

    def _passes(self, dtypes: Sequence[str]) -> ProbeResults:
        timings: List[PassTiming] = []
        ranks = self._world.size
        bandwidth = {}
        share = self._clock.remaining_seconds
        seconds_per_call = share / (60 * len(dtypes) + 20)
        for name, moved, call in bandwidth_calls(_BANDWIDTH_ELEMENTS):
            bandwidth[f"{name} {ranks}"] = ranks * moved / self._clock.measure(call, 4 * seconds_per_call)[0]
        for name, elements, call in step_calls():
            timings.append(PassTiming(name, "float32", ranks, elements, *self._clock.measure(call, seconds_per_call)))
        for dtype in dtypes:
            tokens, forward, both = layer_calls(dtype)
            seconds, spread = self._clock.measure(forward, 2 * seconds_per_call)
            both_seconds, _ = self._clock.measure(both, 2 * seconds_per_call)
            timings.append(PassTiming("layer", dtype, ranks, tokens, seconds, spread))
            timings.append(
                PassTiming(
                    "layer_backward", dtype, ranks, tokens, max(both_seconds - seconds, 0.1 * both_seconds), spread
                )
            )
            pool = NumberPool(getattr(torch, dtype))
            seen: Dict[str, int] = {}
            for name, elements, call in pass_calls(getattr(torch, dtype), pool):
                if self._clock.remaining_seconds < 0 and seen.get(name, 0) > 1:
                    continue  # two sizes of this operation are measured
                seen[name] = seen.get(name, 0) + 1
                timings.append(PassTiming(name, dtype, ranks, elements, *self._clock.measure(call, seconds_per_call)))
        return self._empty(passes=tuple(timings), bandwidth=bandwidth)

    def _messages(self) -> ProbeResults:
        world, timings = self._world, []
        sizes = [group for group in range(2, world.size + 1) if world.size % group == 0]
        sizes = sorted({sizes[0], sizes[-1], sizes[len(sizes) // 2]}, reverse=True)
        seconds_per_call = self._clock.remaining_seconds / (len(sizes) * 4 * len(_MESSAGE_BYTES))
        for group in sizes:
            members = world.split(world.rank // group, world.rank, f"probe of {group}")
            for count, size in enumerate(_MESSAGE_BYTES):
                if count > 1 and self._clock.remaining_seconds < 0:
                    break
                wide = torch.zeros(-(-size // 4 // group) * group)
                narrow = torch.zeros(-(-size // 2 // group) * group, dtype=torch.bfloat16)
                calls: List[Tuple[str, Operation]] = [
                    (ALL_REDUCE, _all_reduce(members, wide)),
                    (REDUCE_SCATTER, _start_and_wait(members.start_reduce_scatter, wide)),
                    (ALL_GATHER, _start_and_wait(members.start_all_gather, wide)),
                ]
                if size < _BUCKET_BYTES:
                    calls.append((NARROW_ALL_REDUCE, _all_reduce(members, narrow)))
                if size < _BUCKET_BYTES and group == sizes[-1]:
                    calls.append((SEND, _send_round(members, wide)))
                for name, call in calls:
                    seconds, spread = self._clock.measure(call, seconds_per_call)
                    rounds = 2 if name == SEND else 1  # there and back
                    timings.append(MessageTiming(name, world.size, group, size, seconds / rounds, spread))
        return self._empty(messages=tuple(timings))

    def _steps(self, dtypes: Sequence[str]) -> ProbeResults:
        timings = []
        runs = small_runs(self._world.size, self._threads, dtypes)
        for count, (name, settings) in enumerate(runs):
            remaining_seconds = self._clock.remaining_seconds
            if count > 1 and remaining_seconds < 0:
                break
            config = load_run_config(overrides=settings)
            trainer = Trainer(
                config, ProcessGrid(self._world, config.layout, kv_copies=config.kv_copies), RandomSamples(config)
            )
            trainer.step()  # not counted; nor is the second step, in which replicas communicate alone
            seconds, spread = self._clock.measure(trainer.step, remaining_seconds / (len(runs) - count))
            trainer.finish()
            timings.append(StepTiming(name, tuple(settings), seconds, spread))
        return self._empty(steps=tuple(timings))


def _all_reduce(group: Communicator, tensor: torch.Tensor) -> Operation:
    return lambda: group.all_reduce(tensor)


def _start_and_wait(start: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Operation:
    return lambda: start(tensor).wait()


def _send_round(group: Communicator, tensor: torch.Tensor) -> Operation:
    """Return a function that sends a message from the first rank to the second and back; other ranks do nothing."""

    def there_and_back() -> None:
        if group.rank == 0:
            group.start_send(tensor, 1).wait()
            group.start_receive(tensor, 1).wait()
        elif group.rank == 1:
            group.start_receive(tensor, 0).wait()
            group.start_send(tensor, 0).wait()

    return there_and_back


def small_runs(ranks: int, threads: int, dtypes: Sequence[str]) -> List[Tuple[str, List[str]]]:
    """Return (name, settings) of runs in which the trainer itself is timed, the most informative first."""
    layouts: Dict[str, Tuple[int, List[str]]] = {"dp": (ranks, [])}
    if ranks > 1 and ranks % 2 == 0:
        layouts.update({"tp": (ranks // 2, ["layout.tp=2"]), "pp": (ranks // 2, ["layout.pp=2"])})
    runs = []

    def add(size: str, model: Tuple[str, ...], layout: str, *more: str) -> None:
        replicas, settings = layouts[layout]
        micro, batch = _BATCHES[model]
        batch = batch if batch % (micro * replicas) == 0 else micro * replicas
        sizes = [f"layout.dp={replicas}", f"training.micro_batch={micro}", f"training.global_batch={batch}"]
        sizes += [f"training.dtype={dtypes[0]}"]
        runs.append(
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
    return runs


def main(arguments: Optional[List[str]] = None) -> int:
    """Run the probe; rank 0 prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dtypes", nargs="+", required=True)
    options = parser.parse_args(arguments)
    prepare_process(options.threads)
    world = open_world(threads=options.threads)

    def print_progress(text: str) -> None:
        if world.rank == 0:
            print(json.dumps({"progress": text}), flush=True)

    dtypes = [name for name in options.dtypes if compat.can_train(getattr(torch, name))]
    try:
        if not dtypes:
            raise UsageError(f"--dtype {' '.join(options.dtypes)}: this build of PyTorch cannot train in it")
        probed = Probe(world, options.threads, options.seconds, print_progress).run(dtypes)
    except FugakuGptError as error:
        print(harmless(f"fugaku-gpt: rank {world.rank}: {error}"), file=sys.stderr, flush=True)
        world.abort(1)
        return 1
    if world.rank == 0:
        print(json.dumps({"probed": probe_to_data(probed)}), flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
