"""The records of a trace: how many calls and phases a rank records in an iteration, and room for those of a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.layout.communications import Transfer, plan_of, program, schedule_of
from fugaku_gpt.layout.schedules import Exchange
from fugaku_gpt.limits import TRACED_CALLS

MORE_RECORDS = 4096  # calls and phases of logs, checkpoints and what else is between iterations
_STEPS_OF_HIERARCHICAL_SUM = 3


def records_of_iteration(config: RunConfig, stage: int) -> Tuple[int, int]:
    """At most how many calls a rank of a stage makes in an iteration, and how many phases it begins."""
    plan = plan_of(replace(config, layout=replace(config.layout, hierarchical_sum=False)))
    calls = 0
    for communication in program(plan, stage, is_calibration=True, has_checksums=plan.checksum_interval is not None):
        exchange = communication.exchange if isinstance(communication, Transfer) else None
        calls += len(exchange.sends) + len(exchange.receives) if exchange is not None else 1
    passes = sum(not isinstance(action, Exchange) for action in schedule_of(plan, stage))
    is_hierarchical = config.layout.hierarchical_sum
    return calls * (_STEPS_OF_HIERARCHICAL_SUM if is_hierarchical else 1), passes + 8  # phases around the passes


def trace_room(config: RunConfig, stage: int, iterations: int, batches_of_files: int = 0) -> Tuple[int, int]:
    """Room for the calls and for the phases of a rank of a stage in a trace; a trace beyond that would be cut.

    Args:
        iterations: number of traced iterations.
        batches_of_files: batches of the windows of ``training.eval_files``, over all replicas.
    """
    training = config.training
    calls, phases = records_of_iteration(config, stage)
    all_calls, all_phases = iterations * calls, iterations * phases
    if training.eval_interval is not None:
        measurements = 2 + iterations // training.eval_interval  # one before, and one after the last iteration
        # a pass over a batch makes no more calls than those of a micro-batch; a phase begins after each, on all ranks
        own_batches = -(-batches_of_files // config.layout.dp)
        all_calls += measurements * (training.eval_batches * calls + own_batches * -(-calls // config.micro_batches))
        all_phases += measurements * (training.eval_batches * phases + batches_of_files)
    most = TRACED_CALLS.value
    return min(all_calls + MORE_RECORDS, most), min(all_phases + MORE_RECORDS, most)
