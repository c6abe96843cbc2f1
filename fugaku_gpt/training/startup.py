"""Start-up of a rank: sets up the process, reads back what took effect, and describes it before the first iteration."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
from dataclasses import asdict
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar

import numpy as np
import torch

import fugaku_gpt
from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator, ProcessGrid, mpi_facts
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.machine import local
from fugaku_gpt.machine.checkout import git_commit
from fugaku_gpt.machine.fugaku import ONE_PIPE_STATES
from fugaku_gpt.machine.system import this_system
from fugaku_gpt.records.text import spans
from fugaku_gpt.training.products import agree_on_products, describe_products, has_float32_matmul, product_dtypes

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h
_MMAP_MAX = 65536  # glibc's default
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
    config: RunConfig, world: Communicator, earlier_kernels: Optional[Mapping[str, Any]] = None
) -> Dict[str, Any]:
    """Make every rank use the same kernels, so that all round alike; collective.

    All ranks compute the same operations in float32 for lack of a good kernel. Our own compiled kernels are used if all
    ranks have them. Otherwise GELU is computed from the error function if PyTorch's own is slow on any rank. For
    layers' products see :func:`~fugaku_gpt.training.products.agree_on_products`. Calling this again changes nothing.

    Args:
        earlier_kernels: the kernels that an earlier start of this run used (:func:`kernels_in_use`), the same on every
            rank. Its choices are not timed again; only operations that this build cannot compute, or not to the type's
            precision, are added. It is ignored if the type differs.

    Returns:
        the kernels in use from then on.
    """
    dtype = getattr(torch, config.training.dtype)
    earlier: Mapping[str, Any] = (
        earlier_kernels if earlier_kernels is not None and earlier_kernels.get("dtype") == config.training.dtype else {}
    )
    compiled = config.node.compiled_kernels and earlier.get("compiled", not earlier) and ops.uses_native_kernels()
    own_gelu = compiled and ops.supports_gelu(dtype)
    gelu_was_native = earlier.get("compiled", False) and ops.supports_gelu(dtype)
    has_earlier_gelu = "gelu_by_erf" in earlier and not gelu_was_native
    local_choices = {
        "in_float32": [*earlier["in_float32"], *compat.operations_without_kernel(dtype)]
        if earlier
        else compat.float32_operations(dtype),
        "gelu_by_erf": not own_gelu and (earlier["gelu_by_erf"] if has_earlier_gelu else _uses_gelu_by_erf(config)),
        "compiled": compiled,
    }
    rank_choices = world.gather_json(local_choices) or []
    agreed: Dict[str, Any] = world.broadcast_json(
        {
            "in_float32": sorted({name for choices in rank_choices for name in choices["in_float32"]}),
            "gelu_by_erf": any(choices["gelu_by_erf"] for choices in rank_choices),
            "compiled": bool(rank_choices) and all(choices["compiled"] for choices in rank_choices),
        }
    )
    ops.choose_native_kernels(agreed["compiled"])
    if config.training.dtype in SIXTEEN_BIT_DTYPES:
        compat.choose_float32_operations(agreed["in_float32"], dtype)
    if _has_gelu_by_erf(config):
        ops.choose_gelu_by_erf(agreed["gelu_by_erf"])
    with mmap_large_allocations():  # the tensors of a measurement
        agree_on_products(config, world, earlier)
    return kernels_in_use(config)


def _uses_gelu_by_erf(config: RunConfig) -> bool:
    return _has_gelu_by_erf(config) and ops.uses_gelu_by_erf()


def _has_gelu_by_erf(config: RunConfig) -> bool:
    return config.model.mlp == "gelu" and config.model.gelu == "erf"


def _uses_onednn(config: RunConfig) -> bool:
    return has_float32_matmul(config) and ops.uses_onednn_matmul()


def kernels_in_use(config: RunConfig) -> Dict[str, Any]:
    """Return the choices of kernels with which another start of the run rounds as this one does, on processors of the
    same kind.

    They are the type of the computation, the operations that are nevertheless computed in float32, and whether GELU is
    computed from the error function, layers' products by oneDNN, and our own compiled kernels are used (for products
    too). On another kind of processor a kernel, ours or PyTorch's, may add in another order, or round to 16 bits at
    another point.
    """
    dtype = config.training.dtype
    return {
        "dtype": dtype,
        "in_float32": compat.float32_operations(getattr(torch, dtype)),
        "gelu_by_erf": _uses_gelu_by_erf(config),
        "onednn": _uses_onednn(config),
        "compiled": ops.uses_native_kernels(),
        "compiled_products": any(map(ops.uses_native_matmul, product_dtypes(config)[:1])),
    }


def check_precision(config: RunConfig) -> None:
    """Check that this PyTorch can compute in ``training.dtype``, with or without workarounds.

    Raises:
        UsageError: it cannot add or multiply in that type.
    """
    dtype = config.training.dtype
    if not compat.can_train(getattr(torch, dtype)):
        raise UsageError(
            f"training.dtype: {dtype}: this PyTorch ({torch.__version__}) cannot add and multiply in it on CPUs; "
            "valid: float32, or another build"
        )


def collective_try(world: Communicator, action: Callable[[], T]) -> T:
    """Call ``action`` on every rank. A ``UsageError`` or ``RunFailed`` on any rank is raised on all, so that no rank
    waits for another; collective.

    Raises:
        UsageError, RunFailed: the message of the first rank that failed, with its number unless that is rank 0.
    """
    problem: Optional[Tuple[bool, str]] = None
    value: Optional[T] = None
    try:
        value = action()
    except (UsageError, RunFailed) as error:
        problem = isinstance(error, RunFailed), str(error)
    problems = world.gather_json(problem)
    first = None
    if problems is not None:
        first = next(([rank, *problem] for rank, problem in enumerate(problems) if problem is not None), None)
    first = world.broadcast_json(first)
    if first is not None:
        rank, is_failure, message = first
        raise (RunFailed if is_failure else UsageError)(f"rank {rank}: {message}" if rank else message)
    return value  # type: ignore[return-value]  # is set, since no rank had a problem


def keep_freed_pages() -> bool:
    """Have glibc keep freed blocks for the next allocation instead of returning pages and touching fresh ones.

    This saves 7 to 15 % of a step (measured). Returns False if the C library is not glibc or another allocator is
    preloaded.
    """
    global _keeps_freed_pages
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if local.allocator_in_use() != "libc" or mallopt is None:
        return False
    # M_MMAP_MAX 0 rather than a high M_MMAP_THRESHOLD, whose largest value differs from one glibc to the next
    _keeps_freed_pages = all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)])
    return _keeps_freed_pages


@contextlib.contextmanager
def mmap_large_allocations() -> Iterator[None]:
    """Allocate large blocks by mmap inside this context, outside of the heap whose freed pages are kept.

    Long-lived weights and optimiser states then do not fragment that heap, and temporary memory is returned to the
    system. Measured with the 124M model: 165 MiB less after the start, 30 MiB less (of 2840) at the peak of a step.
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
    """Collect what is running on every rank, for ``environment.json``; collective. Empty on ranks other than 0."""
    world = grid.world
    cores = local.usable_cores()
    rank_facts = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "affinity": cores,
        "numa_nodes": local.numa_nodes_of(cores),
        "memory_nodes": this_system().memory_nodes(),
        **process,
    }
    if _lacks_native_kernels(config) and ops.native_kernels_problem():
        rank_facts["kernels_problem"] = ops.native_kernels_problem()
    ranks = world.gather_json(rank_facts)
    if ranks is None:  # the rest is the same on every rank: rank 0 alone reads it, not ten thousand ranks
        return {}
    node = config.node
    return {
        "fugaku_gpt": fugaku_gpt.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "build": compat.build_facts(),
        "precision": kernels_in_use(config),
        "compiled_operators": _compiled_operators(config),
        "products_reason": RANK_CONSENSUS.products_reason,
        "replica_sums": grid.sum_facts,
        "notes": _notes(config, ranks),
        "mpi": mpi_facts(),
        "processor": local.processor_name(),
        "vector_extensions": local.vector_flags(),
        "system": f"{platform.system()} {platform.release()} {this_system().architecture()}",
        "memory_limit_bytes": local.memory_limit(),
        "toggles": [asdict(t) for t in local.read_back_toggles(node)],
        "ranks": ranks,
    }


def describe_environment(environment: Dict[str, Any]) -> List[str]:
    """Return the lines of the start-up block of the log."""
    build, mpi, ranks = environment["build"], environment["mpi"], environment["ranks"]
    first = ranks[0]
    extensions = " ".join(environment["vector_extensions"]) or "no known vector extension"
    lines = [
        f"fugaku_gpt {environment['fugaku_gpt']} ({environment['git_commit'] or 'commit unknown'}), "
        f"Python {environment['python']}, NumPy {environment['numpy']}",
        f"torch {build['torch']}: BLAS {build['blas']}, kernels for {build['instruction_set']}, "
        f"fused AdamW {_yes_or_no(build['fused_adamw'])}",
        *_describe_precision(environment["precision"], environment["compiled_operators"]),
        *describe_products(environment["precision"], environment["products_reason"]),
        *_describe_sums(environment["replica_sums"]),
        *(f"note: {note}" for note in environment["notes"]),
        f"processor {environment['processor']} ({extensions}), "
        f"memory {environment['memory_limit_bytes'] / 2**30:.1f} GiB, {environment['system']}",
        f"MPI {mpi['library']}, standard {mpi['standard']}, threads: {mpi['thread_level']}, mpi4py {mpi['mpi4py']}",
        f"allocator {first['allocator']}, keeps freed pages {_yes_or_no(first['allocator_keeps_pages'])}; "
        f"denormals flushed {_yes_or_no(first['flush_denormals'])}",
    ]
    for rank in ranks[:_RANKS_SHOWN]:
        lines.append(
            f"rank {rank['rank']} on {rank['host']}: {rank['threads']} threads on cores {spans(rank['affinity'])}"
            + (f" of {_nodes_text(rank['numa_nodes'])}" if rank.get("numa_nodes") else "")
            + (f", memory of {_nodes_text(rank['memory_nodes'])} only" if rank.get("memory_nodes") else "")
            + (f" (bound: {rank['bound']})" if rank.get("bound") else "")
        )
    if len(ranks) > _RANKS_SHOWN:
        lines.append(f"... and {len(ranks) - _RANKS_SHOWN} more ranks (all in environment.json)")
    ranks_by_host: Dict[str, List[Dict[str, Any]]] = {}
    for rank in ranks:
        ranks_by_host.setdefault(rank["host"], []).append(rank)
    for host, host_ranks in sorted(ranks_by_host.items()):
        threads = sum(rank["threads"] for rank in host_ranks)
        cores = len({core for rank in host_ranks for core in rank["affinity"]})
        if threads > cores:
            lines.append(f"note: {threads} threads share {cores} cores on {host}: times mean little here")
            break
    for toggle in environment["toggles"]:
        state = "applied" if toggle["applied"] else "NOT applied"
        lines.append(f"toggle {toggle['name']}={toggle['requested']}: {state} (seen: {toggle['seen']})")
    return lines


def _compiled_operators(config: RunConfig) -> List[str]:
    """Names of the operators of a run for which there are kernels of our own."""
    model = config.model
    norms = ["LayerNorm"] if model.norm == "layernorm" else []
    if model.norm == "rmsnorm" or model.qk_norm:
        norms.append("RMSNorm")
    positions = ["rotary positions"] if model.positions == "rope" else []
    return ["attention", *norms, *positions, "GELU" if model.mlp == "gelu" else "SwiGLU", "loss", "AdamW"]


def _describe_precision(precision: Dict[str, Any], compiled: Sequence[str]) -> List[str]:
    dtype, operations = precision["dtype"], precision["in_float32"]
    if "GELU" not in compiled or (precision["compiled"] and dtype == "bfloat16"):
        operations = [operation for operation in operations if not operation.startswith("gelu")]
    lines = []
    if dtype in SIXTEEN_BIT_DTYPES:
        lines.append(
            f"computing in {dtype}, weights and sums of gradients in float32; "
            f"in float32 for lack of a good kernel: {', '.join(operations) or 'nothing'}"
        )
    if precision["gelu_by_erf"]:
        lines.append(
            "GELU from the error function, wherever it is computed in float32 or float64: PyTorch's own is slow"
        )
    if precision["compiled"]:
        lines.append(f"{', '.join(compiled)} by our own compiled kernels, but for float64 and float16")
    return lines


def _describe_sums(sums: Dict[str, Any]) -> List[str]:
    if sums["node_first"]:
        return [
            f"gradients are summed within each node first, then between nodes: {sums['nodes']} nodes x "
            f"{sums['replicas'] // sums['nodes']} replicas"
        ]
    return [f"note: layout.hierarchical_sum changes nothing: {sums['why_flat']}"] if sums["why_flat"] else []


def _lacks_native_kernels(config: RunConfig) -> bool:
    """Whether native kernels are wanted and not used: where they are switched off, no library is loaded to ask."""
    return config.node.compiled_kernels and config.training.dtype != "float64" and not ops.uses_native_kernels()


def _notes(config: RunConfig, ranks: Sequence[Mapping[str, Any]]) -> List[str]:
    """Return notes on what this run does without, or does more slowly than it could."""
    notes = []
    if _lacks_native_kernels(config):
        why = "the start that this run resumes from used PyTorch's"
        without = [rank for rank in ranks if "kernels_problem" in rank]
        if without:
            where = "" if len(without) == len(ranks) else f" on rank {without[0]['rank']} ({without[0]['host']})"
            why = f"{without[0]['kernels_problem']}{where}; `fugaku-gpt env kernels` tries to mend that"
        notes.append(f"PyTorch's kernels in place of our own compiled ones: {why}")
    eco_state = local.job_resources().get("eco_state", "")
    if eco_state in map(str, ONE_PIPE_STATES):
        notes.append(f"this node runs at half its peak: eco_state={eco_state} leaves its cores one floating-point pipe")
    if config.training.recompute == "selective" and config.model.attention_dropout == 0.0:
        notes.append(
            "training.recompute selective changes nothing: there are no flags of attention dropout to make again"
        )
    return notes


_RANKS_SHOWN = 8


def _nodes_text(nodes: Sequence[int]) -> str:
    return f"NUMA node{'s' * (len(nodes) > 1)} {spans(nodes)}"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
