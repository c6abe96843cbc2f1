"""The best layouts of a search, looked at closely: intervals, parts, memory in both trainers, waste and rank maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Set, Tuple

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.formulas.flops import notes_flops, tflops_per_node
from fugaku_gpt.planner.run_time import beyond_the_rows
from fugaku_gpt.planner.search.rank_map import RankMap, Torus, rank_map, torus_of
from fugaku_gpt.planner.search.topology import SHAPE, Found, Wanted, config_of, rows_of
from fugaku_gpt.planner.search.waste import waste_of
from fugaku_gpt.planner.tables.predict import Prediction, predict_rows
from fugaku_gpt.planner.tables.seconds import PARTS

_MOST_JUDGED = 2000  # layouts that do not fit this trainer, before the search for those that do is given up


@dataclass(frozen=True)
class Best:
    """One of the best layouts.

    Args:
        tflops: of a node, by the notes' formula.
        ours: bytes of the fullest node that this trainer needs; None on machines that it does not run on.
        waste: lines; see :func:`fugaku_gpt.planner.search.waste.waste_of`.
        torus: its box of nodes, and ``ranks`` the map of its ranks; None where the job gets none.
    """

    config: RunConfig
    prediction: Prediction
    tflops: float
    ours: Optional[int]
    waste: Tuple[str, ...]
    torus: Optional[Torus]
    ranks: Optional[RankMap]


def best_of(
    wanted: Wanted,
    found: Found,
    top: int,
    variants: bool = False,
    judge: Optional[Callable[[RunConfig], Tuple[int, bool]]] = None,
) -> Tuple[List[Best], int]:
    """The fastest layouts that fit this trainer too, and how many faster ones were looked at and do not.

    Args:
        variants: take all, not only the fastest of each (nodes, ranks per node, dp, tp, pp, global batch).
        judge: bytes of the fullest node in this trainer, and whether they fit; None where it does not run on the
            machine.

    Raises:
        UsageError: a layout does not go with the run's other settings.
    """
    chosen: List[Tuple[RunConfig, Optional[int]]] = []
    shapes: Set[Tuple[int, ...]] = set()
    dropped = 0
    for place in found.order:
        shape = tuple(int(found.columns[name][place]) for name in SHAPE)
        if shape in shapes and not variants:
            continue
        config = config_of(wanted, found.columns, int(place))
        ours, fits = judge(config) if judge is not None else (None, True)
        if fits:
            chosen.append((config, ours))
            shapes.add(shape)
        else:
            dropped += 1
        if len(chosen) == top or dropped == _MOST_JUDGED:
            break
    configs = [config for config, _ in chosen]
    predictions = predict_rows(wanted.machine, rows_of(wanted, configs), list(map(beyond_the_rows, configs)))
    best = [_looked_at(wanted, config, one, ours) for (config, ours), one in zip(chosen, predictions)]
    return best, dropped


def _looked_at(wanted: Wanted, config: RunConfig, prediction: Prediction, ours: Optional[int]) -> Best:
    row = prediction.row
    torus = torus_of(row.nodes, config.job.shape) if on_torus(wanted) else None
    ranks = rank_map(torus, config.layout, row.ranks_per_node) if torus is not None else None
    flops = notes_flops(config.model, row.global_batch, row.vocab, row.recompute)
    return Best(
        config=config,
        prediction=prediction,
        tflops=tflops_per_node(flops, prediction.seconds.value, row.nodes),
        ours=ours,
        waste=tuple(waste_of(config, wanted.machine, row, torus, ranks)),
        torus=torus,
        ranks=ranks,
    )


def on_torus(wanted: Wanted) -> bool:
    """Whether jobs ask for boxes of Fugaku's torus."""
    return wanted.hardware.startswith("A64FX") and wanted.config.job.scheduler == "pjm"


def compared(first: Prediction, second: Prediction) -> List[Dict[str, object]]:
    """Seconds of each part of two layouts and their difference, the whole last."""
    lines = [(name, first.parts[name].value, second.parts[name].value) for name in PARTS]
    lines.append(("iteration", first.seconds.value, second.seconds.value))
    return [{"part": name, "first": one, "second": other, "difference": one - other} for name, one, other in lines]


def why_first(first: Prediction, second: Prediction) -> str:
    """In a sentence, why the first is faster: where it gains, where it loses, and how sure that is.

    Where global batches differ, the comparison is for a sequence.
    """
    batches = [one.row.global_batch for one in (first, second)]
    whole = first.seconds.value / batches[0], second.seconds.value / batches[1]
    gains = [(second.parts[name].value / batches[1] - first.parts[name].value / batches[0], name) for name in PARTS]
    gains.sort(reverse=True)
    told = [(gain, f"{name} {gain * batches[0]:+.3g} s") for gain, name in gains if abs(gain) > 0.005 * whole[0]]
    ahead = [text for gain, text in told if gain > 0]
    behind = [text for gain, text in reversed(told) if gain < 0]
    less = 1 - whole[0] / whole[1]
    text = f"1 takes {less:.1%} less than 2: gains in {', '.join(ahead) or 'no single part'}"
    text += f"; loses in {', '.join(behind)}" if behind else ""
    if first.seconds.high / batches[0] > second.seconds.low / batches[1]:
        text += "; their 80 % intervals overlap: measure both"
    return text
