"""Predictions for rows: seconds with an 80 % interval, memory, whether it fits, and the extrapolated inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.machine.constants import UNIT_BYTES, Machine, load_machine, machine_names
from fugaku_gpt.planner.extrapolation import (
    ExtrapolatedInput,
    extrapolated_inputs,
    extrapolation_distance,
    rule_based_inputs,
)
from fugaku_gpt.planner.intervals import TOTAL, Estimate, log_widths
from fugaku_gpt.planner.tables.fitting import check_complete
from fugaku_gpt.planner.tables.footprint import footprint, unit_of
from fugaku_gpt.planner.tables.rows import ConfigRow, RefusedRow, parse_row
from fugaku_gpt.planner.tables.seconds import TIME_COMPONENTS, seconds_by_component
from fugaku_gpt.planner.tables.work import count_work


@dataclass(frozen=True)
class Prediction:
    """The predictions of a machine's models for one row.

    Args:
        seconds: seconds per iteration; ``components`` are the seconds of its components.
        memory: memory in a reading of the row's kind, in ``memory_unit``, which is the row's own unit if it is known,
            else the machine's; ``peak`` is the memory of the fullest stage.
        extrapolated: the inputs that lie outside of the fitted rows' ranges.
    """

    row: ConfigRow
    seconds: Estimate
    components: Mapping[str, Estimate]
    memory: float
    peak: float
    memory_unit: str
    fits: bool
    extrapolated: Tuple[str, ...]


def predict_table(table: Sequence[Mapping[str, str]]) -> "List[Prediction | RefusedRow]":
    """A prediction or a refusal for each line of a CSV, in the order of the lines.

    Only the columns of :class:`fugaku_gpt.planner.tables.rows.ConfigRow` are read: the configuration, not measurements.
    """
    machines = [machine for machine in map(load_machine, machine_names()) if machine.counted is None]
    predictions: "List[Optional[Prediction | RefusedRow]]" = [None] * len(table)
    rows_of_machine: Dict[str, List[Tuple[int, ConfigRow]]] = {}
    for index, cells in enumerate(table):
        row = parse_row(cells)
        if isinstance(row, RefusedRow):
            predictions[index] = row
            continue
        name = next((machine.name for machine in machines if machine.has_hardware(row.hardware)), None)
        if name is None:
            covered = ", ".join(prefix for machine in machines for prefix in machine.hardware)
            predictions[index] = RefusedRow(
                row.id, f"hardware {row.hardware or 'not given'}: no machine file is for it; known: {covered}"
            )
            continue
        rows_of_machine.setdefault(name, []).append((index, row))
    for machine in machines:
        machine_rows = rows_of_machine.get(machine.name, [])
        for (index, _), prediction in zip(machine_rows, predict_rows(machine, [row for _, row in machine_rows])):
            predictions[index] = prediction
    return [prediction for prediction in predictions if prediction is not None]


def predict_rows(
    machine: Machine, rows: Sequence[ConfigRow], unmodelled: Sequence[Sequence[ExtrapolatedInput]] = ()
) -> List[Prediction]:
    """A prediction for each row, all of which are for this machine.

    Args:
        unmodelled: for each row, settings that no row of any machine has and that its columns do not show.

    Raises:
        UsageError: see :func:`fugaku_gpt.planner.tables.fitting.check_complete`.
    """
    if not rows:
        return []
    check_complete(machine)
    work = count_work(rows, machine.facts)
    reading, peak = footprint(
        work, machine.memory.values, machine.facts, machine.memory_unit, machine.memory_of == "node"
    )
    work = replace(work, fullness=peak / np.array([machine.capacity(row.hardware) for row in rows]))

    def component_seconds(constants: Mapping[str, float]) -> "Dict[str, np.ndarray]":
        return seconds_by_component(work, constants, machine.facts)

    counts_stage_distance, ranges = "pipeline_distance" in machine.time.values, machine.time.input_ranges
    outside, rule_based = (
        [extrapolated_inputs(row, ranges) for row in rows],
        [rule_based_inputs(row, counts_stage_distance, ranges) for row in rows],
    )
    if unmodelled:
        rule_based = [[*inputs, *extra] for inputs, extra in zip(rule_based, unmodelled)]
    distances, rule_distances = (
        np.array(list(map(extrapolation_distance, inputs))) for inputs in (outside, rule_based)
    )
    components, deviations = (
        component_seconds(machine.time.values),
        log_widths(component_seconds, machine.time, distances, rule_distances),
    )
    total = np.sum([components[name] for name in TIME_COMPONENTS], axis=0)
    predictions = []
    for index, row in enumerate(rows):
        inputs = (*outside[index], *extrapolated_inputs(row, machine.memory.input_ranges), *rule_based[index])
        iteration_seconds = float(total[index])
        unit = unit_of(row.mem_unit, machine.memory_unit) or machine.memory_unit
        scale = UNIT_BYTES[machine.memory_unit] / UNIT_BYTES[unit]
        predictions.append(
            Prediction(
                row=row,
                seconds=Estimate.from_log_width(iteration_seconds, float(deviations[TOTAL][index])),
                components={
                    name: Estimate.from_log_width(float(components[name][index]), float(deviations[name][index]))
                    for name in TIME_COMPONENTS
                },
                memory=float(reading[index]) * scale,
                peak=float(peak[index]) * scale,
                memory_unit=unit,
                fits=bool(peak[index] <= machine.job_capacity(row.hardware)),
                extrapolated=tuple(dict.fromkeys(extrapolated.text for extrapolated in inputs)),
            )
        )
    return predictions
