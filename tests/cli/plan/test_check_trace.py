"""Tests of the planned step that ``plan check --trace`` writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from fugaku_gpt.cli.main import run


def test_a_planned_step_is_written_for_any_number_of_ranks(tmp_path: Path) -> None:
    layout = ["--set", "layout.tp=4", "--set", "layout.pp=12", "--ranks", "13824", "--micro-batches", "4"]
    files = ["--trace", str(tmp_path / "plan.json.gz"), "--trace", str(tmp_path / "plan.svg")]
    assert run(["plan", "check", "--preset", "30b", *layout, *files]) == 0
    events = json.loads(gzip.decompress((tmp_path / "plan.json.gz").read_bytes()))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(names) == 12 and names[1] == "stage 1, 1152 ranks: 4-7, 52-55, 100-103, ..."
    assert "13824 ranks in 12 classes" in (tmp_path / "plan.svg").read_text()
    assert run(["plan", "check", "--preset", "tiny", "--trace", "plan.txt"]) == 2
