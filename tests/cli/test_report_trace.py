"""Tests of ``report trace`` on files, exit codes and a real run of two ranks."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.cli.trace_files import parse_ranks
from fugaku_gpt.errors import UsageError
from tests.report.traces import write_two_ranks
from tests.support.corpus import write_byte_corpus


def test_the_table_adds_up_and_files_are_written_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_two_ranks(tmp_path / "trace")
    files = [tmp_path / name for name in ("a.json", "b.json.gz", "c.svg")]
    options = [option for path in files for option in ("-o", str(path))]
    assert run(["report", "trace", str(tmp_path), *options, "--format", "csv"]) == 0
    printed = capsys.readouterr()
    first, second = csv.DictReader(io.StringIO(printed.out))
    assert first["rank"] == "rank 0 (dp 0 pp 0 tp 0) node-0" and float(second["waiting"]) == 0.0
    own = ("forward", "backward", "sums", "optimiser", "more", "waiting")
    assert sum(float(first[name]) for name in own) == pytest.approx(float(first["seconds"])) == 10.0
    assert float(first["under_way"]) == 4.75 and float(first["hidden"]) == pytest.approx(3.25 / 4.75, abs=1e-4)
    assert printed.err == "iterations 4-5\nclocks of nodes were compared to within 2 us\n"
    assert gzip.decompress(files[1].read_bytes()) == files[0].read_bytes() and files[2].read_text().startswith("<svg")
    assert run(["report", "trace", str(tmp_path), "--ranks", "1"]) == 0
    assert "1 of 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "trace.html"], "--out trace.html: its name must end in .json or .json.gz, for Perfetto and speedscope"),
        (["--ranks", "3-1"], "--ranks 3-1: valid: numbers and ranges of ranks, such as 0-7,64"),
        (["--ranks", "0,9"], "no trace of rank 9; there are those of 0-1"),
        (["--ranks", "0-9999999"], "a run has at most 1,048,576 ranks"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: List[str], message: str
) -> None:
    write_two_ranks(tmp_path / "trace")
    assert run(["report", "trace", str(tmp_path), *arguments, "-o", str(tmp_path / "a.json")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "a.json").exists()


def test_lists_of_ranks() -> None:
    assert parse_ranks(None) is None
    assert parse_ranks("7, 0-2,1") == [0, 1, 2, 7]
    for wrong in ("", "a", "1-", "-1", "1,,2", "1-2-3", "²"):
        with pytest.raises(UsageError):
            parse_ranks(wrong)


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_of_two_ranks_is_traced_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_byte_corpus(tmp_path / "bytes")
    out = tmp_path / "run"
    model = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab_size=256"]
    training = ["training.iterations=3", "training.global_batch=4", "training.eval_interval=3", "layout.pp=2"]
    command = [sys.executable, "-m", "fugaku_gpt", "train", "--data", str(corpus), "--out", str(out), "--ranks", "2"]
    for setting in (*model, *training, "training.trace_iterations=2-3"):
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    printed = done.stdout.decode()
    assert done.returncode == 0 and f"iterations 2-3 traced: fugaku-gpt report trace {out}\n" in printed, printed
    assert run(["report", "trace", str(out), "-o", str(tmp_path / "trace.json"), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["rank"][:23] for row in rows] == ["rank 0 (dp 0 pp 0 tp 0)", "rank 1 (dp 0 pp 1 tp 0)"]
    assert all(row["more"] > 0 and row["waiting"] > 0 for row in rows)
    categories = {event.get("cat") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"forward", "backward", "optimiser", "validation", "checkpoint", "waiting", "send", "receive"} <= categories
