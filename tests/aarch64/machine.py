"""The emulated machine: A64FX processors by qemu, in the folder that env/make_aarch64.sh has made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Sequence

import pytest

from tests.support.forks import ForkedPython

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = "FUGAKU_GPT_AARCH64"
FOLDER = Path(os.environ[_VARIABLE]).resolve() if _VARIABLE in os.environ else None
COMPILERS = ("gcc-12", "gcc-14", "clang-19")

# name of a processor → qemu's name of it, with the length of its SVE vectors
PROCESSORS = {
    "sve512": "a64fx",
    "sve256": "max,sve-default-vector-length=32",
    "sve128": "max,sve-default-vector-length=16",
    "any-sve": "max,sve-default-vector-length=32",
    "neon": "max,sve=off",
    "neoverse-v1": "max,sve-default-vector-length=32",
    "bf16-sve128": "max,sve-default-vector-length=16",
    "bf16-neon": "max,sve=off",
}
# options by which the kernels are compiled for them, as kernels/build.py chooses them
TARGETS = {
    "sve512": ("-mcpu=a64fx", "-msve-vector-bits=512"),
    "sve256": ("-march=armv8.2-a+sve", "-msve-vector-bits=256"),
    "sve128": ("-march=armv8.2-a+sve", "-msve-vector-bits=128"),
    "any-sve": ("-march=armv8.2-a+sve",),  # where a compiler refuses the length
    "neon": (),
    # with instructions for bfloat16: Graviton 3; what -mcpu=native finds on Grace; a processor without SVE
    "neoverse-v1": ("-mcpu=neoverse-v1", "-msve-vector-bits=256"),
    "bf16-sve128": ("-march=armv8.6-a+sve", "-msve-vector-bits=128"),
    "bf16-neon": ("-march=armv8.6-a",),
}


def folder() -> Path:
    """Returns the machine's folder."""
    assert FOLDER is not None
    return FOLDER


def compiler(name: str) -> str:
    """Returns the command of a cross compiler, or skips the test."""
    command = folder() / name / "bin" / "cc"
    if not command.exists():
        pytest.skip(f"no {name} for Arm here: env/make_aarch64.sh says why")
    return str(command)


class EmulatedPython(ForkedPython):
    """The emulated Python in which PyTorch is imported already: each command runs in a fork of one process."""

    def __init__(self, shared: Path) -> None:
        """
        Args:
            shared: a folder of all workers.
        """
        super().__init__(shared / "emulated", folder() / "bin" / "python", _environment("sve512"))

    def run(self, arguments: Sequence[str], timeout: float = 900.0) -> "subprocess.CompletedProcess[str]":
        """Run it."""
        command = [str(self.program), *arguments]
        return subprocess.run(
            command, env=_environment("sve512"), capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start it, without waiting for it."""
        command = [str(self.program), *arguments]
        return subprocess.Popen(command, env=_environment("sve512"), stdout=subprocess.DEVNULL)


def run_emulated(
    arguments: Sequence[str], processor: str = "sve512", *, packages: str = "", timeout: float = 900.0
) -> "subprocess.CompletedProcess[str]":
    """Run the emulated Python, started anew.

    Args:
        arguments: of Python.
        packages: a folder of packages, which alone are importable; default: all of the machine.
    """
    options = ["-S"] if packages else []
    command = [str(folder() / "bin" / "python"), *options, *arguments]
    environment = _environment(processor, packages)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def variables(processor: str, packages: str = "") -> Dict[str, str]:
    """Returns the variables that the emulated Python needs."""
    return {
        "QEMU_CPU": PROCESSORS[processor],
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), packages])),
        # MPICH's other transports ask the kernel for what qemu does not have
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "MPIR_CVAR_CH4_CMA_ENABLE": "0",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
    }


def _environment(processor: str, packages: str = "") -> Dict[str, str]:
    path = os.pathsep.join([str(folder() / "gcc-12" / "bin"), os.environ["PATH"]])
    return {**os.environ, **variables(processor, packages), "PATH": path}


def run_natively(arguments: Sequence[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run this machine's own Python."""
    environment: Dict[str, str] = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def output(completed: "subprocess.CompletedProcess[str]", code: int = 0) -> List[str]:
    """Returns the lines that a command has printed; the test fails if its exit code is another."""
    assert completed.returncode == code, f"exit code {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout.splitlines()
