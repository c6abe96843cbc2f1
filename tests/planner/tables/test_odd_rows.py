"""Rows as people keep them: odd cells are refused with a reason or read for what they mean, and never break a table."""

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
_COLUMNS = [name for name in _LINES[0] if name not in ("id", *MEASURED)]


def _whole_or_refused(found: Any) -> None:
    if isinstance(found, RefusedRow):
        assert found.reason
        return
    assert isinstance(found, Prediction)
    for guess in (found.seconds, *found.components.values()):
        assert 0 <= guess.low <= guess.value <= guess.high < math.inf
    assert found.seconds.low > 0 and 0 < found.memory < math.inf and found.fits in (True, False)


_CHANGED = st.tuples(
    st.integers(0, len(_LINES) - 1), st.dictionaries(st.sampled_from(_COLUMNS), _ODD, min_size=1, max_size=3)
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_CHANGED, min_size=10, max_size=20))
def test_any_cells_give_a_prediction_or_a_reason(changes: List[Tuple[int, Dict[str, str]]]) -> None:
    lines = [{**_LINES[place], **changed} for place, changed in changes]
    found = predict_table(lines)
    assert len(found) == len(lines)
    for one in found:
        _whole_or_refused(one)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_shape_that_can_run_is_predicted_and_what_no_row_has_is_named(data: st.DataObject) -> None:
    def pick(*values: int) -> int:
        return data.draw(st.sampled_from(values))

    lines = []
    for kind in ("A64FX Fugaku", "A100-80GB", "V100-16GB JeanZay") * 4:
        dp, tp, pp, micro = pick(1, 3, 4096), pick(1, 2, 64), pick(1, 7, 96), pick(1, 5, 64)
        shape = {"layers": pp * pick(1, 40), "heads": tp * pick(1, 3), "vocab": pick(64, 300_000)}
        shape.update(hidden=shape["heads"] * pick(1, 65, 1024), seq_len=pick(1, 32768))
        batch = {"micro_batch": micro, "global_batch": dp * micro * pick(1, 9)}
        place = {"nodes": dp * tp * pp, "ranks_per_node": 1, "dp": dp, "tp": tp, "pp": pp, "zero_stage": pick(0, 1)}
        lines.append(cells(hardware=kind, recompute=pick(0, 1), **shape, **batch, **place))
    for one in predict_table(lines):
        _whole_or_refused(one)
        assert isinstance(one, Prediction) and one.extrapolated


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
    found = parse_row(cells(**changes))
    assert isinstance(found, RefusedRow) and found.reason.startswith(reason)


def test_what_other_programs_make_of_a_cell_is_read_for_what_it_means() -> None:
    plain = parse_row(cells(torch="1.10", zero_stage="1", recompute="True", dtype="fp16", freq_ghz="2.2"))
    other = parse_row(
        cells(torch="1.1", zero_stage="1.0", recompute="1.0", dtype="FP16", freq_ghz="2.20", layers="24.0", tp=" 1 ")
    )
    assert isinstance(plain, ConfigRow) and plain == other
    assert [torch_series(one) for one in ("1.10.2", "v1.7.1", "1.13.0+cpu", "2.13", "")] == [
        "1.10",
        "1.7",
        "1.13",
        "2.13",
        "",
    ]


def test_an_unknown_build_is_predicted_and_named() -> None:
    (found,) = predict_table([cells(hardware="A64FX Fugaku", torch="0.4", dtype="fp32", zero_stage=0)])
    assert isinstance(found, Prediction) and any(text.startswith("torch 0.4: measured") for text in found.extrapolated)


def test_what_is_off_is_not_said_to_be_missing() -> None:
    line = cells(hardware="V100-16GB", zero_stage=0, recompute=False, torch="1.13", dtype="", freq_ghz="")
    (found,) = predict_table([line])
    assert isinstance(found, Prediction)
    said = {
        "zero 0: measured 1",
        "recompute False: measured True",
        "torch 1.13: measured not given",
        "dtype not given: measured fp16",
    }
    assert said <= set(found.extrapolated)


def test_memory_comes_in_the_rows_own_unit() -> None:
    line = {"hardware": "A64FX Fugaku", "dtype": "fp32", "zero_stage": 0, "torch": "1.7"}
    units = ("MiB (node, system-wide used)", "GB", "pages")
    found = [
        one for one in predict_table([cells(mem_unit=unit, **line) for unit in units]) if isinstance(one, Prediction)
    ]
    assert [one.memory_unit for one in found] == ["MiB", "GB", "MiB"]
    assert found[0].memory == found[2].memory == pytest.approx(1024 * found[1].memory)


def test_seconds_that_are_no_seconds_are_no_measurement() -> None:
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


def test_a_table_that_cannot_be_read_as_one_is_a_usage_error(tmp_path: Path) -> None:
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


def test_predictions_do_not_depend_on_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not when the measured columns of the whole reference are dealt out anew, and not when they are gone."""
    lines = reference()

    def predicted(name: str) -> str:
        assert run(["plan", "predict", "--rows", str(_write(tmp_path / name, lines)), "--format", "json"]) == 0
        return capsys.readouterr().out

    before = predicted("a.csv")
    dealt = random.Random(7).sample(lines, len(lines))
    lines = [{**line, **{key: other[key] for key in MEASURED}} for line, other in zip(lines, dealt)]
    assert lines != reference() and predicted("b.csv") == before
    lines = [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]
    without = json.loads(predicted("c.csv"))
    assert [one["sec_per_it"] for one in without] == [one["sec_per_it"] for one in json.loads(before)]
    assert [one["mem_value"] for one in without] == [one["mem_value"] for one in json.loads(before)]
