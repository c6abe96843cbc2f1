"""The benchmarks of several ranks, of the optimiser and of starting: their tables, from models of no size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model.layers=4", "model.hidden=16", "model.heads=2", "model.vocab_size=64"]

sys.path.insert(0, str(ROOT / "benchmarks"))

from scaling import mixes, replicas  # noqa: E402


def lines_of(program: str, *words: str) -> List[str]:
    """What a program prints."""
    settings = [word for setting in SMALL for word in ("--set", setting)]
    command = [sys.executable, str(ROOT / "benchmarks" / program), *words, *settings]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_peers_are_compared_in_pairs() -> None:
    names = ["ddp=2", "dp=2,zero=1", "pp=2,schedule=interleaved,chunks=2"]
    lines = lines_of("peers.py", *names, "--preset", "tiny", "--shape", "16x1", "--turns", "1")
    assert [line.split()[0] for line in lines[2:5]] == names
    assert all(" 2 x 1 " in line for line in lines[2:5])
    assert [line.split()[-1] for line in lines[2:5]][0] == "-"  # gloo does not tell what it hides
    said = [(line.split()[0], line.split()[-1]) for line in lines[5:]]
    assert said == [(names[1], names[0]), (names[2], names[0]), (names[2], names[1])]


def test_a_layout_that_is_none_is_refused() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "dp=2,zer=1"]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2 and b"did you mean layout.zero?" in done.stderr


def test_a_type_that_ours_alone_would_have_is_refused() -> None:
    for program, names, instead in (("peers.py", ["ddp=2", "dp=2"], b"--bf16"), ("step.py", ["ours"], b"ours-bf16")):
        command = [sys.executable, str(ROOT / "benchmarks" / program), *names, "--set", "training.dtype=bfloat16"]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert done.returncode == 2 and instead in done.stderr and not done.stdout


def test_scaling_prints_efficiency_beside_one_rank() -> None:
    words = ["--preset", "tiny", "--shape", "16x1", "--turns", "1", "--ranks", "2", "--mix-ranks", "0"]
    rows = [line.split() for line in lines_of("scaling.py", *words)[3:]]
    assert [row[0] for row in rows] == ["dp=1", "dp=2"]
    assert rows[0][-2:] == ["1.000", "(1.000-1.000)"] and float(rows[1][-2]) > 0


def test_scaling_goes_through_every_mix() -> None:
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


def test_the_optimizer_stands_beside_its_bytes() -> None:
    lines = lines_of("optimizer.py", "--preset", "tiny", "--turns", "1", "--set", "model.seq_len=16")
    rows = [line.split() for line in lines[2:] if ": not on this build: " not in line]
    assert [row[1] for row in rows] == ["float32", "bfloat16"][: len(rows)] and rows
    assert [row[4] for row in rows] == ["32", "34"][: len(rows)]
    assert all(float(row[2]) > 0 and float(row[-2]) > 0 for row in rows)


def test_a_start_is_timed_to_its_first_step() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "startup.py"), "--turns", "1"]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    rows = [line.split() for line in done.stdout.decode().splitlines()[3:]]
    assert [row[0] for row in rows] == ["torch", "floor", "train"]
    assert all(float(row[5]) > 0 for row in rows) and rows[1][3] == "1.00"
