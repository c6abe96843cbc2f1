"""Tests of ``fugaku-gpt job collect``, which makes a table of the files that jobs have written."""

from __future__ import annotations

import csv
import errno
import json
import os
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.records.job import ENDED
from fugaku_gpt.records.run import RunDirectory
from tests.report.jobs import record_end, stats
from tests.report.test_imported import ARGUMENTS, log_of, our_line
from tests.support.job_records import record_submission, write_exit_record
from tests.sweep.fake import leave_run

CONFIG = load_run_config(preset="tiny", overrides=["layout.dp=4", "job.nodes=4", "node.freq_mhz=2200"])


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A run that ended well, and one that was ended at its time limit before its ranks could record anything."""
    finished, timed_out = tmp_path / "runs" / "well", tmp_path / "runs" / "late"
    leave_run(finished, CONFIG)
    record_submission(finished, "101")
    record_end(finished, "101")
    write_exit_record(finished, 0, "101")
    (finished / "well.101.stats").write_text(stats("101"))
    timed_out.mkdir()
    (timed_out / "config.yaml").write_text(dump_run_config(load_run_config(preset="tiny", overrides=["layout.dp=2"])))
    record_submission(timed_out, "102")
    record_end(timed_out, "102", ENDED, raw="EXT", exit_code=0, signal=24, code=11, reason="ELAPSE LIMIT EXC")
    (timed_out / "late.102.stats").write_text(
        stats("102", code="11", reason="ELAPSE LIMIT EXC", elapse="00:00:40 (40)")
    )
    return tmp_path / "runs"


def test_collect_writes_accounting_and_results_and_prints_the_table(
    jobs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["job", "collect", str(jobs), "--format", "md", "--energy"]) == 0
    captured = capsys.readouterr()
    rows = [line for line in captured.out.splitlines() if line.startswith("| ")]
    timed_out_row = next(line for line in rows if "102" in line)
    assert "timeout" in timed_out_row and "too short to tell" in timed_out_row
    finished_row = next(line for line in rows if "101" in line)
    assert '4 (2.2GHz, "eco_state=2")' in finished_row and "| 100 | 200 | 0.09766 |" in finished_row
    assert "result written: timeout" in captured.err and "101" in captured.err
    result = RunDirectory(jobs / "late").result()
    assert result is not None and result.status == "timeout"
    accounting = json.loads((jobs / "well" / "accounting.json").read_text())
    assert accounting["version"] == 1 and accounting["jobs"][0]["knobs"]["freq"]["use"] == "2200"


def test_a_second_collect_changes_nothing(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["job", "collect", str(jobs), "--format", "md"]
    assert run(arguments) == 0
    first = capsys.readouterr().out
    assert run(arguments) == 0
    assert capsys.readouterr().out == first


def test_tables_are_written_to_the_output_folder(
    jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["job", "collect", str(jobs), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"table.md", "table.html", "table.csv", "table.json"}
    lines = {line["job_id"]: line for line in csv.DictReader((out / "table.csv").read_text().splitlines())}
    assert float(lines["101"]["watts_per_node"]) == pytest.approx(100.0)
    assert lines["102"]["energy"] == "too short to tell" and lines["102"]["joules_per_token"] == ""
    capsys.readouterr()
    (tmp_path / "file").touch()
    assert run(["job", "collect", str(jobs), "--out", str(tmp_path / "file")]) == 2
    assert "file: cannot be written" in capsys.readouterr().err


def test_reparse_reads_our_logs_again(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (jobs / "well" / "metrics.jsonl").write_text("")
    (jobs / "well" / "well.101.out").write_text("".join(our_line(number, 0.125) for number in (1, 2, 3)))
    (jobs / "late" / "late.102.out").write_text(our_line(1, 0.5))
    assert run(["job", "collect", str(jobs), "--reparse", "--format", "md"]) == 0
    captured = capsys.readouterr()
    assert "3 iteration lines of fugaku_gpt, 3 new" in captured.err
    assert "| 0.125 |" in captured.out and "| 0.500 |" in captured.out


def test_reparse_makes_a_row_of_another_trainers_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "run.out").write_text(log_of(ARGUMENTS))
    arguments = ["job", "collect", "--reparse", str(tmp_path / "megatron"), "--set", "nodes=4", "--format", "md"]
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert "| 4 | 1.3B | 1 | 4 | 1 | 2 | 1024 | - | 3231.4 | 0.90 | 0.004 | from a log of megatron |" in captured.out
    assert "3 iteration lines of megatron" in captured.err


def test_a_missing_folder_or_option_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["job", "collect", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert run(["job", "collect", "--reparse", str(tmp_path)]) == 2
    assert "holds no run directory" in capsys.readouterr().err
    assert run(["job", "collect", str(tmp_path), "--set", "nodes=4"]) == 2
    assert "together with --reparse" in capsys.readouterr().err


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.ENOENT])
def test_a_file_that_cannot_be_written_is_named_without_a_traceback(
    error_number: int, jobs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # root may write everywhere, and these tests may run as root: the error is simulated
    def failing_fsync(_: int) -> None:
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(os, "fsync", failing_fsync)
    assert run(["job", "collect", str(jobs / "well")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    path = jobs / "well" / "accounting.json"
    assert error == f"fugaku-gpt: {path}: cannot be read or written: {os.strerror(error_number)}"
    assert not [entry for entry in (jobs / "well").iterdir() if entry.name.endswith(".tmp")]


def test_an_internal_error_keeps_the_traceback(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_fsync(*_: object) -> None:
        raise ZeroDivisionError("a mistake of this program")

    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(ZeroDivisionError):
        run(["job", "collect", str(jobs / "well")])
