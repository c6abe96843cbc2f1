"""Counts the cycles of each kernel on A64FX, without one: by emulation and the processor's model in LLVM 19.

    .venv/bin/python benchmarks/a64fx.py                             # all kernels; minutes
    .venv/bin/python benchmarks/a64fx.py attention_forward gelu_erf  # some
    .venv/bin/python benchmarks/a64fx.py --compiler clang-19         # another compiler than gcc-12
    .venv/bin/python benchmarks/a64fx.py --source TREE/fugaku_gpt/kernels/source gelu_erf
    .venv/bin/python benchmarks/a64fx.py --write gelu_erf            # its rows of a64fx.csv and of the documentation

It needs the emulated machine (``make test-arm``), in ``.aarch64`` or where ``$FUGAKU_GPT_AARCH64`` says. Nothing is
timed, and the same sources give the same table everywhere.

1. The kernels are compiled with the options of ``kernels/build.py`` and linked with ``a64fx_driver.c``.
2. qemu runs one kernel in one thread, and names every block of instructions that it executes (``a64fx_trace.py``). So
   the work is that of a real run: an attention head's causal blocks, softmax, packing and tails are all in it, with
   their true trip counts.
3. llvm-mca counts the cycles of what was executed (``a64fx_mca.py``), with an instruction window that runs on across
   loops. Innermost loops are listed apart, by function and number.

A kernel's cycles are divided by its units of work: parameters, elements, or multiply-adds. Its bound is the time of its
floating-point operations at 64 a cycle, or of its bytes from and to memory at 256 GB/s of a CMG's 12 cores at 2 GHz,
10.7 bytes a cycle and core, whichever is longer; its share is the bound in its cycles. Bytes are those that are read
and those that are written, each once.

``count_kernels`` yields the same figures to other programs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from a64fx_mca import Count, Loop, count_cycles
from a64fx_trace import Machine, compile_program, record

from fugaku_gpt.kernels import build
from fugaku_gpt.machine import fugaku
from fugaku_gpt.records.files import write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "a64fx.csv"
PAGE = ROOT / "docs" / "performance" / "a64fx.md"
HERTZ = 2e9
PEAK_FLOP = 2.0 * fugaku.PIPES * fugaku.VECTOR_BYTES / 4  # float32, a cycle: pipes of 16 multiply-adds
MEMORY_BYTES = fugaku.GROUP_BANDWIDTH / fugaku.GROUP_CORES / HERTZ  # a cycle and core
ALLOWED_CHANGE = 0.03  # of a share, from the committed one
LEAST_TIME_SHARE = 0.03  # of a kernel's cycles that a loop must have to be listed
_MARKS = ("<!-- counted by benchmarks/a64fx.py --write -->", "<!-- end -->")
_COLUMNS = "kernel,loop,unit,cycles,bound_cycles,share,flop_per_cycle,time_share,spills,divisions,broadcasts"
_LENGTH, _WIDTH, _ELEMENTS = 1024, 768, 8192
_F32, _BF16 = "0", "1"


class Case(NamedTuple):
    """A kernel's run.

    Attributes:
        arguments: of the driver.
        unit: what its work is counted in.
        units: of the run.
        flop: useful floating-point operations of a unit, if they can bound the kernel.
        bytes: of a unit that memory must give or take.
    """

    arguments: Tuple[str, ...]
    unit: str
    units: int
    flop: float
    bytes: float

    @property
    def is_bound_by_flop(self) -> bool:
        """Whether the floating-point operations take longer than the bytes."""
        return self.flop / PEAK_FLOP > self.bytes / MEMORY_BYTES

    @property
    def bound_cycles(self) -> float:
        """Cycles of a unit at the processor's peak or at its memory's bandwidth, whichever takes longer."""
        return max(self.flop / PEAK_FLOP, self.bytes / MEMORY_BYTES)


class Counted(NamedTuple):
    """A kernel's count.

    Attributes:
        case: what was run.
        cycles: of a unit of work.
        loops: (loop, its share in the run's cycles).
    """

    case: Case
    cycles: float
    loops: List[Tuple[Loop, float]]

    @property
    def share(self) -> float:
        """The bound in the cycles: 1 is the processor's best."""
        return self.case.bound_cycles / self.cycles


def _elementwise(name: str, *numbers: str, bytes_per_element: float) -> Case:
    return Case((name, str(_ELEMENTS), *numbers), "element", _ELEMENTS, 0.0, bytes_per_element)


def _rows(name: str, rows: int, columns: int, kind: str, bytes_per_element: float) -> Case:
    return Case((name, str(rows), str(columns), kind), "element", rows * columns, 0.0, bytes_per_element)


def _gemm(layout: str, m: int, n: int, k: int) -> Case:
    return Case((f"gemm_{layout}", str(m), str(n), str(k)), "multiply-add", m * n * k, 2.0, 0.0)


def _attention(name: str, products: int) -> Case:
    """A head of causal attention; ``products`` [s, s] x [s, d] or as large, of which the mask leaves s (s + 1) / 2."""
    width = 64
    pairs = _LENGTH * (_LENGTH + 1) // 2
    return Case((name, str(_LENGTH), str(width)), "multiply-add", products * pairs * width, 2.0, 0.0)


def _gemv(vectors: int, kind: str, bytes_per_weight: float) -> Case:
    outputs, inputs = 48, 576
    numbers = (str(vectors), str(outputs), str(inputs), kind)
    return Case(("gemv", *numbers), "weight", outputs * inputs, 2.0 * vectors, bytes_per_weight)


def _decode_attention(kind: str, bytes_per_number: float) -> Case:
    """A token's attention to the keys and values of one head, which three heads of queries share."""
    keys, sharing, width = 512, 3, 64
    return Case(
        ("decode_attention", str(keys), str(sharing), kind),
        "number of the cache",
        2 * keys * width,
        2.0 * sharing,
        bytes_per_number,
    )


CASES: Dict[str, Case] = {
    "gemm_nn": _gemm("nn", 256, 96, _WIDTH),
    "gemm_nt": _gemm("nt", 256, 96, _WIDTH),
    "gemm_tn": _gemm("tn", 256, 96, _WIDTH),
    "attention_forward": _attention("attention_forward", 2),
    "attention_backward": _attention("attention_backward", 5),
    "gemv": _gemv(1, _F32, 4.0),
    "gemv_bfloat16": _gemv(1, _BF16, 2.0),
    "gemv_of_8": _gemv(8, _F32, 4.0),
    "decode_attention": _decode_attention(_F32, 4.0),
    "decode_attention_bfloat16": _decode_attention(_BF16, 2.0),
    "layer_norm": _rows("layer_norm", 8, _WIDTH, _F32, 8.0),
    "layer_norm_bfloat16": _rows("layer_norm", 8, _WIDTH, _BF16, 4.0),
    "layer_norm_gradient": _rows("layer_norm_gradient", 64, _WIDTH, _F32, 12.0),
    "layer_norm_gradient_bfloat16": _rows("layer_norm_gradient", 64, _WIDTH, _BF16, 6.0),
    "rms_norm": _rows("rms_norm", 8, _WIDTH, _F32, 8.0),
    "rms_norm_bfloat16": _rows("rms_norm", 8, _WIDTH, _BF16, 4.0),
    "rms_norm_gradient": _rows("rms_norm_gradient", 64, _WIDTH, _F32, 12.0),
    "rms_norm_gradient_bfloat16": _rows("rms_norm_gradient", 64, _WIDTH, _BF16, 6.0),
    "gelu_erf": _elementwise("gelu", _F32, "0", bytes_per_element=8.0),
    "gelu_tanh": _elementwise("gelu", _F32, "1", bytes_per_element=8.0),
    "gelu_erf_gradient": _elementwise("gelu_gradient", _F32, "0", bytes_per_element=12.0),
    "gelu_tanh_gradient": _elementwise("gelu_gradient", _F32, "1", bytes_per_element=12.0),
    "gelu_erf_bfloat16": _elementwise("gelu", _BF16, "0", bytes_per_element=4.0),
    "gelu_erf_gradient_bfloat16": _elementwise("gelu_gradient", _BF16, "0", bytes_per_element=6.0),
    # an element is one of the result, of a gate and what it gates
    "swiglu": _rows("swiglu", 8, 1024, _F32, 12.0),
    "swiglu_gradient": _rows("swiglu_gradient", 8, 1024, _F32, 20.0),
    "swiglu_bfloat16": _rows("swiglu", 8, 1024, _BF16, 6.0),
    "swiglu_gradient_bfloat16": _rows("swiglu_gradient", 8, 1024, _BF16, 10.0),
    # tokens of nine heads of 64, which share their cosines and sines
    "rotate": _rows("rotate", 16, 9 * 64, _F32, 8.0 + 4.0 / 9.0),
    "rotate_bfloat16": _rows("rotate", 16, 9 * 64, _BF16, 4.0 + 4.0 / 9.0),
    # a row is longer than the L1 cache; passes after the first read it from the L2 cache
    "loss_full_rows": _rows("loss_full_rows", 2, 8192, _F32, 8.0),
    "loss_full_rows_bfloat16": _rows("loss_full_rows", 2, 8192, _BF16, 4.0),
    "loss_sums": _rows("loss_sums", 2, 8192, _F32, 4.0),
    "loss_gradient": _rows("loss_gradient", 2, 8192, _F32, 8.0),
    # reads parameter, gradient and two moments; writes all but the gradient, and the rounded parameter
    "adamw": _elementwise("adamw", "0", bytes_per_element=28.0)._replace(unit="parameter"),
    "adamw_bfloat16": _elementwise("adamw", "1", bytes_per_element=30.0)._replace(unit="parameter"),
    "sum_of_squares": Case(("sum_of_squares", str(96 * 4096)), "element", 96 * 4096, 0.0, 4.0),
    "accumulate": _elementwise("accumulate", bytes_per_element=10.0),
    "sum_of_rows": Case(("sum_of_rows", "256", str(_WIDTH)), "element", 256 * _WIDTH, 0.0, 2.0),
}


def count_kernels(
    machine: Machine, names: Sequence[str] = (), compiler: str = "gcc-12", source: Path = build.SOURCE
) -> Iterator[Tuple[str, Counted]]:
    """Yields the name and the count of each kernel, as soon as it is counted; all are compiled once.

    Args:
        machine: the emulated machine.
        names: keys of ``CASES``; default: all.
        compiler: gcc-12, gcc-14 or clang-19.
        source: folder of the kernels' sources.

    Raises:
        RuntimeError: a program failed.
    """
    with tempfile.TemporaryDirectory(prefix="a64fx-") as folder:
        program = compile_program(machine, compiler, fugaku.COMPILER_OPTIONS, Path(folder), source)
        for name in names or CASES:
            yield name, count_kernel(machine, program, name)


def count_kernel(machine: Machine, program: Path, name: str) -> Counted:
    """Returns the count of a kernel of a program that ``compile_program`` has made.

    Raises:
        RuntimeError: a program failed.
    """
    return counted_of(CASES[name], count_cycles(machine, record(machine, program, CASES[name].arguments)))


def counted_of(case: Case, count: Count) -> Counted:
    """Returns a kernel's count by its unit of work, with the loops that take a share of its time."""
    shares = [(loop, loop.iterations * loop.cycles / count.cycles) for loop in count.loops]
    return Counted(case, count.cycles / case.units, [pair for pair in shares if pair[1] >= LEAST_TIME_SHARE])


def rows_of(counts: Dict[str, Counted]) -> List[List[str]]:
    """Returns the table: a row for each kernel, followed by those of its loops."""
    rows = []
    for name, counted in counts.items():
        case = counted.case
        figures = [f"{counted.cycles:.4f}", f"{case.bound_cycles:.4f}", f"{counted.share:.3f}"]
        rows.append([name, "", case.unit, *figures, "", "1.00", "", "", ""])
        for loop, time_share in counted.loops:
            flop = loop.flop / loop.cycles
            figures = [f"{loop.cycles:.2f}", "", f"{flop / PEAK_FLOP:.3f}", f"{flop:.1f}", f"{time_share:.2f}"]
            flags = [str(loop.spills), str(loop.divisions), str(loop.broadcasts)]
            rows.append([name, loop.name, "iteration", *figures, *flags])
    return rows


def committed_shares() -> Dict[str, float]:
    """Returns the shares of the kernels in the committed table."""
    rows = [line.split(",") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {row[0]: float(row[5]) for row in rows if not row[1]}


def difference_from_table(name: str, share: float) -> str:
    """Returns what is wrong with a kernel or with its row in the committed table; empty if both agree.

    They agree if the kernel's share is that of the table within 3 points, or 3 % of shares above 1.
    """
    committed = committed_shares()[name]
    change = share - committed
    if abs(change) <= ALLOWED_CHANGE * max(1.0, committed):
        return ""
    shares = f"{name}: {share:.3f} of its bound where the table has {committed:.3f}"
    renewal = f"benchmarks/a64fx.py --write {name}"
    if change < 0:
        return f"{shares}: the kernel is slower; if that is meant: {renewal}"
    return f"{shares}: the kernel is faster, and the table is stale: {renewal}"


def _write(rows: List[List[str]]) -> None:
    """Write rows into the table and the documentation's page, in place of those of the same kernels."""
    old = [line.split(",") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]] if TABLE.exists() else []
    counted = {row[0] for row in rows}
    merged = rows + [row for row in old if row[0] not in counted and row[0] in CASES]
    merged.sort(key=lambda row: list(CASES).index(row[0]))
    write_text_atomically(TABLE, "\n".join([_COLUMNS, *map(",".join, merged)]) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(_MARKS[0]) + len(_MARKS[0]), text.index(_MARKS[1])
    write_text_atomically(PAGE, f"{text[:begin]}\n\n{_markdown(merged)}\n{text[end:]}")


def _markdown(rows: List[List[str]]) -> str:
    """Returns the tables of the documentation."""
    lines = ["| kernel | unit | cycles of 16 units | bound, cycles | share |", "|---|---|---:|---:|---:|"]
    for name, loop, unit, cycles, bound, share, *_ in rows:
        if not loop:
            limit = "multiply-adds" if CASES[name].is_bound_by_flop else "memory"
            figures = f"{16 * float(cycles):.2f} | {16 * float(bound):.2f}, {limit} | {100 * float(share):.1f} %"
            lines.append(f"| `{name}` | {unit} | {figures} |")
    lines += ["", "| kernel: loop | time | cycles of an iteration | flop a cycle | of the peak | spills, div, dup |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, loop, _, cycles, _, share, flop, time_share, *flags in rows:
        if loop:
            figures = f"{100 * float(time_share):.0f} % | {cycles} | {flop} | {100 * float(share):.1f} %"
            lines.append(f"| `{name}: {loop}` | {figures} | {', '.join(flags)} |")
    return "\n".join(lines) + "\n"


def machine_of(folder: Optional[Path]) -> Machine:
    """Returns the emulated machine of a folder; default: ``$FUGAKU_GPT_AARCH64`` or ``.aarch64``.

    Raises:
        SystemExit: there is none.
    """
    machine = Machine((folder or Path(os.environ.get("FUGAKU_GPT_AARCH64", ROOT / ".aarch64"))).resolve())
    if not Path(machine.qemu()).exists():
        raise SystemExit(f"{machine.folder}: no emulated machine: make test-arm makes one in .aarch64")
    return machine


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"Default: all of {', '.join(CASES)}.")
    parser.add_argument("--compiler", default="gcc-12", choices=["gcc-12", "gcc-14", "clang-19"])
    parser.add_argument("--source", type=Path, default=build.SOURCE, help="Folder of the kernels' sources.")
    parser.add_argument("--machine", type=Path, help="Folder of the emulated machine.")
    parser.add_argument("--write", action="store_true", help="Write a64fx.csv and docs/performance/a64fx.md.")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.kernels if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]}: no such kernel; valid: {', '.join(CASES)}")
    if options.write and (options.compiler, options.source) != ("gcc-12", build.SOURCE):
        parser.error("--write writes what gcc-12 makes of this tree's kernels: no --compiler and no --source")
    machine = machine_of(options.machine)
    print(_COLUMNS.replace(",", " "))
    for name, counted in count_kernels(machine, options.kernels, options.compiler, options.source):
        rows = rows_of({name: counted})
        for row in rows:
            cells = [f"  {row[1]}" if row[1] else row[0], *row[2:]]
            print(f"{cells[0]:28}", " ".join(f"{cell:>12}" for cell in cells[1:]), flush=True)
        if options.write:
            _write(rows)


if __name__ == "__main__":
    main()
