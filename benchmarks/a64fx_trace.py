"""Runs a kernel on the emulated A64FX and records which instructions it executes, in order.

The kernels are compiled by a cross compiler of the emulated machine with the options of ``kernels/build.py``, linked
with a driver (``a64fx_driver.c``) that calls one of them, and run by qemu, which names every block of instructions that
it executes. So trip counts, tails and branches are those of a real run, and no loop has to be found by its name.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.kernels import build

DRIVER = Path(__file__).with_name("a64fx_driver.c")
_EXECUTED = re.compile(r"^Trace \d+: 0x[0-9a-f]+ \[[0-9a-f]+/([0-9a-f]+)/")
_SYMBOL = re.compile(r"^([0-9a-f]+) <([^>]+)>:")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S.*)")
_BRANCH = re.compile(r"^(b|b\.\w+|bl|blr|br|ret|cbn?z|tbn?z)\b")


class Machine(NamedTuple):
    """The folder that ``env/make_aarch64.sh`` has made: qemu, cross compilers and LLVM."""

    folder: Path

    def compiler(self, name: str) -> str:
        """The command of a cross compiler: gcc-12, gcc-14 or clang-19."""
        return str(self.folder / name / "bin" / "cc")

    def qemu(self) -> str:
        return str(self.folder / "qemu" / "usr" / "bin" / "qemu-aarch64")

    def run_llvm(self, program: str, *arguments: str, text: str = "") -> str:
        """Run a program of LLVM 19, with ``text`` as its input; returns what it prints.

        Raises:
            RuntimeError: it failed.
        """
        root = self.folder / "clang-19" / "usr" / "lib"
        libraries = [root / "x86_64-linux-gnu", root / "llvm-19" / "lib"]
        libraries.append(self.folder / "cross" / "usr" / "lib" / "x86_64-linux-gnu")
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))}
        command = [str(root / "llvm-19" / "bin" / program), *arguments]
        return _output(command, environment, text)


class Block(NamedTuple):
    """A stretch of instructions that qemu translates and executes at a time: [first, last] addresses."""

    first: int
    last: int


class Trace(NamedTuple):
    """Record of what a run has executed.

    Attributes:
        blocks: the distinct blocks.
        order: their indices, in the order of execution.
        instructions: address → instruction, in LLVM's syntax.
        symbols: address → name of the function that begins there.
    """

    blocks: List[Block]
    order: List[int]
    instructions: Dict[int, str]
    symbols: Dict[int, str]

    def text(self, block: Block) -> List[str]:
        """The instructions of a block."""
        return [self.instructions[address] for address in range(block.first, block.last + 4, 4)]

    def function(self, address: int) -> str:
        """The name of the function that an address is in."""
        return self.symbols[max(begin for begin in self.symbols if begin <= address)]


def compile_program(machine: Machine, compiler: str, target: Sequence[str], folder: Path, source: Path) -> Path:
    """Compile the kernels of a folder as ``kernels/build.py`` does, and link them with the driver, statically.

    Raises:
        RuntimeError: the compiler refused.
    """
    command = machine.compiler(compiler)
    options = list(build._OPTIONS)
    if compiler.startswith("clang"):  # its OpenMP runtime has other entries than the driver's: loops stay serial
        options[options.index("-fopenmp")] = "-fopenmp-simd"
    objects = []
    for file in sorted(source.glob("*.c")):
        if file.stem != "progress":
            objects.append(str(folder / f"{file.stem}.o"))
            _output([command, *options, *target, "-c", str(file), "-o", objects[-1]])
    program = folder / "driver"
    _output([command, "-std=gnu11", "-O2", "-static", "-o", str(program), str(DRIVER), *objects, "-lm"])
    return program


def record(machine: Machine, program: Path, arguments: Sequence[str]) -> Trace:
    """Run the program emulated and record what it executes between its ``begin`` and ``end``.

    Raises:
        RuntimeError: the run failed, or its log cannot be read or does not come to ``end``.
    """
    symbols, instructions = _disassembly(machine, program)
    address = {name: at for at, name in symbols.items()}
    parser = _LogParser(address["begin"], address["end"])
    span = f"0x{min(instructions):x}..0x{max(instructions):x}"
    with tempfile.TemporaryDirectory(prefix="a64fx-") as folder:
        pipe = Path(folder) / "log"
        os.mkfifo(pipe)
        reader = threading.Thread(target=parser.read, args=(pipe,))
        reader.start()
        options = ["-d", "in_asm,exec,nochain", "-dfilter", span, "-D", str(pipe)]
        try:
            _output([machine.qemu(), *options, str(program), *arguments], {**os.environ, "QEMU_CPU": "a64fx"})
        finally:
            # a run that never opened the log would leave the reader waiting for a writer
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
            reader.join()
    parser.check()
    return Trace([parser.blocks[first] for first in parser.index], parser.order, instructions, symbols)


class _LogParser:
    """Reads qemu's log while it is written."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.blocks: Dict[int, Block] = {}
        self.index: Dict[int, int] = {}
        self.order: List[int] = []
        self._has_ended = False
        self._failure: Optional[BaseException] = None

    def read(self, pipe: Path) -> None:
        """Read the log to its end; what goes wrong is kept for :meth:`check`, as threads raise nothing elsewhere."""
        try:
            with open(pipe, encoding="ascii", errors="replace") as log:
                try:
                    self._parse(log)
                except BaseException as error:
                    self._failure = error
                    for _ in log:  # or qemu would wait for a reader
                        pass
        except OSError as error:
            self._failure = error

    def check(self) -> None:
        """Refuse a log that was not read as far as the kernel's end, since its cycles would be too few.

        Raises:
            RuntimeError: it was not.
        """
        if self._failure is not None:
            raise RuntimeError(f"qemu's log cannot be read: {self._failure}") from self._failure
        if not self.order or not self._has_ended:
            reached = "end" if self.order else "begin"
            raise RuntimeError(
                f"qemu's log stops after {len(self.order)} blocks, before the driver's `{reached}`: run it again"
            )
        missing = [address for address in self.index if address not in self.blocks]
        if missing:
            raise RuntimeError(f"qemu's log has no instructions of the block at 0x{missing[0]:x}: run it again")

    def _parse(self, log: Iterable[str]) -> None:
        first = last = 0
        records = False
        for line in log:
            if line.startswith("Trace "):
                match = _EXECUTED.match(line)
                if match is None:
                    raise ValueError(f"not a line of an executed block: {line.rstrip()}")
                address = int(match[1], 16)
                self._has_ended = self._has_ended or address == self.end
                records = address != self.end and (records or address == self.begin)
                if records:
                    self.order.append(self.index.setdefault(address, len(self.index)))
            elif line.startswith("IN:"):
                first = 0
            elif line.startswith("0x"):
                last = int(line[2 : line.index(":")], 16)
                first = first or last
            elif first:
                self.blocks[first] = Block(first, last)
                first = 0


def _disassembly(machine: Machine, program: Path) -> Tuple[Dict[int, str], Dict[int, str]]:
    """Returns the functions and the instructions of a program, by address."""
    text = machine.run_llvm("llvm-objdump", "-d", "--no-show-raw-insn", "--mattr=+sve,+lse", str(program))
    symbols: Dict[int, str] = {}
    instructions: Dict[int, str] = {}
    for line in text.splitlines():
        symbol, instruction = _SYMBOL.match(line), _INSTRUCTION.match(line)
        if symbol is not None:
            symbols[int(symbol[1], 16)] = symbol[2]
        elif instruction is not None:
            instructions[int(instruction[1], 16)] = " ".join(instruction[2].split("//")[0].split())
    return symbols, instructions


def is_branch(instruction: str) -> bool:
    return _BRANCH.match(instruction) is not None


def is_call(instruction: str) -> bool:
    return instruction.startswith(("bl ", "blr "))


def is_jump(instruction: str) -> bool:
    """Whether it is a branch that stays within a function: no call and no return."""
    return is_branch(instruction) and not is_call(instruction) and not instruction.startswith(("ret", "br "))


def _output(command: Sequence[str], environment: Optional[Dict[str, str]] = None, text: str = "") -> str:
    completed = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, check=False)
    if completed.returncode:
        error = completed.stderr.strip()
        raise RuntimeError(f"{command[0]}: exit code {completed.returncode}: {error[:500]}")
    return completed.stdout


def backward_jumps(trace: Trace) -> Iterator[Tuple[int, int, int]]:
    """Yields (position in the order, address of the loop's head, address of the branch) of every jump backwards."""
    jumps = [is_jump(trace.instructions[block.last]) for block in trace.blocks]
    order, blocks = trace.order, trace.blocks
    for position in range(1, len(order)):
        before = order[position - 1]
        if jumps[before] and blocks[order[position]].first <= blocks[before].last:
            yield position, blocks[order[position]].first, blocks[before].last
