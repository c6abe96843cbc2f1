"""The timeline of a step as its layout plans it, before anything runs: a row for each class of ranks.

The ranks of a pipeline stage do the same, so that a stage is a class, whatever the number of replicas and of
tensor-parallel ranks. Passes take as long as ``communications.chunk_times`` says, in forward passes of a layer;
messages and sums take no time, and are counted.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

from fugaku_gpt.layout.communications import (
    Collective,
    CommunicationPlan,
    backward_communications,
    chunk_times,
    communications_after_backward,
    forward_communications,
    schedule_of,
)
from fugaku_gpt.layout.grid import Coordinates, rank_of
from fugaku_gpt.layout.schedule_times import TimedPass, timed_passes
from fugaku_gpt.layout.schedules import BackwardInput, BackwardWeight, Forward
from fugaku_gpt.records.text import spans as ranges_of
from fugaku_gpt.report.timeline import BACKWARD, FORWARD, MESSAGE_IN, WAITING, WEIGHTS, Row, Span, Timeline

UNIT = "forward passes of a layer"
_KINDS = {Forward: FORWARD, BackwardInput: BACKWARD, BackwardWeight: WEIGHTS}
_RANGES = 3  # ranges of ranks that a name has


def planned_timeline(plan: CommunicationPlan) -> Timeline:
    """The timeline of a step of a plan, all of whose batches have the full size."""
    layout = plan.layout
    passes = timed_passes([schedule_of(plan, stage) for stage in range(layout.pp)], chunk_times(plan))
    end = max(stage_passes[-1].end for stage_passes in passes)
    rows = [_row(plan, stage, stage_passes, end) for stage, stage_passes in enumerate(passes)]
    title = f"planned: {plan.schedule}, {plan.micro_batches} micro-batches, {layout.ranks} ranks in {layout.pp} classes"
    return Timeline(title, rows, UNIT, ("messages and sums take no time here",))


def _row(plan: CommunicationPlan, stage: int, passes: List[TimedPass], end: float) -> Row:
    per_chunk = {
        chunk.index: (
            _counted(forward_communications(plan, chunk)),
            _counted(backward_communications(plan, chunk)),
        )
        for chunk in plan.model_chunks
        if chunk.stage == stage
    }
    phases: List[Span] = []
    waits: List[Span] = []
    messages: List[Span] = []
    reached = 0.0
    for timed in passes:
        action = timed.action
        kind, chunk = _KINDS[type(action)], f" chunk {action.chunk}" if plan.chunks > 1 else ""
        details: Dict[str, Any] = {"micro_batch": action.micro_batch, "chunk": action.chunk}
        if not isinstance(action, BackwardWeight):
            details.update(per_chunk[action.chunk][isinstance(action, BackwardInput)])
        label = f"{kind} {action.micro_batch}{chunk}"
        phases.append(Span(kind, reached, timed.end, label, details))
        if timed.start > reached:
            waits.append(Span(WAITING, reached, timed.start, f"wait for the input of {label}", {}))
        if timed.arrived is not None:
            messages.append(Span(MESSAGE_IN, timed.arrived, timed.start, f"input of {label}", {}))
        reached = timed.end
    if end > reached:
        phases.append(Span(phases[-1].kind, reached, end, "end of the pipeline", {}))
        waits.append(Span(WAITING, reached, end, "wait for the end of the pipeline", {}))
    after = _counted(communications_after_backward(plan, stage))
    iteration = Span("iteration", 0.0, end, "iteration", after)
    return Row(_name(plan, stage), [iteration], phases, waits, messages)


def _name(plan: CommunicationPlan, stage: int) -> str:
    layout = plan.layout
    ranks = sorted(
        rank_of(Coordinates(dp, stage, tp), layout, plan.order) for dp in range(layout.dp) for tp in range(layout.tp)
    )
    ranges = ranges_of(ranks).split(", ")
    shown = ", ".join(ranges[:_RANGES]) + (", ..." if len(ranges) > _RANGES else "")
    return f"stage {stage}, {len(ranks)} rank{'s' * (len(ranks) > 1)}: {shown}"


def _counted(collectives: Iterable[Collective]) -> Dict[str, Any]:
    """How many collectives of each kind there are, and how many elements each rank gives to them."""
    counts: Dict[str, List[int]] = {}
    for collective in collectives:
        of_kind = counts.setdefault(f"{collective.operation} {collective.communicator}", [0, 0])
        of_kind[0] += 1
        of_kind[1] += collective.elements
    return {kind: f"{count} of {elements} elements" for kind, (count, elements) in counts.items()}
