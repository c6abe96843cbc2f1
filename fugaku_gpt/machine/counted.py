"""Cycles of our kernels on a processor, counted by a model of it: the section ``counted`` of a machine file.

The cycles come from LLVM's model of the processor (llvm-mca) for instructions that a kernel executes in emulation
(``benchmarks/a64fx.py``); nothing was timed. ``benchmarks/counted_machine.py`` writes the file.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Dict, Mapping, Tuple

VERSION = 1
LOSS_OF_COLUMNS = "loss of columns"


@dataclass(frozen=True)
class CountedKernel:
    """One kernel on one core, with both floating-point pipes and all loads from the L1 cache.

    Attributes:
        operation: name in ``machine/probed.py`` of what it computes, or ``loss of columns``: the loss where
            tensor-parallel ranks share the logits' columns.
        cycles: for each multiply-add of products, those of attention without what its mask leaves out; for each element
            of a pass.
        case: the kernel's name in the table.
    """

    operation: str
    cycles: float
    case: str


@dataclass(frozen=True)
class CountedCycles:
    """The kernels of a node and what their time depends on besides.

    Attributes:
        table: file of the counted cycles that the kernels are from.
        compiler: what compiled them.
        cores: cores of a node.
        groups: its NUMA domains, each with memory and L2 cache of its own.
        bandwidth: bytes/s between a group's memory and its L2 cache.
        l2_bytes: size of that cache.
        line_bytes: size of a cache line.
        tile_rows, tile_columns: sizes of the part of a product's result that the micro-kernel has in registers (MR and
            NR).
        depth: most of a product's inner dimension that is packed at a time (KC).
        group_rows: rows for which a thread reads its packed columns again (MC).
        packed_columns: most columns that a thread packs at a time.
    """

    table: str
    compiler: str
    cores: int
    groups: int
    bandwidth: float
    l2_bytes: int
    line_bytes: int
    tile_rows: int
    tile_columns: int
    depth: int
    group_rows: int
    packed_columns: int
    kernels: Tuple[CountedKernel, ...]

    @property
    def cores_of_group(self) -> int:
        """Cores that share a group's memory and L2 cache."""
        return self.cores // self.groups

    def cycles(self) -> Dict[str, float]:
        """Cycles by operation."""
        return {kernel.operation: kernel.cycles for kernel in self.kernels}


_COLUMNS = [field.name for field in fields(CountedKernel)]
_SIZES = (
    "cores", "groups", "l2_bytes", "line_bytes", "tile_rows", "tile_columns", "depth", "group_rows", "packed_columns",
)  # fmt: skip


def counted_to_data(counted: CountedCycles) -> Dict[str, Any]:
    """The section as data for YAML: the kernels are a table of column names and rows."""
    data: Dict[str, Any] = {"version": VERSION}
    data.update({field.name: getattr(counted, field.name) for field in fields(counted)})
    rows = [[getattr(kernel, name) for name in _COLUMNS] for kernel in counted.kernels]
    data["kernels"] = {"columns": list(_COLUMNS), "rows": rows}
    return data


def counted_from_data(data: Mapping[str, Any]) -> CountedCycles:
    """The inverse of :func:`counted_to_data`.

    Raises:
        ValueError, KeyError, TypeError: the data are not valid.
    """
    if data["version"] != VERSION:
        raise ValueError(f"counted.version {data['version']}: this version reads {VERSION}")
    if list(data["kernels"]["columns"]) != _COLUMNS:
        raise ValueError(f"counted.kernels.columns {data['kernels']['columns']}: must be {_COLUMNS}")
    kernels = tuple(
        CountedKernel(str(operation), float(cycles), str(case)) for operation, cycles, case in data["kernels"]["rows"]
    )
    sizes = {name: int(data[name]) for name in _SIZES}
    counted = CountedCycles(
        table=str(data["table"]),
        compiler=str(data["compiler"]),
        bandwidth=float(data["bandwidth"]),
        kernels=kernels,
        **sizes,
    )
    positive = [*sizes.values(), counted.bandwidth, *(kernel.cycles for kernel in kernels)]
    if not all(number > 0 for number in positive) or counted.cores % counted.groups:
        raise ValueError("counted: sizes and cycles must be above 0, and cores a multiple of groups")
    return counted
