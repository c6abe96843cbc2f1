"""Tests of severities and their thresholds."""

from __future__ import annotations

import pytest

from fugaku_gpt.pjm.lint.registry import ERROR, INFO, WARNING, is_at_least


@pytest.mark.parametrize(
    ("threshold", "reaching"),
    [(None, []), (INFO, [INFO, WARNING, ERROR]), (WARNING, [WARNING, ERROR]), (ERROR, [ERROR])],
)
def test_a_threshold_is_reached_by_it_and_by_more_severe_findings(threshold: str, reaching: "list[str]") -> None:
    assert [severity for severity in (INFO, WARNING, ERROR) if is_at_least(severity, threshold)] == reaching
