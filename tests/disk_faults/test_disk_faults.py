"""Calls to the file system that fail: some of each scenario here, each of them by ``make soak``."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.disk_faults.calls import Call
from tests.disk_faults.run import Trials

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
QUEUE = ".local/state/fugaku-gpt/local"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (Call("rank0", "write", "run/metrics.jsonl", 2), errno.ENOSPC),
        pytest.param(
            Call("rank0", "write", "run/tensorboard/events.out.tfevents.H", 3), errno.ENOSPC, marks=pytest.mark.long
        ),
        (Call("main", "open-to-read", "run/result.json", 1), errno.EIO),
    ],
)
def test_a_run_with_a_failing_call_ends_and_names_it(tmp_path: Path, call: Call, error: int) -> None:
    assert Trials("train", tmp_path.resolve()).problems(call, error)[0] == []


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (Call("main", "open-to-write", f"{QUEUE}/queue.log", 1), errno.EROFS),
        (Call("main", "write", f"{QUEUE}/N/.state.json.H.tmp", 1), errno.ENOSPC),
        (Call("main", "write", "run/job.jsonl", 1), errno.EDQUOT),
    ],
)
def test_a_job_with_a_failing_call_ends_and_names_it(tmp_path: Path, call: Call, error: int) -> None:
    assert Trials("job", tmp_path.resolve()).problems(call, error)[0] == []


def test_a_call_that_is_not_made_is_no_proof(tmp_path: Path) -> None:
    problems, _ = Trials("job", tmp_path.resolve()).problems(Call("main", "write", "run/nothing", 1), errno.EIO)
    assert problems == ["the call was not made this time"]
