"""Tests that a toggle which costs seconds is named with the sizes at which rows saw it help and hurt."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import Dict

from fugaku_gpt.config import load_run_config
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.planner.run_time import run_to_row
from fugaku_gpt.planner.tables.toggles import PAIRS, costly_toggles
from tests.support.measurements import MEASUREMENTS


def test_the_pairs_are_rows_of_the_table_that_differ_in_the_toggle() -> None:
    with open(MEASUREMENTS, encoding="utf-8", newline="") as stream:
        lines: Dict[str, Dict[str, str]] = {line["id"]: line for line in csv.DictReader(stream)}
    for pair in PAIRS["tcmalloc"]:
        without, toggled = lines[pair.without], lines[pair.toggled]
        assert (without["tcmalloc"], toggled["tcmalloc"]) == ("False", "True")
        for key in (
            "model",
            "nodes",
            "dp",
            "tp",
            "pp",
            "micro_batch",
            "global_batch",
            "freq_ghz",
            "torch",
            "recompute",
        ):
            assert without[key] == toggled[key], (pair, key)
        assert int(toggled["nodes"]) == pair.nodes
        assert round(float(toggled["sec_per_it"]) / float(without["sec_per_it"]), 3) == pair.ratio


def test_a_costly_toggle_is_named_where_it_costs_and_only_there() -> None:
    machine = load_machine("a64fx")
    overrides = ["training.global_batch=1024", "node.tcmalloc=true"]

    def row(nodes: int) -> "list[str]":
        config = load_run_config(None, "124m", [*overrides, f"job.nodes={nodes}", f"layout.dp={nodes}"], check=False)
        costly = costly_toggles(machine, run_to_row(config, machine))
        assert costly_toggles(machine, replace(run_to_row(config, machine), tcmalloc=False)) == []
        assert costly_toggles(machine, replace(run_to_row(config, machine), hardware="another")) == []
        return costly

    assert row(16) == []
    (text,) = row(512)
    assert text.startswith("node.tcmalloc costs ") and "0.56 on 64 nodes" in text and "2.11 on 512 nodes" in text
