"""Tests of what jobs take from the corpora of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.jobs.submission import load_prepared
from tests.data.files import write_megatron
from tests.data.test_run_vocabulary import a_corpus

RUN = "model: {layers: 1, hidden: 8, heads: 1, seq_len: 8}\ntraining: {iterations: 60}\ndata: {paths: [corpus]}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with ``run.yaml``, whose corpus ``corpus`` has 300 tokens."""
    corpus = a_corpus(tmp_path / "corpus", 300)
    (corpus / "manifest.json").write_text((corpus / "manifest.json").read_text().replace('"tokens": 1', '"tokens": 27'))
    (corpus / "manifest.json").write_text((corpus / "manifest.json").read_text().replace('ents": 1', 'ents": 3'))
    write_megatron(corpus / "corpus", [[1] * 9] * 3)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_has_the_vocabulary_and_the_validation_of_its_corpus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["job", "render", "run.yaml"]) == 0
    script, notes = capsys.readouterr()
    assert "#   model.vocab_size: 300\n" in script and "#   training.eval_interval: 60\n" in script
    assert "# Note: model.vocab_size is 300, that of the corpus corpus\n" in script
    assert "note: training.eval_interval is 60: validation at the start and the end" in notes


def test_settings_of_the_run_stay_in_the_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stated = ["--set", "model.vocab_size=400", "--set", "training.eval_interval=null"]
    assert run(["job", "submit", "run.yaml", *stated, "--scheduler", "local", "--dry-run"]) == 0
    script, notes = capsys.readouterr()
    assert "#   model.vocab_size: 400\n" in script and "eval_interval" not in script and "eval_interval" not in notes


def test_a_corpus_that_cannot_be_read_decides_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["job", "render", "run.yaml", "--set", "data.paths=[gone]"]) == 0
    script, notes = capsys.readouterr()
    assert "vocab_size" not in script and "note: data.paths: gone: there is no corpus" in notes
    (folder / "corpus" / "manifest.json").write_text("{")
    assert run(["job", "render", "run.yaml"]) == 0
    script, notes = capsys.readouterr()
    assert "vocab_size" not in script and "note: data.paths: corpus/manifest.json" in notes


def test_a_script_with_the_settings_of_the_corpus_goes_with_a_file_that_states_none(folder: Path) -> None:
    (folder / "run.yaml").rename(folder / "config.yaml")
    assert run(["job", "render", "config.yaml", "--out", "job.sh"]) == 0
    prepared = load_prepared(folder)
    assert prepared.config == load_run_config(folder / "config.yaml")


def test_plans_are_made_with_the_vocabulary_of_the_corpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "memory", "run.yaml"]) == 0
    with_corpus, notes = capsys.readouterr()
    assert notes.count("note: model.vocab_size is 300, that of the corpus corpus\n") == 1
    assert run(["plan", "memory", "run.yaml", "--set", "model.vocab_size=300"]) == 0
    assert capsys.readouterr() == (with_corpus, "")
    for command in ("time", "check"):
        assert run(["plan", command, "run.yaml"]) == 0
        assert "note: model.vocab_size is 300" in capsys.readouterr().err
    (folder / "corpus" / "manifest.json").write_text("{")
    assert run(["plan", "memory", "run.yaml"]) == 0
    assert "note" not in capsys.readouterr().err, "a plan needs no corpus"


def test_sweeps_and_comparisons_take_the_vocabulary_of_the_corpus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "note: model.vocab_size is 300, that of the corpus corpus\n"
    (folder / "sweep.yaml").write_text("defaults: {data.paths: [corpus]}\nmatrix: {training.seed: [1, 2]}\n")
    assert run(["sweep", "expand", "sweep.yaml"]) == 0
    assert capsys.readouterr().err == note, "once for all rows"
    dry_run = ["sweep", "submit", "sweep.yaml", "--out", "out", "--scheduler", "local", "--dry-run", "--scripts"]
    assert run(dry_run) == 0
    output = capsys.readouterr().out
    assert note in output and "#   model.vocab_size: 300\n" in output
    assert run([*dry_run, "--set", "model.vocab_size=400"]) == 0
    output = capsys.readouterr().out
    assert "model.vocab_size is" not in output and "#   model.vocab_size: 400\n" in output
    command = ["compare", "base", "tcmalloc=true", "--run", "run.yaml", "--job", "slurm"]
    assert run([*command, "--set", "training.global_batch=2", "--out", "job"]) == 0
    assert load_run_config(folder / "job" / "config.yaml").model.vocab_size == 300
