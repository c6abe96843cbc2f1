"""Tests that the titles of other people's tables are understood, and what they do not mean is not guessed."""

from __future__ import annotations

import pytest

from fugaku_gpt.report.check import check_tables, check_text
from fugaku_gpt.report.column_titles import column_of, unit_in_title
from fugaku_gpt.report.markdown_tables import read_tables
from tests.report.test_check_notes import rules, table


@pytest.mark.parametrize(
    ("column", "titles"),
    [
        ("nodes", ("Nodes", "NNODES", "#Nodes", "# nodes")),
        ("ranks", ("GPUs", "#GPUs", "NGPU", "Num. GPUs", "NPUs", "Ranks", "World size")),
        ("seconds", ("Sec/it", "s/iter", "Step Time (s)", "Time/iter (s)", "Iteration time [ms]", "ms/it", "Speed")),
        ("tflops", ("TFLOPs*", "TFLOP/s/GPU", "TFLOPS per GPU", "Model TFLOP/sec/GPU", "Achieved teraFLOP/s per GPU")),
        ("aggregate", ("Est. Aggr. PetaFLOPs", "Aggregate PFlops/s", "PFLOPs")),
        ("mem", ("Mem", "Peak memory", "GPU M", "Mem/GPU", "Memory per GPU (GB)", "Max mem")),
        ("mbs", ("MBS", "Micro-BS", "Mic-BS", "Micro batch size")),
        ("seconds", ("Throughput (s/it)", "Throughput [sec per iteration]")),
        (
            "",
            (
                "Throughput",
                "GPU",
                "MFU",
                "Throughput (tokens/s)",
                "Time (h)",
                "TFLOPs (total)",
                "Mem (%)",
                "Tokens/s",
                "it/s",
            ),
        ),
    ],
)
def test_titles(column: str, titles: "tuple[str, ...]") -> None:
    assert {title: column_of(title) for title in titles} == dict.fromkeys(titles, column)


def test_units_in_titles() -> None:
    titles = {
        "Time (ms)": "ms",
        "Step time [s]": "s",
        "ms/it": "ms",
        "Mem (GB / GPU)": "GB",
        "Sec/it": "",
        "MFU (%)": "",
    }
    assert {title: unit_in_title(title) for title in titles} == titles


SETTINGS = "# A100, NLAYERS=40 / NHIDDEN=5120 / NHEADS=40 / SEQ_LEN=4096 / VOCAB=32000\n\n"


def test_times_in_milliseconds_per_iteration() -> None:
    titles = ("Nodes", "DP", "TP", "PP", "MBS", "GBS", "AC", "ms/it", "TFLOPs")
    row = (4, 4, 2, 4, 1, 256, "w/", 23000, 163.93)
    assert rules(SETTINGS + table(titles, row)) == []
    assert rules(SETTINGS + table(titles, (*row[:-1], 120.0))) == ["tflops"]


def test_columns_that_no_rule_reads_are_named() -> None:
    titles = ("GPUs", "TP", "PP", "DP", "MFU", "TFLOPs/GPU", "Job ID")
    checked = check_tables(SETTINGS + table(titles, (8, 8, 1, 1, "31%", 97, 811), (8, 4, 2, 1, "30%", 95, 812)))
    assert checked.findings == () and checked.unread == {"MFU": 2, "Job ID": 2}


def test_context_parallel_ranks_count() -> None:
    titles = ("GPUs", "TP", "CP", "PP", "DP", "TFLOP/s/GPU")
    assert rules(table(titles, ("16,384", 8, 16, 16, 8, 380), ("8,192", 8, 1, 16, 64, 430))) == []
    assert rules(table(titles, ("16,384", 8, 8, 16, 8, 380))) == ["ranks"]


def test_a_column_of_models_holds_names() -> None:
    titles = ("Nodes", "Model", "TP", "PP", "DP", "GBS", "Seq len", "Step time [s]", "TFLOP/s/GPU")
    rows = [
        (1, "Llama 3.1-70B", 8, 1, 1, "1,024", "4K", 64.3, 310),
        (2, "140B (synthetic)", 8, 1, 2, "1k", "2K", 64.3, 310),
    ]
    assert rules("# H100\n\n" + table(titles, *rows)) == []
    shifted = (1, 8, "Llama 3.1-70B", 1, 1, "1,024", "4K", 64.3, 310)
    assert rules("# H100\n\n" + table(titles, shifted)) != []
    named = table(("Nodes", "Size", *titles[2:]), *rows)
    assert rules("# H100\n\n" + named) == ["cells", "cells"]


@pytest.mark.parametrize("memory", ["60 GB / GPU", "59.82GiB(93.49%)", "60GB/node"])
def test_memory_says_whose_it_is(memory: str) -> None:
    titles = ("Nodes", "DP", "TP", "PP", "Mem", "Sec/it", "TFLOPs")
    assert rules(SETTINGS + table(titles, (2, 2, 8, 1, memory, 60.0, 100.0))) == []
    assert "cells" in rules(SETTINGS + table(titles, (2, 2, 8, 1, "60 GB/s", 60.0, 100.0)))


def test_a_table_without_a_column_of_speeds_has_no_row_without_figures() -> None:
    assert rules(table(("GPUs", "TP", "PP", "DP", "Mem"), (8, 8, 1, 1, "60GB"))) == []


def test_the_standard_formula_of_gpus_is_no_finding() -> None:
    """Megatron counts the logits of a run without recomputation in full, the notes on Fugaku three quarters of them."""
    settings = "NLAYERS=24 / NHIDDEN=1024 / NHEADS=16 / SEQ_LEN=1024 / VOCAB=50257, w/o activation checkpointing\n\n"
    titles = ("GPUs", "DP", "TP", "PP", "MBS", "GBS", "Speed", "TFLOPs")
    text = "# A100\n\n" + settings + table(titles, (8, 8, 1, 1, 4, 512, 3.0, 54.73))
    assert rules(text) == []
    assert rules(text.replace("54.73", "65.0")) == ["tflops"]


def test_a_single_decimal_may_be_cut() -> None:
    titles = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")
    row = (5, "350M", 1, 1, 5, 1, 8, "10000 MiB", 30.0, 0.2, "11-21")
    text = f"### 350M model, Sequence Length=2048, PyTorch 1.10\n{table(titles, row)}"
    assert rules(text) == []  # 0.287
    assert rules(text.replace("| 0.2 |", "| 0.1 |")) == rules(text.replace("| 0.2 |", "| 0.28 |")) == ["tflops"]


FUGAKU = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")
HEADING = "### 1.3B model, Sequence Length=1024, \\w Activation Checkpointing, PyTorch 1.7\n"


def test_a_mark_at_the_nodes_says_why_a_row_failed() -> None:
    row = ("1 (LD_PRELOAD=libtcmalloc.so)^^", "1.3B", 1, 1, 1, 1, 1024, "- MiB", "-", "-", "02-15")
    assert rules(HEADING + table(FUGAKU, row)) == []
    assert rules(HEADING + table(FUGAKU, ("1", *row[1:]))) == ["no-cause"]


def test_a_shifted_row_with_a_wrong_clock_is_two_findings() -> None:
    row = ("1 (2.2Hz, max-proc-per-node=4)^^", "1.3B", 1, 4, 1, 1, 1024, "- MiB", "-", "-", "-", "02-15")
    findings = check_text(HEADING + table(FUGAKU, row))[1]
    assert [finding.rule for finding in findings] == ["shifted", "unit"]


@pytest.mark.parametrize(
    ("cells", "read"), [(("26.1s", "~30 s"), True), (("26.1", "30"), False), (("12k", "9"), False)]
)
def test_a_throughput_without_a_unit_is_a_time_only_by_the_cells(cells: "tuple[str, str]", read: bool) -> None:
    titles = ("Nodes", "DP", "TP", "PP", "MBS", "GBS", "Throughput", "TFLOPs")
    rows = [(4, 4, 2, 4, 1, 256 * (1 + number), cell, 100) for number, cell in enumerate(cells)]
    (read_table,) = read_tables(SETTINGS + table(titles, *rows))
    assert [row.cell("seconds") for row in read_table.rows] == (list(cells) if read else ["", ""])
