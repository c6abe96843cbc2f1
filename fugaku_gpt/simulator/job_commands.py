"""Commands that only jobs have on PATH: ``mpiexec``, ``module``, ``llio_transfer`` and ``dir_transfer``."""

from __future__ import annotations

import sys
from typing import List

from fugaku_gpt.simulator.client import BANNER


def main(command: str, arguments: List[str]) -> int:
    """Run one command and return its exit code."""
    sys.stderr.write(f"{command}: {BANNER}\n")
    sys.stderr.flush()
    if command in ("mpiexec", "mpirun"):
        from fugaku_gpt.simulator.mpiexec import main as mpiexec

        return mpiexec(arguments)
    if command == "module":
        sys.stderr.write(f"module {' '.join(arguments)}: nothing is loaded: this machine has no module of Fugaku\n")
        return 0
    from fugaku_gpt.simulator.transfer import dir_transfer, llio_transfer

    return llio_transfer(arguments) if command == "llio_transfer" else dir_transfer(arguments)
