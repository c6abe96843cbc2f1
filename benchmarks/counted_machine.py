"""Writes the machine file of counted cycles from the table of ``benchmarks/a64fx.py``, for ``plan time``.

    .venv/bin/python benchmarks/counted_machine.py          # prints it
    .venv/bin/python benchmarks/counted_machine.py --write  # fugaku_gpt/machine/data/a64fx-counted.yaml

Cycles come from the committed table, so that they are as new as that: first ``benchmarks/a64fx.py --write``. The sizes
of GEMM's blocks and of the L2 cache come from ``kernels/source/gemm_sizes.h``, by the preprocessor of the emulated
machine's compiler for A64FX (``make test-arm`` makes it, in ``.aarch64`` or where ``$FUGAKU_GPT_AARCH64`` says).
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import subprocess
from pathlib import Path
from typing import Dict, Mapping, Optional, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.kernels import build
from fugaku_gpt.machine.constants import Machine, load_machine, machine_yaml
from fugaku_gpt.machine.counted import LOSS_OF_COLUMNS, CountedCycles, CountedKernel
from fugaku_gpt.machine.fugaku import COMPILER_OPTIONS, CORES, GROUP_BANDWIDTH, GROUPS
from fugaku_gpt.machine.probed import ATTENTION, ATTENTION_BACKWARD, INPUT, LINEAR, WEIGHT, round_digits
from fugaku_gpt.records.files import write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "a64fx.csv"
FILE = ROOT / "fugaku_gpt" / "machine" / "data" / "a64fx-counted.yaml"
COMPILER = "gcc-12"  # of the table
# operation → the kernels that compute it one after the other, each in the same unit
KERNELS: Mapping[str, "tuple[str, ...]"] = {
    LINEAR: ("gemm_nt",),
    INPUT: ("gemm_nn",),
    WEIGHT: ("gemm_tn",),
    ATTENTION: ("attention_forward",),
    ATTENTION_BACKWARD: ("attention_backward",),
    "layer_norm": ("layer_norm",),
    "layer_norm_backward": ("layer_norm_gradient",),
    "gelu_erf": ("gelu_erf",),
    "gelu_erf_backward": ("gelu_erf_gradient",),
    "gelu_tanh": ("gelu_tanh",),
    "gelu_tanh_backward": ("gelu_tanh_gradient",),
    "loss": ("loss_full_rows",),
    LOSS_OF_COLUMNS: ("loss_sums", "loss_gradient"),
    "squares": ("sum_of_squares",),
    "optimiser": ("adamw",),
}
# size in the machine file → macros of gemm_sizes.h
SIZES = {
    "tile_rows": "MR",
    "tile_columns": "NR",
    "depth": "KC",
    "group_rows": "MC_PANELS * MR",
    "packed_columns": "PRIVATE_PANELS * NR",
    "l2_bytes": "L2_BYTES",
    "line_bytes": "CACHE_LINE",
}


def read_cycles(table: Path) -> Dict[str, float]:
    """Cycles of a unit of work by kernel, from a table of ``benchmarks/a64fx.py``.

    Raises:
        UsageError: it cannot be read, or has no figure of a kernel.
    """
    try:
        with table.open(encoding="utf-8", newline="") as lines:
            cycles = {row["kernel"]: float(row["cycles"]) for row in csv.DictReader(lines) if not row["loop"]}
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(f"{table}: not a table of benchmarks/a64fx.py: {error}") from None
    missing = [kernel for kernels in KERNELS.values() for kernel in kernels if kernel not in cycles]
    if missing:
        raise UsageError(f"{table}: no cycles of {', '.join(missing)}: benchmarks/a64fx.py --write writes all of them")
    return cycles


def gemm_sizes(machine: Path, source: Path = build.SOURCE) -> Dict[str, int]:
    """Sizes of GEMM's blocks on A64FX, and of the cache that they are made for.

    Args:
        machine: folder of the emulated machine.

    Raises:
        UsageError: there is no compiler, or the sources have no such macro.
    """
    compiler = machine / COMPILER / "bin" / "cc"
    if not compiler.exists():
        raise UsageError(f"{compiler}: not there: make test-arm makes it in .aarch64")
    text = '#include "gemm_sizes.h"\n' + "".join(f"@{name} {macros}\n" for name, macros in SIZES.items())
    done = subprocess.run(
        [str(compiler), "-E", "-P", "-fopenmp", *COMPILER_OPTIONS, "-I", str(source), "-x", "c", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UsageError(f"{source}/gemm_sizes.h: {done.stderr[-500:]}")
    lines = [line[1:].partition(" ") for line in done.stdout.splitlines() if line.startswith("@")]
    return {name: _product_of(name, expression) for name, _, expression in lines}


def _product_of(name: str, expression: str) -> int:
    """The value of products and sums of integers."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add)):
            left, right = value(node.left), value(node.right)
            return left * right if isinstance(node.op, ast.Mult) else left + right
        raise UsageError(f"{name}: gemm_sizes.h has no number for {SIZES[name]}: {expression}")

    return value(ast.parse(expression.strip(), mode="eval"))


def counted_machine(cycles: Mapping[str, float], sizes: Mapping[str, int]) -> Machine:
    """The machine: a64fx, with counted cycles.

    Args:
        cycles: of kernels, as :func:`read_cycles` returns them.
        sizes: as :func:`gemm_sizes` returns them.
    """
    base = load_machine("a64fx")
    kernels = tuple(
        CountedKernel(operation, round_digits(sum(cycles[name] for name in names)), " + ".join(names))
        for operation, names in KERNELS.items()
    )
    counted = CountedCycles(
        table=str(TABLE.relative_to(ROOT)),
        compiler=" ".join((COMPILER, *COMPILER_OPTIONS)),
        cores=CORES,
        groups=GROUPS,
        bandwidth=GROUP_BANDWIDTH,
        kernels=kernels,
        **sizes,
    )
    return Machine(
        name="a64fx-counted",
        title="Fugaku, A64FX, by counted cycles of our kernels",
        hardware=base.hardware,
        facts=base.facts,
        memory_unit=base.memory_unit,
        memory_of=base.memory_of,
        time=base.time,
        memory=base.memory,
        counted=counted,
        base=base.name,
    )


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE, help="Table of cycles; default: the committed one.")
    emulated = Path(os.environ.get("FUGAKU_GPT_AARCH64", ROOT / ".aarch64"))
    parser.add_argument("--machine", type=Path, default=emulated, help="Folder of the emulated machine.")
    parser.add_argument("--write", action="store_true", help="Write the machine file in place of printing it.")
    options = parser.parse_args(arguments)
    try:
        text = machine_yaml(counted_machine(read_cycles(options.table), gemm_sizes(options.machine)))
    except UsageError as error:
        parser.error(str(error))
    if options.write:
        write_text_atomically(FILE, text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
