"""Tests of measured rows beside rows of reference: pairs, ratios, spreads, and the tables byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import List, Sequence

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.formulas.flops import notes_flops, tflops_per_node
from fugaku_gpt.records.run import OUT_OF_MEMORY
from fugaku_gpt.report.beside import ALIGNMENT, TITLES, Pair, cells_of, pairs_by_heading, put_beside, values_of
from fugaku_gpt.report.beside_tables import beside_page, beside_tables
from fugaku_gpt.report.collect import collect_rows
from fugaku_gpt.report.reference import ReferenceRow, read_reference
from fugaku_gpt.report.rows import ResultRow
from tests.report.test_reference import HEADER, TINY
from tests.sweep.fake import leave_run

TABLES = """\
### tiny model on A64FX Fugaku (reference), Sequence Length=128
| Nodes | Size | DP | TP | PP | MBS | GBS | Ref. Mem | Mem | Ref. Sec/it | Sec/it | Ratio | Spread | Ref. TFLOPs \
| TFLOPs | Notes |
| ----: | ---: | -: | -: | -: | --: | --: | -------: | --: | ----------: | -----: | ----: | -----: | ----------: \
| -----: | ----: |
| 1 | 1.1M | 1 | 1 | 1 | 4 | 16 | 100.5 MiB | 1028.0 MiB | 0.500 | 0.400 | 0.800 | outside 0.300 to 0.450 | 0.03 \
| 0.03 | t.1; 11-14, n=3 |
| 1 (max-proc-per-node=2) | tiny | 2 | 1 | 1 | 4 | 16 | 100.5 MiB | - | 0.500 | - | - | - | 0.03 | - | t.2: failed |

### 1.1M model, Sequence Length=128, PyTorch 2.13, without a reference
| Nodes | Size | DP | TP | PP | MBS | GBS | Ref. Mem | Mem | Ref. Sec/it | Sec/it | Ratio | Spread | Ref. TFLOPs \
| TFLOPs | Notes |
| ----: | ---: | -: | -: | -: | --: | --: | -------: | --: | ----------: | -----: | ----: | -----: | ----------: \
| -----: | ----: |
| 1 (max-proc-per-node=2) | 1.1M | 1 | 2 | 1 | 4 | 16 | - | 1028.0 MiB | - | 0.500 | - | - | - | 0.03 | 11-14 |
"""
SECOND = TINY.replace("t.1", "t.2").replace(",1,1,1,1,1,4,16", ",1,2,2,1,1,4,16").replace(",ok", ",fail")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text(HEADER + TINY + SECOND, encoding="utf-8")
    for name, pace in (("a", 0.3), ("b", 0.45), ("c", 0.4)):
        leave_run(tmp_path / "runs" / name, load_run_config(preset="tiny"), pace=pace)
    leave_run(tmp_path / "runs" / "tp", load_run_config(preset="tiny", overrides=["layout.tp=2"]))
    return tmp_path


def pairs_of(folder: Path) -> List[Pair]:
    references, _ = read_reference(folder / "rows.csv")
    return put_beside(references, *collect_rows([folder / "runs"]))


def test_the_tables_byte_for_byte(runs: Path) -> None:
    pairs = pairs_of(runs)
    assert beside_tables(pairs) == TABLES == beside_tables(pairs_of(runs))
    assert ALIGNMENT.count("|") == len(TITLES) + 1
    page = beside_page(pairs)
    assert page.count("<tr") == 2 + 3 and page.count('class="bad"') == 1 and "outside 0.300 to 0.450" in page
    assert "<dt>least_seconds</dt><dd>0.3</dd>" in page and "tcmalloc_applied" not in page
    assert "Ref. columns are the reference" in page and "TFLOPs × nodes" not in page


def test_values_have_both_sides_and_nothing_for_a_configuration_that_was_not_run(runs: Path) -> None:
    both, alone, without = map(values_of, pairs_of(runs))
    assert (both["reference"], both["reference_seconds_per_iteration"], both["seconds_per_iteration"]) == (
        "t.1", 0.5, 0.4,
    )  # fmt: skip
    assert (both["ratio"], both["repeats"], both["least_seconds"], both["most_seconds"]) == (0.8, 3, 0.3, 0.45)
    assert both["is_outside_of_spread"] is True and both["layers"] == 4 and both["reference_memory"] == "100.5 MiB"
    assert both["samples_per_second"] == pytest.approx(40) and both["reference_samples_per_second"] == 32
    empty = ("seconds_per_iteration", "ratio", "repeats", "is_outside_of_spread", "runs", "hardware", "tflops")
    assert alone["reference_status"] == "failed" and [alone[name] for name in empty] == [None] * len(empty)
    assert without["reference"] is None and without["ratio"] is None and without["repeats"] == 1


ROW = ResultRow("tiny", 128, 1, 1, 1, 1, 4, 16, seconds_per_iteration=1.0, layers=4, hidden=128, heads=4)
REFERENCE = ReferenceRow(replace(ROW, is_reference=True, hardware="A64FX"), {}, ("t.1",), seconds_digit=0.05)


@pytest.mark.parametrize(
    ("seconds", "is_outside", "cell"),
    [
        ((1.06, 1.2), True, "outside 1.06 to 1.2"),
        ((1.05, 1.2), False, "inside 1.05 to 1.2"),  # 1.0 may be 1.05 before it was rounded
        ((0.8, 0.94), True, "outside 0.800 to 0.940"),
        ((0.8, 1.2), False, "inside 0.800 to 1.2"),
        ((1.5,), None, "one run"),
    ],
)
def test_a_reference_is_outside_of_the_spread_with_the_rounding(
    seconds: Sequence[float], is_outside: object, cell: str
) -> None:
    pair = Pair(REFERENCE, replace(ROW, seconds_per_iteration=sum(seconds) / len(seconds)), tuple(seconds))
    assert pair.is_outside is is_outside and cells_of(pair)[TITLES.index("Spread")] == cell
    assert pair.ratio == pytest.approx(sum(seconds) / len(seconds))


def test_a_run_that_failed_has_no_ratio(runs: Path) -> None:
    config = load_run_config(preset="tiny", overrides=["layout.dp=2"])
    leave_run(runs / "runs" / "oom", config, OUT_OF_MEMORY, "MemoryError")
    (pair,) = [pair for pair in pairs_of(runs) if pair.reference is not None and pair.reference.ids == ("t.2",)]
    assert pair.measured is not None and pair.ratio is None and pair.is_outside is None
    assert cells_of(pair)[-1] == "t.2: failed; 11-14, OOM" and cells_of(pair)[TITLES.index("Spread")] == "-"


def test_tflops_are_counted_as_the_reference_counts_them(runs: Path) -> None:
    text = HEADER + TINY.replace(",16,,,,fp32", ",16,,True,,fp32")
    (runs / "rows.csv").write_text(text, encoding="utf-8")
    config = load_run_config(preset="tiny", overrides=["training.recompute=full"])
    leave_run(runs / "runs" / "recompute", config)
    pair = pairs_of(runs)[0]
    expected = tflops_per_node(notes_flops(config.model, 16, 2048, recompute=True), 0.5, 1)
    assert pair.tflops == pytest.approx(expected) and pair.measured is not None
    assert pair.tflops == pytest.approx((pair.measured.tflops_notes or 0) * 4 / 3)


def test_the_notes_name_another_processor() -> None:
    same, other = (replace(ROW, hardware=name, date="11-14") for name in ("Fujitsu A64FX", "A Xeon"))
    assert cells_of(Pair(REFERENCE, same, (1.0,)))[-1] == "t.1; 11-14"
    assert cells_of(Pair(REFERENCE, other, (1.0,)))[-1] == "t.1; 11-14; on A Xeon"


@pytest.mark.parametrize(
    ("stated", "processor", "is_same"),
    [
        ("A64FX Fugaku", "Fujitsu A64FX", True),
        ("AMD EPYC", "AMD EPYC 7763 64-Core Processor", True),
        ("AMD EPYC", "AMD Ryzen 9", False),
        ("AMD EPYC 7763", "AMD EPYC 9654 96-Core Processor", False),
        ("2x Xeon Gold 6148", "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz", True),
        ("4x L4", "NVIDIA L40", False),
        ("", "AMD EPYC", False),
    ],
)
def test_processors_are_compared_by_number_or_by_every_word(stated: str, processor: str, is_same: bool) -> None:
    reference = replace(REFERENCE, row=replace(REFERENCE.row, hardware=stated))
    notes = cells_of(Pair(reference, replace(ROW, hardware=processor, date="11-14"), (1.0,)))[-1]
    assert notes == "t.1; 11-14" + ("" if is_same else f"; on {processor}")


def test_each_measured_row_of_a_configuration_has_a_line(runs: Path) -> None:
    leave_run(runs / "runs" / "seed", load_run_config(preset="tiny", overrides=["training.seed=7"]))
    lines = [pair for pair in pairs_of(runs) if pair.reference is not None and pair.reference.ids == ("t.1",)]
    assert len(lines) == 2 and {cells_of(pair)[-1] for pair in lines} == {"t.1; 11-14, seed=1234, n=3",
                                                                          "t.1; 11-14, seed=7"}  # fmt: skip
    assert [title for title, _ in pairs_by_heading(pairs_of(runs))][1].endswith(", without a reference")
