"""Compile the kernels for this processor, into the environment of this Python."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.files import write_bytes_atomically

SOURCE = Path(__file__).parent / "source"
_COMPILERS = ("cc", "gcc", "clang")
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
_PR_SVE_GET_VL, _PR_SVE_VL_LEN_MASK = 51, 0xFFFF  # of prctl(2)


class CompiledLibrary(NamedTuple):
    """Kernels that were compiled.

    Attributes:
        file: the library.
        target: options for this processor, besides those that are always used.
        refused: errors of the better targets that were tried first; "" if the best one worked.
    """

    file: Path
    target: str
    refused: str


def sources() -> List[Path]:
    """The files that are compiled."""
    return sorted(SOURCE.glob("*.c"))


def library_file(prefix: Optional[Path] = None) -> Path:
    """The file of the library of these sources for this kind of processor, whether or not it exists. A library of other
    sources, or for another kind of processor, has another name.

    Args:
        prefix: prefix of the environment; default: this Python's.
    """
    kind = hashlib.sha256(repr((platform.machine(), _OPTIONS, _targets())).encode())
    for file in sorted(SOURCE.iterdir()):
        if file.suffix in (".c", ".h"):
            kind.update(file.read_bytes())
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or hidden: the name tells the machine's family alone
        text = ""
    for line in sorted(set(_PROCESSOR.findall(text))):
        kind.update(line.encode())
    return (prefix or Path(sys.prefix)) / "lib" / "fugaku_gpt" / f"kernels-{kind.hexdigest()[:16]}.so"


def compile_kernels(compiler: Optional[str] = None, prefix: Optional[Path] = None) -> CompiledLibrary:
    """Compile the library for this processor and put it in its place; one that is there is replaced.

    Args:
        compiler: command of the compiler, with options if needed; default: the first of cc, gcc and clang on PATH.

    Raises:
        UsageError: there is no compiler, it cannot compile this, or the place cannot be written.
    """
    command = shlex.split(compiler) if compiler is not None else [name for name in _COMPILERS if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        looked_for = compiler if compiler is not None else ", ".join(_COMPILERS)
        raise UsageError(
            f"no C compiler ({looked_for}) on PATH: install one (Debian: apt-get install gcc), or name yours with "
            "--compiler; without these kernels PyTorch's own are used"
        )
    library = library_file(prefix)
    refused: List[str] = []
    with tempfile.TemporaryDirectory(prefix="fugaku-gpt-kernels-") as folder:
        for target in _targets():
            error_output = _run([*command, *_OPTIONS, *target, "-c", *map(str, sources())], folder)
            if not error_output:
                break
            refused.append(f"{' '.join(target) or 'without a target'}: {error_output}")
        else:
            raise UsageError(f"{command[0]} cannot compile the kernels:\n{error_output}")
        objects = [f"{file.stem}.o" for file in sources()]
        # without -fopenmp: its runtime must be the one that PyTorch has loaded, not another with threads of its own
        error_output = _run([*command, "-shared", "-o", library.name, *objects, "-lm"], folder)
        if error_output:
            raise UsageError(f"{command[0]} cannot link the kernels:\n{error_output}")
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(library, (Path(folder) / library.name).read_bytes())
        except OSError as error:
            raise UsageError(f"{library.parent}: {error.strerror}: the kernels are put into the environment") from None
    return CompiledLibrary(library, " ".join(target), "\n".join(refused))


def _targets() -> List[Sequence[str]]:
    """Options by which compilers choose this processor's instructions, the best first."""
    if platform.machine() != "aarch64":
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
    if platform.machine() != "aarch64":
        return 0
    answer: int = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)
    return max(0, answer) & _PR_SVE_VL_LEN_MASK


def _run(command: Sequence[str], folder: str) -> str:
    """Run a command; returns the output of one that failed, and "" for one that succeeded."""
    try:
        completed = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{command[0]} was not done after {_TIMEOUT_SECONDS:.0f} s: try it by hand, or another"
        ) from None
    except OSError as error:
        return str(error)
    if completed.returncode == 0:
        return ""
    lines = (completed.stderr or completed.stdout).strip().splitlines() or [f"exit code {completed.returncode}"]
    return "\n".join(lines[:20])
