"""Tests that the check of hand-written tables reports the notes' own mistakes and none of their correct rows."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Tuple

import pytest

from fugaku_gpt.report.check import check_text
from fugaku_gpt.report.findings import RowFinding
from fugaku_gpt.report.notes_table import notes_tables
from fugaku_gpt.report.rows import ResultRow
from tests.report.example_tables import cells_of, column, measured_tables, row_lines, table_of
from tests.report.test_notes_table import EXPECTED, INCONSISTENT, by_hand, measurements

# Rows of the notes that cannot be right, with the rule that names them.
EXPECTED_FINDINGS = {name: ("tflops", why) for name, why in INCONSISTENT.items()}
EXPECTED_FINDINGS.update(
    {
        "f1b3.t2.L45": ("duplicate", "exact duplicate of the row above"),
        "dsf.049": ("duplicate", "the configuration of dsf.045 measured again: 3534.9 s, not 3720.0"),
        "dsf.056": ("tflops", "0.905 is 0.90 and 0.91 averaged; with two decimals it is rounded twice"),
    }
)


def lines_and_rules(text: str, **options: object) -> List[Tuple[int, str]]:
    _, findings = check_text(text, **options)  # type: ignore[arg-type]
    return [(finding.line, finding.rule) for finding in findings]


def only(text: str) -> RowFinding:
    """The single finding in a text."""
    _, findings = check_text(text)
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize("table", sorted(measured_tables()))
def test_exactly_the_inconsistent_measured_rows_are_reported(table: str) -> None:
    named_rows = measured_tables()[table]
    by_name = dict(named_rows)
    groups: List[List[str]] = []  # as notes_tables orders them
    text = notes_tables(list(by_name.values()))
    headings = {}
    for name, row in named_rows:
        key = (row.size, row.seq_len, row.recompute, row.torch)
        if key not in headings:
            headings[key] = len(groups)
            groups.append([])
        groups[headings[key]].append(name)
    names = [name for group in groups for name in group]
    at = dict(zip(row_lines(text), names))
    assert len(at) == len(named_rows)
    rows, findings = check_text(text)
    assert rows == len(named_rows)
    named = {(at[finding.line], finding.rule) for finding in findings}
    assert named == {(name, rule) for name, (rule, _) in EXPECTED_FINDINGS.items() if name in by_name}


def test_the_notes_page_lacks_two_causes_and_has_a_wrong_figure() -> None:
    assert lines_and_rules(EXPECTED) == [(5, "no-cause"), (6, "tflops"), (8, "no-cause")]


def row(name: str = "fsweep.t2.L26", **values: object) -> ResultRow:
    """A correct row of the notes: 124M on one node with four ranks, by default."""
    line = measurements()[name]
    return replace(by_hand(line), torch=line["torch"], **values)  # type: ignore[arg-type]


def with_cells(base: ResultRow, **cells: str) -> str:
    """The table of a row with cells replaced, by title."""
    own = cells_of(base)
    for title, text in cells.items():
        own[column({"Sec": "Sec/it", "Aggr": "Est. Aggr. PetaFLOPs"}.get(title, title))] = text
    return table_of(base, own)


def test_swapped_seconds_and_tflops_are_reported_though_their_product_is_right() -> None:
    for name in ("fsweep.t2.L26", "dsf.012", "dsf.018", "fsweep.t3.L33"):
        base = row(name)
        own = cells_of(base)
        finding = only(with_cells(base, Sec=own[column("TFLOPs")], TFLOPs=own[column("Sec/it")]))
        assert finding.rule == "swapped" and finding.what.startswith("Sec/it"), name
        assert "TFLOPs" in finding.what


@pytest.mark.parametrize("position", range(11))
def test_shifted_cells_are_reported_with_their_column(position: int) -> None:
    base = row("dsf.012")
    own = cells_of(base)
    finding = only(table_of(base, [*own[:position], "", *own[position:-1]]))
    assert finding.rule == "shifted" and "to the right" in finding.what
    finding = only(table_of(base, own[:position] + own[position + 1 :]))
    assert finding.rule == "shifted" and "to the left" in finding.what and finding.line == 4


def test_the_causes_of_speeds_that_do_not_follow() -> None:
    assert "one rank: times 4 ranks per node" in only(with_cells(row(), TFLOPs="0.29", Aggr="0.000")).cause
    assert "4 ranks once too often" in only(with_cells(row(), TFLOPs="4.63", Aggr="0.005")).cause
    assert "milliseconds" in only(with_cells(row(), Sec="721700.0")).cause
    assert "without activation checkpointing" in only(with_cells(row("dsf.012"), TFLOPs="0.36", Aggr="0.022")).cause
    assert "sequence length of 2048" in only(with_cells(row("dsf.012"), TFLOPs="1.10", Aggr="0.069")).cause
    assert "exact formula" in only(with_cells(row(), TFLOPs="1.24", Aggr="0.001")).cause
    assert "all 64 nodes" in check_text(with_cells(row("dsf.012"), TFLOPs="30.83", Aggr="-"))[1][-1].cause
    assert "1.13" in only(notes_tables([row("fsweep.t3.L34")])).what


def test_a_global_batch_of_24_for_1024() -> None:
    base = row("dsf.012")
    _, findings = check_text(with_cells(base, GBS="24"))
    assert {finding.rule for finding in findings} == {"batch", "tflops"}
    assert any("GBS 24 for 1024" in finding.cause for finding in findings)


@pytest.mark.parametrize(
    ("cells", "rule", "cause"),
    [
        ({"Nodes": "1 (max-proc-per-node=4, 2.2Hz)"}, "unit", "2.2 GHz was meant"),
        ({"Nodes": "1 (max-proc-per-node=4, 2200GHz)"}, "unit", "MHz for GHz"),
        ({"Mem": "22266.2 GiB"}, "memory", "GiB for MiB"),
        ({"Mem": "22.3 MiB"}, "memory", "unit is too small"),
        ({"Mem": "22266.2"}, "unit", ""),
        ({"Mem": "40000.0 MiB"}, "memory", "of all nodes"),
        ({"Sec": "721700 ms"}, "unit", ""),
        ({"Aggr": "1.160"}, "aggregate", ""),
        ({"DP": "8"}, "ranks", "factor of 2"),
        ({"Nodes": "1"}, "ranks", "max-proc-per-node=4 is not written"),
        ({"GBS": "-"}, "missing", ""),
        ({"TP": "four"}, "cells", ""),
        ({"Sec": "-", "TFLOPs": "-", "Aggr": "-", "Mem": "-"}, "no-cause", "OOM"),
        ({"Sec": "x", "TFLOPs": "x", "Aggr": "-", "Mem": "-"}, "no-cause", "OOM"),
    ],
)
def test_a_wrong_cell_is_a_single_finding(cells: "dict[str, str]", rule: str, cause: str) -> None:
    finding = only(with_cells(row(), **cells))
    assert finding.rule == rule and cause in finding.cause and finding.line == 4


def test_an_aggregate_by_powers_of_ten_is_distinguished_from_a_wrong_aggregate() -> None:
    base = row("dsf.018")  # 512 nodes at 0.40
    text = with_cells(base, Aggr="0.205")
    assert "it is / 1000" in only(text).cause
    assert lines_and_rules(text, si=True) == []
    assert lines_and_rules(notes_tables([base]), si=True) == [(4, "aggregate")]
    assert "not divided" in only(with_cells(base, Aggr="204.800")).cause
    assert "number of nodes" in only(with_cells(base, Aggr="0.100")).cause


def test_more_than_the_machine_can_do() -> None:
    base = row(tflops_notes=7.0, seconds_per_iteration=None)
    assert only(notes_tables([base])).rule == "peak"
    single_pipe = row(tflops_notes=3.5, seconds_per_iteration=None, knobs=(("eco_state", 2),))
    assert "one pipe" in only(notes_tables([single_pipe])).what
    assert lines_and_rules(notes_tables([base]), machine="other") == []


def test_a_layout_that_the_model_does_not_have() -> None:
    finding = only(with_cells(row("dsf.018"), DP="1", TP="512"))
    assert finding.rule == "swapped" and "DP" in finding.what and "TP" in finding.what
    text = notes_tables([row("dsf.018", dp=64, tp=8)])
    assert "TP 8 does not divide the 12 heads" in only(text).what


def test_a_refused_layout_is_a_correct_row() -> None:
    refused = replace(
        row("dsf.018", dp=64, tp=8, seconds_per_iteration=None, tflops_notes=None, node_used_bytes=None),
        status="refused",
        reason="layout.tp: 8: must divide model.heads 12",
    )
    assert lines_and_rules(notes_tables([refused])) == []


@pytest.mark.parametrize("cause", ["OOM", "stuck after the first iteration", "timeout", "failed: no such file", "lost"])
def test_a_failure_with_a_cause_is_a_correct_row(cause: str) -> None:
    base = row(seconds_per_iteration=None, tflops_notes=None, node_used_bytes=None, remarks=(cause,))
    assert lines_and_rules(notes_tables([base])) == []


def test_duplicates() -> None:
    base = row("dsf.012")
    twice = notes_tables([base, base])
    assert lines_and_rules(twice) == [(5, "duplicate")] and "copied twice" in only(twice).cause
    slower = row("dsf.012", seconds_per_iteration=40.0, tflops_notes=0.43)
    assert "a setting differs" in only(notes_tables([base, slower])).cause
    with_remark = replace(slower, remarks=("with the flight recorder",))
    assert lines_and_rules(notes_tables([base, with_remark])) == []
    failed = replace(base, seconds_per_iteration=None, tflops_notes=None, node_used_bytes=None, remarks=("OOM",))
    assert lines_and_rules(notes_tables([base, failed])) == []
    assert lines_and_rules(notes_tables([replace(failed, job_id="21103755"), replace(failed, job_id="21103756")])) == []
    other = replace(slower, not_applied=("2.2GHz",))
    assert lines_and_rules(notes_tables([base, other])) == []


def test_a_slight_deviation_is_no_swap_of_cells_that_only_change_the_padding() -> None:
    table = (
        "### 30B model, Sequence Length=2048, Activation Checkpointing, PyTorch 1.10\n"
        "| Nodes | Size | DP | TP | PP | MBS | GBS | Sec/it | TFLOPs | Notes |\n"
        "| ----: | ---: | -: | -: | -: | --: | --: | -----: | -----: | ----: |\n"
        "| 2304 | 30B | 8 | 6 | 48 | 1 | 1536 | 465.1534 | 0.735 | 02-15 |\n"
    )
    assert "or they were averaged over different iterations" in only(table).cause
    assert only(table).rule == "tflops"


GPUS = """\
### 200B on A100, NLAYERS=80 NHIDDEN=14400 NHEADS=96 SEQ_LEN=2048 VOCAB_SIZE=250k GBS=2048, activation checkpointing
| NNODES | TP | PP | DP | MBS | Speed | TFlops | Notes |
| -----: | -: | -: | -: | --: | ----: | -----: | :---- |
| 40 | 8 | 10 | 4 | 1 | 221.21 | 94.39 | 02-21 |
| 40 | 8 | 10 | 4 | 2 | 207.92 | 100.43 | 02-21 |
| 40 | 8 | 10 | 4 | 8 | x | x | OOM |
"""


def test_tables_of_gpu_runs() -> None:
    assert lines_and_rules(GPUS) == []
    assert lines_and_rules(GPUS.replace("| 4 | 2 | 207.92", "| 8 | 2 | 207.92")) == [(5, "ranks")]
    assert lines_and_rules(GPUS.replace("OOM", "02-21")) == [(6, "no-cause")]
    assert lines_and_rules(GPUS.replace("100.43", "10.043")) == [(5, "tflops")]
    assert lines_and_rules(GPUS.replace("100.43", "803.44")) == [(5, "peak"), (5, "tflops")]
    turned = GPUS + "| 40 | 8 | 10 | 4 | 2 | 100.43 | 207.92 | 02-25 |\n"
    assert "swapped: 100.43 and 207.92" in only(turned).cause


def test_models_of_unknown_shape_are_compared_with_each_other() -> None:
    lines = GPUS.replace("NLAYERS=80 NHIDDEN=14400 NHEADS=96 ", "").replace("200B", "777B").splitlines()
    lines[-1:] = ["| 40 | 8 | 10 | 4 | 4 | 208.18 | 100.30 | |", "| 40 | 8 | 10 | 4 | 8 | 229.69 | 90.91 | |"]
    assert lines_and_rules("\n".join(lines)) == []
    assert lines_and_rules("\n".join(lines).replace("90.91", "45.45")) == [(7, "tflops")]
