"""Trains several layouts one after the other in the same ranks: starting Python takes longer than training there.

    mpirun -n 2 python -m tests.aarch64.train_layouts FILE

FILE has, as JSON, a list of runs, each with the keys ``out`` (its directory) and ``settings`` (overrides).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fugaku_gpt.config import load_run_config
from fugaku_gpt.training.run import train

if __name__ == "__main__":
    for run in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        code = train(load_run_config(overrides=run["settings"]), Path(run["out"]), threads=1)
        if code != 0:
            sys.exit(code)
