"""Tests that a save which is killed or fails at any file system call leaves the old or the new checkpoint valid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from tests.checkpoint.faults import CALLS, OLD
from tests.support.checkpoints import cut_flat, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_fault_at_any_call_loses_no_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.faults", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    calls, ends = report["calls"], report["ends"]
    assert set(calls) >= set(CALLS) - {"open_to_read", "read_at", "exists"}
    everything, writes = sum(calls.values()), calls["write_at"]
    assert ends["kill"] == {"-9": everything} and ends["torn"] == {"-9": writes} and ends["short"] == {"0": writes}
    assert sum(ends["full"].values()) == everything and ends["full"]["3"] > writes
    assert sum(ends["broken"].values()) == everything and ends["once"]["3"] > everything / 2


def test_nothing_is_made_visible_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: List[Tuple[str, str]] = []  # (call, path)
    files: Dict[int, str] = {}

    def recorded(name: str) -> Any:
        real = getattr(file_system, name)

        def call(*arguments: Any) -> Any:
            result = real(*arguments)
            if name == "create":
                files[result] = str(arguments[0])
            log.append((name, files[result] if name == "create" else files.get(arguments[0], str(arguments[0]))))
            return result

        return call

    for name in ("create", "write_at", "sync", "rename", "sync_folder"):
        monkeypatch.setattr(file_system, name, recorded(name))
    path = save(tmp_path / "checkpoints", 5, OLD, cut_flat(OLD, 2))
    assert verify_checkpoint(path) == []
    hidden, tracker = [source for call, source in log if call == "rename"]
    shown, tracked = (log.index(("rename", source)) for source in (hidden, tracker))
    for file in sorted({created for call, created in log if call == "create"}):
        last_write = max(at for at, entry in enumerate(log) if entry == ("write_at", file))
        assert last_write < log.index(("sync", file)) < (tracked if file == tracker else shown)
        if file != tracker:
            assert log.index(("create", file)) < log.index(("sync_folder", hidden)) < shown
    assert log.index(("sync_folder", str(path.parent.parent))) < shown  # the folder of checkpoints is new, too
    parents = [at for at, entry in enumerate(log) if entry == ("sync_folder", str(path.parent))]
    assert shown < parents[0] < log.index(("create", tracker)) < tracked < parents[1]
