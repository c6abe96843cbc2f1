"""Tests of the linter that a user's choices make."""

from __future__ import annotations

from pathlib import Path

from fugaku_gpt.pjm.lint.engine import find_scripts
from fugaku_gpt.pjm.lint.files import lint_files, linter_for
from fugaku_gpt.pjm.lint.registry import all_rules

DIRECTIVE = "#PJM -L node=1\n"


def test_without_choices_all_rules_are_checked_and_errors_of_a_day_are_warnings() -> None:
    linter = linter_for()
    assert not linter.strict and linter_for(strict=True).strict
    assert [rule.id for rule in linter.rules] == [rule.id for rule in all_rules()]
    chosen = linter_for(select=["PJM02,PJM050"], ignore=["PJM020"]).rules
    ids = [rule.id for rule in chosen]
    assert "PJM050" in ids and "PJM020" not in ids and all(rule_id.startswith(("PJM02", "PJM050")) for rule_id in ids)


def test_files_that_cannot_be_read_are_named_beside_reports(tmp_path: Path) -> None:
    script, missing = tmp_path / "a.sh", tmp_path / "b.sh"
    script.write_text(DIRECTIVE)
    reports, unreadable = lint_files(linter_for(), [str(script), str(missing)])
    assert [report.path for report in reports] == [str(script)]
    assert unreadable == [f"{str(missing)!r}: cannot be read: No such file or directory"]


def test_a_file_of_a_folder_is_a_script_up_to_a_mebibyte(tmp_path: Path) -> None:
    for name, size in (("small.sh", 2**20), ("large.sh", 2**20 + 1)):
        (tmp_path / name).write_text(DIRECTIVE.ljust(size, "#"))
    (tmp_path / ".hidden.sh").write_text(DIRECTIVE)
    (tmp_path / "notes.txt").write_text("echo\n" + DIRECTIVE)
    assert list(find_scripts([str(tmp_path)])) == [str(tmp_path / "small.sh")]
    assert list(find_scripts([str(tmp_path / "large.sh")])) == [str(tmp_path / "large.sh")]
