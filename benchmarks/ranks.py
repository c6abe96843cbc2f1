"""Runs a benchmark's ranks: the program starts itself again under ``mpirun``, and passes on the output of rank 0."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, List, Sequence

from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.launch.processes import run_command

if TYPE_CHECKING:
    from fugaku_gpt.comm import Communicator

ROOT = Path(__file__).resolve().parent.parent


def run_ranks(ranks: int, program: str, arguments: Sequence[str], timeout: float = 600.0) -> List[str]:
    """The lines that ``program`` prints on ``ranks`` ranks of one thread each; no process is left behind.

    Raises:
        SystemExit: a rank failed, or the time limit (seconds) has passed; shows what was printed.
    """
    launcher = find_launcher()
    lines: List[str] = []
    outcome = run_command(
        [*launcher.command_prefix(ranks), sys.executable, program, *arguments],
        {**launcher.environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=timeout,
        on_line=lines.append,
    )
    if not outcome.ok:
        why = f"did not end in {timeout:g} s" if outcome.timed_out else f"ended with exit code {outcome.exit_code}"
        raise SystemExit("\n".join([*lines, f"{Path(program).name} on {ranks} ranks {why}"]))
    return lines


def open_patient_world() -> "Communicator":
    """Opens a communicator of all ranks that wait without spinning, however few they are: on a machine that is shared
    with other work, a rank that spins takes processor time from the rank that it waits for."""
    from fugaku_gpt.comm import open_world
    from fugaku_gpt.machine.local import usable_cores

    return open_world(threads=len(usable_cores()) + 1)
