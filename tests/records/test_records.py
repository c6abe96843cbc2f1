"""The formats that runs leave behind: what is written is read back, as far as a kill has let it be written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.files import write_json_atomically, write_text_atomically
from fugaku_gpt.records.flight import read_flight
from fugaku_gpt.records.run import OK, MetricsWriter, Result, RunDirectory
from fugaku_gpt.records.summary import summarise
from fugaku_gpt.records.sweep import SweepEntry, digest_of, read_sweep_entry, write_sweep_entry
from fugaku_gpt.records.text import spans
from tests.doctor.flights import write_flight
from tests.sweep.fake import iteration


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomically(path, {"é": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"é": 1}
    with pytest.raises(ValueError):
        write_json_atomically(path, {"x": math.nan})
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "\ud800")
    assert json.loads(path.read_text(encoding="utf-8")) == {"é": 1}
    assert [child.name for child in tmp_path.iterdir()] == ["a.json"]


def test_a_run_directory_round_trip(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "deep" / "run")
    directory.create("a: 1\n")
    assert directory.result() is None and directory.environment() is None and directory.metrics("iteration") == []
    result = Result(OK, "", 1.0, 2.0, 3, {"seconds_per_iteration": 0.5})
    directory.write_result(result)
    directory.write_environment({"build": {}})
    assert directory.result() == result and directory.environment() == {"version": 1, "build": {}}
    with pytest.raises(UsageError, match="already holds a run"):
        directory.create("a: 1\n")


def test_metrics_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    writer = MetricsWriter(directory.metrics_file)
    writer.write("iteration", {"iteration": 1, "loss": math.nan, "lr": math.inf})
    writer.write("validation", {"loss": 2.0})
    writer.close()
    with open(directory.metrics_file, "a") as stream:
        stream.write('{"kind": "iteration", "itera')
    assert directory.metrics("iteration") == [{"kind": "iteration", "iteration": 1, "loss": None, "lr": None}]
    with open(directory.metrics_file, "a") as stream:
        stream.write("\n")
    with pytest.raises(UsageError, match="not JSON lines"):
        directory.metrics("iteration")


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99, "status": "ok"}', '{"version": 1, "status": "fine"}'])
def test_a_damaged_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UsageError, match="result.json"):
        RunDirectory(tmp_path).result()


def test_the_summary_leaves_out_the_first_samples() -> None:
    config = load_run_config(preset="tiny")
    lines = [iteration(number, seconds) for number, seconds in enumerate((9.0, 8.0, 1.0, 3.0, 2.0), start=1)]
    summary = summarise(config, lines, [{"loss": 7.0}, {"loss": 6.0}])
    assert (summary["seconds_per_iteration"], summary["samples"], summary["warmup_samples"]) == (2.0, 5, 2)
    assert (summary["first_loss"], summary["last_loss"]) == (7.0, 3.0)
    assert (summary["first_validation_loss"], summary["last_validation_loss"]) == (7.0, 6.0)
    assert summary["node_used_bytes"] == 2**30 + 5 * 2**20
    assert summary["tokens_per_second"] == 16 * 128 / 2.0
    short = summarise(config, lines[:2], [])
    assert short["seconds_per_iteration"] == 8.5 and "last_validation_loss" not in short
    assert "seconds_per_iteration" not in summarise(config, [], [])


def test_flights_keep_the_last_calls_in_order(tmp_path: Path) -> None:
    path = write_flight(tmp_path, 1001, 2000, [("tp", "all_reduce", "a.py:1", True)] * 400)
    assert path == tmp_path / "001" / "rank-001001.flight"
    flight = read_flight(path)
    assert (flight.rank, flight.ranks, flight.process) == (1001, 2000, 4711)
    assert [call.sequence for call in flight.calls] == list(range(145, 401))
    call = flight.calls[-1]
    assert (call.communicator, call.operation, call.dtype, call.site) == ("tp", "all_reduce", "float32", "a.py:1")
    assert call.shape == (4, 8) and call.left - call.entered == 0.5


def test_sweep_entries_round_trip_and_other_versions_are_refused(tmp_path: Path) -> None:
    entry = SweepEntry("demo", "a-r1", "a", 0, 1, digest_of("x"))
    assert read_sweep_entry(tmp_path) is None
    write_sweep_entry(tmp_path, entry)
    assert read_sweep_entry(tmp_path) == entry
    assert digest_of("x") != digest_of("y") and len(digest_of("x")) == 16
    (tmp_path / "sweep.json").write_text((tmp_path / "sweep.json").read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(UsageError, match="version 2"):
        read_sweep_entry(tmp_path)


def test_numbers_are_put_in_spans() -> None:
    assert spans([]) == "" and spans([4]) == "4" and spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
