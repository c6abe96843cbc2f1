"""Tests that configurations of run directories are those that the loader of run files returns."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Dict, List

import pytest

from fugaku_gpt.config import changed_settings, dump_run_config, load_run_config, preset_names, recorded
from fugaku_gpt.config.recorded import load_recorded
from fugaku_gpt.errors import ConfigError

_ONLY_OF_TOKENS = ("data.weights", "data.paths=[corpus,")
OVERRIDES: List[List[str]] = [
    [],
    ["layout.dp=2", "job.elapse=1:30:00", "data.paths=[corpus, /corpora/b]"],
    ["training.lr=0.002", "training.seed=7", "node.preload=[libtcmalloc.so]", "data.weights=[0.5]", "data.paths=[a]"],
    ["job.shape=2x1x1", "job.nodes=2", "layout.dp=2"],
    ["job.tarball=/home/u/torch.tar", "job.local_tmp=30Gi"],
]


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def outcome(load: "object", file: Path) -> object:
    """Return the configuration that a loader returns, or the message of its error."""
    try:
        return load(file)  # type: ignore[operator]
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
def test_equal_to_the_loader_of_run_files_for_every_preset(tmp_path: Path) -> None:
    for name in preset_names():
        for number, overrides in enumerate(OVERRIDES):
            if name.startswith("arc-"):  # grids have one file, and neither weights nor skipped samples
                overrides = [text for text in overrides if not text.startswith(_ONLY_OF_TOKENS)]
            config = load_run_config(preset=name, overrides=overrides)
            file = write(tmp_path / f"{name}-{number}", dump_run_config(config))
            assert load_recorded(file).config == config == load_run_config(file)
            assert list(load_recorded(file).settings.items()) == list(changed_settings(config).items())


def test_equal_after_random_damage_messages_included(tmp_path: Path) -> None:
    chance = random.Random(7)
    lines = dump_run_config(load_run_config(preset="tiny", overrides=OVERRIDES[2])).splitlines()
    edits = ["", "  layers: 0", "model:", "  - a", "x", "  layers: 4", "preset: tiny", "  heads: 3", "\tdp: 2", "# x"]
    messages = 0
    for number in range(60):
        damaged = list(lines)
        for _ in range(chance.randint(1, 2)):
            damaged.insert(chance.randrange(len(damaged)), chance.choice(edits))
            if chance.random() < 0.5:
                del damaged[chance.randrange(len(damaged))]
        file = write(tmp_path / str(number), "\n".join(damaged) + "\n")
        expected = outcome(load_run_config, file)
        assert outcome(lambda file: load_recorded(file).config, file) == expected
        messages += isinstance(expected, str)
    assert 10 < messages < 60


def test_equal_text_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: Dict[str, int] = {}

    def counted(text: str, origin: str) -> object:
        parsed[text] = parsed.get(text, 0) + 1
        return parse(text, origin)

    parse = recorded.parse_sections
    monkeypatch.setattr(recorded, "parse_sections", counted)
    recorded._of_text.cache_clear()
    recorded._section_of.cache_clear()
    for seed in range(5):
        config = load_run_config(preset="tiny", overrides=[f"training.seed={seed}"])
        for repeat in range(2):
            load_recorded(write(tmp_path / f"{seed}-{repeat}", dump_run_config(config)))
    sections = [text.partition(":")[0] for text in parsed]
    assert set(parsed.values()) == {1} and sections.count("training") == 5 and sections.count("model") == 1


def test_relative_paths_are_looked_up_unless_a_run_has_begun(tmp_path: Path) -> None:
    text = dump_run_config(load_run_config(preset="tiny", overrides=["data.paths=[corpus]"]))
    prepared, begun = write(tmp_path / "prepared", text), write(tmp_path / "begun", text)
    (prepared.parent / "corpus").mkdir()
    (begun.parent / "corpus").mkdir()
    (begun.parent / ".claim.1").write_text("")
    assert load_recorded(prepared).config.data.paths == (str(prepared.parent / "corpus"),)
    assert load_recorded(begun).config.data.paths == ("corpus",)
    assert load_recorded(begun).is_portable
    (prepared.parent / "corpus").rmdir()
    assert load_recorded(prepared).config.data.paths == ("corpus",) and not load_recorded(prepared).is_portable


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml: no such file"):
        load_recorded(tmp_path / "config.yaml")
