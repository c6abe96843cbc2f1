"""Tests of versioned JSON files: valid, absent, damaged, of another kind, and of another version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

from fugaku_gpt.errors import CheckpointError, UsageError
from fugaku_gpt.versioned_json import parse_versioned_json, read_versioned_json


def nodes_of(values: Dict[str, Any]) -> int:
    if values["nodes"] < 1:
        raise ValueError(f"nodes {values['nodes']} is below 1")
    return int(values["nodes"])


def read(path: Path, **options: Any) -> Optional[int]:
    return read_versioned_json(path, "a list of nodes", (3, 2), nodes_of, mend="write it again", **options)


@pytest.mark.parametrize("version", [2, 3])
def test_every_version_that_is_listed_is_read(tmp_path: Path, version: int) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps({"version": version, "nodes": 384}))
    assert read(file) == 384


def test_a_file_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert read(tmp_path / "nodes.json") is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a list of nodes: it is not JSON"),
        (b'{"version": 3, "no', "not a list of nodes: it is not JSON"),
        (b'{"version": 3, "nodes": "\xff"}', "not a list of nodes: it is not JSON"),
        (b"[" * 100_000, "not a list of nodes: it is not JSON"),
        (b"[3]", "not a list of nodes: it is not a JSON object"),
        (b'{"nodes": 384}', "not a list of nodes: it has no 'version'"),
        (b'{"version": 3}', "not a list of nodes: it has no 'nodes'"),
        (b'{"version": 3, "nodes": 0}', "not a list of nodes: nodes 0 is below 1"),
        (b'{"version": 3, "nodes": "four"}', "not a list of nodes: its fields are not those of this version"),
        (b'{"version": 4, "nodes": 384}', "version 4 of this format; this program reads version 3 and 2"),
        (b'{"version": "3", "nodes": 384}', "version '3' of this format; this program reads version 3 and 2"),
        (b'{"version": [3], "nodes": 384}', r"version [3] of this format; this program reads version 3 and 2"),
    ],
)
def test_an_unusable_file_is_named_with_reason_and_remedy(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "nodes.json"
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read(file)
    assert str(caught.value) == f"{file}: {reason}; write it again"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").mkdir()
    with pytest.raises(UsageError, match=r"nodes\.json: cannot be read: Is a directory; write it again"):
        read(tmp_path / "nodes.json")


def test_an_empty_file_counts_as_missing_where_writers_may_leave_it(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_bytes(b"")
    assert read(tmp_path / "nodes.json", is_missing_if_empty=True) is None


def test_the_type_of_the_error_is_the_callers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a list of nodes: it is not JSON"):
        parse_versioned_json(
            b"{", tmp_path, "a list of nodes", (3,), nodes_of, mend="write it again", error=CheckpointError
        )


def test_an_error_of_another_kind_in_the_parser_passes_through(tmp_path: Path) -> None:
    def refuse(values: Dict[str, Any]) -> int:
        raise CheckpointError("something else")

    with pytest.raises(CheckpointError, match="^something else$"):
        parse_versioned_json(b'{"version": 3}', tmp_path, "a list of nodes", (3,), refuse, mend="write it again")
