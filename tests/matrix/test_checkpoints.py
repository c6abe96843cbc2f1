"""Tests that training resumes from checkpoints that each build has written, in ``tests/golden/checkpoints``.

``make test-matrix`` tests all pairs of builds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict

import pytest

from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.training import resume as resuming
from tests.matrix.cases import FIXTURE, FIXTURES, SAVED
from tests.matrix.checkpoints import FIXTURES_FOLDER, only_checkpoint, resume


def test_the_repository_has_a_checkpoint_of_each_build() -> None:
    assert {path.name for path in FIXTURES_FOLDER.iterdir()} == set(FIXTURES)


@pytest.mark.parametrize("build", FIXTURES)
def test_a_checkpoint_of_another_build_resumes_along_the_uninterrupted_curve(build: str) -> None:
    path = only_checkpoint(FIXTURES_FOLDER / build / FIXTURE)
    manifest = read_manifest(path)
    assert verify_checkpoint(path) == [] and manifest.iteration == SAVED and len(manifest.files) == 2
    assert build == "torch-" + manifest.build["torch"].partition("+")[0]
    resumed = resume(None, path, FIXTURE, "")
    print(f"from {build}: {resumed.distances}")
    assert resumed.problem == ""


@pytest.mark.parametrize(
    "mistake", [{"optimizer_steps": 0}, {"consumed_samples": 0}, {"iteration": SAVED - 1}], ids=lambda m: "".join(m)
)
def test_state_that_differs_from_the_saved_state_is_detected(mistake: Dict[str, Any]) -> None:
    path = only_checkpoint(FIXTURES_FOLDER / FIXTURES[0] / FIXTURE)
    manifest = read_manifest(path)
    wrong = replace(manifest, state={**manifest.state, **mistake})
    assert "too far from the curve" in resume(None, path, FIXTURE, "", wrong).problem


@pytest.mark.parametrize("kind", ["first_moment", "second_moment"])
def test_lost_moments_are_detected(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming.Checkpoint, "has_tensor", lambda self, which, name: which != kind)
    path = only_checkpoint(FIXTURES_FOLDER / FIXTURES[0] / FIXTURE)
    assert "too far from the curve" in resume(None, path, FIXTURE, "").problem
