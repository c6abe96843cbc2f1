"""Random valid runs over every feature of a layout and of training, for ``soak.py``. No MPI here."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import (
    BIASES,
    GRID_ORDERS,
    LR_SCHEDULES,
    MLPS,
    NORMS,
    PIPELINE_SCHEDULES,
    POSITIONS,
    RECOMPUTE,
    SIXTEEN_BIT_DTYPES,
)
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.stages import chunks_of
from fugaku_gpt.model import recompute_of
from tests.support.tiny import tiny_config

LAYERS = 8
SEQ_LEN = 24
# heads, width and MLP divide by 2, 3, 4 and 6; a pipeline may have up to eight stages
MODEL = (f"model.layers={LAYERS}", "model.hidden=48", "model.heads=12", f"model.seq_len={SEQ_LEN}")
LARGEST_BATCH = 32  # sequences, or one micro-batch of each replica
_EXAMPLES_PER_LAYOUT = 10  # hypothesis likes to change one thing of what it has drawn before
_KV_HEADS = (1, 2, 3, 4, 6, 12)  # the divisors of the heads
_NODE, _SPOILT = "node_replicas", "spoilt_rank"


@dataclass(frozen=True)
class Drawn:
    """A random run.

    Attributes:
        settings: ``key=value`` of the config.
        node_replicas: how many replicas count as sharing a node; None: all ranks do.
        spoilt_rank: rank whose gradients are made NaN in the second iteration; None: no rank's.
    """

    settings: Tuple[str, ...]
    node_replicas: Optional[int] = None
    spoilt_rank: Optional[int] = None

    @property
    def config(self) -> RunConfig:
        """The run's config.

        Raises:
            UsageError: the run is not valid.
        """
        return tiny_config(*MODEL, *self.settings)

    @property
    def reference(self) -> "Drawn":
        """The same training on one rank. Wide types need not be cut into the same micro-batches."""
        config = self.config
        wide = config.training.dtype not in SIXTEEN_BIT_DTYPES
        micro_batch = config.training.micro_batch * (config.layout.dp if wide else 1)
        layout_only = ("layout.", "training.recompute", "training.gradient_dtype", "training.bucket", "training.micro")
        training_settings = [setting for setting in self.settings if not setting.startswith(layout_only)]
        return Drawn(
            (*training_settings, f"training.micro_batch={micro_batch}"), None, None if self.spoilt_rank is None else 0
        )

    @property
    def arguments(self) -> List[str]:
        """Arguments of which :func:`from_arguments` makes the run."""
        options = [(_NODE, self.node_replicas), (_SPOILT, self.spoilt_rank)]
        return [*self.settings, *(f"{name}={value}" for name, value in options if value is not None)]


def from_arguments(arguments: Sequence[str]) -> Drawn:
    """Returns the run that has these :attr:`Drawn.arguments`."""
    options: Dict[str, int] = {}
    run_settings = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in (_NODE, _SPOILT):
            options[name] = int(value)
        else:
            run_settings.append(argument)
    return Drawn(tuple(run_settings), options.get(_NODE), options.get(_SPOILT))


def draw_layouts(ranks: int, count: int, number: int) -> List[Drawn]:
    """Draws ``count`` different valid runs on ``ranks`` ranks; the same ones for the same ``number``."""
    distinct: Dict[Drawn, None] = {}

    @seed(number)
    @settings(
        max_examples=_EXAMPLES_PER_LAYOUT * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(layouts(ranks))
    def collect(drawn: Drawn) -> None:
        distinct[drawn] = None

    collect()
    assert len(distinct) >= count, f"{len(distinct)} different layouts on {ranks} ranks where {count} were wanted"
    return random.Random(number).sample(list(distinct), count)


@st.composite
def layouts(draw: st.DrawFn, ranks: int) -> Drawn:
    """Draws a valid run on ``ranks`` ranks: what the configuration or the recompute budget refuses is rejected."""
    grid = draw(st.sampled_from(_grids(ranks)))
    chosen: Dict[str, object] = dict(zip(("layout.dp", "layout.tp", "layout.pp"), grid))
    chosen.update(draw(_cuts(*grid)))
    dtype = draw(st.sampled_from(("float64", "float64", "float64", "float32", *SIXTEEN_BIT_DTYPES)))
    chosen["training.dtype"] = dtype
    chosen.update(draw(_batches(grid[0])))
    chosen.update(draw(_recompute()))
    chosen.update(draw(_training(dtype)))
    chosen.update(draw(_decoder(grid[1])))
    drawn = Drawn(
        tuple(f"{key}={value}" for key, value in chosen.items()),
        draw(st.sampled_from((None, 2, 3, 4))) if chosen["layout.hierarchical_sum"] else None,
        draw(st.none() | st.integers(0, ranks - 1)) if chosen["training.non_finite"] == "skip" else None,
    )
    try:
        config = drawn.config
        recompute_of(config, chunks_of(config))
    except UsageError:
        reject()
    return drawn


def _grids(ranks: int) -> List[Tuple[int, int, int]]:
    """Returns (dp, tp, pp) of all grids; those that cut in more than one way are repeated, to be drawn more often."""
    sizes = range(1, ranks + 1)
    grids = [(dp, tp, pp) for dp in sizes for tp in sizes for pp in sizes if dp * tp * pp == ranks]
    return [grid for grid in grids for _ in range(sum(size > 1 for size in grid) ** 2 or 1)]


@st.composite
def _cuts(draw: st.DrawFn, dp: int, tp: int, pp: int) -> Dict[str, object]:
    schedule = draw(st.sampled_from(PIPELINE_SCHEDULES))
    chunks = draw(st.integers(1, LAYERS // pp)) if schedule == "interleaved" else 1
    chosen: Dict[str, object] = {
        "layout.order": draw(st.sampled_from(GRID_ORDERS)),
        "layout.schedule": schedule,
        "layout.chunks": chunks,
        "layout.zero": draw(st.sampled_from((0, 1))),
        "layout.hierarchical_sum": draw(st.booleans()),
        "layout.sequence_parallel": draw(st.booleans()),
        "training.bucket_mib": draw(st.sampled_from((0.005, 0.02, 1))),
        "training.buckets_at_once": draw(st.sampled_from((1, 2, 50))),
        "training.progress_ms": draw(st.sampled_from((0, 0.001, 2))),
    }
    if draw(st.booleans()):
        pieces = pp * chunks
        cuts = draw(st.lists(st.integers(1, LAYERS), min_size=pieces - 1, max_size=pieces - 1, unique=True))
        ends = [0, *sorted(cuts), LAYERS]
        chosen["layout.split"] = [end - start for start, end in zip(ends, ends[1:])]
    return chosen


@st.composite
def _batches(draw: st.DrawFn, dp: int) -> Dict[str, object]:
    micro_batch = draw(st.sampled_from((1, 2, 3)))
    share = micro_batch * dp
    count = draw(st.integers(1, max(1, min(10, LARGEST_BATCH // share))))
    chosen: Dict[str, object] = {"training.micro_batch": micro_batch, "training.global_batch": share * count}
    if draw(st.booleans()):
        start = draw(st.integers(1, count))
        chosen["training.ramp_start"] = share * start
        chosen["training.ramp_increment"] = share * draw(st.integers(1, max(1, count - start)))
        chosen["training.ramp_samples"] = draw(st.integers(1, 2 * share * count))
    if draw(st.booleans()):
        start = draw(st.integers(1, SEQ_LEN))
        chosen["training.seq_ramp_start"] = start
        chosen["training.seq_ramp_increment"] = draw(st.sampled_from((SEQ_LEN - start or 1, start, 1, 2)))
        chosen["training.seq_ramp_iterations"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        first = draw(st.integers(0, 40))
        chosen["training.skip_samples"] = f"[{first}-{first + draw(st.integers(0, 9))}, {draw(st.integers(0, 60))}]"
    return chosen


@st.composite
def _recompute(draw: st.DrawFn) -> Dict[str, object]:
    chosen: Dict[str, object] = {"training.recompute": draw(st.sampled_from(RECOMPUTE))}
    if chosen["training.recompute"] == "none":
        return chosen
    how = draw(st.sampled_from(("all", "layers", "budget")))
    if how == "layers":
        chosen["training.recompute_layers"] = draw(st.integers(0, 3))
    elif how == "budget":
        chosen["training.recompute_budget_mib"] = draw(st.sampled_from((0.2, 0.4, 0.8, 1.6, 3.2)))
    return chosen


@st.composite
def _training(draw: st.DrawFn, dtype: str) -> Dict[str, object]:
    chosen: Dict[str, object] = {
        "model.dropout": draw(st.sampled_from((0, 0.1))),
        "model.attention_dropout": draw(st.sampled_from((0, 0.1))),
        "model.embedding_layernorm": draw(st.booleans()),
        "training.lr_schedule": draw(st.sampled_from(LR_SCHEDULES)),
        "training.iterations": 4,
        "training.warmup_iterations": draw(st.sampled_from((0, 1, 2))),
        "training.clip_grad": draw(st.sampled_from((0, 0.5))),
        "training.non_finite": draw(st.sampled_from(("stop", "skip"))),
    }
    chosen.update(draw(_documents()))
    if dtype != "float64" and draw(st.booleans()):
        chosen["training.gradient_dtype"] = "bfloat16"
    if dtype == "float16":  # the largest one overflows
        chosen["training.loss_scale"] = draw(st.sampled_from((256, 65536, 2**26)))
        chosen["training.loss_scale_window"] = draw(st.sampled_from((1, 1000)))
    if dtype == "float64" and draw(st.booleans()):  # some losses are spikes by this; roundings do not decide
        chosen["training.rollback_every"] = draw(st.sampled_from((1, 2)))
        chosen["training.spike_window"] = 2
        chosen["training.spike_ratio"] = 1.001
    return chosen


@st.composite
def _documents(draw: st.DrawFn) -> Dict[str, object]:
    """Documents apart, in every third run, with and without what that allows."""
    if draw(st.integers(0, 2)):
        return {}
    return {
        "data.document_mask": True,
        "data.reset_positions": draw(st.booleans()),
        "data.loss_across_documents": draw(st.booleans()),
    }


@st.composite
def _decoder(draw: st.DrawFn, tp: int) -> Dict[str, object]:
    """The fields in which a Llama differs from a GPT-2, each by itself; half of all runs are of a GPT-2."""
    if draw(st.booleans()):
        return {}
    return {
        "model.norm": draw(st.sampled_from(NORMS)),
        "model.mlp": draw(st.sampled_from(MLPS)),
        "model.positions": draw(st.sampled_from(POSITIONS)),
        "model.kv_heads": draw(st.sampled_from([heads for heads in _KV_HEADS if heads % tp == 0 or tp % heads == 0])),
        "model.head_dim": draw(st.sampled_from((4, 6))),
        "model.tied_embeddings": draw(st.booleans()),
        "model.biases": draw(st.sampled_from(BIASES)),
        "model.qk_norm": draw(st.booleans()),
    }
