"""Predictions for rows: seconds with an 80 % interval, memory, whether it fits, and which inputs are guessed at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import UNIT_BYTES, Machine, load_machine, machine_names
from fugaku_gpt.planner.fitting import NORMAL_80, unseen_inputs
from fugaku_gpt.planner.footprint import footprint, unit_of
from fugaku_gpt.planner.rows import Refused, Row, in_no_table, parse_row
from fugaku_gpt.planner.seconds import PARTS, seconds_by_part
from fugaku_gpt.planner.work import Work, work_of


@dataclass(frozen=True)
class Guess:
    """A figure with its 80 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, width: float) -> "Guess":
        """Of a value and the standard deviation of its logarithm."""
        reach = float(np.exp(NORMAL_80 * width))
        return cls(value, value / reach, value * reach)


@dataclass(frozen=True)
class Prediction:
    """What a model says of one row.

    Args:
        seconds: per iteration; ``parts`` of each of its parts.
        memory: what a reading of the row's kind shows, in ``memory_unit``, which is the row's own where that is known,
            else the machine's; ``peak`` that of the fullest stage.
        extrapolated: the inputs that no fitted row is like.
    """

    row: Row
    seconds: Guess
    parts: Mapping[str, Guess]
    memory: float
    peak: float
    memory_unit: str
    fits: bool
    extrapolated: Tuple[str, ...]


def predict_table(table: Sequence[Mapping[str, str]]) -> "List[Prediction | Refused]":
    """A prediction or a refusal for each line of a CSV, in its order.

    Only the columns of :class:`fugaku_gpt.planner.rows.Row` are looked at: a configuration, not what it measured.
    """
    machines = [load_machine(name) for name in machine_names()]
    found: "List[Optional[Prediction | Refused]]" = [None] * len(table)
    waiting: Dict[str, List[Tuple[int, Row]]] = {}
    for place, cells in enumerate(table):
        row = parse_row(cells)
        if isinstance(row, Refused):
            found[place] = row
            continue
        name = next(
            (one.name for one in machines if any(row.hardware.startswith(start) for start in one.hardware)), None
        )
        if name is None:
            known = ", ".join(start for one in machines for start in one.hardware)
            found[place] = Refused(
                row.id, f"hardware {row.hardware or 'not given'}: no machine file is for it; known: {known}"
            )
            continue
        waiting.setdefault(name, []).append((place, row))
    for machine in machines:
        mine = waiting.get(machine.name, [])
        for (place, _), prediction in zip(mine, predict_rows(machine, [row for _, row in mine])):
            found[place] = prediction
    return [one for one in found if one is not None]


def predict_rows(machine: Machine, rows: Sequence[Row]) -> List[Prediction]:
    """A prediction for each row, all of this machine."""
    if not rows:
        return []
    if machine.probed is not None:
        raise UsageError(
            f"machine {machine.name}: its file is of `plan probe` and tells of runs of our own trainer, not of rows; "
            "`plan time RUN.yaml --machine FILE.yaml` reads it"
        )
    work = work_of(rows, machine.facts)
    reading, peak = footprint(
        work, machine.memory.values, machine.facts, machine.memory_unit, machine.memory_of == "node"
    )
    work = replace(work, fullness=peak / np.array([machine.capacity(row.hardware) for row in rows]))
    parts = seconds_by_part(work, machine.time.values, machine.facts)
    total = np.sum([parts[name] for name in PARTS], axis=0)
    widths = _widths(machine, work, parts)
    found = []
    for place, row in enumerate(rows):
        unseen = dict.fromkeys([*unseen_inputs(row, machine.time.seen), *unseen_inputs(row, machine.memory.seen)])
        unseen.update(dict.fromkeys(in_no_table(row, "pipeline_distance" in machine.time.values)))
        whole = float(total[place])
        unit = unit_of(row.mem_unit, machine.memory_unit) or machine.memory_unit
        scale = UNIT_BYTES[machine.memory_unit] / UNIT_BYTES[unit]
        found.append(
            Prediction(
                row=row,
                seconds=Guess.around(whole, float(widths["total"][place])),
                parts={name: Guess.around(float(parts[name][place]), float(widths[name][place])) for name in PARTS},
                memory=float(reading[place]) * scale,
                peak=float(peak[place]) * scale,
                memory_unit=unit,
                fits=bool(peak[place] <= machine.capacity(row.hardware)),
                extrapolated=tuple(unseen),
            )
        )
    return found


def _widths(machine: Machine, work: Work, parts: Mapping[str, "np.ndarray"]) -> Dict[str, "np.ndarray"]:
    """Standard deviations [N] of the logarithm of each part and of the total: what the constants leave open, and what
    rows of one configuration differ by."""
    free, step = machine.time.free, 1e-4
    covariance = (
        np.array(machine.time.covariance) if machine.time.covariance else np.diag([one.width**2 for one in free])
    )
    slopes: Dict[str, List["np.ndarray"]] = {name: [] for name in (*PARTS, "total")}
    for constant in free:
        moved = seconds_by_part(
            work, {**machine.time.values, constant.name: constant.value * np.exp(step)}, machine.facts
        )
        for name in PARTS:
            slopes[name].append((moved[name] - parts[name]) / step)
        slopes["total"].append(np.sum([slopes[name][-1] for name in PARTS], axis=0))
    whole = {**parts, "total": np.sum([parts[name] for name in PARTS], axis=0)}
    found = {}
    for name, lines in slopes.items():
        slope = np.array(lines).T
        deviation = np.sqrt(np.maximum(0.0, np.einsum("ij,jk,ik->i", slope, covariance, slope)))
        share = deviation / np.where(whole[name] > 0, whole[name], 1.0)
        found[name] = np.hypot(share, machine.time.interval_spread)
    return found
