"""Tests of the sources of a run's configuration: files, presets and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import ConfigError


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Returns a run file with a width and a seed."""
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  hidden: 96\ntraining:\n  seed: 3\n")
    return file


def test_overrides_win_over_settings_these_over_the_file_and_this_over_the_preset(run_file: Path) -> None:
    source = RunSource(run_file, "tiny", ("training.seed=4", "training.micro_batch=1"))
    plain, config = RunSource(None, "tiny", ()).load(), source.load("training.micro_batch=2")
    assert (config.model.hidden, config.training.seed, config.training.micro_batch) == (96, 4, 2)
    assert config.model.layers == plain.model.layers and plain.model.hidden != 96


def test_keys_are_those_of_the_file_and_of_settings_and_the_preset(run_file: Path) -> None:
    keys = {"model.hidden", "training.seed"}
    assert RunSource(run_file, None, ()).written_keys() == keys
    assert RunSource(run_file, "tiny", ("layout.tp=2",)).written_keys() == {*keys, "layout.tp", "preset"}
    assert RunSource(None, None, ()).written_keys() == set()


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_source_that_was_read_keeps_the_settings_of_the_file(run_file: Path, is_removed: bool) -> None:
    source = RunSource(run_file, "tiny", ("training.seed=4",)).as_read()
    before = source.load()
    if is_removed:
        run_file.unlink()
    else:
        run_file.write_text("model.layers: 7\n")
    assert source.load() == before and before.model.hidden == 96
    assert source.written_keys() == {"model.hidden", "training.seed", "preset"}


def test_a_source_without_a_file_can_be_read_and_a_missing_file_cannot(tmp_path: Path) -> None:
    source = RunSource(None, "tiny", ())
    assert source.as_read().load() == source.load()
    with pytest.raises(ConfigError, match="no such file"):
        RunSource(tmp_path / "none.yaml", "tiny", ()).as_read()


def test_settings_that_do_not_fit_together_are_loaded_without_a_check() -> None:
    source = RunSource(None, "tiny", ("model.heads=5",))
    with pytest.raises(ConfigError, match=r"model\.heads"):
        source.load()
    assert source.load(check=False).model.heads == 5
