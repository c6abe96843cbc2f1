"""A run whose processes were killed all at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.records.claim import Holder, claim_folder
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import CLAIM, RunDirectory

# a mark of its own for each process of tests: some give it to a process that lives
DEAD = Holder(f"a mark of tests in process {os.getpid()}", socket.gethostname(), 2**22 - 3, 1.0)


def killed_run(path: Path, holder: Holder = DEAD) -> RunDirectory:
    """A run directory as a kill of all processes leaves it: three iterations, and no result."""
    path.mkdir(parents=True)
    directory = RunDirectory(path)
    directory.config_file.write_text(dump_run_config(load_run_config(preset="tiny")), encoding="utf-8")
    claim_folder(path, CLAIM, holder)
    directory.write_environment({"ranks": [{"host": holder.host}]})
    writer = MetricsWriter(directory.metrics_file)
    for number in range(1, 4):
        writer.write("iteration", {"iteration": number, "seconds": 0.5, "loss": 7.0 - number, "tokens": 128})
    writer.close()
    return directory
