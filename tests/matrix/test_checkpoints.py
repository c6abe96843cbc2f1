"""Checkpoints that each build has written, kept in ``tests/golden/checkpoints``, go on here; all pairs of builds:
``make test-matrix``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict

import pytest

from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.training import resume as resuming
from tests.matrix.cases import FIXTURE, FIXTURES, SAVED
from tests.matrix.checkpoints import FIXTURES_FOLDER, only_checkpoint, resume


def test_a_checkpoint_of_each_build_is_kept() -> None:
    assert {path.name for path in FIXTURES_FOLDER.iterdir()} == set(FIXTURES)


@pytest.mark.parametrize("build", FIXTURES)
def test_what_another_build_has_saved_goes_on_as_if_it_had_not_been_interrupted(build: str) -> None:
    path = only_checkpoint(FIXTURES_FOLDER / build / FIXTURE)
    manifest = read_manifest(path)
    assert verify_checkpoint(path) == [] and manifest.iteration == SAVED and len(manifest.files) == 2
    assert build == "torch-" + manifest.build["torch"].partition("+")[0]
    resumed = resume(None, path, FIXTURE, "")
    print(f"from {build}: {resumed.found}")
    assert resumed.problem == ""


@pytest.mark.parametrize(
    "mistake", [{"optimizer_steps": 0}, {"consumed_samples": 0}, {"iteration": SAVED - 1}], ids=lambda m: "".join(m)
)
def test_state_that_is_not_what_was_saved_is_found(mistake: Dict[str, Any]) -> None:
    path = only_checkpoint(FIXTURES_FOLDER / FIXTURES[0] / FIXTURE)
    manifest = read_manifest(path)
    wrong = replace(manifest, state={**manifest.state, **mistake})
    assert "too far from the curve" in resume(None, path, FIXTURE, "", wrong).problem


@pytest.mark.parametrize("kind", ["first_moment", "second_moment"])
def test_moments_that_are_lost_are_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming.Checkpoint, "has_tensor", lambda self, which, name: which != kind)
    path = only_checkpoint(FIXTURES_FOLDER / FIXTURES[0] / FIXTURE)
    assert "too far from the curve" in resume(None, path, FIXTURE, "").problem
