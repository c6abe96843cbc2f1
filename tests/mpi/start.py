"""``python -m tests.mpi.start RANKS ARGUMENTS...``: runs this Python with ARGUMENTS on RANKS ranks of this machine."""

from __future__ import annotations

import os
import sys

from fugaku_gpt.launch.launcher import find_launcher

if __name__ == "__main__":
    launcher = find_launcher()
    command = [*launcher.command_prefix(int(sys.argv[1])), sys.executable, *sys.argv[2:]]
    os.execvpe(command[0], command, {**os.environ, **launcher.environment})
