"""The best layouts of a search in detail: intervals, components, memory in both trainers, waste and rank maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Set, Tuple

from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.formulas.flops import notes_flops, tflops_per_node
from fugaku_gpt.machine.constants import FUGAKU_HARDWARE
from fugaku_gpt.planner.run_time import unmodelled_settings
from fugaku_gpt.planner.search.rank_map import NodeBox, RankMap, choose_node_box, choose_rank_map
from fugaku_gpt.planner.search.topology import SHAPE_COLUMNS, CostedLayouts, SearchSpace, layout_rows, layout_run
from fugaku_gpt.planner.search.waste import find_waste
from fugaku_gpt.planner.tables.predict import Prediction, predict_rows
from fugaku_gpt.planner.tables.seconds import TIME_COMPONENTS

_MAX_REJECTED = 2000  # layouts that do not fit this trainer, after which the search for those that do fit ends


@dataclass(frozen=True)
class RankedLayout:
    """One of the best layouts.

    Args:
        tflops: TFLOP/s of a node, by the notes' formula.
        trainer_bytes: bytes of the fullest node in this trainer; None on machines that it does not run on.
        waste: one line for each waste; see :func:`fugaku_gpt.planner.search.waste.find_waste`.
        node_box, rank_map: the box of nodes, and the map of ranks to them; None if the job asks for none.
    """

    config: RunConfig
    prediction: Prediction
    tflops: float
    trainer_bytes: Optional[int]
    waste: Tuple[str, ...]
    node_box: Optional[NodeBox]
    rank_map: Optional[RankMap]


def best_layouts(
    space: SearchSpace,
    layouts: CostedLayouts,
    top: int,
    variants: bool = False,
    check_memory: Optional[Callable[[RunConfig], Tuple[int, bool]]] = None,
) -> Tuple[List[RankedLayout], int]:
    """The fastest layouts that also fit in this trainer, and the number of faster ones that do not.

    Args:
        variants: list all layouts, not only the fastest of each (nodes, ranks per node, dp, tp, pp, global batch).
        check_memory: returns the bytes of the fullest node in this trainer, and whether they fit; None if the trainer
            does not run on the machine.

    Raises:
        UsageError: a layout contradicts other settings of the run.
    """
    chosen: List[Tuple[RunConfig, Optional[int]]] = []
    shapes: Set[Tuple[int, ...]] = set()
    dropped = 0
    for index in layouts.ranking:
        shape = tuple(int(layouts.columns[name][index]) for name in SHAPE_COLUMNS)
        if shape in shapes and not variants:
            continue
        config = layout_run(space, layouts.columns, int(index))
        trainer_bytes, fits = check_memory(config) if check_memory is not None else (None, True)
        if fits:
            chosen.append((config, trainer_bytes))
            shapes.add(shape)
        else:
            dropped += 1
        if len(chosen) == top or dropped == _MAX_REJECTED:
            break
    configs = [config for config, _ in chosen]
    predictions = predict_rows(space.machine, layout_rows(space, configs), list(map(unmodelled_settings, configs)))
    ranked = [
        _describe_layout(space, config, prediction, trainer_bytes)
        for (config, trainer_bytes), prediction in zip(chosen, predictions)
    ]
    return ranked, dropped


def _describe_layout(
    space: SearchSpace, config: RunConfig, prediction: Prediction, trainer_bytes: Optional[int]
) -> RankedLayout:
    row = prediction.row
    node_box = choose_node_box(row.nodes, config.job.shape) if uses_torus(space) else None
    rank_map = choose_rank_map(node_box, config.layout, row.ranks_per_node) if node_box is not None else None
    flops = notes_flops(config.model, row.global_batch, row.vocab, row.recompute)
    return RankedLayout(
        config=config,
        prediction=prediction,
        tflops=tflops_per_node(flops, prediction.seconds.value, row.nodes),
        trainer_bytes=trainer_bytes,
        waste=tuple(find_waste(config, space.machine, row, node_box, rank_map)),
        node_box=node_box,
        rank_map=rank_map,
    )


def uses_torus(space: SearchSpace) -> bool:
    """True if jobs ask for boxes of Fugaku's torus."""
    return space.hardware.startswith(FUGAKU_HARDWARE) and space.config.job.scheduler == "pjm"


def compare_components(first: Prediction, second: Prediction) -> List[Dict[str, object]]:
    """Seconds of each component of two layouts and their difference; the iteration is last."""
    lines = [(name, first.components[name].value, second.components[name].value) for name in TIME_COMPONENTS]
    lines.append(("iteration", first.seconds.value, second.seconds.value))
    return [
        {"part": name, "first": seconds, "second": other_seconds, "difference": seconds - other_seconds}
        for name, seconds, other_seconds in lines
    ]


def explain_ranking(first: Prediction, second: Prediction) -> str:
    """Explains in a sentence why the first layout is faster: where it gains, where it loses, and how certain that is.

    Where global batches differ, the comparison is for a sequence.
    """
    batches = [prediction.row.global_batch for prediction in (first, second)]
    seconds_per_sequence = first.seconds.value / batches[0], second.seconds.value / batches[1]
    gains = [
        (second.components[name].value / batches[1] - first.components[name].value / batches[0], name)
        for name in TIME_COMPONENTS
    ]
    gains.sort(reverse=True)
    gain_texts = [
        (gain, f"{name} {gain * batches[0]:+.3g} s")
        for gain, name in gains
        if abs(gain) > 0.005 * seconds_per_sequence[0]
    ]
    ahead = [text for gain, text in gain_texts if gain > 0]
    behind = [text for gain, text in reversed(gain_texts) if gain < 0]
    saving = 1 - seconds_per_sequence[0] / seconds_per_sequence[1]
    text = f"1 takes {saving:.1%} less than 2: gains in {', '.join(ahead) or 'no single part'}"
    text += f"; loses in {', '.join(behind)}" if behind else ""
    if first.seconds.high / batches[0] > second.seconds.low / batches[1]:
        text += "; their 80 % intervals overlap: measure both"
    return text
