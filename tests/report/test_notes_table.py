"""Tests that tables equal those of the notes, byte for byte."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import Dict, List, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.formulas.flops import notes_flops, tflops_per_node
from fugaku_gpt.report.html import html_tables
from fugaku_gpt.report.markdown_tables import read_tables
from fugaku_gpt.report.notes_table import (
    nodes_cell,
    notes_cell,
    notes_tables,
    row_cells,
    seconds_cell,
    toggle_text,
    validation_cell,
)
from fugaku_gpt.report.rows import ResultRow, merge_repeats, raw_values
from tests.report.rows_of_tables import rows_from_tables
from tests.support.measurements import MEASUREMENTS

DEFAULT_GHZ = 2.0  # clock of the machine when those tables were written

EXPECTED = """\
### 124M model, Sequence Length=1024, PyTorch 1.10
| Nodes | Size | DP | TP | PP | MBS | GBS | Mem | Sec/it | TFLOPs | Est. Aggr. PetaFLOPs | Notes |
| ----: | ---: | -: | -: | -: | --: | --: | --: | -----: | -----: | -------------------: | ----: |
| 1 (max-proc-per-node=4) | 124M | 4 | 1 | 1 | 1 | 1024 | 28827.7 MiB | 613.2 | 1.36 | 0.001 | 02-15, 21103755 |
| 1 (max-proc-per-node=4) | 124M | 1 | 4 | 1 | 1 | 1024 | - | - | - | - | 02-15, 21104749 |
| 512 | 124M | 512 | 1 | 1 | 1 | 1024 | 8223.2 MiB | 3.7 | 0.43 | 0.215 | 02-15 |
| 512 (2.2GHz) | 124M | 512 | 1 | 1 | 1 | 1024 | 8347.0 MiB | 3.2 | 0.50 | 0.250 | 02-15 |
| 512 (LD_PRELOAD=libtcmalloc.so) | 124M | 512 | 1 | 1 | 1 | 1024 | - | - | - | - | 02-15, 21103942 |
| 1 (max-proc-per-node=4, 2.2GHz, LD_PRELOAD=libtcmalloc.so, "retention_state=0") | 124M | 4 | 1 | 1 | 1 | 1024 | - \
| 522.7 | 1.60 | 0.002 | 02-15 |
"""

# (id in measurements.csv, job of the notes)
NOTES_ROWS = (
    ("fsweep.t1.L6", "21103755"),
    ("fsweep.t1.L7", "21104749"),
    ("fsweep.t1.L10", ""),
    ("fsweep.t1.L12", ""),
    ("fsweep.t1.L13", "21103942"),
    ("fsweep.t2.L27", ""),
)

# Rows whose figures do not follow from one another: the first two by their remarks, the others found by this test.
INCONSISTENT = {
    "fsweep.t1.L10": "3.7 s gives 0.441 TFLOPs, the table says 0.43: averaged separately",
    "fsweep.t3.L34": "10023.9 s gives 1.160 TFLOPs, the table says 1.13: one of the two is wrong",
    "dsf.014": "9.9 s gives 0.440 TFLOPs, the table says 0.42: averaged over other iterations",
    "dsf.020": "10.4 s gives 0.358 TFLOPs, the table says 0.37: averaged over other iterations",
    "dsf.066": "17.6 s gives 0.989 TFLOPs, the table says 0.98: cut, not rounded",
}


def measurements() -> Dict[str, Dict[str, str]]:
    with open(MEASUREMENTS, encoding="utf-8", newline="") as stream:
        return {line["id"]: line for line in csv.DictReader(stream)}


def by_hand(line: Dict[str, str], job: str = "") -> ResultRow:
    """A row of a hand-written table."""

    def integer(name: str) -> Optional[int]:
        return int(line[name]) if line[name] else None

    ghz = float(line["freq_ghz"])
    return ResultRow(
        size=line["model"],
        seq_len=integer("seq_len"),
        nodes=int(line["nodes"]),
        dp=integer("dp"),
        tp=integer("tp"),
        pp=integer("pp"),
        micro_batch=integer("micro_batch"),
        global_batch=integer("global_batch"),
        ranks_per_node=int(line["ranks_per_node"]),
        recompute=line["recompute"] == "True",
        torch="1.10",  # the block in the notes' format page shows one row of a 1.7 table under this heading
        freq_mhz=round(ghz * 1000) if ghz != DEFAULT_GHZ else None,
        tcmalloc=line["tcmalloc"] == "True",
        retention_state=0 if line["retention_state"] == "0" else None,
        node_used_bytes=float(line["mem_value"]) * 2**20 if line["mem_value"] else None,
        seconds_per_iteration=float(line["sec_per_it"]) if line["sec_per_it"] else None,
        tflops_notes=float(line["tflops"]) if line["tflops"] else None,
        date="02-15",
        job_id=job,
    )


def test_the_rows_of_the_notes_byte_for_byte() -> None:
    lines = measurements()
    rows = [by_hand(lines[name], job) for name, job in NOTES_ROWS]
    assert notes_tables(rows) == EXPECTED


def test_petaflops_by_powers_of_ten_on_request() -> None:
    row = by_hand(measurements()["fsweep.t1.L12"])
    assert row_cells(row)[10] == "0.250" and row_cells(row, si=True)[10] == "0.256"


def applicable() -> List[str]:
    return [
        name
        for name, line in measurements().items()
        if line["tflops_formula"] == "megatron_72_or_96" and line["sec_per_it"] and line["tflops"]
    ]


@pytest.mark.parametrize("name", applicable())
def test_the_notes_tflops_follow_from_their_seconds(name: str) -> None:
    line = measurements()[name]
    model = ModelConfig(
        layers=int(line["layers"]), hidden=int(line["hidden"]), heads=int(line["heads"]), seq_len=int(line["seq_len"])
    )
    flops = notes_flops(model, int(line["global_batch"]), int(line["vocab"]), line["recompute"] == "True")
    seconds, nodes, stated_tflops = float(line["sec_per_it"]), int(line["nodes"]), float(line["tflops"])
    # both are rounded: the seconds to their last digit, the TFLOPs to two decimals (0.735 is 0.73 and 0.74 averaged)
    digit = 10.0 ** -len(line["sec_per_it"].partition(".")[2])
    half = 0.005
    low = tflops_per_node(flops, seconds + digit / 2, nodes) - half
    high = tflops_per_node(flops, seconds - digit / 2, nodes) + half
    assert (low <= stated_tflops <= high) is (name not in INCONSISTENT)


def test_headings_and_order() -> None:
    def row(size: str, torch: str, recompute: bool = False, **values: object) -> ResultRow:
        return ResultRow(size, 1024, 1, 1, 1, 1, 1, 8, torch=torch, recompute=recompute, **values)  # type: ignore[arg-type]

    text = notes_tables([row("124M", "2.13"), row("1.3B", "2.13", True), row("124M", "", status="refused")])
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "### 124M model, Sequence Length=1024, PyTorch 2.13",  # the row that never started joins its build
        "### 1.3B model, Sequence Length=1024, Activation Checkpointing, PyTorch 2.13",
    ]
    assert "\n\n### 1.3B" in text and text.endswith("|\n") and not text.endswith("\n\n")
    two = notes_tables([row("124M", "2.13"), row("124M", "1.10"), row("124M", "")])
    assert [line for line in two.splitlines() if "unknown" in line] == [
        "### 124M model, Sequence Length=1024, PyTorch unknown"
    ]
    assert notes_tables([]) == ""


def test_failures_and_toggles_that_were_not_applied_are_reported() -> None:
    def notes(**values: object) -> str:
        return notes_cell(ResultRow("124M", 1024, 1, 1, 1, 1, 1, 8, **values))  # type: ignore[arg-type]

    assert notes() == ""
    assert notes(status="oom", reason="MemoryError") == "OOM"
    assert notes(status="timeout", date="11-20") == "11-20, timeout"
    reason = "a/b.yaml:3: layout.tp: 3: must divide\nmodel.heads 4"
    assert notes(status="refused", reason=reason) == "refused: layout.tp: 3: must divide model.heads 4"
    long = notes(status="failed", reason="x" * 200)
    assert long == "failed: " + "x" * 79 + "…"
    applied = notes(not_applied=("2.2GHz", "retention_state=0"), remarks=("n=3",))
    assert applied == "n=3, not applied: 2.2GHz, retention_state=0"
    row = ResultRow("124M", 1024, 1, 1, 1, 1, 1, 8, status="failed", reason="a | b")
    assert notes_tables([row]).splitlines()[-1].count("\\|") == 1


@pytest.mark.parametrize(
    ("seconds", "cell"),
    [
        (None, "-"),
        (11727.94, "11727.9"),
        (36.14, "36.1"),
        (9.996, "10.0"),
        (9.994, "9.99"),
        (3.724, "3.72"),
        (3.7, "3.7"),
        (1.0, "1.0"),
        (0.9996, "1.0"),
        (0.9994, "0.999"),
        (0.1234, "0.123"),
        (0.09996, "0.100"),
        (0.01234, "0.0123"),
        (0.00001234, "0.0000123"),
    ],
)
def test_seconds(seconds: Optional[float], cell: str) -> None:
    assert seconds_cell(seconds) == cell


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_seconds_are_rounded_not_changed(seconds: float) -> None:
    cell = seconds_cell(seconds)
    assert "e" not in cell
    assert abs(float(cell) - seconds) <= min(0.0500001, seconds * 0.00501)
    if float(cell) < 1:
        assert len(cell.replace("0.", "", 1).lstrip("0")) == 3


def test_a_validation_loss_has_a_column_where_a_run_has_it() -> None:
    plain = ResultRow("124M", 1024, 1, 1, 1, 1, 1, 8, torch="2.13")
    assert "Validation" not in notes_tables([plain]) and "Validation" not in html_tables([plain])
    both = [replace(plain, first_validation_loss=8.0, last_validation_loss=4.5), replace(plain, nodes=2)]
    text = notes_tables(both)
    assert "| Est. Aggr. PetaFLOPs | Validation loss | Notes |" in text
    assert [line.split(" | ")[-2] for line in text.splitlines()[3:]] == ["8.000 to 4.500", "-"]
    assert len({line.count("|") for line in text.splitlines()[1:]}) == 1
    page = html_tables(both)
    assert "Validation loss</th>" in page and "<td>8.000 to 4.500</td>" in page
    again = rows_from_tables(read_tables(text))
    assert (again[0].first_validation_loss, again[0].last_validation_loss) == (8.0, 4.5)
    assert notes_tables(again) == text


def test_losses_of_evaluation_files_stand_beside_the_validation_loss() -> None:
    plain = ResultRow("124M", 1024, 1, 1, 1, 1, 1, 8, torch="2.13")
    evaluated = replace(plain, evaluations=(("news", 8.0, 4.0), ("code", 9.0, 9.0)))
    (cell,) = [line.split(" | ")[-2] for line in notes_tables([evaluated]).splitlines()[3:]]
    assert cell == "news 8.000 to 4.000, code 9.000"
    validated = replace(evaluated, first_validation_loss=8.5, last_validation_loss=4.5)
    assert validation_cell(validated) == "8.500 to 4.500, news 8.000 to 4.000, code 9.000"
    assert raw_values(evaluated)["evaluation_losses"] == "news: 8.000000 to 4.000000; code: 9.000000 to 9.000000"
    repeated = replace(evaluated, evaluations=(("news", 6.0, 2.0), ("code", 9.0, 5.0)))
    assert merge_repeats([evaluated, repeated]).evaluations == (("news", 7.0, 3.0), ("code", 9.0, 7.0))


@pytest.mark.slow
@given(st.integers(1, 9999))
def test_clocks_are_read_back(mhz: int) -> None:
    clock = toggle_text("freq_mhz", mhz)
    assert clock.endswith("GHz") and round(float(clock[:-3]) * 1000) == mhz
    assert toggle_text("freq_mhz", 2200) == "2.2GHz" and toggle_text("freq_mhz", 2000) == "2.0GHz"


def test_only_toggles_that_differ_stand_in_the_nodes_cell() -> None:
    assert nodes_cell(ResultRow("124M", 1024, 3, 1, 1, 1, 1, 8)) == "3"
    row = ResultRow("124M", 1024, 3, 1, 1, 1, 1, 8, ranks_per_node=2, retention_state=1)
    assert nodes_cell(row) == '3 (max-proc-per-node=2, "retention_state=1")'
