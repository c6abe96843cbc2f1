"""Tests of the plan of a sweep: what is read of its file, and found again in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.sweep.plan import PLAN_FILE, plan_of, read_plan, write_plan


def test_a_plan_is_the_text_of_the_file_and_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "many.yaml"
    file.write_text("preset: tiny\n", encoding="utf-8")
    plan = plan_of(file, ("training.seed=2",))
    assert (plan.file, plan.name, plan.text, plan.overrides, plan.base) == (
        str(file), "many", "preset: tiny\n", ("training.seed=2",), str(tmp_path),
    )  # fmt: skip
    assert read_plan(tmp_path) is None
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan
    (tmp_path / PLAN_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=PLAN_FILE):
        read_plan(tmp_path)


def test_a_file_that_cannot_be_read_is_a_usage_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml: no such file"):
        plan_of(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"cannot be read: .*directory"):
        plan_of(tmp_path)
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"odd\.yaml: cannot be read: .*utf-8"):
        plan_of(tmp_path / "odd.yaml")
