"""Checks a library of kernels, in this process, or in another: one that was compiled wrongly may end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Optional

from fugaku_gpt.kernels.library import LibraryError, load_library
from fugaku_gpt.kernels.trials import failures
from fugaku_gpt.machine.checkout import checkout

_TIMEOUT_SECONDS = 300.0
_ANSWER = "fugaku_gpt kernels: "
_PROGRAM = f"""
import sys
from pathlib import Path
import torch
from fugaku_gpt.kernels.check import problem_of
sys.stdout.write({_ANSWER!r} + problem_of(Path(sys.argv[1]), torch.get_num_threads()) + "\\n")
"""


def problem_of(file: Optional[Path], threads: int) -> str:
    """Return why a library cannot be used in this process, which has loaded an OpenMP runtime, in one line; empty if it
    can.

    Args:
        file: the library; None: this environment's.
        threads: number of threads of the kernels.
    """
    try:
        library = load_library(file)
    except LibraryError as error:
        return str(error)
    failed = failures(library, threads)
    if not failed:
        return ""
    return f"they compute wrong results: {failed[0]}" + (f"; and {len(failed) - 1} more" if len(failed) > 1 else "")


def check_library(file: Path) -> str:
    """Return why a library cannot be used with this Python's PyTorch, in one line; empty if it can be."""
    paths = [str(checkout() or ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        completed = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"their trials were not done after {_TIMEOUT_SECONDS:.0f} s"
    answers = [line[len(_ANSWER) :] for line in completed.stdout.splitlines() if line.startswith(_ANSWER)]
    if answers and completed.returncode == 0:
        return answers[-1]
    if completed.returncode < 0:
        return f"their trials ended by {signal.Signals(-completed.returncode).name}"
    lines = completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"]
    return f"their trials ended: {lines[-1]}"
