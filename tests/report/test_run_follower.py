"""Tests of the follower of growing metrics, and of the columns that are made of them, against the reader of files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Dict, List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.limits import METRICS_LINE
from fugaku_gpt.records.metrics import MetricsWriter, read_sound_lines, without_superseded
from fugaku_gpt.report.run_follower import RunFollower
from fugaku_gpt.report.run_series import Columns, RunSeries

ANEW = {"kind": "resumed", "iteration": 0, "checkpoint": None}
PIECES = [
    '{"kind": "iteration", "iteration": 1, "loss": 7.5, "compute_max_node": "knoten-ä"}',
    '{"kind": "iteration", "iteration": 2, "loss": null, "lr": 0.001}',
    '{"kind": "iteration", "iteration": 3, "loss": 6.5, "grad_norm": 2}',
    '{"kind": "iteration", "iteration": "3"}',
    '{"kind": "validation", "iteration": 2, "loss": 7.25, "tokens": 100}',
    '{"kind": "evaluation", "iteration": 2, "name": "a.txt", "loss": 7.0}',
    '{"kind": "left_out", "iteration": 2, "why": "spike"}',
    '{"kind": "left_out", "iteration": [], "why": "spike"}',
    '{"kind": "checkpoint", "iteration": 2, "name": "iteration-000002"}',
    '{"kind": "resumed", "iteration": 1, "checkpoint": "iteration-000001"}',
    '{"kind": "resumed", "iteration": 0, "checkpoint": null}',
    '{"kind": "cut"}',
    '{"kind": "iter',
    "[1]",
    "",
    "\u2028\x85é",
]
CONTENTS = st.lists(
    st.tuples(
        st.sampled_from([text.encode() for text in PIECES] + [b"\xff\xc3"]), st.sampled_from([b"\n", b"\r\n", b"\r"])
    ),
    max_size=12,
).map(lambda lines: b"".join(text + end for text, end in lines))


def follow(path: Path, pieces: List[bytes], most: int) -> Tuple[List[Dict[str, Any]], RunFollower]:
    """The lines that a follower returns while pieces are appended to a file."""
    follower = RunFollower(path.parent, most)
    lines = follower.poll()
    for piece in pieces:
        with open(path, "ab") as stream:
            stream.write(piece)
        lines += follower.poll()
        while follower.has_more:
            lines += follower.poll()
    return lines, follower


@settings(max_examples=150, deadline=None)
@given(CONTENTS, st.lists(st.integers(0, 10**6), max_size=6), st.integers(1, 300))
def test_however_bytes_arrive_the_lines_are_those_of_the_reader(content: bytes, at: List[int], most: int) -> None:
    content += b'{"kind": "end"}\n'  # an end of line that no later byte can lengthen
    places = sorted({0, len(content), *(position % len(content) for position in at)})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        lines, follower = follow(path, [content[i:j] for i, j in zip(places, places[1:])], most)
        assert (lines, follower.damaged) == read_sound_lines(path)
        assert (follower.is_missing, follower.problem) == (False, "")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES[:3] + PIECES[4:7] + PIECES[8:11]), max_size=30))
def test_columns_leave_out_lines_that_a_resumption_has_superseded(texts: List[str]) -> None:
    lines = [json.loads(text) for text in texts]
    series = RunSeries()
    for line in lines:
        series.add(line)
    valid = without_superseded(lines)

    def rows(kind: str, names: Tuple[str, ...]) -> List[Tuple[Any, ...]]:
        return [tuple(line.get(name) for name in names) for line in valid if line["kind"] == kind]

    def columns(of: Columns, names: Tuple[str, ...]) -> List[Tuple[Any, ...]]:
        empty = [float("nan")] * len(of)
        return list(zip(*([value if value == value else None for value in of.numbers.get(n, empty)] for n in names)))

    names = ("iteration", "loss", "lr", "grad_norm")
    assert columns(series.iterations, names) == rows("iteration", names)
    assert columns(series.validation, ("iteration", "loss")) == rows("validation", ("iteration", "loss"))
    evaluated = series.evaluations.get("a.txt", Columns())
    assert columns(evaluated, ("iteration", "loss")) == rows("evaluation", ("iteration", "loss"))
    nodes = [line.get("compute_max_node", "") for line in valid if line["kind"] == "iteration"]
    assert series.iterations.texts.get("compute_max_node", [""] * len(nodes)) == nodes
    events = [
        (line["iteration"], line["kind"]) for line in valid if line["kind"] in ("resumed", "left_out", "checkpoint")
    ]
    assert [event[:2] for event in series.events] == events


def test_a_reader_of_columns_learns_from_which_line_they_have_changed() -> None:
    columns = Columns()
    for iteration in (1, 2, 3, 4):
        columns.append({"iteration": iteration, "loss": 8.0 - iteration})
    columns.mark()
    columns.append({"iteration": 5, "loss": None})
    assert (columns.lowest_length, len(columns), columns.newest("loss")) == (4, 5, 4.0)
    columns.drop_after(2)
    columns.append({"iteration": 3, "loss": 5.5})
    assert (columns.lowest_length, list(columns.iterations), columns.newest("loss")) == (2, [1.0, 2.0, 3.0], 5.5)
    assert columns.newest("lr") is None


def test_names_without_end_do_not_fill_the_memory() -> None:
    series = RunSeries()
    for first in (0, 1000):
        series.add({"kind": "iteration", "iteration": 1, **{f"figure {n}": n for n in range(first, first + 1000)}})
        series.add({"kind": "evaluation", "iteration": 1, "name": str(first), "loss": 1.0})
    assert len(series.iterations.numbers) == 200 and set(map(len, series.iterations.numbers.values())) == {2}
    for number in range(1000):
        series.add({"kind": "evaluation", "iteration": 1, "name": str(number), "loss": 1.0})
    assert len(series.evaluations) == 200


def test_a_run_that_appears_ends_and_is_resumed_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    follower = RunFollower(folder)
    assert follower.poll() == [] and follower.is_missing
    folder.mkdir()
    writer = MetricsWriter(follower.path)
    writer.write("iteration", {"iteration": 1, "loss": 7.5})
    first = {"kind": "iteration", "iteration": 1, "loss": 7.5}
    assert follower.poll() == [first] and not follower.is_missing
    writer.close()
    with open(follower.path, "a") as stream:
        stream.write('{"kind": "iteration", "itera')  # a kill
    assert follower.poll() == []
    writer = MetricsWriter(follower.path)  # the run is resumed
    writer.write("resumed", {"iteration": 1, "checkpoint": "iteration-000001"})
    writer.close()
    assert follower.poll() == [{"kind": "resumed", "iteration": 1, "checkpoint": "iteration-000001"}]
    assert follower.damaged == 1 == read_sound_lines(follower.path)[1]


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_file_that_was_replaced_supersedes_the_lines_before(tmp_path: Path, is_longer: bool) -> None:
    follower = RunFollower(tmp_path)
    follower.path.write_text('{"kind": "iteration", "iteration": 1, "loss": 7.5}\n{"kind": "iter')
    assert len(follower.poll()) == 1
    follower.path.unlink()
    assert follower.poll() == [] and follower.is_missing
    lines = [{"kind": "iteration", "iteration": n, "loss": 7.0} for n in range(1, 5 if is_longer else 2)]
    follower.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert follower.poll() == [ANEW, *lines]
    assert follower.poll() == [] and follower.damaged == 0


def test_a_line_beyond_the_limit_costs_no_memory_and_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    long = b'{"kind": "iteration", "iteration": 1, "x": "' + b"x" * METRICS_LINE.value
    end = b'{"kind": "end"}\n'
    lines, follower = follow(path, [long, long, b'"}\n' + end], 2**16)
    assert lines == [{"kind": "end"}] and follower.damaged == 1
    assert (lines, follower.damaged) == read_sound_lines(path)


def test_nothing_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "iteration", "iteration": 1}\n' * 1000)
    sizes: List[int] = []

    class CountedReads:
        """A file whose reads are counted."""

        def __init__(self, path: Path) -> None:
            self.stream = open(path, "rb")  # noqa: SIM115  # closed by __exit__
            self.seek, self.seekable = self.stream.seek, self.stream.seekable

        def read(self, size: int) -> bytes:
            sizes.append(size)
            return self.stream.read(size)

        def __enter__(self) -> "CountedReads":
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

    monkeypatch.setattr("fugaku_gpt.report.run_follower.open_file", CountedReads)
    follower = RunFollower(tmp_path, most=2000)
    lines = follower.poll()
    while follower.has_more:
        sizes.clear()
        lines += follower.poll()
        assert sum(sizes) <= 2000 + 256
    sizes.clear()
    assert len(lines) == 1000 and follower.poll() == [] and sum(sizes) <= 256


def test_a_file_that_cannot_be_read_is_a_problem_until_it_can(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    os.mkfifo(follower.path)
    assert follower.poll() == [] and "pipe" in follower.problem
    follower.path.unlink()
    follower.path.mkdir()
    assert follower.poll() == [] and "directory" in follower.problem
    follower.path.rmdir()
    follower.path.write_text('{"kind": "iteration", "iteration": 1}\n')
    assert len(follower.poll()) == 1 and follower.problem == ""


def test_a_run_without_metrics_has_no_lines_and_says_so(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    for _ in range(2):
        assert (follower.is_missing, follower.has_more, follower.damaged, follower.problem) == (True, False, 0, "")
        assert follower.poll() == []
    follower.path.write_text(PIECES[0] + "\n", encoding="utf-8")
    assert len(follower.poll()) == 1 and not follower.is_missing


def test_a_file_that_cannot_be_read_is_a_problem_and_not_missing(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    follower.path.mkdir()
    assert follower.poll() == []
    assert (follower.problem, follower.is_missing) == ("Is a directory", False)
