"""Tests that correct made-up tables give no finding, and that any mistake put into a row is reported."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import List

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fugaku_gpt.report.check import check_text
from fugaku_gpt.report.figures import Interval, read_figure
from fugaku_gpt.report.notes_table import COLUMNS, NO_VALUE, notes_tables
from fugaku_gpt.report.rows import ResultRow
from tests.report.example_tables import cells_of, column, rows, table_of

few = settings(max_examples=40, deadline=None)
many = settings(max_examples=150, deadline=None)
LAYOUT = {column("DP"), column("TP"), column("PP")}


def rules(text: str) -> List[str]:
    return [finding.rule for finding in check_text(text)[1]]


@pytest.mark.slow
@few
@given(st.lists(rows(), min_size=1, max_size=4, unique_by=lambda row: (row.size, row.nodes, row.dp, row.tp, row.pp)))
def test_correct_rows_give_no_finding(correct_rows: List[ResultRow]) -> None:
    text = notes_tables(correct_rows)
    count, findings = check_text(text)
    assert count == len(correct_rows) and findings == []


@pytest.mark.slow
@few
@given(rows(failed=True))
def test_only_failures_without_a_cause_are_reported(row: ResultRow) -> None:
    assert rules(notes_tables([row])) == []
    assume(row.remarks != ("forward and backward reduce are slow",))
    assert rules(notes_tables([replace(row, status="ok")])) == ["no-cause"]


@pytest.mark.slow
@few
@given(rows())
def test_swapped_seconds_and_tflops(row: ResultRow) -> None:
    own = cells_of(row)
    a, b = column("Sec/it"), column("TFLOPs")
    assume(read_figure(own[a]).decimals != 2)  # nothing says of 1.51 and 1.56 which are the seconds
    own[a], own[b] = own[b], own[a]
    assert rules(table_of(row, own)) == ["swapped"]


@many
@given(rows(), st.sampled_from(list(combinations(range(len(COLUMNS)), 2))))
@pytest.mark.slow
def test_any_two_cells_swapped(row: ResultRow, places: "tuple[int, int]") -> None:
    own = cells_of(row)
    first, second = places
    assume(own[first] != own[second])
    assume(not {first, second} <= LAYOUT)  # another layout, as good as the first: see below
    if {first, second} == {column("TFLOPs"), column("Est. Aggr. PetaFLOPs")}:
        speed, aggregate = (read_figure(own[position]) for position in (first, second))
        assume(not speed.interval.overlaps(aggregate.interval))  # about 1024 nodes: the same figure twice
        assume(aggregate.value > 0.02)  # else it is rounded to nothing
    if {first, second} == {column("Sec/it"), column("TFLOPs")}:
        assume(read_figure(own[column("Sec/it")]).decimals != 2)  # nothing says of 1.51 and 1.56 which are the seconds
    own[first], own[second] = own[second], own[first]
    assert rules(table_of(row, own))


@pytest.mark.slow
@few
@given(rows(), st.integers(2, 6))
def test_a_tensor_split_that_the_heads_do_not_have(row: ResultRow, factor: int) -> None:
    dp, nodes, batch = (100 * factor * (value or 0) for value in (row.dp, row.nodes, row.global_batch))
    wide = replace(row, dp=dp, nodes=nodes, global_batch=batch)
    assert rules(notes_tables([wide])) == []
    own = cells_of(wide)
    a, b = column("DP"), column("TP")
    own[a], own[b] = own[b], own[a]
    assert "swapped" in rules(table_of(wide, own)) or "layout" in rules(table_of(wide, own))


@pytest.mark.slow
@few
@given(rows(), st.integers(0, len(COLUMNS) - 2), st.sampled_from(["", "-"]))
def test_a_cell_too_many(row: ResultRow, position: int, blank: str) -> None:
    own = cells_of(row)
    assert rules(table_of(row, [*own[:position], blank, *own[position:-1]]))
    assert rules(table_of(row, [*own[:position], blank, *own[position:]]))


@pytest.mark.slow
@few
@given(rows(), st.integers(0, len(COLUMNS) - 2))
def test_a_cell_too_few(row: ResultRow, position: int) -> None:
    own = cells_of(row)
    # without notes, the remaining cells are a correct row without an aggregate
    assume(position != column("Est. Aggr. PetaFLOPs") or own[column("Notes")] != NO_VALUE)
    assert rules(table_of(row, own[:position] + own[position + 1 :]))


@pytest.mark.slow
@few
@given(rows(), st.sampled_from([("MiB", "GiB"), ("MiB", ""), ("MiB", "KiB")]))
def test_another_unit_of_memory(row: ResultRow, units: "tuple[str, str]") -> None:
    own = cells_of(row)
    own[column("Mem")] = own[column("Mem")].replace(*units)
    assert rules(table_of(row, own))


@pytest.mark.slow
@few
@given(rows(), st.sampled_from(["2.2Hz", "2.0Hz", "2200GHz", "2.2MHz"]))
def test_another_unit_of_the_clock(row: ResultRow, clock: str) -> None:
    own = cells_of(row)
    nodes, _, toggles = own[0].partition(" (")
    other_toggles = [toggle for toggle in toggles.rstrip(")").split(", ") if toggle and "GHz" not in toggle]
    own[0] = f"{nodes} ({', '.join([*other_toggles, clock])})"
    assert rules(table_of(row, own)) == ["unit"]


@pytest.mark.slow
@few
@given(rows(), st.sampled_from([1000.0, 60.0, 0.001]))
def test_another_unit_of_time(row: ResultRow, factor: float) -> None:
    assert row.seconds_per_iteration is not None
    seconds = row.seconds_per_iteration * factor
    assume(seconds > 1e-3)
    assert set(rules(notes_tables([replace(row, seconds_per_iteration=seconds)]))) & {"tflops", "swapped"}


@pytest.mark.slow
@few
@given(rows())
def test_the_speed_of_a_single_rank(row: ResultRow) -> None:
    assume(row.ranks_per_node > 1 and row.tflops_notes is not None)
    row_per_rank = replace(row, tflops_notes=(row.tflops_notes or 0) / row.ranks_per_node)
    findings = check_text(notes_tables([row_per_rank]))[1]
    assert [finding.rule for finding in findings] == ["tflops"]


@pytest.mark.slow
@few
@given(rows(), st.integers(2, 40))
def test_another_global_batch(row: ResultRow, factor: int) -> None:
    """The row contradicts the formula, or looks like a row with swapped cells."""
    assert row.global_batch is not None
    assert set(rules(notes_tables([replace(row, global_batch=row.global_batch * factor)]))) & {"tflops", "swapped"}


@pytest.mark.slow
@few
@given(rows(), st.floats(1.1, 5.0))
def test_an_aggregate_of_another_row(row: ResultRow, factor: float) -> None:
    own = cells_of(row)
    position = column("Est. Aggr. PetaFLOPs")
    wrong = f"{float(own[position]) * factor + 0.002:.3f}"
    speed = read_figure(own[column("TFLOPs")]).interval.times((row.nodes or 0) / 1024.0)
    assume(not speed.overlaps(Interval(float(wrong) - 0.0005, float(wrong) + 0.0005)))
    own[position] = wrong
    (rule,) = rules(table_of(row, own))
    assert rule in {"aggregate", "swapped"}  # it may be right for a row whose nodes and another cell are swapped


@pytest.mark.slow
@few
@given(st.lists(rows(), min_size=1, max_size=3), st.data())
def test_a_row_copied(correct_rows: List[ResultRow], data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(correct_rows))
    assert "duplicate" in rules(notes_tables([*correct_rows, row]))


@few
@given(st.text())
def test_any_text_can_be_checked(text: str) -> None:
    check_text(text)


CELL = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["-", "x", "OOM", "1", "64", "124M", "8.1 GiB", "1e9999", "0", "1,024", "~3", "0,000", "3.7^^", "\\|", "2.2Hz"]
    ),
)


@many
@given(st.lists(st.lists(CELL, min_size=1, max_size=14), max_size=4), st.booleans())
@pytest.mark.slow
def test_any_cells_can_be_checked(cell_rows: List[List[str]], gpus: bool) -> None:
    header = (
        "| NNODES | TP | PP | DP | MBS | GBS | Speed | TFlops | Notes |" if gpus else "| " + " | ".join(COLUMNS) + " |"
    )
    lines = ["### 1.3B model, Sequence Length=1024", header, "|" + "--|" * header.count("|")]
    lines += ["| " + " | ".join(cells) + " |" for cells in cell_rows]
    check_text("\n".join(lines))
