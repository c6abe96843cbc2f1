"""Every reader of untrusted files, with mutations of a fixed seed and odd files, in a process with little memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from tests.fuzz.__main__ import fuzz_guided
from tests.fuzz.calls import watch_time
from tests.fuzz.guided import Campaign
from tests.fuzz.mutations import TEXT
from tests.fuzz.readers import Reader, prepare
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


def _read_numbers(path: Path) -> int:
    """A reader with a fault: it refuses what is no number, but not a number of two lines."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text[:1].isdigit():
        raise UsageError(f"{path}: no number")
    return int(text)


def test_foreign_errors_are_recorded_once_for_each_kind(tmp_path: Path) -> None:
    watch_time()
    reader = Reader("numbers", "numbers.txt", TEXT, _read_numbers, (b"1",))
    prepare(reader, tmp_path)
    campaign = Campaign(reader, tmp_path / reader.file, tmp_path / "record.json", patience=10.0)
    for content in (b"1", b"x", b"1\nabc", b"2\nb", b""):
        campaign.call(content)
    campaign.write_record()
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    ((content, text),) = record["kinds"].values()
    assert record["calls"] == 5 and bytes.fromhex(content) == b"2\nb" and "ValueError" in text


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_a_reader_is_fuzzed_by_atheris_until_its_time_is_over(tmp_path: Path) -> None:
    (reader,) = (reader for reader in all_readers() if reader.name == "expression")
    calls, kinds = fuzz_guided(reader, tmp_path, seed=1, seconds=2.0, patience=10.0)
    assert calls >= len(reader.seeds) and not kinds


@pytest.mark.slow
def test_a_process_of_atheris_that_ends_early_is_a_finding(tmp_path: Path) -> None:
    nobody = Reader("no such reader", "x.txt", TEXT, _read_numbers, (b"1",))
    calls, kinds = fuzz_guided(nobody, tmp_path, seed=1, seconds=1.0)
    assert calls == 0 and "the process ended" in kinds
