"""Checks that two ranks of the ``mpirun`` on PATH meet through mpi4py; the exit code is 0 if they do.

An mpi4py that loads another MPI than that of the ``mpirun`` does not fail: each rank finds itself alone.
"""

import os
import subprocess
import sys

from fugaku_gpt.launch.launcher import find_launcher

launcher = find_launcher()
command = [*launcher.command_prefix(2), sys.executable, "-c", "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2"]
sys.exit(subprocess.run(command, env={**os.environ, **launcher.environment}, check=False).returncode)
