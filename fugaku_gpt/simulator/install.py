"""The commands of a simulator's folder: small programs in ``bin/`` that start this package, wherever one calls them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from fugaku_gpt.simulator.client import COMMANDS
from fugaku_gpt.simulator.environment import PART
from fugaku_gpt.simulator.spool import Spool

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
INSIDE = ("mpiexec", "mpirun", "llio_transfer", "dir_transfer")  # those of a job
_START = """import sys
sys.path.append({root!r})  # last: it may hold more than this package
"""
_CLIENT = """from fugaku_gpt.simulator.client import main
sys.exit(main({spool!r}, sys.argv[1], sys.argv[2:]))
"""
_INSIDE = """from fugaku_gpt.simulator.inside import main
sys.exit(main(sys.argv[1], sys.argv[2:]))
"""
_DAEMON = """from fugaku_gpt.simulator.daemon import main
sys.exit(main({spool!r}))
"""
_RANK = """from fugaku_gpt.simulator.rank import main
main(sys.argv[1], sys.argv[2], sys.argv[3:])
"""


def install(spool: Spool) -> None:
    """Write them anew."""
    values = {"root": str(PACKAGE_ROOT), "spool": str(spool.root)}
    for name, text in (("client", _CLIENT), ("inside", _INSIDE), ("daemon", _DAEMON), ("rank", _RANK)):
        (spool.lib / f"{name}.py").write_text((_START + text).format(**values), encoding="utf-8")
    python = shlex.quote(sys.executable)
    for command in COMMANDS:
        # -I and -S: neither the user's variables nor site-packages matter, and a command starts in a few hundredths of
        # a second
        line = f'exec {python} -I -S {shlex.quote(str(spool.lib / "client.py"))} {command} "$@"'
        _write(spool.bin / command, line)
    for command in INSIDE:
        line = f'export {PART}=1\nexec {python} {shlex.quote(str(spool.lib / "inside.py"))} {command} "$@"'
        _write(spool.bin / command, line)


def _write(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n# of a simulated PJM on this machine, not Fugaku\n{line}\n", encoding="utf-8")
    path.chmod(0o755)
