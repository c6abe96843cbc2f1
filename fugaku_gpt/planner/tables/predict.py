"""Predictions for rows: seconds with an 80 % interval, memory, whether it fits, and which inputs are guessed at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.machine.constants import UNIT_BYTES, Machine, load_machine, machine_names
from fugaku_gpt.planner.extrapolation import Outside, distance, in_no_table, outside
from fugaku_gpt.planner.intervals import WHOLE, Guess, widths
from fugaku_gpt.planner.tables.fitting import check_complete
from fugaku_gpt.planner.tables.footprint import footprint, unit_of
from fugaku_gpt.planner.tables.rows import ConfigRow, RefusedRow, parse_row
from fugaku_gpt.planner.tables.seconds import PARTS, seconds_by_part
from fugaku_gpt.planner.tables.work import work_of


@dataclass(frozen=True)
class Prediction:
    """What a model says of one row.

    Args:
        seconds: per iteration; ``parts`` of each of its parts.
        memory: what a reading of the row's kind shows, in ``memory_unit``, which is the row's own where that is known,
            else the machine's; ``peak`` that of the fullest stage.
        extrapolated: the inputs that no fitted row is like.
    """

    row: ConfigRow
    seconds: Guess
    parts: Mapping[str, Guess]
    memory: float
    peak: float
    memory_unit: str
    fits: bool
    extrapolated: Tuple[str, ...]


def predict_table(table: Sequence[Mapping[str, str]]) -> "List[Prediction | RefusedRow]":
    """A prediction or a refusal for each line of a CSV, in its order.

    Only the columns of :class:`fugaku_gpt.planner.tables.rows.Row` are read: a configuration, not what it measured.
    """
    machines = [load_machine(name) for name in machine_names()]
    found: "List[Optional[Prediction | RefusedRow]]" = [None] * len(table)
    waiting: Dict[str, List[Tuple[int, ConfigRow]]] = {}
    for place, cells in enumerate(table):
        row = parse_row(cells)
        if isinstance(row, RefusedRow):
            found[place] = row
            continue
        name = next((one.name for one in machines if one.covers(row.hardware)), None)
        if name is None:
            known = ", ".join(start for one in machines for start in one.hardware)
            found[place] = RefusedRow(
                row.id, f"hardware {row.hardware or 'not given'}: no machine file is for it; known: {known}"
            )
            continue
        waiting.setdefault(name, []).append((place, row))
    for machine in machines:
        mine = waiting.get(machine.name, [])
        for (place, _), prediction in zip(mine, predict_rows(machine, [row for _, row in mine])):
            found[place] = prediction
    return [one for one in found if one is not None]


def predict_rows(machine: Machine, rows: Sequence[ConfigRow], further: Sequence[Sequence[Outside]] = ()) -> List[Prediction]:
    """A prediction for each row, all of this machine.

    Args:
        further: of each row what no row of any machine has and its columns do not tell.

    Raises:
        UsageError: as :func:`fugaku_gpt.planner.tables.fitting.check_complete`.
    """
    if not rows:
        return []
    check_complete(machine)
    work = work_of(rows, machine.facts)
    reading, peak = footprint(
        work, machine.memory.values, machine.facts, machine.memory_unit, machine.memory_of == "node"
    )
    work = replace(work, fullness=peak / np.array([machine.capacity(row.hardware) for row in rows]))

    def parts_of(constants: Mapping[str, float]) -> "Dict[str, np.ndarray]":
        return seconds_by_part(work, constants, machine.facts)

    ordered, seen = "pipeline_distance" in machine.time.values, machine.time.seen
    unlike, ruled = [outside(row, seen) for row in rows], [in_no_table(row, ordered, seen) for row in rows]
    if further:
        ruled = [[*one, *more] for one, more in zip(ruled, further)]
    far, by_rule = (np.array(list(map(distance, inputs))) for inputs in (unlike, ruled))
    parts, reach = parts_of(machine.time.values), widths(parts_of, machine.time, far, by_rule)
    total = np.sum([parts[name] for name in PARTS], axis=0)
    found = []
    for place, row in enumerate(rows):
        inputs = (*unlike[place], *outside(row, machine.memory.seen), *ruled[place])
        whole = float(total[place])
        unit = unit_of(row.mem_unit, machine.memory_unit) or machine.memory_unit
        scale = UNIT_BYTES[machine.memory_unit] / UNIT_BYTES[unit]
        found.append(
            Prediction(
                row=row,
                seconds=Guess.around(whole, float(reach[WHOLE][place])),
                parts={name: Guess.around(float(parts[name][place]), float(reach[name][place])) for name in PARTS},
                memory=float(reading[place]) * scale,
                peak=float(peak[place]) * scale,
                memory_unit=unit,
                fits=bool(peak[place] <= machine.capacity(row.hardware)),
                extrapolated=tuple(dict.fromkeys(one.text for one in inputs)),
            )
        )
    return found
