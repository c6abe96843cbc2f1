"""Has the ranks of a run agree on how layers' products are computed: as was measured, or as the run asks for."""

from __future__ import annotations

import hashlib
import socket
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import RunConfig
from fugaku_gpt.kernels.product_verdicts import MIN_SPEEDUP, ProductVerdict
from fugaku_gpt.ops.product_choice import current_stamp, recorded_verdict
from fugaku_gpt.ops.product_timing import measure_at_start

_AUTO, _ON, _OFF = "auto", "on", "off"  # of node.compiled_products


def agree_on_products(config: RunConfig, world: Communicator, earlier: Mapping[str, Any]) -> None:
    """Make every rank compute layers' products in the same way, so that all round alike; collective. The ranks have
    agreed on everything else about kernels (:func:`~fugaku_gpt.training.startup.agree_on_kernels`).

    Our own kernels, or oneDNN, compute them if they are faster on every rank. The first rank of each node reads the
    verdict from the file beside the library. Where no rank of a stamp has one, the first rank of that stamp measures,
    for a few seconds at most, and writes the file; the others wait. It measures in its own process, since a process
    with MPI cannot fork on every machine, and another process would import PyTorch once more.

    Args:
        earlier: what an earlier start of this run agreed on, which then holds, unless ``node.compiled_products`` says
            otherwise; empty without one.
    """
    dtypes = product_dtypes(config)
    if not dtypes:
        return
    facts = _facts_of_rank(config, world.on_this_node("node"), earlier)
    rank_facts = _gather(world, facts)
    measuring: List[int] = world.broadcast_json(_measuring_ranks(rank_facts))
    if measuring:
        if world.rank in measuring:
            facts.update(_measure(config, facts["missing"]))
        rank_facts = _gather(world, facts)
    agreed: Dict[str, Any] = world.broadcast_json(_decide(config, rank_facts, earlier) if rank_facts else None)
    for dtype in dtypes:
        ops.choose_native_matmul(agreed["compiled"], dtype)
    if torch.float32 in dtypes:
        ops.choose_onednn_matmul(agreed["onednn"])
    RANK_CONSENSUS.products_reason = agreed["reason"]


def product_dtypes(config: RunConfig) -> Tuple[torch.dtype, ...]:
    """The types of a run's products for which there are other ways than PyTorch's, that of most of them first; what is
    not computed in 16 bits is computed in float32."""
    dtype = config.training.dtype
    own = (getattr(torch, dtype),) if dtype in ("float32", "bfloat16") else ()
    return own + ((torch.float32,) if dtype != "float32" and has_float32_matmul(config) else ())


def has_float32_matmul(config: RunConfig, in_float32: Optional[Sequence[str]] = None) -> bool:
    """Whether a run multiplies matrices in float32.

    Args:
        in_float32: the operations that it computes in float32; default: those that are agreed on.
    """
    dtype = config.training.dtype
    operations = compat.float32_operations(getattr(torch, dtype)) if in_float32 is None else in_float32
    return dtype == "float32" or not {"linear", "matmul"}.isdisjoint(operations)


def describe_products(precision: Mapping[str, Any], reason: str) -> List[str]:
    """The lines of the start-up report on how layers' products are computed, and why.

    Args:
        precision: what :func:`~fugaku_gpt.training.startup.kernels_in_use` returns.
        reason: why, as the ranks agreed; empty if there is no other way than PyTorch's.
    """
    lines = []
    if precision["compiled_products"]:
        lines.append(f"products of layers that are large enough too: {reason}")
    if precision["onednn"]:
        which = "other products of layers" if precision["compiled_products"] else "products of layers"
        lines.append(f"{which} by oneDNN" + ("" if precision["compiled_products"] else f": {reason}"))
    return lines or ([f"products of layers by PyTorch: {reason}"] if reason else [])


def _is_agreed(dtypes: Sequence[torch.dtype]) -> bool:
    is_complete = torch.float32 not in dtypes or RANK_CONSENSUS.products_by_onednn is not None
    return is_complete and all(dtype in RANK_CONSENSUS.compiled_products for dtype in dtypes)


def _facts_of_rank(config: RunConfig, node: Communicator, earlier: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the ways that this rank has, and the verdict for its stamp, or why none counts (``missing``); collective
    over the ranks of a node, the first of which reads library and verdict."""
    dtypes = product_dtypes(config)
    facts: Dict[str, Any] = {
        "host": socket.gethostname(),
        "has_compiled": ops.uses_native_kernels() and ops.supports_native_matmul(dtypes[0]),
        "has_onednn": torch.float32 in dtypes and ops.has_onednn(),
        "stamp": "",
        "missing": "",
        "is_agreed": not earlier and _is_agreed(dtypes),
        **_verdict_facts(None, ""),
    }
    needs_verdict = not facts["is_agreed"] and _needs_verdict(config, facts, earlier)
    on_node = node.gather_json({"needs_verdict": needs_verdict}) or []
    is_read = any(of_rank["needs_verdict"] for of_rank in on_node)
    recorded: Dict[str, Any] = node.broadcast_json(_recorded_facts(config) if is_read else {})
    if facts["is_agreed"]:  # by an earlier call in this process, which other ranks may not have had
        facts["is_compiled_faster"] = RANK_CONSENSUS.compiled_products[dtypes[0]]
        facts["is_onednn_faster"] = bool(RANK_CONSENSUS.products_by_onednn)
        facts["text"] = RANK_CONSENSUS.products_reason
    elif needs_verdict:
        facts.update(recorded)
    return facts


def _recorded_facts(config: RunConfig) -> Dict[str, Any]:
    """The stamp in force and the recorded verdict for it, or why none counts; without a stamp if it cannot be known."""
    threads = torch.get_num_threads()
    try:
        stamp = hashlib.sha256(repr((current_stamp(), threads)).encode()).hexdigest()[:16]
        verdict, missing = recorded_verdict(_measured_dtype(config), threads)
    except OSError as error:  # the library cannot be read
        return _verdict_facts(None, f"the verdict on them cannot be looked up: {error}")
    return {"stamp": stamp, "missing": missing, **_verdict_facts(verdict, "")}


def _needs_verdict(config: RunConfig, facts: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    decides_compiled = facts["has_compiled"] and config.node.compiled_products == _AUTO and not earlier
    return decides_compiled or (facts["has_onednn"] and not _has_earlier_onednn(config, earlier))


def _measured_dtype(config: RunConfig) -> str:
    return "bfloat16" if config.training.dtype == "bfloat16" else "float32"


def _has_earlier_onednn(config: RunConfig, earlier: Mapping[str, Any]) -> bool:
    """Whether an earlier start has chosen for or against oneDNN: it has if it had products in float32."""
    return bool(earlier) and has_float32_matmul(config, earlier["in_float32"])


def _verdict_facts(verdict: Optional[ProductVerdict], remark: str) -> Dict[str, Any]:
    if verdict is None:
        return {"is_compiled_faster": False, "is_onednn_faster": False, "text": remark}
    text = verdict.describe()
    if verdict.compiled_speedup is not None and not verdict.uses_compiled:
        text += f"; ours are used from {MIN_SPEEDUP:g} on"
    text += f"; {remark}" if remark else ""
    return {"is_compiled_faster": verdict.uses_compiled, "is_onednn_faster": verdict.uses_onednn, "text": text}


def _measuring_ranks(rank_facts: Sequence[Mapping[str, Any]]) -> List[int]:
    """The first rank with each stamp, if no rank with that stamp has a verdict."""
    first_ranks: Dict[str, int] = {}
    for rank, facts in enumerate(rank_facts):
        if facts["stamp"] and facts["missing"]:
            first_ranks.setdefault(facts["stamp"], rank)
    recorded = {facts["stamp"] for facts in rank_facts if not facts["missing"]}
    return [rank for stamp, rank in first_ranks.items() if stamp not in recorded]


def _measure(config: RunConfig, missing: str) -> Dict[str, Any]:
    try:
        verdict, problem = measure_at_start(_measured_dtype(config), torch.get_num_threads())
    except (RuntimeError, OSError, MemoryError) as error:  # such as memory that PyTorch, or mmap, does not get
        reason = str(error) or type(error).__name__
        return _verdict_facts(None, f"they could not be measured: {reason.splitlines()[0]}")
    remark = f"at this start, since {missing}" + (f"; {problem}" if problem else "")
    return {**_verdict_facts(verdict, remark), "missing": ""}


def _gather(world: Communicator, facts: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The facts of all ranks on rank 0, each with the verdict of the first rank of its stamp that has one; empty on the
    others."""
    rank_facts = world.gather_json(facts) or []
    verdicts: Dict[str, Dict[str, Any]] = {}
    for local_facts in rank_facts:
        if local_facts["stamp"] and not local_facts["missing"]:
            verdict = {name: local_facts[name] for name in ("is_compiled_faster", "is_onednn_faster", "text")}
            verdicts.setdefault(local_facts["stamp"], verdict)
    return [{**local_facts, **verdicts.get(local_facts["stamp"], {})} for local_facts in rank_facts]


def _decide(config: RunConfig, rank_facts: Sequence[Mapping[str, Any]], earlier: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the way that all ranks use, and why; for rank 0."""
    votes = [_wants_compiled(config, facts, earlier) for facts in rank_facts]
    compiled = all(votes)
    if _has_earlier_onednn(config, earlier):
        onednn = bool(earlier.get("onednn", False)) and all(facts["has_onednn"] for facts in rank_facts)
    else:
        onednn = all(facts["has_onednn"] and facts["is_onednn_faster"] for facts in rank_facts)
    if all(facts["is_agreed"] for facts in rank_facts):
        return {"compiled": compiled, "onednn": onednn, "reason": rank_facts[0]["text"]}
    reason = _reason(config, rank_facts, earlier, votes)
    if earlier and bool(earlier.get("compiled_products", False)) != compiled:
        before = "PyTorch's or oneDNN's" if compiled else "ours"
        reason += f"; they were {before} in the start that this run resumes from: results are rounded differently"
    return {"compiled": compiled, "onednn": onednn, "reason": reason}


def _wants_compiled(config: RunConfig, facts: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    if config.node.compiled_products == _OFF or not facts["has_compiled"]:
        return False
    if config.node.compiled_products == _ON and not facts["is_agreed"]:
        return True
    return bool(earlier.get("compiled_products", False)) if earlier else bool(facts["is_compiled_faster"])


def _reason(
    config: RunConfig, rank_facts: Sequence[Mapping[str, Any]], earlier: Mapping[str, Any], votes: Sequence[bool]
) -> str:
    mode = config.node.compiled_products
    rank = votes.index(False) if False in votes else 0
    facts = rank_facts[rank]
    if mode == _OFF or (mode == _ON and all(votes)):
        return f"node.compiled_products is {mode}" + (f"; {facts['text']}" if facts["text"] else "")
    where = f" on rank {rank} ({facts['host']})" if len(rank_facts) > 1 else ""
    is_missed = mode == _ON or bool(earlier.get("compiled_products")) or any(f["has_compiled"] for f in rank_facts)
    if not facts["has_compiled"] and is_missed:
        asked = "node.compiled_products is on, but " if mode == _ON else ""
        return f"{asked}our kernels have no products in {_measured_dtype(config)}{where}"
    if earlier:
        return "as in the start that this run resumes from" if facts["has_compiled"] or facts["has_onednn"] else ""
    if not facts["has_compiled"]:
        return str(facts["text"])
    return f"{facts['text']}{where if len(set(votes)) > 1 else ''}"
