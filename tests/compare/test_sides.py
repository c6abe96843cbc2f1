"""Tests of texts that name a side, and of the messages that refuse other texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.compare.sides import (
    Condition,
    LiveSide,
    RecordedSide,
    config_of,
    parse_side,
    refuse_unequal_work,
    work_per_iteration,
)
from fugaku_gpt.errors import ConfigError, UsageError
from tests.compare.runs import tiny


def parse(text: str) -> object:
    return parse_side(text, lambda word: word.startswith("torch-"))


@pytest.mark.parametrize(
    ("text", "environment", "settings"),
    [
        ("base", "", ()),
        ("-", "", ()),
        ("torch-1.7", "torch-1.7", ()),
        ("tcmalloc=true", "", ("node.tcmalloc=true",)),
        ("threads=1,dtype=bfloat16", "", ("node.threads_per_rank=1", "training.dtype=bfloat16")),
        ("torch-2.13,node.tcmalloc=true", "torch-2.13", ("node.tcmalloc=true",)),
        # commas inside a value stay there
        ("layout.order=tp,pp,dp,ranks=4", "", ("layout.order=tp,pp,dp", "ranks=4")),
        ("training.lr=1e-4", "", ("training.lr=1e-4",)),
    ],
)
def test_a_live_side(text: str, environment: str, settings: object) -> None:
    assert parse(text) == LiveSide(text, environment, settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchh", "'torchh' is no environment, no key=value and no folder of runs"),
        ("tcmaloc=true", "did you mean tcmalloc?"),
        ("nodes=1,split=3", "split: of which section? valid: layout.split, data.split"),
        ("missing.csv:torch=1.7", "missing.csv: no such file"),
        ("", "an empty word"),
    ],
)
def test_invalid_sides_are_refused_with_a_hint(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert message in str(refused.value)


def test_a_report_names_an_environment_s_file_without_the_folder() -> None:
    side = parse_side("/some/where/mine.yaml,threads=1", lambda word: word.endswith(".yaml"))
    assert isinstance(side, LiveSide) and side.label == "mine,threads=1"


def test_recorded_sides_are_folders_and_tables_with_conditions(tmp_path: Path) -> None:
    table = tmp_path / "notes.csv"
    table.write_text("id\n")
    assert parse(f"{table}:pytorch=1.10,nodes<=64") == RecordedSide(
        f"{table}:pytorch=1.10,nodes<=64", table, (Condition("torch", "=", "1.10"), Condition("nodes", "<=", "64"))
    )
    assert parse(f"{tmp_path}:tcmalloc=true") == RecordedSide(
        f"{tmp_path}:tcmalloc=true", tmp_path, (Condition("node.tcmalloc", "=", "true"),)
    )
    with pytest.raises(UsageError, match="no such column; did you mean nodes"):
        parse(f"{table}:node=1")
    with pytest.raises(UsageError, match="expected a condition such as"):
        parse(f"{table}:fast")


@pytest.mark.parametrize(
    ("condition", "value", "holds"),
    [
        (Condition("torch", "=", "1.10"), "1.1", False),  # a build is no number
        (Condition("freq_ghz", "=", "2"), 2.0, True),
        (Condition("freq_ghz", "!=", "2"), 2.2, True),
        (Condition("nodes", "<", "64"), 64, False),
        (Condition("nodes", ">=", "64"), 64, True),
        (Condition("tcmalloc", "=", "true"), True, True),
        (Condition("retention", "=", "default"), None, True),
        (Condition("retention", "<", "1"), None, False),
    ],
)
def test_conditions(condition: Condition, value: object, holds: bool) -> None:
    assert condition.is_met_by(value) == holds


def test_ranks_are_more_replicas_of_the_same_batch() -> None:
    base = ["layout.tp=2"]
    assert config_of(LiveSide("base"), None, "tiny", base, 4).layout.dp == 2
    assert config_of(LiveSide("ranks=8", "", ("ranks=8",)), None, "tiny", base, 4).layout.dp == 4
    with pytest.raises(UsageError, match=r"5 ranks cannot be divided by layout.tp 2"):
        config_of(LiveSide("ranks=5", "", ("ranks=5",)), None, "tiny", base)


def test_grids_of_a_single_size_are_compared_and_of_several_refused() -> None:
    with pytest.raises(ConfigError, match="those of several sizes have no common one; valid: one bucket"):
        config_of(LiveSide("base"), None, "arc-nano", [])
    sizes = [["data.buckets=[16]", "model.seq_len=256"], ["data.buckets=[30]"]]
    small, large = (work_per_iteration(config_of(LiveSide("base"), None, "arc-nano", texts)) for texts in sizes)
    with pytest.raises(UsageError, match="seq_len"):
        refuse_unequal_work(small, large)


def test_sides_that_do_other_work_are_refused() -> None:
    refuse_unequal_work(work_per_iteration(tiny()), work_per_iteration(tiny("training.dtype=bfloat16", "layout.dp=2")))
    with pytest.raises(UsageError, match="training.global_batch: 16 and 32"):
        refuse_unequal_work(work_per_iteration(tiny()), work_per_iteration(tiny("training.global_batch=32")))
    with pytest.raises(UsageError, match="model.layers: 4 and 2"):
        refuse_unequal_work(work_per_iteration(tiny()), work_per_iteration(tiny("model.layers=2")))


def test_flags_are_accepted_in_all_spellings_of_yaml() -> None:
    for word in ("true", "Yes", "on", "1"):
        assert Condition("tcmalloc", "=", word).is_met_by(True) and Condition("tcmalloc", "!=", word).is_met_by(False)
    for word in ("false", "no", "OFF", "0"):
        assert Condition("tcmalloc", "=", word).is_met_by(False) and not Condition("tcmalloc", "=", word).is_met_by(
            True
        )
    assert Condition("nodes", "=", "1").is_met_by(1)
