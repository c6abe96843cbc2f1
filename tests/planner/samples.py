"""Rows of the reference measurements, and made-up lines like them."""

from __future__ import annotations

from typing import Dict, List

from fugaku_gpt.planner.tables.fitting import MeasuredRow
from fugaku_gpt.planner.tables.rows import ConfigRow, parse_measured_rows, parse_row, read_table
from tests.support.measurements import MEASUREMENTS

MEASURED = ("mem_value", "sec_per_it", "tflops", "tflops_formula", "status", "remarks")


def reference() -> List[Dict[str, str]]:
    return read_table(MEASUREMENTS)


def of_hardware(start: str) -> List[MeasuredRow]:
    return [
        measured_row for measured_row in parse_measured_rows(reference()) if measured_row[0].hardware.startswith(start)
    ]


def cells(**changes: object) -> Dict[str, str]:
    """A line for two nodes of four V100 each."""
    line = {
        "id": "t.1",
        "hardware": "V100-32GB",
        "layers": 24,
        "hidden": 2048,
        "heads": 16,
        "vocab": 50304,
        "seq_len": 2048,
        "nodes": 2,
        "ranks_per_node": 4,
        "processes": "",
        "dp": 4,
        "tp": 1,
        "pp": 2,
        "micro_batch": 2,
        "global_batch": 512,
        "zero_stage": 1,
        "recompute": True,
        "torch": "",
        "dtype": "fp16",
        "mem_unit": "GB",
        **changes,
    }
    return {key: str(value) for key, value in line.items()}


def row(**changes: object) -> ConfigRow:
    parsed = parse_row(cells(**changes))
    assert isinstance(parsed, ConfigRow), parsed
    return parsed
