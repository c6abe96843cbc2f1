"""Every reader of untrusted files, with mutations of a fixed seed and odd files, in a process with little memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz.registry import ROOT, all_readers


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", ["a", "b"])
def test_only_errors_of_ours_come_out_soon_and_in_little_memory(part: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--calls", "120", "--seed", "1", "--patience", "4", "--part", part]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    output = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, output[-4000:]


def test_every_reader_has_a_name_and_a_seed() -> None:
    names = [reader.name for reader in all_readers()]
    assert len(set(names)) == len(names) > 35 and all(reader.seeds for reader in all_readers())
