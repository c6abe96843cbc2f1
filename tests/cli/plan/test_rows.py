"""``plan predict`` and ``plan fit``."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Dict, List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.machine.constants import load_machine
from tests.planner.samples import MEASURED, REFERENCE, reference

FIELDS = ["id", "sec_per_it", "sec_per_it_low", "sec_per_it_high", "mem_value", "mem_unit", "fits", "refused"]


def _write(path: Path, lines: List[Dict[str, str]]) -> str:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


def test_every_row_is_predicted_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "predict", "--rows", str(REFERENCE), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found] == [one["id"] for one in reference()]
    assert all(list(one) == [*FIELDS, "extrapolated"] for one in found)
    for one in found:
        if one["refused"] is None:
            assert one["sec_per_it_low"] < one["sec_per_it"] < one["sec_per_it_high"] and one["mem_value"] > 0
        else:
            assert one["sec_per_it"] is None and one["fits"] is None
    died = {one["id"] for one in reference() if one["status"].lower().startswith("oom")}
    assert {one["id"] for one in found if one["fits"] is False} == died


def test_what_was_measured_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = reference()[:40]
    run(["plan", "predict", "--rows", _write(tmp_path / "a.csv", lines), "--format", "csv"])
    before = capsys.readouterr().out
    for line in lines:
        line.update(dict.fromkeys(MEASURED, "7"))
    run(["plan", "predict", "--rows", _write(tmp_path / "b.csv", lines), "--format", "csv"])
    assert capsys.readouterr().out == before


def test_unknown_hardware_is_refused_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = reference()[:2]
    lines[1]["hardware"] = "Abacus"
    assert run(["plan", "predict", "--rows", _write(tmp_path / "a.csv", lines), "--format", "json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["refused"] is None
    assert second["refused"].startswith("hardware Abacus: no machine file is for it; known: A100-80GB, A64FX")


def test_a_fit_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in reference() if line["hardware"].startswith("V100")]
    rows, out = _write(tmp_path / "rows.csv", lines), tmp_path / "mine.yaml"
    assert run(["plan", "fit", "--rows", rows, "--machine", "v100", "--out", str(out), "--format", "csv"]) == 0
    judged = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [one["left_out_by"] for one in judged] == ["configuration", "table"]
    written, here = load_machine(str(out)), load_machine("v100")
    assert written.time.rows == here.time.rows
    for name, value in here.time.values.items():
        assert written.time.values[name] == pytest.approx(value, rel=0.02)


@pytest.mark.slow
def test_predicted_against_measured_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = _write(tmp_path / "rows.csv", [line for line in reference() if line["hardware"].startswith("V100")])
    pictures = []
    for name in ("a.svg", "b.svg", "c.png"):
        assert run(["plan", "fit", "--rows", rows, "--machine", "v100", "--plot", str(tmp_path / name)]) == 0
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1] and b"v100.t1" in pictures[0] and b"ran out of it" in pictures[0]
    assert pictures[2].startswith(b"\x89PNG")
    died = pictures[0].count(b"#ff0000")
    lines = [line for line in reference() if line["hardware"].startswith("V100") and line["status"] != "OOM"]
    alive = ["plan", "fit", "--rows", _write(tmp_path / "alive.csv", lines), "--machine", "v100"]
    assert run([*alive, "--plot", str(tmp_path / "d.svg")]) == 0
    assert died > (tmp_path / "d.svg").read_bytes().count(b"#ff0000")


@pytest.mark.parametrize(
    "more, said",
    [
        (["--rows", str(REFERENCE), "--plot", "fit.pdf"], "--plot fit.pdf: its name must end in .svg or .png"),
        (["--rows", str(REFERENCE), "--plot", "no/such/folder/fit.svg"], "--plot no/such/folder/fit.svg: cannot be"),
        (["--runs", "runs", "--plot", "fit.svg"], "--plot fit.svg: goes with --rows"),
    ],
)
@pytest.mark.slow
def test_a_picture_that_cannot_be_drawn_is_a_usage_error(
    more: List[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "fit", "--machine", "v100", *more]) == 2
    assert said in capsys.readouterr().err


def test_rows_of_another_machine_or_that_all_failed_cannot_be_fitted_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in reference() if line["hardware"].startswith("V100")]
    rows = _write(tmp_path / "rows.csv", lines)
    assert run(["plan", "fit", "--rows", rows, "--machine", "a100"]) == 2
    assert "no row with sec_per_it and status ok whose hardware begins with A100-80GB" in capsys.readouterr().err
    estimated = _write(tmp_path / "estimated.csv", [{**line, "status": "estimated"} for line in lines])
    assert run(["plan", "fit", "--rows", estimated, "--machine", "v100"]) == 2


def test_a_single_row_has_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = next(line for line in reference() if line["hardware"].startswith("V100") and line["sec_per_it"])
    assert (
        run(["plan", "fit", "--rows", _write(tmp_path / "a.csv", [line]), "--machine", "v100", "--format", "json"]) == 0
    )
    assert [one["baseline_median"] for one in json.loads(capsys.readouterr().out)] == [None, None]


@pytest.mark.parametrize("name", ["no/such/folder/m.yaml", "m.txt"])
def test_a_machine_file_that_cannot_be_written_is_said_before_the_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / name)
    assert run(["plan", "fit", "--rows", str(REFERENCE), "--machine", "v100", "--out", out]) == 2
    assert run(["plan", "probe", "--out", out]) == 2
    assert capsys.readouterr().err.count(f"--out {out}: ") == 2
    (tmp_path / "m.yaml").mkdir()
    lines = [line for line in reference() if line["hardware"].startswith("V100")][:2]
    rows = _write(tmp_path / "rows.csv", lines)
    assert run(["plan", "fit", "--rows", rows, "--machine", "v100", "--out", str(tmp_path / "m.yaml")]) == 2
