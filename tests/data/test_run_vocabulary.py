"""Tests of the vocabulary of runs that do not state one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List, Optional, Tuple

import pytest

from fugaku_gpt.checkpoint.hugging_face_models import GPT2, tensor_pairs
from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.data.run_vocabulary import vocabulary_of_run
from tests.data.files import write_megatron
from tests.support.checkpoints import cut_flat, save, some_arrays


def a_corpus(folder: Path, vocab_size: int) -> Path:
    """A prepared folder as far as its manifest."""
    folder.mkdir()
    facts = {"version": 1, "tokens": 1, "documents": 1, "vocab_size": vocab_size, "fingerprint": "x"}
    (folder / "manifest.json").write_text(json.dumps(facts))
    return folder


def vocabulary(
    paths: List[Path],
    settings: Tuple[str, ...] = (),
    preset: Optional[str] = None,
    file: Optional[Path] = None,
    resume_from: Optional[Path] = None,
) -> Optional[int]:
    source = RunSource(file, preset, settings)
    config = source.load(f"data.paths={json.dumps([str(path) for path in paths])}")
    taken = vocabulary_of_run(source, config, resume_from)
    return taken.size if taken is not None else None


def test_a_run_that_states_no_vocabulary_has_that_of_the_corpora(tmp_path: Path) -> None:
    small, large = a_corpus(tmp_path / "small", 300), a_corpus(tmp_path / "large", 32000)
    assert vocabulary([small]) == 300
    assert vocabulary([small, large]) == 32000
    assert vocabulary([a_corpus(tmp_path / "same", 2048)]) is None
    write_megatron(tmp_path / "pair", [[1, 2]])
    assert vocabulary([tmp_path / "pair"]) is None and vocabulary([]) is None
    assert vocabulary([tmp_path / "pair", small]) == 300
    (tmp_path / "pair").mkdir()  # Megatron's cache
    assert vocabulary([tmp_path / "pair", small]) == 300
    assert vocabulary([tmp_path / "gone"]) is None, "the ranks report it"


def test_a_stated_vocabulary_stays(tmp_path: Path) -> None:
    small, large = a_corpus(tmp_path / "small", 300), a_corpus(tmp_path / "large", 60000)
    file = tmp_path / "run.yaml"
    file.write_text("model: {vocab_size: 400}")
    assert vocabulary([small], file=file) is None and vocabulary([large], file=file) is None
    assert vocabulary([large], ("model.vocab_size=400",)) is None
    assert vocabulary([large], ("model.padded_vocab_size=4096",)) is None
    assert vocabulary([small], preset="tiny") is None, "a preset's vocabulary stays if the corpus fits"
    assert vocabulary([large], preset="tiny") == 60000
    file.write_text("preset: 124m")
    assert vocabulary([small], file=file) is None and vocabulary([large], file=file) == 60000


def test_a_resumed_run_has_the_vocabulary_of_the_checkpoint(tmp_path: Path) -> None:
    model = load_run_config(overrides=["model.layers=1", "model.hidden=8", "model.heads=2"]).model
    arrays = some_arrays(1, {pair.ours: pair.shape for pair in tensor_pairs(model, GPT2)})
    (tmp_path / "run").mkdir()
    checkpoints = tmp_path / "run" / "checkpoints"
    for size in (2048, 512):
        save(
            checkpoints, 4096 - size, arrays, cut_flat(arrays, 1), config={"model": {**vars(model), "vocab_size": size}}
        )
    corpus = a_corpus(tmp_path / "corpus", 300)
    assert vocabulary([corpus], resume_from=tmp_path / "run") == 512
    assert vocabulary([corpus], resume_from=checkpoints / "step-00002048") is None
    assert vocabulary([corpus], resume_from=tmp_path / "new") == 300
    assert vocabulary([corpus], ("model.vocab_size=400",), resume_from=tmp_path / "run") is None


def test_train_prints_the_vocabulary_that_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = a_corpus(tmp_path / "corpus", 2**24)
    # far too large for any machine, so that nothing starts
    arguments = ["--data", str(corpus), "--set", "model.hidden=65536", "--ranks", "1", "--out", str(tmp_path / "out")]
    assert run(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert f"note: model.vocab_size is 16777216, that of the corpus {corpus}" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()
