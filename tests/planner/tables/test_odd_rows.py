"""Tests of odd table cells: each is refused with a reason or read for its meaning, and never breaks a table."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fugaku_gpt.cli.main import run
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import UNIT_BYTES, load_machine, machine_names
from fugaku_gpt.planner.tables.predict import Prediction, predict_table
from fugaku_gpt.planner.tables.rows import ConfigRow, RefusedRow, parse_measurement, parse_row, read_table, torch_series
from tests.planner.samples import MEASURED, cells, reference

_ODD = st.one_of(
    st.sampled_from(
        ["", " ", "nan", "inf", "-1", "0", "1e400", "1e9", "2147483647", "2147483648", "1.5", "x", "-", "1,024"]
    ),
    st.integers(-2, 100_000).map(str),
    st.text(max_size=8),
)
_LINES = reference()
_MACHINES = [load_machine(name) for name in machine_names()]
_COLUMNS = [name for name in _LINES[0] if name not in ("id", *MEASURED)]


def _assert_finite_or_refused(outcome: Any) -> None:
    """A refusal gives its reason; a prediction has finite estimates, and fits if the fullest stage's memory does."""
    if isinstance(outcome, RefusedRow):
        assert outcome.reason
        return
    assert isinstance(outcome, Prediction)
    for estimate in (outcome.seconds, *outcome.components.values()):
        assert 0 <= estimate.low <= estimate.value <= estimate.high < math.inf
    assert outcome.seconds.low > 0 and 0 < outcome.memory < math.inf
    hardware = outcome.row.hardware
    machine = next(machine for machine in _MACHINES if machine.has_hardware(hardware))
    peak_bytes = outcome.peak * UNIT_BYTES[outcome.memory_unit]
    capacity_bytes = machine.job_capacity(hardware) * UNIT_BYTES[machine.memory_unit]
    assert 0 < peak_bytes < math.inf
    if not math.isclose(peak_bytes, capacity_bytes, rel_tol=1e-9):  # the unit's conversion rounds
        assert outcome.fits == (peak_bytes < capacity_bytes)


_CHANGED = st.tuples(
    st.integers(0, len(_LINES) - 1), st.dictionaries(st.sampled_from(_COLUMNS), _ODD, min_size=1, max_size=3)
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_CHANGED, min_size=10, max_size=20))
def test_any_cells_give_a_prediction_or_a_reason(changes: List[Tuple[int, Dict[str, str]]]) -> None:
    lines = [{**_LINES[index], **changed} for index, changed in changes]
    outcomes = predict_table(lines)
    assert len(outcomes) == len(lines)
    for outcome in outcomes:
        _assert_finite_or_refused(outcome)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_shape_that_can_run_is_predicted_and_extrapolation_is_named(data: st.DataObject) -> None:
    def pick(*values: int) -> int:
        return data.draw(st.sampled_from(values))

    lines = []
    for kind in ("A64FX Fugaku", "A100-80GB", "V100-16GB JeanZay") * 4:
        dp, tp, pp, micro = pick(1, 3, 4096), pick(1, 2, 64), pick(1, 7, 96), pick(1, 5, 64)
        shape = {"layers": pp * pick(1, 40), "heads": tp * pick(1, 3), "vocab": pick(64, 300_000)}
        shape.update(hidden=shape["heads"] * pick(1, 65, 1024), seq_len=pick(1, 32768))
        batch = {"micro_batch": micro, "global_batch": dp * micro * pick(1, 9)}
        placement = {"nodes": dp * tp * pp, "ranks_per_node": 1, "dp": dp, "tp": tp, "pp": pp, "zero_stage": pick(0, 1)}
        lines.append(cells(hardware=kind, recompute=pick(0, 1), **shape, **batch, **placement))
    for outcome in predict_table(lines):
        _assert_finite_or_refused(outcome)
        assert isinstance(outcome, Prediction) and outcome.extrapolated


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"layers": "nan"}, "layers nan: must be a whole number from 1 to 2147483647"),
        ({"nodes": "inf"}, "nodes inf: must be a whole number"),
        ({"processes": "8.5"}, "processes 8.5: must be a whole number"),
        ({"global_batch": "1,024"}, "global_batch 1,024: must be a whole number"),
        ({"vocab": " "}, "vocab is not given"),
        ({"freq_ghz": "2.2Hz"}, "freq_ghz 2.2Hz: must be a number from 0.1 to 10"),
        ({"freq_ghz": "2200"}, "freq_ghz 2200: must be a number from 0.1 to 10"),
        ({"zero_stage": "nan"}, "zero_stage nan: must be 0, 1, 2 or 3"),
    ],
)
def test_odd_cells_are_named(changes: Dict[str, str], reason: str) -> None:
    parsed = parse_row(cells(**changes))
    assert isinstance(parsed, RefusedRow) and parsed.reason.startswith(reason)


def test_cells_rewritten_by_other_programs_are_read_alike() -> None:
    plain = parse_row(cells(torch="1.10", zero_stage="1", recompute="True", dtype="fp16", freq_ghz="2.2"))
    rewritten = parse_row(
        cells(torch="1.1", zero_stage="1.0", recompute="1.0", dtype="FP16", freq_ghz="2.20", layers="24.0", tp=" 1 ")
    )
    assert isinstance(plain, ConfigRow) and plain == rewritten
    assert [torch_series(version) for version in ("1.10.2", "v1.7.1", "1.13.0+cpu", "2.13", "")] == [
        "1.10",
        "1.7",
        "1.13",
        "2.13",
        "",
    ]


def test_an_unknown_build_is_predicted_and_named() -> None:
    (prediction,) = predict_table([cells(hardware="A64FX Fugaku", torch="0.4", dtype="fp32", zero_stage=0)])
    assert isinstance(prediction, Prediction) and any(
        text.startswith("torch 0.4: measured") for text in prediction.extrapolated
    )


def test_settings_that_are_off_are_not_reported_as_missing() -> None:
    line = cells(hardware="V100-16GB", zero_stage=0, recompute=False, torch="1.13", dtype="", freq_ghz="")
    (prediction,) = predict_table([line])
    assert isinstance(prediction, Prediction)
    expected = {
        "zero 0: measured 1",
        "recompute False: measured True",
        "torch 1.13: measured not given",
        "dtype not given: measured fp16",
    }
    assert expected <= set(prediction.extrapolated)


def test_memory_comes_in_the_rows_own_unit() -> None:
    line = {"hardware": "A64FX Fugaku", "dtype": "fp32", "zero_stage": 0, "torch": "1.7"}
    units = ("MiB (node, system-wide used)", "GB", "pages")
    predictions = [
        outcome
        for outcome in predict_table([cells(mem_unit=unit, **line) for unit in units])
        if isinstance(outcome, Prediction)
    ]
    assert [prediction.memory_unit for prediction in predictions] == ["MiB", "GB", "MiB"]
    assert predictions[0].memory == predictions[2].memory == pytest.approx(1024 * predictions[1].memory)


def test_unreadable_seconds_are_no_measurement() -> None:
    for text in ("", "nan", "inf", "-3", "0", "OOM", "1,000"):
        assert parse_measurement({"sec_per_it": text}).seconds is None


def _write(path: Path, lines: List[Dict[str, str]], end: str = "\n", mark: str = "") -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        stream.write(mark)
        writer = csv.DictWriter(stream, list(lines[0]), lineterminator=end)
        writer.writeheader()
        writer.writerows(lines)
    return path


def test_marks_line_ends_spaces_and_further_columns_change_nothing(tmp_path: Path) -> None:
    lines = reference()[:30]
    plain = predict_table(lines)
    spaced = [{f" {key} ": f" {value} " for key, value in {"note": "n", **line}.items()} for line in lines]
    assert predict_table(read_table(_write(tmp_path / "a.csv", spaced, "\r\n", "\ufeff"))) == plain


def test_an_unreadable_table_is_a_usage_error(tmp_path: Path) -> None:
    text = _write(tmp_path / "a.csv", reference()[:2]).read_text()
    odd = tmp_path / "odd.csv"
    for content, reason in (
        (b"", "columns are missing"),
        (text.replace(",", ";").encode(), "columns are missing"),
        (text.replace("hidden", "layers", 1).encode(), "columns are missing: hidden"),
        (text.replace("remarks", "layers", 1).encode(), "columns occur twice: layers"),
        (text.encode("utf-16"), "cannot be read as CSV"),
    ):
        odd.write_bytes(content)
        with pytest.raises(UsageError, match=reason):
            read_table(odd)
        assert run(["plan", "predict", "--rows", str(odd)]) == 2


def test_shifted_and_short_lines_are_refused_alone(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.csv", reference()[:3])
    lines = file.read_text().splitlines()
    lines[2] = "," + lines[2]
    lines[3] = ",".join(lines[3].split(",")[:5])
    file.write_text("\n".join([*lines, "", ",,"]) + "\n")
    first, shifted, short, empty = predict_table(read_table(file))
    assert isinstance(first, Prediction)
    assert isinstance(shifted, RefusedRow) and shifted.reason.startswith("more cells than the header")
    assert isinstance(short, RefusedRow) and short.reason == "heads is not given"
    assert isinstance(empty, RefusedRow) and empty.id == "" and empty.reason == "layers is not given"


@pytest.mark.slow
def test_predictions_do_not_depend_on_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shuffling or removing the measured columns of the reference changes no prediction."""
    lines = reference()

    def predicted(name: str) -> str:
        assert run(["plan", "predict", "--rows", str(_write(tmp_path / name, lines)), "--format", "json"]) == 0
        return capsys.readouterr().out

    before = predicted("a.csv")
    shuffled = random.Random(7).sample(lines, len(lines))
    lines = [{**line, **{key: other[key] for key in MEASURED}} for line, other in zip(lines, shuffled)]
    assert lines != reference() and predicted("b.csv") == before
    lines = [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]
    without = json.loads(predicted("c.csv"))
    assert [row["sec_per_it"] for row in without] == [row["sec_per_it"] for row in json.loads(before)]
    assert [row["mem_value"] for row in without] == [row["mem_value"] for row in json.loads(before)]
