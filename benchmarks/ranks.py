"""A benchmark's ranks: the program starts itself again under ``mpirun``, and hands on what its rank 0 prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, Sequence

from fugaku_gpt.jobs.launcher import find_launcher
from fugaku_gpt.jobs.processes import run_command

ROOT = Path(__file__).resolve().parent.parent


def run_ranks(ranks: int, program: str, arguments: Sequence[str], timeout: float = 600.0) -> List[str]:
    """The lines that ``program`` prints on so many ranks of one thread each; no process stays behind.

    Raises:
        SystemExit: a rank failed, or the time limit (seconds) has passed; shows what was printed.
    """
    launcher = find_launcher()
    lines: List[str] = []
    outcome = run_command(
        [*launcher.start(ranks), sys.executable, program, *arguments],
        {**launcher.environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=timeout,
        on_line=lines.append,
    )
    if not outcome.ok:
        why = f"did not end in {timeout:g} s" if outcome.timed_out else f"ended with exit code {outcome.exit_code}"
        raise SystemExit("\n".join([*lines, f"{Path(program).name} on {ranks} ranks {why}"]))
    return lines
