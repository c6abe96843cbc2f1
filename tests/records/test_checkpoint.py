"""Checkpoints: saved in one cut, read in another; which are whole, which are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fugaku_gpt.records.checkpoint import latest, list_checkpoints
from fugaku_gpt.records.checkpoint_keep import newest_valid, retain, verify
from fugaku_gpt.records.checkpoint_read import open_checkpoint
from tests.support.checkpoints import cut_flat, save, some_arrays


@pytest.mark.parametrize("ranks", [1, 2, 3, 50])
def test_what_is_saved_is_read(tmp_path: Path, ranks: int) -> None:
    arrays = some_arrays(ranks)
    path = save(tmp_path / "checkpoints", 12, arrays, cut_flat(arrays, ranks), state={"loss_scale": 0.1})
    assert path.name == "step-00000012" and latest(path.parent) == path
    assert verify(path) == [] and newest_valid(path.parent).path == path
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.manifest.state == {"loss_scale": 0.1}
        for key, array in arrays.items():
            read = checkpoint.tensor(*key.split("/"))
            assert read.dtype == array.dtype and np.array_equal(read, array)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    arrays = some_arrays(0)
    for iteration in (10, 20, 30, 30, 40):
        save(tmp_path, iteration, arrays, cut_flat(arrays, 2))
    assert [info.path.name for info in list_checkpoints(tmp_path)] == [
        "step-00000040", "step-00000030-2", "step-00000030", "step-00000020", "step-00000010",
    ]  # fmt: skip
    assert retain(tmp_path, 2, 10) == ["step-00000030"]
    assert retain(tmp_path, 2, 20) == ["step-00000010"]
    assert retain(tmp_path, 1) == ["step-00000030-2", "step-00000020"]
    assert newest_valid(tmp_path) == (tmp_path / "step-00000040", [])
