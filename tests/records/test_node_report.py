"""Tests of reading and writing reports of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.node_report import (
    MEASUREMENTS_FILE,
    REPORT_FILE,
    TEXT_FILE,
    VERSION,
    read_measurements,
    read_report,
    remove_report,
    write_measurements,
    write_report,
)

REPORT = {
    "made": "2026-11-28",
    "fugaku_gpt": "0.2.0",
    "products": [],
    "measurements": [],
    "failure": "",
    "checks": [{"name": "a", "status": "ok", "seen": "b"}],
    "findings": [{"subject": "a", "expected": "b", "seen": "c", "status": "differs"}],
}


def test_a_report_is_read_back_from_a_folder_or_a_file(tmp_path: Path) -> None:
    write_report(tmp_path, REPORT, "a text")
    for path in (tmp_path, tmp_path / REPORT_FILE):
        read = read_report(path)
        assert {key: read[key] for key in REPORT} == REPORT


def test_a_report_that_is_not_there_or_incomplete_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file; give the folder of a report"):
        read_report(tmp_path)
    for key in REPORT:
        write_report(tmp_path, {name: value for name, value in REPORT.items() if name != key}, "")
        with pytest.raises(UsageError, match=REPORT_FILE):
            read_report(tmp_path)


def test_files_of_an_earlier_call_are_removed_alone(tmp_path: Path) -> None:
    write_report(tmp_path, REPORT, "a text")
    for name in (MEASUREMENTS_FILE, "a user's"):
        (tmp_path / name).write_text("", encoding="utf-8")
    assert {REPORT_FILE, TEXT_FILE} < {path.name for path in tmp_path.iterdir()}
    remove_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a user's"]
    remove_report(tmp_path)


def test_measurements_are_read_back_with_the_section_that_is_being_measured(tmp_path: Path) -> None:
    assert read_measurements(tmp_path) is None
    for section in ("rates", ""):
        write_measurements(tmp_path, section, {"hosts": {"a": {"page_bytes": 65536}}})
        measured = read_measurements(tmp_path)
        assert measured == {"version": VERSION, "section": section, "hosts": {"a": {"page_bytes": 65536}}}
    (tmp_path / MEASUREMENTS_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="measure again"):
        read_measurements(tmp_path)
