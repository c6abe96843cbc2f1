"""Tests of the rules that a check says it leaves out, for tables that lack one statement each."""

from __future__ import annotations

from typing import List

import pytest

from fugaku_gpt.report.check import check_tables

HEADING = "### LAYERS=24 HIDDEN=2048 HEADS=16 VOCAB_SIZE=50257, Sequence Length=1024, Activation Checkpointing"
ALL = {"Nodes": "4", "DP": "4", "TP": "4", "PP": "2", "MBS": "1", "GBS": "512", "Sec/it": "10.0", "TFLOPs": "99.99"}
RANKS = "DP * TP * PP are all GPUs: GPUs per node not said"
SPEED = "TFLOPs follow from Sec/it: {} not said"


def skipped(heading: str, **cells: str) -> List[str]:
    """Names of what is left out for a table of one row; ``cells``: other texts of columns, "" for no such column."""
    row = {title: text for title, text in {**ALL, **cells}.items() if text}
    lines = [list(row), ["--:" for _ in row], list(row.values())]
    return sorted(check_tables(heading + "\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)).skipped)


FUGAKU = HEADING + ", PyTorch 1.10"
V100 = HEADING + " on V100, GPUs per node: 8"


@pytest.mark.parametrize("heading", [FUGAKU, V100])
def test_nothing_is_left_out_of_a_table_that_says_everything(heading: str) -> None:
    assert skipped(heading) == []


@pytest.mark.parametrize(
    ("heading", "cells", "expected"),
    [
        (FUGAKU, {"GBS": ""}, [SPEED.format("GBS")]),
        (FUGAKU, {"Nodes": "-"}, [SPEED.format("nodes")]),
        (FUGAKU.replace(" Sequence Length=1024,", ""), {}, [SPEED.format("sequence length")]),
        (FUGAKU.replace("2048", "2000").replace("VOCAB_SIZE=50257", ""), {}, [SPEED.format("vocabulary")]),
        (FUGAKU.replace("HEADS=16", ""), {}, ["TP divides the heads: number of heads not said"]),
        (FUGAKU.replace("HEADS=16", ""), {"TP": "1", "DP": "16"}, []),
        (FUGAKU.replace("LAYERS=24", ""), {"TP": "1", "DP": "16"}, [SPEED.format("layers and hidden size")]),
        (FUGAKU, {"GBS": "", "Sec/it": ""}, []),  # there is nothing to follow from
        (FUGAKU, {"GBS": "", "TFLOPs": ""}, []),
        (V100, {"GBS": "", "Nodes": "-", "DP": "-"}, [SPEED.format("GBS, GPUs")]),
        (V100.replace(", GPUs per node: 8", ""), {}, []),  # 8 follow from the row
        (V100.replace(", GPUs per node: 8", ""), {"Nodes": "5"}, [RANKS]),
        (V100, {"Nodes": "5"}, []),
        (FUGAKU, {"Nodes": "5"}, []),
    ],
)  # fmt: skip
def test_missing_statements_are_named(heading: str, cells: "dict[str, str]", expected: List[str]) -> None:
    assert skipped(heading, **cells) == expected
