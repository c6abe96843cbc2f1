"""Names the features that are switched on in a run, by which the coverage of test matrices is measured."""

from __future__ import annotations

from typing import Callable, Dict, FrozenSet

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import LR_SCHEDULES, PIPELINE_SCHEDULES, LayoutConfig

FEATURES: Dict[str, Callable[[RunConfig], bool]] = {
    "dp": lambda run: run.layout.dp > 1,
    "tp": lambda run: run.layout.tp > 1,
    "pp": lambda run: run.layout.pp > 1,
    "order": lambda run: run.layout.order != LayoutConfig().order and _axes(run.layout) > 1,
    "zero": lambda run: run.layout.zero == 1 and run.layout.dp > 1,
    "sequence parallel": lambda run: run.layout.sequence_parallel and run.layout.tp > 1,
    "hierarchical sum": lambda run: run.layout.hierarchical_sum and run.layout.dp > 3,  # two nodes of two
    "uneven split": lambda run: len(set(run.layout.split)) > 1,
    "selective": lambda run: run.training.recompute == "selective",
    "full": lambda run: run.training.recompute == "full",
    "some layers": lambda run: run.training.recompute_layers is not None,
    "budget": lambda run: run.training.recompute_budget_mib is not None,
    "bfloat16": lambda run: run.training.dtype == "bfloat16",
    "float16": lambda run: run.training.dtype == "float16",
    "bfloat16 sums": lambda run: run.training.gradient_dtype == "bfloat16" and run.layout.dp > 1,
    "batch ramp": lambda run: (run.training.ramp_start or run.training.global_batch) < run.training.global_batch,
    "length ramp": lambda run: (run.training.seq_ramp_start or run.model.seq_len) < run.model.seq_len,
    "samples left out": lambda run: bool(run.training.skip_samples),
    "steps left out": lambda run: run.training.non_finite == "skip",
    "rollback": lambda run: run.training.rollback_every is not None,
    "documents": lambda run: run.data.document_mask,
    "rmsnorm": lambda run: run.model.norm == "rmsnorm",
    "swiglu": lambda run: run.model.mlp == "swiglu",
    "rope": lambda run: run.model.positions == "rope",
    "shared keys": lambda run: run.model.kv_head_count < run.model.heads,
    "copied keys": lambda run: run.kv_copies > 1,
    "own head": lambda run: not run.model.tied_embeddings,
    "no biases": lambda run: run.model.biases == "none",
    "biases of qkv": lambda run: run.model.biases == "qkv",
    "norms of heads": lambda run: run.model.qk_norm,
    "wide heads": lambda run: run.model.query_width != run.model.hidden,
}


def _schedule(name: str) -> Callable[[RunConfig], bool]:
    return lambda run: run.layout.schedule == name and run.layout.pp * run.layout.chunks > 1


def _learning_rate(name: str) -> Callable[[RunConfig], bool]:
    return lambda run: run.training.lr_schedule == name


FEATURES.update({name: _schedule(name) for name in PIPELINE_SCHEDULES})
FEATURES.update({name: _learning_rate(name) for name in LR_SCHEDULES})


def features_of(run: RunConfig) -> FrozenSet[str]:
    """Names of the ``FEATURES`` that a run has."""
    return frozenset(name for name, has in FEATURES.items() if has(run))


def _axes(layout: LayoutConfig) -> int:
    return sum(size > 1 for size in (layout.dp, layout.tp, layout.pp))
