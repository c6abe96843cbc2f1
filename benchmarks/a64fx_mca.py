"""Counts the cycles of recorded instructions on A64FX, by the processor's model in LLVM 19 (llvm-mca).

The recorded order is cut into segments of some hundred instructions, at the heads of loops, so that the same segments
return. A segment's cycles are those by which it lengthens what ran before it: the model runs the segment before it, and
both, each once, and the difference counts. So what an instruction window of 128 overlaps across a boundary is counted
as such. The cycles of a run are the sum over all of its segments.

The model hits the L1 cache always, predicts every branch, and lets no load wait for a store. The last is wrong for sums
that a loop keeps in memory, so loops that load what they have stored at the same unchanged address are counted with
every load after all earlier stores, which is too slow for the other loads of such a loop.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Dict, List, NamedTuple, Tuple

from a64fx_trace import Machine, Trace, backward_jumps, is_call, is_jump

OUTER_INSTRUCTIONS = 200  # of a segment at least, before it is cut at the head of an outer loop
INNER_INSTRUCTIONS = 800  # before it is cut at the head of an innermost loop
LOOP_ITERATIONS = 100  # of a loop that is counted alone
_REGIONS = 200  # for one start of llvm-mca
_MULTIPLY_ADD = re.compile(r"^f(n?ml[as]|n?mad|n?msb|n?madd|n?msub)$")
_ARITHMETIC = re.compile(r"^f(add|sub|subr|mul|nmul|div|divr|sqrt|max|min|maxnm|minnm|abd)$")
_MEMORY = re.compile(r"\[([^\]]+)\]")
_VECTOR = re.compile(r"\b[zqv]\d+")

Path_ = Tuple[int, ...]  # indices of blocks


class Loop(NamedTuple):
    """An innermost loop of a run, without calls.

    Attributes:
        name: its function, and its number among that function's loops of this run, in the order of addresses.
        iterations: how often its most frequent way was taken.
        cycles: of one iteration of that way, repeated.
        flop: operations of that way on float32 or float64 numbers.
        instructions: of that way.
        spills: vectors that it loads or stores at an address that does not change, on the stack or stored to.
        divisions: divisions and square roots of vectors, for each of which a pipe is blocked 98 cycles.
        broadcasts: numbers that are spread over a vector out of a register, which takes a slot of a multiply-add.
    """

    name: str
    iterations: int
    cycles: float
    flop: int
    instructions: int
    spills: int
    divisions: int
    broadcasts: int


class Count(NamedTuple):
    """The cycles of a run, its instructions, and its innermost loops by cycles, the longest first."""

    cycles: float
    instructions: int
    loops: List[Loop]


def count_cycles(machine: Machine, trace: Trace) -> Count:
    """Count a recorded run."""
    loops = _Loops(trace)
    model = _Model(machine, trace)
    segments = _segments(trace, loops)
    pairs: Counter[Tuple[Path_, Path_, bool]] = Counter()
    before: Path_ = ()
    for segment, is_ordered in segments:
        pairs[before, segment, is_ordered] += 1
        before = segment
    model.request([(first, o) for first, _, o in pairs if first] + [(a + b, o) for a, b, o in pairs])
    cycles = sum(
        times * (model.cycles(first + second, o) - (model.cycles(first, o) if first else 0.0))
        for (first, second, o), times in pairs.items()
    )
    instructions = sum(len(trace.text(trace.blocks[index])) for index in trace.order)
    return Count(cycles, instructions, sorted(loops.counted(model), key=lambda loop: -loop.iterations * loop.cycles))


class _Loops:
    """The loops of a run."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.positions: List[Tuple[int, int]] = []  # (position in the order, head) of every jump backwards
        self.last: Dict[int, int] = {}  # head → the loop's last branch
        for position, head, branch in backward_jumps(trace):
            self.positions.append((position, head))
            self.last[head] = max(branch, self.last.get(head, 0))
        calls = [block.last for block in trace.blocks if is_call(trace.instructions[block.last])]
        self.innermost = {head for head, last in self.last.items() if not self._has_inside(head, last, calls)}
        self.paths = self._paths()
        self.in_memory = {head for head in self.innermost if _memory_sums(self._text(self.usual_path(head)))}

    def _has_inside(self, head: int, last: int, calls: List[int]) -> bool:
        """Whether another loop, or a call, is within the addresses of a loop."""
        return any(head <= call <= last for call in calls) or any(
            head <= other and end <= last and other != head for other, end in self.last.items()
        )

    def _paths(self) -> "Dict[int, Counter[Path_]]":
        """Head → how often each way through an innermost loop was taken."""
        paths: Dict[int, Counter[Path_]] = {head: Counter() for head in self.innermost}
        for (position, head), (following, next_head) in zip(self.positions, self.positions[1:]):
            if head == next_head and head in paths:
                path = tuple(self.trace.order[position:following])
                if all(head <= self.trace.blocks[index].first <= self.last[head] for index in path):
                    paths[head][path] += 1
        return paths

    def usual_path(self, head: int) -> Path_:
        """The most frequent way through a loop; empty if it never ran twice in a row."""
        return min(self.paths[head], key=lambda path: (-self.paths[head][path], path), default=())

    def _text(self, path: Path_) -> List[str]:
        return [line for index in path for line in self.trace.text(self.trace.blocks[index])]

    def counted(self, model: "_Model") -> List[Loop]:
        numbers: Counter[str] = Counter()
        loops = []
        paths = {head: self.usual_path(head) for head in sorted(self.innermost)}
        repeated = {head: path * LOOP_ITERATIONS for head, path in paths.items() if path}
        model.request([(path, head in self.in_memory) for head, path in repeated.items()])
        for head, path in paths.items():
            function = self.trace.function(head)
            numbers[function] += 1
            if not path:
                continue
            text = self._text(path)
            cycles = model.cycles(repeated[head], head in self.in_memory) / LOOP_ITERATIONS
            name = f"{function}:{numbers[function]}"
            flop = sum(flop_of(line) for line in text)
            counts = (_spills(text), sum(map(_is_division, text)), sum(map(_is_broadcast, text)))
            loops.append(Loop(name, self.paths[head][path], cycles, flop, len(text), *counts))
        return loops


def _segments(trace: Trace, loops: _Loops) -> List[Tuple[Path_, bool]]:
    """Cuts a run into segments, and says of each whether most of it is a loop with sums in memory."""
    lengths = [(block.last - block.first) // 4 + 1 for block in trace.blocks]
    segments: List[Tuple[Path_, bool]] = []
    begin = size = at = in_memory = 0
    for position, head in [*loops.positions, (len(trace.order), 0)]:
        size += sum(lengths[index] for index in trace.order[at:position])
        at = position
        in_memory += head in loops.in_memory
        least = INNER_INSTRUCTIONS if head in loops.innermost else OUTER_INSTRUCTIONS
        if size >= least or position == len(trace.order):
            segments.append((tuple(trace.order[begin:position]), in_memory >= 4))
            begin, size, in_memory = position, 0, 0
    return [segment for segment in segments if segment[0]]


class _Model:
    """Calls of llvm-mca, one for each sequence of blocks."""

    def __init__(self, machine: Machine, trace: Trace) -> None:
        self.machine = machine
        self.texts = ["\n".join(map(_without_target, trace.text(block))) for block in trace.blocks]
        self.known_cycles: Dict[Tuple[Path_, bool], float] = {}

    def cycles(self, path: Path_, is_ordered: bool) -> float:
        """The cycles of blocks, which were requested."""
        return self.known_cycles[path, is_ordered]

    def request(self, paths: List[Tuple[Path_, bool]]) -> None:
        for is_ordered in (False, True):
            missing = sorted({path for path, ordered in paths if ordered == is_ordered})
            missing = [path for path in missing if (path, is_ordered) not in self.known_cycles]
            for first in range(0, len(missing), _REGIONS):
                self._run(missing[first : first + _REGIONS], is_ordered)

    def _run(self, paths: List[Path_], is_ordered: bool) -> None:
        """Asks for some sequences by one start of llvm-mca."""
        regions = []
        for number, path in enumerate(paths):
            code = "\n".join(self.texts[index] for index in path)
            regions.append(f"# LLVM-MCA-BEGIN r{number}\n{code}\n# LLVM-MCA-END r{number}\n")
        options = ["-march=aarch64", "-mcpu=a64fx", "-mattr=+sve", "-iterations=1", "-instruction-info=0"]
        options += ["-resource-pressure=0", f"-noalias={'false' if is_ordered else 'true'}", "-"]
        printed = self.machine.run_llvm("llvm-mca", *options, text="".join(regions) + ".Ltarget:\n")
        cycles = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("Total Cycles:")]
        if len(cycles) != len(paths):
            raise RuntimeError(f"llvm-mca counted {len(cycles)} of {len(paths)} sequences")
        for path, count in zip(paths, cycles):
            self.known_cycles[path, is_ordered] = count


def _without_target(instruction: str) -> str:
    """An instruction with some label as its target; calls and returns are branches, as the model takes them."""
    name = instruction.split()[0]
    if is_call(instruction) or name in ("ret", "br"):
        return "b .Ltarget"
    if is_jump(instruction) or name in ("adr", "adrp"):
        operands = instruction.split("<")[0].split()
        return " ".join([*operands[:-1], ".Ltarget"])
    return instruction


def flop_of(instruction: str) -> int:
    """The floating-point operations of an instruction: one a lane, two of a multiply-add."""
    name, _, operands = instruction.partition(" ")
    if name == "movprfx":
        return 0
    each = 2 if _MULTIPLY_ADD.match(name) else 1 if _ARITHMETIC.match(name) else 0
    target = operands.split(",")[0]
    if target.endswith(".s"):
        return 16 * each
    if target.endswith(".d"):
        return 8 * each
    vector = re.match(r"v\d+\.(\d+)[sd]$", target)
    return each * int(vector[1]) if vector else each


def _is_division(instruction: str) -> bool:
    return re.match(r"^f(div|divr|sqrt) [zv]", instruction) is not None


def _is_broadcast(instruction: str) -> bool:
    return re.match(r"^(mov|dup) z\d+\.[bhsd], ([swx]\d+|z\d+\.[bhsd]\[|wzr)", instruction) is not None


def _written_registers(line: str) -> List[str]:
    """The general registers that an instruction changes."""
    name, _, operands = line.partition(" ")
    written = []
    if not name.startswith(("st", "cmp", "cmn", "tst", "cb", "tb", "b.", "prf")):
        written = [_full_register(operand) for operand in operands.split(",")[: 2 if name.startswith("ldp") else 1]]
    address = _MEMORY.search(line)
    if address and (line.endswith("!") or re.search(r"\], #", line)):
        written.append(_full_register(address[1].split(",")[0]))
    return written


def _full_register(operand: str) -> str:
    """The name of a register's 64 bits."""
    return re.sub(r"^w(\d+|zr)$", r"x\1", operand.strip())


def _vector_accesses(text: List[str]) -> List[Tuple[bool, str]]:
    """Returns (whether it is a store, address) of a loop's accesses to vectors at addresses that do not change."""
    # a register's value as a sum that does not change from one iteration to the next; "?" if it may change
    values = {register: "?" for line in text for register in _written_registers(line)}
    accesses = []
    for line in text:
        name, _, operands = line.partition(" ")
        address = _MEMORY.search(operands)
        if address and _VECTOR.search(operands) and not name.startswith(("ld1r", "prf")):
            terms = [values.get(term, term) for term in map(_full_register, address[1].split(","))]
            if "?" not in terms:
                accesses.append((name.startswith("st"), "+".join(terms)))
        sources = [values.get(term, term) for term in map(_full_register, operands.split(",")[1:])]
        for register in _written_registers(line):
            is_sum = name in ("add", "mov") and "?" not in sources and address is None
            values[register] = "+".join(sources) if is_sum else "?"
    return accesses


def _memory_sums(text: List[str]) -> bool:
    """Whether a loop loads what it has stored at the same address in the iteration before."""
    first_is_store: Dict[str, bool] = {}
    for is_store, address in _vector_accesses(text):
        first_is_store.setdefault(address, is_store)
    return any(
        (True, address) in _vector_accesses(text) for address, is_store in first_is_store.items() if not is_store
    )


def _spills(text: List[str]) -> int:
    """The accesses at unchanged addresses that are stored to, or on the stack."""
    accesses = _vector_accesses(text)
    stored = {address for is_store, address in accesses if is_store}
    return sum(address in stored or address.startswith("sp") for _, address in accesses)
