"""Tests of the times of the events that are made of the metrics of a run."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import OK, Result, RunDirectory
from fugaku_gpt.report.export_events import write_event_folders


def times_of(folder: Path) -> List[Tuple[int, float]]:
    """The step, below 128, and the time of each event with scalars, in order."""
    (file,) = [path for path in folder.iterdir() if path.is_file()]
    return [(step, time) for step, time, content in _events(file.read_bytes()) if content[:1] == b"\x2a"]


def _events(data: bytes) -> Iterator[Tuple[int, float, bytes]]:
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        event, data = data[12 : 12 + size], data[12 + size + 4 :]
        assert event[:1] == b"\x09" and event[9:10] == b"\x10"  # a double, the time; a number, the step
        yield event[10], struct.unpack("<d", event[1:9])[0], event[11:]


def test_the_time_of_an_event_is_the_start_and_the_seconds_of_all_iterations_so_far(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    metrics = MetricsWriter(run.metrics_file)
    metrics.write("iteration", {"iteration": 1, "seconds": 2.0, "loss": 5.0})
    metrics.write("validation", {"iteration": 1, "loss": 5.0, "seconds": 64.0})
    metrics.write("iteration", {"iteration": 4, "seconds": 3.0, "loss": 4.0})  # the mean of three
    metrics.write("iteration", {"iteration": 5, "seconds": None, "loss": 4.0})
    metrics.write("iteration", {"iteration": 6, "seconds": 1.0, "loss": 4.0})
    metrics.close()
    run.write_result(Result(OK, "", 1000.0, 2000.0, 6))
    (folder,) = write_event_folders({run.path: "run"}, tmp_path / "events")
    assert times_of(folder) == [(1, 1002.0), (1, 1002.0), (4, 1011.0), (5, 1011.0), (6, 1012.0)]


@pytest.mark.parametrize(
    "name, message",
    [
        ("events.out.tfevents.1.host", "holds event files already; choose another -o"),
        ("notes.txt", "is there already; choose another -o"),
        ("", "is there already; choose another -o"),
    ],
)
def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path, name: str, message: str) -> None:
    folder = tmp_path / "events" / "run"
    folder.mkdir(parents=True)
    if name:
        (folder / name).write_text("")
    with pytest.raises(UsageError, match=message):
        write_event_folders({tmp_path / "run": "run"}, tmp_path / "events")
    assert [path.name for path in folder.iterdir()] == [name][: bool(name)]
