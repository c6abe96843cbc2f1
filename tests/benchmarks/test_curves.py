"""Tests of the loss-curve benchmark: its distances, its picture, and a short run of real ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Dict, List
from xml.etree import ElementTree

import pytest

from benchmarks import curves as program
from benchmarks.curves import LAYOUTS, LibraryBytes, draw, farthest, settings_of, table
from fugaku_gpt.config import load_run_config


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_valid_and_small_enough_for_a_single_machine(name: str) -> None:
    assert 1 <= load_run_config(overrides=settings_of(LAYOUTS[name], "float32", 100)).layout.ranks <= 8


def test_there_are_eight_layouts_that_use_every_kind_of_parallelism() -> None:
    all_settings = " ".join(LAYOUTS.values())
    assert len(set(LAYOUTS.values())) == 8
    for setting in ("dp=2", "tp=2", "pp=4", "interleaved", "gpipe", "zero=1", "sequence_parallel=true"):
        assert setting in all_settings
    assert "recompute=full" in all_settings and "recompute=selective" in all_settings


def test_the_distance_is_the_largest_of_all_steps_and_infinite_if_a_loss_is_nan() -> None:
    assert farthest([3.0, 2.0, 1.5], [3.0, 2.5, 1.25]) == (0.5, 2)
    assert farthest([3.0, math.nan, 9.0], [3.0, 2.5, 1.25]) == (math.inf, 2)
    lines = table({"one rank": [3.0, 2.0], "other": [3.0, 2.25]})
    assert lines[-1].split() == ["other", "3.000000", "2.250000", "2.5e-01", "2"]


def test_samples_are_neighbours_in_real_text() -> None:
    samples = LibraryBytes(64, limit=10000)
    batch = samples.batch(3, 2)
    assert batch.shape == (2, 65) and batch[0, -1] == batch[1, 0]
    assert len(set(batch.reshape(-1).tolist())) > 10 and batch.max() < 256


@pytest.mark.slow
def test_the_picture_is_the_same_text_each_time(tmp_path: Path) -> None:
    curves = {"one rank": [3.0, 2.0, 1.0], "other": [3.0, 2.0, 1.0 + 1e-6]}
    for name in ("a.svg", "b.svg"):
        draw(curves, 1e-3, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "other" in "".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())


@pytest.mark.torch
def test_a_single_bit_of_a_single_weight_is_changed() -> None:
    from tests.mpi.trained import full_tensors, trainer_of

    trainer = trainer_of(None, load_run_config(overrides=settings_of("", "float32", 1, "llama-untied")))
    before = full_tensors(trainer, trainer.buffers.parameters)
    assert "output.weight" in before
    program.change_one_bit(trainer)
    after = full_tensors(trainer, trainer.buffers.parameters)
    bits = {
        name: (after[name].numpy().view("int32") != weights.numpy().view("int32")) for name, weights in before.items()
    }
    assert {name: int(changed.sum()) for name, changed in bits.items() if changed.any()} == {
        "blocks.0.mlp.down.weight": 1
    }
    name, position = program.CHANGED_WEIGHT
    weights = [tensors[name].reshape(-1)[position].item() for tensors in (before, after)]
    assert weights[0] < weights[1] == pytest.approx(weights[0], rel=1.2e-7)
    trainer.finish()


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_short_run_on_real_ranks_passes_and_a_bound_that_nothing_meets_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "new" / "curves.svg"
    only = ["--only", "tp2 sp selective"]
    arguments = ["--steps", "3", "--dtype", "float64", "--one-bit", *only, "--picture", str(picture)]
    curves: Dict[str, List[float]] = {}
    run_ranks = program.run

    def run_once(name: str, layout: str, dtype: str, steps: int, model: str) -> List[float]:
        """Runs each layout once, for both calls of the program."""
        if name not in curves:
            curves[name] = run_ranks(name, layout, dtype, steps, model)
        return curves[name]

    monkeypatch.syspath_prepend(str(Path(program.__file__).parent))  # as for a program in that folder
    monkeypatch.setattr(program, "run", run_once)
    assert program.main(arguments) == 0
    assert "largest distance" in capsys.readouterr().out and picture.exists()
    one_rank, one_bit, tp2 = curves.values()
    assert list(curves)[1] == program.ONE_BIT and one_bit != one_rank and one_bit == pytest.approx(one_rank, rel=1e-12)
    assert tp2 == pytest.approx(one_rank, rel=1e-12)
    assert program.main([*arguments, "--bound", "-1"]) == 1
    assert "TOO FAR" in capsys.readouterr().out
