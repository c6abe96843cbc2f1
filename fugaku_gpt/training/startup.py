"""What is really running: set up the process, read everything back, and say it before the first iteration."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
from dataclasses import asdict
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, TypeVar

import numpy as np
import torch

import fugaku_gpt
from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator, ProcessGrid, mpi_facts
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine import local
from fugaku_gpt.machine.checkout import git_commit
from fugaku_gpt.records.text import spans
from fugaku_gpt.training.binding import memory_nodes

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_MMAP_MAX = 65536  # glibc's own
_keeps_freed_pages = False


def prepare_process(threads: int) -> Dict[str, Any]:
    """Set threads, denormal flushing and the allocator; returns what took effect."""
    torch.set_num_threads(threads)
    keeps_pages = keep_freed_pages()
    ops.use_tensor_pool(keeps_pages)
    return {
        "threads": torch.get_num_threads(),
        "flush_denormals": compat.flush_denormals(),
        "allocator": local.allocator_in_use(),
        "allocator_keeps_pages": keeps_pages,
    }


def agree_on_kernels(
    config: RunConfig, world: Communicator, keep: Optional[Mapping[str, Any]] = None
) -> Dict[str, Any]:
    """Have every rank compute the same operations in float32 for want of a good kernel, and the others in the same way,
    so that all round alike: by our own compiled kernels where all have them, GELU else by the error function where
    PyTorch's own is slow on any.

    Collective. What was agreed on stays: calling it again changes nothing.

    Args:
        keep: what an earlier start of this run used (:func:`kernels_in_use`), on every rank alike: no clock is asked
            again of what it names, and only what this build cannot compute, or not to the type's precision, is added.
            It counts where the type is the same.

    Returns:
        what is used from now on.
    """
    dtype = getattr(torch, config.training.dtype)
    kept: Mapping[str, Any] = keep if keep is not None and keep.get("dtype") == config.training.dtype else {}
    compiled = config.node.compiled_kernels and kept.get("compiled", not kept) and ops.uses_native_kernels()
    own_gelu = compiled and ops.supports_gelu(dtype)
    nobody_asked = kept.get("compiled", False) and ops.supports_gelu(dtype)
    answered = "gelu_by_erf" in kept and not nobody_asked
    mine = {
        "in_float32": [*kept["in_float32"], *compat.operations_without_kernel(dtype)]
        if kept
        else compat.float32_operations(dtype),
        "gelu_by_erf": not own_gelu and (kept["gelu_by_erf"] if answered else _gelu_by_erf(config)),
        "onednn": _may_be_onednn(config, kept),
        "compiled": compiled,
        "compiled_products": _may_be_compiled(config, kept),
    }
    of_ranks = world.gather_json(mine) or []
    agreed: Dict[str, Any] = world.broadcast_json(
        {
            "in_float32": sorted({name for found in of_ranks for name in found["in_float32"]}),
            "gelu_by_erf": any(found["gelu_by_erf"] for found in of_ranks),
            "onednn": bool(of_ranks) and all(found["onednn"] for found in of_ranks),
            "compiled": bool(of_ranks) and all(found["compiled"] for found in of_ranks),
            "compiled_products": bool(of_ranks) and all(found["compiled_products"] for found in of_ranks),
        }
    )
    ops.choose_native_kernels(agreed["compiled"])
    ops.choose_native_matmul(agreed["compiled_products"])
    if config.training.dtype in SIXTEEN_BIT_DTYPES:
        compat.choose_float32_operations(agreed["in_float32"], dtype)
    if config.model.gelu == "erf":
        ops.choose_gelu_by_erf(agreed["gelu_by_erf"])
    if _multiplies_in_float32(config.training.dtype, agreed["in_float32"]):
        ops.choose_onednn_matmul(agreed["onednn"])
    return kernels_in_use(config)


def _may_be_compiled(config: RunConfig, kept: Mapping[str, Any]) -> bool:
    """Whether layers' products could be our own kernels', as far as this rank knows."""
    if not config.node.compiled_kernels or kept:
        return bool(config.node.compiled_kernels and kept.get("compiled_products", False))
    return ops.uses_native_matmul()


def _gelu_by_erf(config: RunConfig) -> bool:
    return config.model.gelu == "erf" and ops.uses_gelu_by_erf()


def _by_onednn(config: RunConfig) -> bool:
    dtype = config.training.dtype
    return _multiplies_in_float32(dtype, compat.float32_operations(getattr(torch, dtype))) and ops.uses_onednn_matmul()


def _may_be_onednn(config: RunConfig, kept: Mapping[str, Any]) -> bool:
    """Whether float32 products could be oneDNN's on this rank, be there any or not: another's clock may ask for them.
    What an earlier start did counts only where it had such products."""
    if kept and _multiplies_in_float32(config.training.dtype, kept["in_float32"]):
        return bool(kept.get("onednn", False)) and ops.has_onednn()
    return config.training.dtype != "float64" and ops.uses_onednn_matmul()


def _multiplies_in_float32(dtype: str, in_float32: Sequence[str]) -> bool:
    return dtype == "float32" or not {"linear", "matmul"}.isdisjoint(in_float32)


def kernels_in_use(config: RunConfig) -> Dict[str, Any]:
    """The type that is computed in, the operations that are computed in float32 all the same, whether the GELU is
    computed from the error function, whether layers' products are oneDNN's, and whether our own compiled kernels are
    used, for products too: with these, another start of a run rounds as this one does on processors of the same kind.
    (On another kind a kernel, ours or PyTorch's, may add in another order, or round to 16 bits elsewhere.)"""
    dtype = config.training.dtype
    return {
        "dtype": dtype,
        "in_float32": compat.float32_operations(getattr(torch, dtype)),
        "gelu_by_erf": _gelu_by_erf(config),
        "onednn": _by_onednn(config),
        "compiled": ops.uses_native_kernels(),
        "compiled_products": ops.uses_native_matmul(),
    }


def check_precision(config: RunConfig) -> None:
    """Whether this PyTorch can compute in ``training.dtype``, with whatever help.

    Raises:
        UsageError: it cannot add or multiply in that type.
    """
    dtype = config.training.dtype
    if not compat.can_train(getattr(torch, dtype)):
        raise UsageError(
            f"training.dtype: {dtype}: this PyTorch ({torch.__version__}) cannot add and multiply in it on CPUs; "
            "valid: float32, or another build"
        )


def together(world: Communicator, action: Callable[[], T]) -> T:
    """Do something on every rank that may fail on some: a failure anywhere is raised everywhere, so that nobody waits.

    Raises:
        UsageError: the first rank's message, with its rank where rank 0 had no such trouble.
    """
    problem: Optional[str] = None
    value: Optional[T] = None
    try:
        value = action()
    except UsageError as error:
        problem = str(error)
    problems = world.gather_json(problem)
    first = None
    if problems is not None:
        first = next(((f"rank {rank}: " if rank else "") + text for rank, text in enumerate(problems) if text), None)
    first = world.broadcast_json(first)
    if first is not None:
        raise UsageError(first)
    return value  # type: ignore[return-value]  # set: no rank had a problem


def keep_freed_pages() -> bool:
    """Have glibc keep freed blocks for the next allocation instead of handing pages back and touching fresh ones.

    Measured: 7 to 15 % of a step. False where the C library is not glibc or another allocator is preloaded.
    """
    global _keeps_freed_pages
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if local.allocator_in_use() != "libc" or mallopt is None:
        return False
    # M_MMAP_MAX 0 rather than a high M_MMAP_THRESHOLD, whose largest value differs from one glibc to the next
    _keeps_freed_pages = all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)])
    return _keeps_freed_pages


@contextlib.contextmanager
def pages_of_its_own() -> Iterator[None]:
    """What is made here and is large lies outside of the heap whose freed pages are kept: weights and optimiser states,
    which last, do not part that heap into pieces, and what is freed on the way is handed back.

    Measured: 124M after its start 165 MiB less, at the peak of a step 30 MiB less (of 2840).
    """
    if not _keeps_freed_pages:
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, _MMAP_MAX)
    try:
        yield
    finally:
        mallopt(_M_MMAP_MAX, 0)


def collect_environment(config: RunConfig, grid: ProcessGrid, process: Dict[str, Any]) -> Dict[str, Any]:
    """What is running, on every rank; collective over the world, complete on rank 0."""
    world = grid.world
    rank_facts = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "affinity": local.usable_cores(),
        "memory_nodes": memory_nodes(),
        **process,
    }
    ranks = world.gather_json(rank_facts)
    if ranks is None:  # what follows is the same on every rank: one looks, not ten thousand
        return {}
    node = config.node
    return {
        "fugaku_gpt": fugaku_gpt.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "build": compat.build_facts(),
        "precision": kernels_in_use(config),
        "replica_sums": grid.sum_facts,
        "notes": _notes(config),
        "mpi": mpi_facts(),
        "processor": local.processor_name(),
        "vector_extensions": local.vector_flags(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "memory_limit_bytes": local.memory_limit(),
        "toggles": [asdict(t) for t in local.read_back_toggles(node)],
        "ranks": ranks,
    }


def describe_environment(environment: Dict[str, Any]) -> List[str]:
    """The start-up block of the log."""
    build, mpi, ranks = environment["build"], environment["mpi"], environment["ranks"]
    first = ranks[0]
    extensions = " ".join(environment["vector_extensions"]) or "no known vector extension"
    lines = [
        f"fugaku_gpt {environment['fugaku_gpt']} ({environment['git_commit'] or 'commit unknown'}), "
        f"Python {environment['python']}, NumPy {environment['numpy']}",
        f"torch {build['torch']}: BLAS {build['blas']}, kernels for {build['instruction_set']}, "
        f"fused AdamW {_yes(build['fused_adamw'])}",
        *_describe_precision(environment["precision"]),
        *_describe_sums(environment["replica_sums"]),
        *(f"note: {note}" for note in environment["notes"]),
        f"processor {environment['processor']} ({extensions}), "
        f"memory {environment['memory_limit_bytes'] / 2**30:.1f} GiB, {environment['system']}",
        f"MPI {mpi['library']}, standard {mpi['standard']}, threads: {mpi['thread_level']}, mpi4py {mpi['mpi4py']}",
        f"allocator {first['allocator']}, keeps freed pages {_yes(first['allocator_keeps_pages'])}; "
        f"denormals flushed {_yes(first['flush_denormals'])}",
    ]
    for rank in ranks[:_RANKS_SHOWN]:
        lines.append(
            f"rank {rank['rank']} on {rank['host']}: {rank['threads']} threads on cores {spans(rank['affinity'])}"
            + (f", memory of nodes {spans(rank['memory_nodes'])}" if rank.get("memory_nodes") else "")
            + (f" (bound: {rank['bound']})" if rank.get("bound") else "")
        )
    if len(ranks) > _RANKS_SHOWN:
        lines.append(f"... and {len(ranks) - _RANKS_SHOWN} more ranks (all in environment.json)")
    of_host: Dict[str, List[Dict[str, Any]]] = {}
    for rank in ranks:
        of_host.setdefault(rank["host"], []).append(rank)
    for host, there in sorted(of_host.items()):
        threads = sum(rank["threads"] for rank in there)
        cores = len({core for rank in there for core in rank["affinity"]})
        if threads > cores:
            lines.append(f"note: {threads} threads share {cores} cores on {host}: times mean little here")
            break
    for toggle in environment["toggles"]:
        state = "applied" if toggle["applied"] else "NOT applied"
        lines.append(f"toggle {toggle['name']}={toggle['requested']}: {state} (seen: {toggle['seen']})")
    return lines


def _describe_precision(precision: Dict[str, Any]) -> List[str]:
    dtype, operations = precision["dtype"], precision["in_float32"]
    if precision["compiled"] and dtype == "bfloat16":
        operations = [operation for operation in operations if not operation.startswith("gelu")]
    said = []
    if dtype in SIXTEEN_BIT_DTYPES:
        said.append(
            f"computing in {dtype}, weights and sums of gradients in float32; "
            f"in float32 for want of a good kernel: {', '.join(operations) or 'nothing'}"
        )
    if precision["gelu_by_erf"]:
        said.append(
            "GELU from the error function, wherever it is computed in float32 or float64: PyTorch's own is slow"
        )
    if precision["compiled"]:
        said.append("attention, LayerNorm, GELU, loss, AdamW by our own compiled kernels, but for float64 and float16")
    if precision["compiled_products"] and dtype in ("float32", "bfloat16"):
        said.append("products of layers that are large enough too: libraries have slower ones for this processor")
    if precision["onednn"]:
        said.append("products of layers by oneDNN: MKL has slower kernels for processors that are not Intel's")
    return said


def _describe_sums(sums: Dict[str, Any]) -> List[str]:
    if sums["node_first"]:
        return [
            f"gradients are summed within each node first, then between nodes: {sums['nodes']} nodes x "
            f"{sums['replicas'] // sums['nodes']} replicas"
        ]
    return [f"note: layout.hierarchical_sum changes nothing: {sums['why_flat']}"] if sums["why_flat"] else []


def _notes(config: RunConfig) -> List[str]:
    """What a run asks for in vain."""
    notes = []
    if config.node.compiled_kernels and not ops.uses_native_kernels() and config.training.dtype != "float64":
        why = (
            "some rank has none, or the start that this one goes on from had none"
            if ops.has_native_kernels()
            else "none are compiled for this processor and version, or they do not run here: fugaku-gpt env kernels"
        )
        notes.append(f"PyTorch's kernels in place of our own compiled ones: {why}")
    if config.training.recompute == "selective" and config.model.attention_dropout == 0.0:
        notes.append(
            "training.recompute selective changes nothing: there are no flags of attention dropout to make again"
        )
    return notes


_RANKS_SHOWN = 8


def _yes(value: bool) -> str:
    return "yes" if value else "no"
