"""Tests of what ranks of a launch do where one of them cannot measure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_gpt import ops
from fugaku_gpt.launch.launcher import find_launcher

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0  # far more than it takes; past them a rank waits for another

# each rank measures the rates of cores, and rank 0, which has those that both share, has no memory in one of the calls
PROGRAM = """
import sys
from fugaku_gpt.comm import open_world
from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.training import node_check

def fail(*arguments, **options):
    raise MemoryError("no memory")

def failing(*arguments, **options):
    return node_check.CoreWork(fail, fail)

world = open_world(threads=1)
name, folder = sys.argv[1:]
if world.rank == 0:
    setattr(node_check, name, fail if name == "_clock_of_first" else failing)
config = load_run_config(overrides=["layout.dp=2"])
check = node_check.NodeCheck(world, config, folder, {"threads": 1}, is_short=True)
try:
    check._rates()
except RunFailed as error:
    print(f"rank {world.rank} has: {error}", flush=True)
world.barrier()
"""


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
@pytest.mark.parametrize("name", ["triad", "_clock_of_first"])
def test_no_rank_waits_for_one_that_cannot_measure_its_cores(name: str, tmp_path: Path) -> None:
    if name == "_clock_of_first" and not ops.has_native_kernels():
        pytest.skip("no kernels are compiled here")
    launcher = find_launcher()
    command = [*launcher.command_prefix(2), sys.executable, "-c", PROGRAM, name, str(tmp_path)]
    environment = {**os.environ, **launcher.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    output = done.stdout.decode()
    assert done.returncode == 0, output
    for rank in (0, 1):
        assert f"rank {rank} has: the rates of cores could not be measured on rank 0 (" in output, output
    assert "): no memory" in output
