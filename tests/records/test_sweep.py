"""Tests of the entry of a run in a sweep, and of the digest of its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.sweep import SweepEntry, digest_of, digest_of_config, read_sweep_entry, write_sweep_entry


def test_entries_round_trip_and_other_versions_are_refused(tmp_path: Path) -> None:
    entry = SweepEntry("demo", "a-r1", "a", 0, 1, digest_of("x"), "2.2GHz")
    assert read_sweep_entry(tmp_path) is None
    write_sweep_entry(tmp_path, entry)
    assert read_sweep_entry(tmp_path) == entry
    assert digest_of("x") != digest_of("y") and len(digest_of("x")) == 16
    values = json.loads((tmp_path / "sweep.json").read_text())
    (tmp_path / "sweep.json").write_text(json.dumps({**values, "version": 3}))
    with pytest.raises(UsageError, match="version 3 of this format; this program reads version 2"):
        read_sweep_entry(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 1}', '{"run": "a", "more": 1}'])
def test_a_damaged_entry_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(UsageError, match="sweep.json: not a sweep entry"):
        read_sweep_entry(tmp_path)


def test_the_digest_covers_the_settings_that_differ_from_the_defaults(tmp_path: Path) -> None:
    config = load_run_config(overrides=["layout.dp=2", "training.lr=2e-4"])
    same = load_run_config(overrides=["training.lr=0.0002", "layout.dp=2.0", "layout.tp=1"])
    assert digest_of_config(config) == digest_of_config(same) != digest_of_config(load_run_config())
    older = tmp_path / "older.yaml"  # a file from before some fields were there
    older.write_text("layout: {dp: 2}\ntraining: {lr: 2e-4}\n")
    assert digest_of_config(load_run_config(older)) == digest_of_config(config)


def test_an_entry_of_the_first_version_gets_the_current_digest(tmp_path: Path) -> None:
    config = load_run_config(preset="tiny", overrides=["layout.dp=2"])
    first = {"sweep": "s", "run": "a-r1", "row": "a", "order": 0, "repeat": 1, "digest": "0123", "version": 1}
    (tmp_path / "sweep.json").write_text(json.dumps(first))
    entry = read_sweep_entry(tmp_path)
    assert entry is not None and entry.digest == "0123"  # a refused row: there is no configuration
    (tmp_path / "config.yaml").write_text(dump_run_config(config))
    entry = read_sweep_entry(tmp_path)
    assert entry is not None and entry.digest == digest_of_config(config)
