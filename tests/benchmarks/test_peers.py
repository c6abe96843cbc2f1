"""Tests of the benchmarks of several ranks, of the optimizer and of starting: their tables, from minimal models."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import List

import pytest

from tests.benchmarks.programs import BENCHMARKS, printed_lines, refusal

from peers import config_of, table  # isort: skip  # modules of benchmarks/
from scaling import mixes, replicas  # isort: skip
from turns import Unit  # isort: skip

SMALL = ["model.layers=4", "model.hidden=16", "model.heads=2", "model.vocab_size=64"]


def lines_of(capfd: pytest.CaptureFixture[str], program: str, *arguments: str) -> List[str]:
    """The lines that a program prints for a small model."""
    return printed_lines(
        capfd, program, *arguments, *[argument for setting in SMALL for argument in ("--set", setting)]
    )


NAMES = ["ddp=2", "dp=2,zero=1", "pp=2,schedule=interleaved,chunks=2"]


def assert_is_table_of_pairs(lines: List[str], names: List[str]) -> None:
    """Asserts that a table has a line for each contestant and, below them, one for each pair."""
    contestants, pairs = lines[: len(names)], [line for line in lines[len(names) :] if not line.startswith("from the ")]
    assert [line.split()[0] for line in contestants] == names
    assert all(" 2 x 1 " in line for line in contestants)
    assert contestants[0].split()[-1] == "-"  # gloo does not report what it hides
    compared_pairs = [(line.split()[0], line.split()[-1]) for line in pairs]
    assert compared_pairs == [(other, name) for second, other in enumerate(names) for name in names[:second]]


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_peers_are_compared_in_pairs(capfd: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capfd, "peers", *NAMES[::2], "--preset", "tiny", "--shape", "16x1", "--turns", "1")
    assert_is_table_of_pairs(lines[2:], NAMES[::2])


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_other_trainers_are_compared_or_named_as_lacking(capfd: pytest.CaptureFixture[str]) -> None:
    """FSDP2 is in current PyTorch; DeepSpeed is in another environment, which ``make peers`` makes."""
    names = ["fsdp=2", "deepspeed=2", "dp=2"]
    lines = lines_of(capfd, "peers", *names, "--preset", "tiny", "--shape", "16x1", "--turns", "1")
    lacking = [line for line in lines if ": not on this build: " in line]
    assert any(line.startswith("deepspeed=2: ") and "`make peers` installs it" in line for line in lacking)
    table = [line for line in lines if line not in lacking][2:]
    compared = ["dp=2"] if any(line.startswith("fsdp=2: ") for line in lacking) else ["fsdp=2", "dp=2"]
    assert [line.split()[0] for line in table[: len(compared)]] == compared
    assert table[-1].startswith("from the start to the end of the first step: ")


def test_three_peers_are_three_pairs_of_which_each_is_compared_within_the_turns() -> None:
    options = argparse.Namespace(preset="tiny", shape="16x1", micro_batches=4, bf16=False, settings=SMALL)
    configs = {name: config_of(name, options) for name in NAMES}
    seconds, hidden = ((4.0, 2.0, 1.0), (8.0, 2.0, 4.0)), (None, 0.5, 0.25)
    turns = [
        {
            name: Unit(taken, {"loss": 1.0, "hidden": share}, [2**20])
            for name, taken, share in zip(NAMES, seconds_of_turn, hidden)
        }
        for seconds_of_turn in seconds
    ]
    lines = table(configs, turns, 2)[1:]
    assert_is_table_of_pairs(lines, NAMES)
    # the contestants with two replicas have twice the tokens of the pipeline
    assert " has 3.000 (2.000-4.000) x " in lines[3]
    assert " has 1.500 (1.000-2.000) x " in lines[4] and " has 0.625 (0.250-1.000) x " in lines[5]


def test_an_invalid_layout_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert "did you mean layout.zero?" in refusal(capfd, "peers", "dp=2,zer=1")


def test_a_type_for_ours_alone_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for program, names, instead in (("peers", ["ddp=2", "dp=2"], "--bf16"), ("step", ["ours"], "ours-bf16")):
        assert instead in refusal(capfd, program, *names, "--set", "training.dtype=bfloat16")


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_scaling_prints_efficiency_beside_a_single_rank(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--preset", "tiny", "--shape", "16x1", "--turns", "1", "--ranks", "2", "--mix-ranks", "0"]
    rows = [line.split() for line in lines_of(capfd, "scaling", *arguments)[3:]]
    assert [row[0] for row in rows] == ["dp=1", "dp=2"]
    assert rows[0][-2:] == ["1.000", "(1.000-1.000)"] and float(rows[1][-2]) > 0


def test_scaling_covers_every_mix() -> None:
    assert replicas(12) == ["dp=1", "dp=2", "dp=4", "dp=8", "dp=12"]
    assert mixes(4, 12) == [
        "dp=4",
        "dp=2,tp=2",
        "dp=2,pp=2",
        "dp=2,pp=2,schedule=interleaved,chunks=2",
        "tp=4",
        "tp=2,pp=2",
        "tp=2,pp=2,schedule=interleaved,chunks=2",
        "pp=4",
        "pp=4,schedule=interleaved,chunks=2",
    ]
    assert mixes(2, 2) == ["dp=2", "tp=2", "pp=2"]  # two layers are not enough for two chunks of each stage


@pytest.mark.long
def test_the_optimizer_is_compared_with_memory_bandwidth(capfd: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capfd, "optimizer", "--preset", "tiny", "--turns", "1", "--set", "model.seq_len=16")
    rows = [line.split() for line in lines[2:] if ": not on this build: " not in line]
    assert [row[1] for row in rows] == ["float32", "bfloat16"][: len(rows)] and rows
    assert [row[4] for row in rows] == ["32", "34"][: len(rows)]
    assert all(float(row[2]) > 0 and float(row[-2]) > 0 for row in rows)


@pytest.mark.long
def test_a_start_is_timed_to_the_first_step() -> None:
    command = [sys.executable, str(BENCHMARKS / "startup.py"), "--turns", "1", "--warm-ups", "0"]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    rows = [line.split() for line in done.stdout.decode().splitlines()[3:]]
    assert [row[0] for row in rows] == ["torch", "floor", "train"]
    assert all(float(row[5]) > 0 for row in rows) and rows[1][3] == "1.00"
