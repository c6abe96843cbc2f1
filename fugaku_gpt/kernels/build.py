"""Compile the kernels for this processor, into the environment of this Python."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.system import this_system
from fugaku_gpt.records.files import write_bytes_atomically

SOURCE = Path(__file__).parent / "source"
# The first that knows this processor's best instructions is used. Fujitsu's comes last: what it compiles needs its
# OpenMP runtime, which only PyTorch's builds by that compiler bring along.
_COMPILERS = ("cc", "gcc", "clang", "fcc -Nclang")
# No -ffast-math: NaN must stay NaN, and gcc before 13 would flush denormals in the process that loads the library
_OPTIONS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
# the lines of /proc/cpuinfo that distinguish kinds of processors
_PROCESSOR = re.compile(r"^(?:vendor_id|cpu family|model|flags|Features|CPU implementer|CPU part)\s*:.*$", re.MULTILINE)
_TIMEOUT_SECONDS = 300.0  # seconds of a compiler
_LINE_LENGTH = 200  # characters of a compiler's error that are shown
_PR_SVE_GET_VL, _PR_SVE_VL_LEN_MASK = 51, 0xFFFF  # of prctl(2)


class CompiledLibrary(NamedTuple):
    """Kernels that were compiled.

    Attributes:
        file: the library.
        compiler: command of the compiler.
        target: options for this processor, besides those that are always used.
        refused: what compilers said of the better targets that were tried first, a line each.
        problem: why the library cannot be used, in one line; then it is not in its place. Empty if it can be used, or
            was not checked.
    """

    file: Path
    compiler: str
    target: str
    refused: Tuple[str, ...]
    problem: str = ""


def sources() -> List[Path]:
    """The files that are compiled."""
    return sorted(SOURCE.glob("*.c"))


def library_file(prefix: Optional[Path] = None) -> Path:
    """The file of the library of these sources for this kind of processor, whether or not it exists. A library of other
    sources, or for another kind of processor, has another name.

    Args:
        prefix: prefix of the environment; default: this Python's.
    """
    kind = hashlib.sha256(repr((this_system().architecture(), _OPTIONS, _targets())).encode())
    for file in sorted(SOURCE.iterdir()):
        if file.suffix in (".c", ".h"):
            kind.update(file.read_bytes())
    text = this_system().read("proc/cpuinfo") or ""  # hidden: the name tells the machine's family alone
    for line in sorted(set(_PROCESSOR.findall(text))):
        kind.update(line.encode())
    return (prefix or Path(sys.prefix)) / "lib" / "fugaku_gpt" / f"kernels-{kind.hexdigest()[:16]}.so"


def compile_kernels(
    compiler: Optional[str] = None, prefix: Optional[Path] = None, check: Optional[Callable[[Path], str]] = None
) -> CompiledLibrary:
    """Compile the library for this processor and put it in its place; one that is there is replaced.

    Compilers are tried with options for this processor, from the best options down, until a library is compiled that
    can be used. If none can be, nothing is put in place, and the problem of the first one is returned.

    Args:
        compiler: command of the compiler, with options if needed; default: cc, gcc, clang and fcc as far as they are on
            PATH.
        check: returns why a library cannot be used, or an empty text; default: all can.

    Raises:
        UsageError: there is no compiler, none can compile this, or the place cannot be written.
    """
    commands = _commands(compiler)
    library = library_file(prefix)
    refused: List[str] = []
    unusable: Optional[CompiledLibrary] = None
    with tempfile.TemporaryDirectory(prefix="fugaku-gpt-kernels-") as folder:
        built = Path(folder) / library.name
        for target, command in itertools.product(_targets(), commands):
            error = _compile(command, target, built)
            problem = check(built) if check is not None and not error else ""
            compiled = CompiledLibrary(library, shlex.join(command), " ".join(target), tuple(refused), problem)
            if not error and not problem:
                _install(built.read_bytes(), library)
                return compiled
            if not error and unusable is None:
                unusable = compiled
            refused.append(f"{shlex.join([*command, *target])}: {error or problem}")
    if unusable is None:
        raise UsageError("the kernels cannot be compiled:\n" + "\n".join(refused))
    return unusable._replace(refused=tuple(refused))


def _commands(compiler: Optional[str]) -> List[List[str]]:
    """The commands of the compilers to try, each program once: cc and gcc are often the same.

    Raises:
        UsageError: there is none.
    """
    candidates = [compiler] if compiler is not None else list(_COMPILERS)
    commands: Dict[str, List[str]] = {}
    for candidate in candidates:
        try:
            words = shlex.split(candidate)
        except ValueError as error:
            raise UsageError(f"--compiler {candidate}: {error}") from None
        program = shutil.which(words[0]) if words else None
        if program is not None:
            commands.setdefault(" ".join([os.path.realpath(program), *words[1:]]), words)
    if not commands:
        names = ", ".join((text.split() or [repr(text)])[0] for text in candidates)
        raise UsageError(
            f"no C compiler ({names}) on PATH: install one (Debian: apt-get install gcc), or name yours with "
            "--compiler; without these kernels PyTorch's own are used"
        )
    return list(commands.values())


def _compile(command: Sequence[str], target: Sequence[str], library: Path) -> str:
    """Compile the sources into a library; returns what the compiler refused, in one line, and "" if it did not."""
    folder = str(library.parent)
    error = _run([*command, *_OPTIONS, *target, "-c", *map(str, sources())], folder)
    if error:
        return error
    objects = [f"{file.stem}.o" for file in sources()]
    # without -fopenmp: its runtime must be the one that PyTorch has loaded, not another with threads of its own
    return _run([*command, "-shared", "-o", library.name, *objects, "-lm"], folder)


def _install(contents: bytes, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(library, contents)
    except OSError as error:
        raise UsageError(f"{library.parent}: {error.strerror}: the kernels are put into the environment") from None


def _targets() -> List[Sequence[str]]:
    """Options by which compilers choose this processor's instructions, the best first."""
    if this_system().architecture() != "aarch64":
        # an assembler may be older than the compiler
        return [("-march=native",), ("-march=native", "-mno-avx512bf16"), ()]
    length = sve_vector_bytes()
    if not length:
        return [("-mcpu=native",), ()]
    bits = f"-msve-vector-bits={8 * length}"
    return [("-mcpu=native", bits), ("-mcpu=a64fx", bits), ("-march=armv8.2-a+sve", bits), ("-mcpu=native",), ()]


def sve_vector_bytes() -> int:
    """Bytes of an SVE vector in this process; 0 on a processor without SVE.

    The kernel is asked for the process's own length: the default in ``/proc/sys/abi/sve_default_vector_length`` may be
    another one, and a container or an emulator may not show it.
    """
    if this_system().architecture() != "aarch64":
        return 0
    answer: int = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)
    return max(0, answer) & _PR_SVE_VL_LEN_MASK


def _run(command: Sequence[str], folder: str) -> str:
    """Run a compiler; returns the error of one that failed, in one line, and "" for one that succeeded."""
    try:
        completed = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"was not done after {_TIMEOUT_SECONDS:.0f} s: try it by hand, or another"
    except OSError as error:
        return str(error)
    if completed.returncode == 0:
        return ""
    lines = (completed.stderr or completed.stdout).strip().splitlines() or [f"exit code {completed.returncode}"]
    # the first error, not the valid values and the sources that compilers print around it
    line = next((line for line in lines if "error" in line.lower()), lines[0]).strip()
    return line if len(line) <= _LINE_LENGTH else line[: _LINE_LENGTH - 3] + "..."
