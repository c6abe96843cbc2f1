"""The trainings with a golden curve, the layouts that must draw it too, and the tolerance of every build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

from fugaku_gpt.config import RunConfig
from tests.mpi.cases import config_of

VOCABULARY = 32  # see tests.support.corpus.letters
RUN = (
    f"model.vocab_size={VOCABULARY}",
    "data.split=[8, 2, 0]",
    "training.iterations=8",
    "training.warmup_iterations=2",
    "training.decay_iterations=8",
    "training.lr=5e-3",
)
# AdamW divides mere rounding errors by its epsilon: see tests/mpi/test_parity.py
LARGE_EPS = "training.eps=1e-5"
ROUNDING = {"loss": 1e-12, "norm": 1e-11}
OF_FLOAT64 = "float64 rounds to 1e-16; builds and layouts were seen 3e-16 apart"


@dataclass(frozen=True)
class Case:
    """A training with a golden curve.

    Attributes:
        about: the features that are switched on.
        training: settings as :func:`tests.mpi.cases.config_of` abbreviates them.
        settings: further settings, as ``key=value``.
        layouts: layouts of ranks, abbreviated alike; each draws the curve of one rank.
        tolerance: largest relative distances from the golden curve: of a loss (that of validation too), and of a norm.
        reason: the reason for this tolerance.
        in_float32: operations computed in float32 even if this build has kernels for their 16-bit type; None: only
            those for which it has no kernel.
    """

    about: str
    training: str
    settings: Tuple[str, ...]
    layouts: Tuple[str, ...]
    tolerance: Dict[str, float]
    reason: str
    in_float32: Optional[Tuple[str, ...]] = None

    def config(self, layout: str = "", *more: str) -> RunConfig:
        """The run's configuration in a layout, with further ``key=value`` settings."""
        return config_of(f"{self.training} {layout}", *RUN, *self.settings, *more)


CASES: Dict[str, Case] = {
    "float64": Case(
        "both dropouts, LayerNorm of the embedding, clipping, weight decay, cosine",
        "",
        ("training.dtype=float64", "training.weight_decay=0.1"),
        (
            "dp=2 zero full",
            "tp=2 sp selective micro=2",
            "pp=2 zero-bubble",
            "dp=2 tp=2 zero sp full micro=2",
            "dp=2 tp=2 pp=2 zero sp interleaved selective micro=2",
        ),
        ROUNDING,
        OF_FLOAT64,
    ),
    "plain": Case(
        "no dropout, no LayerNorm of the embedding, no clipping, tanh GELU, a straight line of learning rates",
        "linear",
        (
            "training.dtype=float64",
            "model.dropout=0",
            "model.attention_dropout=0",
            "model.embedding_layernorm=false",
            "model.gelu=tanh",
            "training.clip_grad=0",
        ),
        ("tp=2 micro=2", "dp=2 pp=2 zero gpipe split=[3,1]"),
        ROUNDING,
        OF_FLOAT64,
    ),
    "ramps": Case(
        "batches and sequences that grow, samples that are left out, warm-up-stable-decay",
        "batch-ramp length-ramp leave-samples wsd",
        ("training.dtype=float64",),
        ("dp=2 zero", "tp=2 pp=2 sp interleaved"),
        ROUNDING,
        OF_FLOAT64,
    ),
    "llama-float64": Case(
        "RMSNorm, SwiGLU, rotary positions, heads that share keys, norms of these, output weights of its own; dropout",
        "llama",
        ("training.dtype=float64", "training.weight_decay=0.1", "model.embedding_layernorm=false"),
        ("tp=2 sp selective micro=2", "dp=2 pp=2 zero interleaved full"),
        ROUNDING,
        OF_FLOAT64,
    ),
    "float32": Case(
        "both dropouts, LayerNorm of the embedding, clipping, weight decay, cosine",
        "",
        (LARGE_EPS, "training.weight_decay=0.1"),
        (
            "dp=2 zero selective",
            "tp=2 sp full micro=2",
            "pp=2 interleaved micro=2",
            "dp=2 tp=2 pp=2 zero sp gpipe full micro=2",
        ),
        {"loss": 1e-6, "norm": 1e-5},
        "float32 rounds to 6e-8; builds and layouts were seen 3e-8 apart in losses and 6e-8 in norms",
    ),
    "llama": Case(
        "RMSNorm, SwiGLU, rotary positions, heads that share keys, norms of these, output weights of its own; dropout",
        "llama",
        (LARGE_EPS, "training.weight_decay=0.1", "model.embedding_layernorm=false"),
        ("tp=2 sp full micro=2",),
        {"loss": 1e-6, "norm": 3e-5},
        "float32 rounds to 6e-8; builds were seen 6e-8 apart in losses and 5e-6 in norms",
    ),
    "bfloat16": Case(
        "both dropouts, float32 masters, cosine",
        "bfloat16",
        (LARGE_EPS,),
        ("dp=2 zero", "tp=2 sp selective micro=2", "dp=2 tp=2 pp=2 zero sp micro=2"),
        {"loss": 6e-4, "norm": 2e-3},
        "bfloat16 rounds to 4e-3, and builds compute other operations in float32 for lack of a kernel; seen 1.2e-4 "
        "apart in losses and 4e-4 in norms",
    ),
    # without a norm of the embedding, this training carries roundings of 16 bits to 7e-2 of a norm, also on one rank
    "llama-bfloat16": Case(
        "RMSNorm, of the embedding too, SwiGLU, rotary positions, heads that share keys, norms of these, untied; "
        "dropout, float32 masters",
        "llama bfloat16",
        (LARGE_EPS, "training.weight_decay=0.1"),
        ("dp=2 zero", "tp=2 sp selective micro=2", "dp=2 tp=2 pp=2 zero sp micro=2"),
        {"loss": 6e-4, "norm": 2e-3},
        "as of bfloat16; builds were seen 6e-5 apart in losses and 3e-4 in norms",
    ),
    # a gradient overflows sooner where its product is rounded to float16 before it is added to the sum
    "float16": Case(
        "both dropouts, float32 masters, a loss scale that overflows, cosine; products in float32",
        "float16",
        (LARGE_EPS, "training.loss_scale=131072", "training.loss_scale_window=3"),
        ("dp=2 zero", "pp=2 interleaved full"),
        {"loss": 1e-4, "norm": 5e-4},
        "float16 rounds to 5e-4, and builds compute other operations in float32 for lack of a kernel; seen 3e-6 apart "
        "in losses and 3e-5 in norms",
        ("linear", "matmul", "bmm", "baddbmm"),
    ),
    "float16-products": Case(
        "the same with a loss scale that never overflows; whatever this build has a kernel for in float16",
        "float16",
        (LARGE_EPS, "training.loss_scale=1024", "training.loss_scale_window=3"),
        ("dp=2 zero",),
        {"loss": 1e-4, "norm": 5e-4},
        "as of float16; with all operations in float16 and in float32 seen 2e-6 apart in losses and 2e-5 in norms",
    ),
    "small": Case(
        "a model of which a checkpoint takes a few KB",
        "",
        (LARGE_EPS, "model.layers=2", "model.hidden=4", "model.heads=2", "model.seq_len=16", "model.vocab_multiple=1"),
        (),
        {"loss": 1e-6, "norm": 1e-5},
        "float32 rounds to 6e-8; seen 1e-8 apart in losses and 4e-7 in norms",
    ),
}
SAVED = 4  # iterations after which checkpoints are written; the curve continues to the last iteration
# by two ranks, for both ways of sharding state: across the parameters of replicas, and through tensors
SAVED_BY = "dp=2 zero"
READ_BY = ("dp=2 zero", "tp=2 sp")
FIXTURE = "small"  # the case of the checkpoints in tests/golden/checkpoints
FIXTURES = ("torch-1.7.1", "torch-1.10.2", "torch-2.13.0")  # the builds that have written one each
