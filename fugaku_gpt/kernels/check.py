"""Checks a library of kernels, in this process, or in another: one that was compiled wrongly may end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Optional, Sequence, Tuple

from fugaku_gpt.kernels.library import LibraryError, load_library
from fugaku_gpt.kernels.trials import failures
from fugaku_gpt.machine.checkout import checkout

TIMEOUT_SECONDS = 300.0
_ANSWER = "fugaku_gpt kernels: "
_PROGRAM = """
import torch
from pathlib import Path
from fugaku_gpt.kernels.check import problem_of
answer(problem_of(Path(sys.argv[1]), torch.get_num_threads()))
"""
_HEAD = f"""
import sys
def answer(text):
    sys.stdout.write({_ANSWER!r} + text + "\\n")
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
    problem, answer = run_in_child(_PROGRAM, [str(file)], "their trials", TIMEOUT_SECONDS)
    return problem or answer


def run_in_child(program: str, arguments: Sequence[str], subject: str, timeout: float) -> Tuple[str, str]:
    """Run a program in a new process of this Python, with this package; returns (problem, answer).

    Args:
        program: Python; it calls ``answer(text)`` with one line, and its arguments are ``sys.argv[1:]``.
        subject: what the program does, in the plural, for the problem: ``their trials``.
        timeout: seconds after which the process is killed.

    Returns:
        ("", the answer), or (why there is none, in one line, "").
    """
    paths = [str(checkout() or ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        completed = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _HEAD + program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{subject} were not done after {timeout:.0f} s", ""
    answers = [line[len(_ANSWER) :] for line in completed.stdout.splitlines() if line.startswith(_ANSWER)]
    if answers and completed.returncode == 0:
        return "", answers[-1]
    if completed.returncode < 0:
        return f"{subject} ended by {signal.Signals(-completed.returncode).name}", ""
    lines = completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"]
    return f"{subject} ended: {lines[-1]}", ""
