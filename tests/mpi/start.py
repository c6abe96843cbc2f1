"""``python -m tests.mpi.start RANKS WORDS...``: this Python with WORDS on so many ranks of this machine."""

from __future__ import annotations

import os
import sys

from fugaku_gpt.launch.launcher import find_launcher

if __name__ == "__main__":
    launcher = find_launcher()
    words = [*launcher.command_prefix(int(sys.argv[1])), sys.executable, *sys.argv[2:]]
    os.execvpe(words[0], words, {**os.environ, **launcher.environment})
