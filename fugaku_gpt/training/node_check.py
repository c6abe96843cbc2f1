"""Runs the measurements of ``fugaku-gpt doctor node`` on every rank of a launch.

    mpirun -n 2 python -m fugaku_gpt.training.node_check run.yaml FOLDER --threads 1

It is in this folder because it times the trainer's own step, which needs torch and MPI. Rank 0 writes what was measured
to ``measurements.json`` after each section (``fugaku_gpt/records/node_report.py``), so that a section which ends the
process leaves the sections before it; and it prints a line before each.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.config import RunConfig, changed_settings, load_run_config
from fugaku_gpt.data.random_samples import random_samples
from fugaku_gpt.errors import EXIT_OK, EXIT_RUN_FAILED, FugakuGptError, RunFailed, UsageError
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.harmless import harmless
from fugaku_gpt.kernels import load_library
from fugaku_gpt.kernels.build import sve_vector_bytes
from fugaku_gpt.kernels.library import Library
from fugaku_gpt.kernels.rates import CoreWork, clock_hertz, compiled_triad, multiply_adds, timed_on_cores, triad
from fugaku_gpt.machine import local
from fugaku_gpt.machine.memory import numa_node_use
from fugaku_gpt.machine.system import this_system
from fugaku_gpt.records.node_report import ALL_CORES, write_measurements
from fugaku_gpt.training.binding import bind
from fugaku_gpt.training.probe import Clock
from fugaku_gpt.training.startup import agree_on_kernels, collect_environment, prepare_process
from fugaku_gpt.training.trainer import Trainer

_SUM_BYTES = (8, 2**13, 2**17, 2**20, 2**23, 2**26)
_SECONDS_PER_SUM = 1.0
_WARM_UP = 2  # iterations before the timed ones: in the second, replicas communicate alone
# variables that decide where ranks, threads and pages are
_SETTINGS = (
    "OMP_", "GOMP_", "KMP_", "FLIB_", "XOS_MMM_L_", "PLE_", "PARALLEL", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD",
)  # fmt: skip
_ROUNDS = 5  # of each rate, of which the best counts


class NodeCheck:
    """The sections of the measurement, in their order. All methods are collective.

    Args:
        config: the run whose step is timed; its layout has the ranks of this launch.
        folder: gets the measurements.
        process: what :func:`fugaku_gpt.training.startup.prepare_process` and the binding have returned.
        is_short: measure for a moment only, so that figures mean little.
    """

    def __init__(
        self, world: Communicator, config: RunConfig, folder: Path, process: Dict[str, Any], is_short: bool = False
    ) -> None:
        self._world, self._node = world, world.on_this_node("node")
        self._config, self._folder, self._process, self._is_short = config, folder, process, is_short
        self._grid = ProcessGrid(world, config.layout, kv_copies=config.kv_copies)

    def run(self, iterations: int) -> None:
        """Measure everything, and write it."""
        sections: Dict[str, Callable[[], Any]] = {
            "environment": lambda: collect_environment(self._config, self._grid, self._process),
            "hosts": self._hosts,
            "kernels": self._kernels,
            "rates": self._rates,
            "all_reduce": self._all_reduce,
            "step": lambda: self._step(iterations),
        }
        measured: Dict[str, Any] = {}
        for name, measure in sections.items():
            self._write(name, measured)
            measured[name] = measure()
        self._write("", measured)

    def _write(self, section: str, measured: Dict[str, Any]) -> None:
        if self._world.rank == 0:
            write_measurements(self._folder, section, measured)
            if section:
                print(f"measuring: {section}", flush=True)

    def _hosts(self) -> List[Dict[str, Any]]:
        """Facts about each node, from its first rank."""
        return self._of_nodes(_host_facts() if self._node.rank == 0 else None)

    def _kernels(self) -> Dict[str, Any]:
        problem = ops.native_kernels_problem()
        problems = self._world.gather_json(problem) or []
        first = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        return {"problem": first, "lanes": None if problem else load_library().lanes()}

    def _rates(self) -> List[Dict[str, Any]]:
        """Rates of each node's cores."""
        has_kernels = all(self._all_of(self._world, not ops.native_kernels_problem()))
        rates, problem = {}, ""
        try:
            rates = self._rates_of_node(load_library() if has_kernels else None)
        except RunFailed as error:  # on all ranks of this node; those of others wait for them
            problem = str(error)
        first = next(filter(None, self._all_of(self._world, problem)), "")
        if first:
            raise RunFailed(first)
        torch.set_num_threads(self._process["threads"])  # PyTorch's add, on one core, has changed it
        return self._of_nodes(rates if self._node.rank == 0 else None)

    def _rates_of_node(self, library: Optional[Library]) -> Dict[str, Any]:
        """Rates of this node's cores. A core that several ranks share is measured by the first of them.

        Raises:
            RunFailed: a rank of this node could not measure; on all of them.
        """
        affinities: List[List[int]] = self._all_of(self._node, this_system().affinity())
        earlier = {core for cores in affinities[: self._node.rank] for core in cores}
        own = [core for core in affinities[self._node.rank] if core not in earlier]
        cores = sorted({core for affinity in affinities for core in affinity})
        rates: Dict[str, Any] = {"host": socket.gethostname(), "cores": len(cores)}
        if library is not None:
            clocks = self._on_node(partial(_clock_of_first, library, own))
            rates["clock_hertz"] = {str(core): hertz for core, hertz in filter(None, clocks)}
            work = multiply_adds(library, **({"steps": 10_000} if self._is_short else {}))
            rates["multiply_add_flops"] = self._rate_of_node(work, own)
        work = triad(
            compiled_triad(library) if library is not None else _pytorch_triad,
            **({"floats": 2**16} if self._is_short else {}),
        )
        rates["triad"] = "our kernels" if library is not None else "PyTorch's add"
        rates["bandwidth"] = {
            ", ".join(map(str, local.numa_nodes_of(group))) or "unknown": self._rate_of_node(
                work, [core for core in own if core in group]
            )
            for group in local.group_by_numa_node(cores)
        }
        rates["bandwidth"][ALL_CORES] = self._rate_of_node(work, own)
        return rates

    def _rate_of_node(self, work: CoreWork, cores: Sequence[int]) -> float:
        """The best round's units per second, of the given cores of all ranks of this node at once."""
        rounds = self._on_node(lambda: timed_on_cores(work, cores, _ROUNDS, self._node.barrier))
        return max(
            sum(units for units, _ in on_cores) / max(seconds for _, seconds in on_cores)
            for on_cores in zip(*filter(None, rounds))
        )

    def _on_node(self, measure: Callable[[], Any]) -> List[Any]:
        """The measurements of the ranks of this node, by rank, on all of them.

        Raises:
            RunFailed: one of them could not; on all of them.
        """
        value, problem = None, ""
        try:
            value = measure()
        except (RuntimeError, OSError, MemoryError) as error:
            problem = f"rank {self._world.rank} ({socket.gethostname()}): {str(error) or type(error).__name__}"
        answers = self._all_of(self._node, {"value": value, "problem": problem})
        first = next((answer["problem"] for answer in answers if answer["problem"]), "")
        if first:
            raise RunFailed(f"the rates of cores could not be measured on {first}")
        return [answer["value"] for answer in answers]

    def _all_reduce(self) -> List[Dict[str, Any]]:
        if self._world.size == 1:
            return []
        clock, timings = Clock(self._world), []
        for size in _SUM_BYTES:
            tensor = torch.full((size // 4,), float(self._world.rank + 1))
            self._world.all_reduce(tensor)
            expected = self._world.size * (self._world.size + 1) / 2
            if not bool((tensor == expected).all()):
                raise RunFailed(f"all-reduce of {size} bytes: {float(tensor[0])} in place of {expected}")
            tensor.zero_()
            seconds, spread = clock.measure(
                partial(self._world.all_reduce, tensor), 0.02 if self._is_short else _SECONDS_PER_SUM
            )
            timings.append({"bytes": size, "seconds": seconds, "spread": spread})
        return timings

    def _step(self, iterations: int) -> Dict[str, Any]:
        config, model = self._config, self._config.model
        agree_on_kernels(config, self._world)
        trainer = Trainer(config, self._grid, random_samples(config))
        seconds, loss = [], None
        for number in range(_WARM_UP + iterations):
            self._world.barrier()
            before = time.perf_counter()
            step = trainer.step()
            took = torch.tensor([time.perf_counter() - before], dtype=torch.float64)
            self._world.all_reduce(took, "max")
            if number >= _WARM_UP:
                seconds.append(float(took[0]))
            loss = step.loss
            if self._world.rank == 0:
                print(f"iteration {number + 1} of {_WARM_UP + iterations}: {float(took[0]):.3f} s", flush=True)
        trainer.finish()
        batch, median = config.training.global_batch, sorted(seconds)[len(seconds) // 2]
        exact = exact_flops(model, batch, config.padded_outputs)
        notes = notes_flops(model, batch, config.padded_outputs)
        return {
            "model": size_name(model),
            "settings": {key: value for key, value in changed_settings(config).items() if not key.startswith("job.")},
            "iterations": iterations,
            "seconds": seconds,
            "tokens_per_second": batch * model.seq_len / median,
            "tflops_exact": tflops_per_node(exact, median, config.job.nodes),
            "tflops_notes": tflops_per_node(notes, median, config.job.nodes),
            "loss": loss,
        }

    def _of_nodes(self, facts: Optional[Dict[str, Any]]) -> List[Dict[str, Any]]:
        """The facts of the nodes, which their first ranks have, by rank; on every rank."""
        return [of_node for of_node in self._all_of(self._world, facts) if of_node]

    def _all_of(self, group: Communicator, value: Any) -> List[Any]:
        gathered: List[Any] = group.broadcast_json(group.gather_json(value))
        return gathered


def _clock_of_first(library: Library, cores: Sequence[int]) -> Optional[Tuple[int, float]]:
    """The first of some cores and its clock in hertz; None without cores."""
    return (cores[0], clock_hertz(library, cores[0])) if cores else None


def _pytorch_triad(arrays: "List[np.ndarray[Any, Any]]", factor: float, passes: int) -> None:
    torch.set_num_threads(1)  # in the thread of one core
    x, y, z = map(torch.from_numpy, arrays)
    for _ in range(passes):
        torch.add(x, y, alpha=factor, out=z)


def _host_facts() -> Dict[str, Any]:
    system = this_system()
    nodes = {}
    for node in local.numa_nodes_of(local.online_cores()):
        use = numa_node_use([node])
        nodes[str(node)] = {
            "cores": system.read_numbers(f"sys/devices/system/node/node{node}/cpulist"),
            "memory_bytes": use.limit if use is not None else None,
        }
    large_pages = system.read("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
    return {
        "host": socket.gethostname(),
        "processor": local.processor_name(),
        "page_bytes": system.page_bytes(),
        "memory_limit_bytes": local.memory_limit(),
        "sve_bits": 8 * sve_vector_bytes(),
        "numa_nodes": nodes,
        "power": local.job_resources(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        "huge_pages": int(large_pages) if large_pages and large_pages.isdecimal() else None,
    }


def main(arguments: Optional[List[str]] = None) -> int:
    """Measure as a rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="Run file; its layout has the ranks of this launch.")
    parser.add_argument("folder", type=Path, help="Folder for the measurements.")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--short", action="store_true", help="Measure for moments only.")
    options = parser.parse_args(arguments)
    config = load_run_config(options.run)
    world = open_world(threads=options.threads)
    try:
        if world.size != config.layout.ranks:
            raise UsageError(f"{config.layout.ranks} ranks were to be started, and MPI has joined {world.size}")
        process = {**bind(world, config.node.bind, options.threads), **prepare_process(options.threads)}
        NodeCheck(world, config, options.folder, process, options.short).run(options.iterations)
    except FugakuGptError as error:
        print(harmless(f"fugaku-gpt: rank {world.rank}: {error}"), file=sys.stderr, flush=True)
        if world.size > 1:
            world.abort(EXIT_RUN_FAILED)
        return EXIT_RUN_FAILED
    except BaseException:  # other ranks may be waiting for this one
        traceback.print_exc()
        if world.size > 1:
            world.abort(EXIT_RUN_FAILED)
        return EXIT_RUN_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
