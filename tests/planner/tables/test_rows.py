"""Tests of which rows are valid configurations, and of the fields that they have before a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Optional

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.tables.rows import ConfigRow, RefusedRow, parse_row, read_table
from tests.planner.samples import MEASURED, cells, reference, row


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"pp": 5, "dp": 1, "nodes": 5, "ranks_per_node": 1}, "layers 24 cannot be divided by pp 5"),
        ({"tp": 3, "dp": 1, "pp": 1, "nodes": 3, "ranks_per_node": 1}, "heads 16 cannot be divided by tp 3"),
        ({"global_batch": 510}, "global batch 510 cannot be divided by dp 4 * micro-batch 2 = 8"),
        ({"processes": 16}, "ranks 16 are not nodes 2 * ranks per node 4 = 8"),
        ({"dp": 8}, "dp 8 * tp 1 * pp 2 = 16 are not the 8 ranks"),
        ({"heads": 12}, "hidden 2048 cannot be divided by heads 12"),
        ({"layers": ""}, "layers is not given"),
        ({"hidden": "2k"}, "hidden 2k: must be a whole number from 1 to 2147483647"),
        ({"micro_batch": 0}, "micro_batch 0: must be a whole number from 1 to 2147483647"),
        ({"recompute": "maybe"}, "recompute maybe: must be True or False"),
        *(
            ({"freq_ghz": text}, f"freq_ghz {text}: must be a number from 0.1 to 10")
            for text in ("0.09", "10.1", "0", "x")
        ),
        *(({"zero_stage": text}, f"zero_stage {text}: must be 0, 1, 2 or 3") for text in ("4", "-1", "1.5", "x")),
    ],
)
def test_rows_that_no_run_can_have_are_refused_with_the_reason(changes: dict, reason: str) -> None:
    assert parse_row(cells(**changes)) == RefusedRow("t.1", reason)


def test_of_the_reference_only_impossible_and_incomplete_rows_are_refused() -> None:
    refused = {parsed.id: parsed.reason for parsed in map(parse_row, reference()) if isinstance(parsed, RefusedRow)}
    assert refused.pop("a100.t27.L483") == "layers 72 cannot be divided by pp 48"
    assert set(refused.values()) == {"layers is not given"} and all(name.startswith("v100.t") for name in refused)


def test_a_row_holds_nothing_that_was_measured() -> None:
    assert not {field.name for field in fields(ConfigRow)} & set(MEASURED)


def test_the_same_run_in_two_tables_has_the_same_configuration_key() -> None:
    assert row(id="a.1").configuration_key == row(id="b.7", vocab=50257, dtype="bf16").configuration_key
    assert row().configuration_key != row(micro_batch=1).configuration_key


def test_a_table_without_a_required_column_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("id,hardware,layers\n1,A64FX,12\n")
    with pytest.raises(UsageError, match=r"columns are missing: hidden, heads, vocab.*found: id, hardware, layers"):
        read_table(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("text", "value"),
    [("True", True), ("yes", True), ("1", True), ("1.0", True), ("FALSE", False), ("no", False), ("0", False),
     ("0.0", False)],
)  # fmt: skip
def test_flags_are_written_in_several_ways(text: str, value: bool) -> None:
    assert row(recompute=text).recompute is value
    assert row(tcmalloc=text).tcmalloc is value


@pytest.mark.parametrize(
    "text, retention", [("0", 0), ("1", 1), ("0.0", 0), ("1.0", 1), ("", None), ("2", None), ("-1", None), ("x", None)]
)
def test_retention_is_off_on_or_unknown(text: str, retention: Optional[int]) -> None:
    assert row(retention_state=text).retention == retention


@pytest.mark.parametrize("text, clock", [("0.1", 0.1), ("10", 10.0), ("2.2", 2.2), ("", 0.0)])
def test_a_clock_is_in_gigahertz(text: str, clock: float) -> None:
    assert row(freq_ghz=text).freq_ghz == clock


@pytest.mark.parametrize("text, stage", [("0", 0), ("1", 1), ("2", 2), ("3", 3), ("3.0", 3), ("", 0)])
def test_stages_of_zero_are_up_to_three(text: str, stage: int) -> None:
    assert row(zero_stage=text).zero == stage
