"""Installs the commands of a simulator: small programs in ``bin/`` that run this package from any folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from fugaku_gpt.simulator.client import COMMANDS
from fugaku_gpt.simulator.environment import STAND_IN_VARIABLE
from fugaku_gpt.simulator.spool import Spool

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
JOB_COMMANDS = ("mpiexec", "mpirun", "module", "llio_transfer", "dir_transfer")  # commands of a job
_PREAMBLE = """import sys
sys.path.append({root!r})  # last: it may hold more than this package
"""
_CLIENT = """from fugaku_gpt.simulator.client import main
sys.exit(main({spool!r}, sys.argv[1], sys.argv[2:]))
"""
_JOB_COMMAND = """from fugaku_gpt.simulator.job_commands import main
sys.exit(main(sys.argv[1], sys.argv[2:]))
"""
_DAEMON = """from fugaku_gpt.simulator.daemon import main
sys.exit(main({spool!r}))
"""
_RANK = """from fugaku_gpt.simulator.rank import main
main(sys.argv[1], sys.argv[2], sys.argv[3:])
"""


def install_commands(spool: Spool) -> None:
    """Write all commands and the programs that they start; files that exist are replaced."""
    paths = {"root": str(PACKAGE_ROOT), "spool": str(spool.root)}
    for name, text in (("client", _CLIENT), ("inside", _JOB_COMMAND), ("daemon", _DAEMON), ("rank", _RANK)):
        (spool.lib / f"{name}.py").write_text((_PREAMBLE + text).format(**paths), encoding="utf-8")
    python = shlex.quote(sys.executable)
    for command in COMMANDS:
        # -I and -S leave out the user's variables and site-packages: a command starts in a few hundredths of a second
        shell_line = f'exec {python} -I -S {shlex.quote(str(spool.lib / "client.py"))} {command} "$@"'
        _write_command(spool.bin / command, shell_line)
    for command in JOB_COMMANDS:
        shell_line = (
            f'export {STAND_IN_VARIABLE}=1\nexec {python} {shlex.quote(str(spool.lib / "inside.py"))} {command} "$@"'
        )
        _write_command(spool.bin / command, shell_line)


def _write_command(path: Path, shell_line: str) -> None:
    path.write_text(f"#!/bin/sh\n# of a simulated PJM on this machine, not Fugaku\n{shell_line}\n", encoding="utf-8")
    path.chmod(0o755)
