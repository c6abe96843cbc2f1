"""Tests of the validation of runs that do not state one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List, Tuple

import pytest

from fugaku_gpt.config.source import RunSource
from fugaku_gpt.data import samples
from fugaku_gpt.data.run_validation import validation_of_run
from tests.data.files import write_megatron
from tests.support.grids import SETTINGS, write_tasks


def validation(path: Path, *settings: str) -> Tuple[List[str], str]:
    source = RunSource(None, "tiny", settings)
    config = source.load(f"data.paths={json.dumps([str(path)])}", "model.seq_len=8", "training.iterations=60")
    return validation_of_run(source, config)


def test_a_run_validates_where_the_corpus_has_a_validation_part(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [[1] * 9] * 3)
    override, note = validation(tmp_path / "c")
    assert override == ["training.eval_interval=60"]
    assert note.startswith("training.eval_interval is 60: validation at the start and the end; --set training.eval_")


def test_many_documents_are_counted_without_reading_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("each rank would read the index")

    monkeypatch.setattr(samples, "open_samples", refuse)
    write_megatron(tmp_path / "c", [[1]] * 300)  # nine of them for validation
    assert validation(tmp_path / "c")[0] == ["training.eval_interval=60"]
    write_megatron(tmp_path / "d", [[1]] * 260)  # eight
    with pytest.raises(AssertionError):
        validation(tmp_path / "d")


def test_a_run_that_cannot_validate_says_why(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [[1] * 9])
    override, note = validation(tmp_path / "c")
    assert override == [] and note.startswith(f"no validation: {tmp_path / 'c'}: its valid split has 0 tokens in 0 ")
    assert "of 1, less than one sample of model.seq_len + 1 = 9" in note


def test_a_blend_in_megatrons_order_validates_where_it_has_samples_enough(tmp_path: Path) -> None:
    for name in ("c", "d"):
        write_megatron(tmp_path / name, [[1] * 9] * 300)  # nine of them for validation
    paths = json.dumps([str(tmp_path / "c"), str(tmp_path / "d")])
    settings = [f"data.paths={paths}", "data.order=megatron", "model.seq_len=8", "training.iterations=10"]
    source = RunSource(None, "tiny", ())
    override, note = validation_of_run(source, source.load(*settings, "training.eval_batches=100"))
    assert override == [] and "the valid split of the blend has 20 samples" in note and "state data.weights" in note
    enough = source.load(*settings, "training.eval_batches=1", "training.global_batch=4")
    assert validation_of_run(source, enough)[0] == ["training.eval_interval=10"]
    repeated = source.load(*settings, "training.eval_batches=100", "data.weights=[1,1]")
    assert validation_of_run(source, repeated)[0] == ["training.eval_interval=10"]


def test_a_stated_validation_stays(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [[1] * 9] * 3)
    for stated in ("7", "null"):
        assert validation(tmp_path / "c", f"training.eval_interval={stated}") == ([], "")


def test_a_missing_corpus_is_left_to_the_ranks(tmp_path: Path) -> None:
    assert validation(tmp_path / "gone") == ([], "")


def test_a_run_on_grids_validates_where_a_grid_of_that_share_fits(tmp_path: Path) -> None:
    def of_grids(*settings: str) -> Tuple[List[str], str]:
        source = RunSource(None, None, (*SETTINGS, "training.iterations=60", *settings))
        return validation_of_run(source, source.load(f"data.paths={json.dumps([str(tmp_path / 'tasks.json')])}"))

    write_tasks(tmp_path / "tasks.json")
    assert of_grids()[0] == ["training.eval_interval=60"]
    assert of_grids("data.split=[100,0,0]") == ([], "no validation: data.split has no share for it")
    large, small = ([[number] * 7] * 7 for number in (1, 2)), [[3]]
    (tmp_path / "tasks.json").write_text(
        json.dumps({"a": {"train": [dict(zip(("input", "output"), large))], "test": [{"input": small}]}})
    )
    override, note = of_grids("data.buckets=[4]", "model.seq_len=16")
    assert override == [] and "the valid split has no grid of at most 4 x 4 cells" in note
