"""Tests of exported metrics: what is read back is what the runs have logged."""

from __future__ import annotations

import csv
import io
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fugaku_gpt.errors import UsageError
from fugaku_gpt.harmless import csv_cell
from fugaku_gpt.records.metrics import _FIGURES, MetricsWriter, read_lines, read_valid_lines, without_superseded
from fugaku_gpt.report.export import (
    COLUMNS,
    INTEGER,
    NUMBER,
    TEXT,
    exported_rows,
    write_csv,
    write_csv_file,
    write_parquet_file,
)
from fugaku_gpt.report.export_events import write_event_folders
from tests.support.events import has_reader_of_events, read_curves

SEPARATE = ("run", "kind", "iteration", "name", "buckets")
VALUES = {
    NUMBER: st.none() | st.floats(-1e12, 1e12) | st.sampled_from([5e-324, 1e-45, 0.1 + 0.2, -0.0]),
    INTEGER: st.none() | st.integers(0, 2**53),
    TEXT: st.text(max_size=9),
}
FIGURES = st.lists(
    st.one_of(
        *(
            st.tuples(st.sampled_from([n for n, c in COLUMNS.items() if c.kind == kind and n not in SEPARATE]), values)
            for kind, values in VALUES.items()
        )
    ),
    max_size=5,
).map(dict)
LINES = st.one_of(
    st.builds(
        lambda kind, iteration, figures: {"kind": kind, "iteration": iteration, **figures},
        st.sampled_from(["iteration", "validation"]),
        st.integers(0, 9),
        FIGURES,
    ),
    st.fixed_dictionaries({"kind": st.just("evaluation"), "iteration": st.integers(0, 9), "name": st.text(max_size=9)}),
    st.fixed_dictionaries({"kind": st.just("checkpoint"), "iteration": st.integers(0, 9), "name": st.just("step-1")}),
    st.fixed_dictionaries(
        {"kind": st.just("resumed"), "iteration": st.integers(0, 9), "checkpoint": st.sampled_from([None, "step-3"])}
    ),
)


def write_metrics(run: Path, lines: List[Dict[str, Any]]) -> Path:
    """Writes a run with these lines alone; returns its folder."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").unlink(missing_ok=True)
    writer = MetricsWriter(run / "metrics.jsonl")
    for line in lines:
        writer.write(line["kind"], {name: value for name, value in line.items() if name != "kind"})
    writer.close()
    return run


def csv_rows(*runs: Path) -> List[Dict[str, str]]:
    """The rows of an export, each cell as its text."""
    pieces: List[str] = []
    write_csv(exported_rows({run: run.name for run in runs}), pieces.append)
    return list(csv.DictReader(io.StringIO("".join(pieces), newline="")))


def expected(line: Dict[str, Any], column: str) -> str:
    """The text of a cell."""
    value = line.get(column)
    return "" if value is None else str(csv_cell(value))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=12))
def test_csv_read_back_equals_the_lines(lines: List[Dict[str, Any]], tmp_path: Path) -> None:
    rows = csv_rows(write_metrics(tmp_path / "run", lines))
    valid = [line for line in without_superseded(lines) if line["kind"] in ("iteration", "validation", "evaluation")]
    assert len(rows) == len(valid)
    for row, line in zip(rows, valid):
        assert list(row) == list(COLUMNS) and row["run"] == "run" and row["kind"] == line["kind"]
        for name, column in COLUMNS.items():
            if column.kind == TEXT and name not in SEPARATE[:2]:
                assert row[name] == expected(line, name)
            elif column.kind != TEXT:
                value: Optional[float] = line.get(name)
                assert row[name] == "" if value is None else float(row[name]) == value


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=20))
def test_lines_are_read_one_by_one_as_they_are_all_at_once(lines: List[Dict[str, Any]], tmp_path: Path) -> None:
    file = write_metrics(tmp_path / "run", lines) / "metrics.jsonl"
    assert list(read_valid_lines(file)) == without_superseded(read_lines(file))


def test_every_figure_of_a_line_has_a_column() -> None:
    assert set(COLUMNS) >= _FIGURES


def test_a_run_that_is_still_writing_is_exported_as_it_was_at_the_start(tmp_path: Path) -> None:
    file = write_metrics(tmp_path, [{"kind": "iteration", "iteration": n} for n in (1, 2, 3)]) / "metrics.jsonl"
    lines = read_valid_lines(file)
    assert next(lines)["iteration"] == 1
    writer = MetricsWriter(file)
    writer.write("resumed", {"iteration": 1, "checkpoint": "step-1"})
    writer.write("iteration", {"iteration": 2})
    writer.close()
    assert [line["iteration"] for line in lines] == [2, 3]


def test_cells_are_not_computed_by_a_spreadsheet(tmp_path: Path) -> None:
    line = {"kind": "evaluation", "iteration": 1, "name": "=cmd|' /C calc'!A0", "loss": -2.5}
    (row,) = csv_rows(write_metrics(tmp_path / "@run", [line]))
    assert row["name"].startswith("'=cmd") and row["run"] == "'@run" and row["loss"] == "-2.5"
    (row,) = csv_rows(write_metrics(tmp_path / "b", [{**line, "name": "\x1b]0;title\x07"}]))
    assert row["name"] == "\\x1b]0;title\\x07"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"consumed_tokens": 1.5}, "consumed_tokens 1.5: not a whole number"),
        ({"compute_max_rank": "x"}, "compute_max_rank 'x': not a whole number"),
        ({"loss": "x"}, "loss 'x': not a number"),
    ],
)
def test_a_line_with_another_type_is_named_and_no_file_is_left(
    values: Dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = write_metrics(tmp_path / "run", [{"kind": "iteration", "iteration": n} for n in (1, 2)])
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as stream:
        stream.write(json.dumps({"kind": "iteration", "iteration": 3, **values}) + "\n")
    for write in (write_csv_file, write_parquet_file):
        if write is write_parquet_file:
            pytest.importorskip("pyarrow")
        with pytest.raises(UsageError, match=message):
            write(exported_rows({run: "run"}), tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_device_or_a_folder_is_not_replaced(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "run", [{"kind": "iteration", "iteration": 1}])
    os.mkfifo(tmp_path / "device")
    for path in (tmp_path / "device", tmp_path / "run"):
        with pytest.raises(UsageError, match=f"{path.name}: cannot be written: "):
            write_csv_file(exported_rows({run: "run"}), path)
    assert (tmp_path / "device").is_fifo()


def test_parquet_has_the_same_rows_with_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    lines: List[Dict[str, Any]] = [
        {"kind": "validation", "iteration": 0, "loss": 5.5, "tokens": 192, "buckets": {"16": {"loss": 1.0}}},
        {"kind": "iteration", "iteration": 1, "loss": None, "lr": 0.1, "consumed_tokens": 2**53 + 1},
        {"kind": "iteration", "iteration": 2, "loss": 4, "compute_max_node": "n\x1b1", "lr": 0.2},
    ]
    out = tmp_path / "metrics.parquet"
    write_parquet_file(exported_rows({write_metrics(tmp_path / "run", lines): "run"}), out)
    table = parquet.read_table(out)
    assert table.column_names == list(COLUMNS)
    types = {TEXT: "string", INTEGER: "int64", NUMBER: "double"}
    assert [str(field.type) for field in table.schema] == [types[column.kind] for column in COLUMNS.values()]
    assert table.schema.field("lr").metadata[b"description"] == b"learning rate"
    rows = table.to_pylist()
    assert [row["kind"] for row in rows] == ["validation", "iteration", "iteration"]
    assert [row["loss"] for row in rows] == [5.5, None, 4.0]
    assert rows[1]["consumed_tokens"] == 2**53 + 1 and json.loads(rows[0]["buckets"]) == {"16": {"loss": 1.0}}
    assert rows[2]["compute_max_node"] == "n\\x1b1"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_memory_does_not_grow_with_the_file(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("fugaku_gpt.report.export._BATCH_ROWS", 50)
    write, peaks = write_csv_file if form == "csv" else write_parquet_file, []
    lines = [{"kind": "iteration", "iteration": n, "loss": 1.0 / (n + 1), "lr": n / 7} for n in range(2000)]
    for count in (200, 200, 2000):  # the first loads what is loaded once
        run = write_metrics(tmp_path / "run", lines[:count])
        tracemalloc.start()
        write(exported_rows({run: "run"}), tmp_path / "out")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    grown = peaks[2] - peaks[1]
    assert grown < 64 * 1800, peaks  # bytes of 1,800 more lines; a line as a dictionary alone has more than 300


@pytest.mark.skipif(not has_reader_of_events(), reason="the package tensorboard is not installed")
def test_an_older_run_becomes_events_with_each_step_once(tmp_path: Path) -> None:
    lines: List[Dict[str, Any]] = [
        {"kind": "validation", "iteration": 0, "loss": 5.5, "tokens": 192},
        *({"kind": "iteration", "iteration": n, "loss": 1.0 / n, "consumed_tokens": 64 * n} for n in (1, 2, 3)),
        {"kind": "resumed", "iteration": 1, "checkpoint": "step-1"},
        *({"kind": "iteration", "iteration": n, "loss": 2.0 / n, "consumed_tokens": 64 * n} for n in (2, 3, 4)),
    ]
    run = write_metrics(tmp_path / "run", lines)
    (folder,) = write_event_folders({run: "run"}, tmp_path / "events")
    assert folder == tmp_path / "events" / "run"
    curves = read_curves(folder)
    assert curves["train/loss"] == [(1, 1.0), (2, 1.0), (3, pytest.approx(2 / 3)), (4, 0.5)]
    assert curves["validation/loss"] == [(0, 5.5)]
    by_tokens = read_curves(folder / "by_tokens")
    assert [step for step, _ in by_tokens["by_tokens/train/loss"]] == [64, 128, 192, 256]
    with pytest.raises(UsageError, match="holds event files already"):
        write_event_folders({run: "run"}, tmp_path / "events")


def test_nothing_is_left_of_events_that_cannot_be_written(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "run", [{"kind": "iteration", "iteration": 1, "loss": 1.0}])
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as stream:
        stream.write('damage\n{"kind": "iteration", "iteration": 2}\n')
    with pytest.raises(UsageError, match="not JSON lines"):
        write_event_folders({run: "run"}, tmp_path / "events")
    assert list((tmp_path / "events").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/run: cannot be written: (Not a directory|File exists)"):
        write_event_folders({run: "run"}, tmp_path / "file")
