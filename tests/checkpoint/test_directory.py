"""Tests that checkpoints are saved in one cut and read in another, and of which are valid and which are retained."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.checkpoint import file_list, file_system, retention
from fugaku_gpt.checkpoint.data_file import Entry, plan_file, write_pieces
from fugaku_gpt.checkpoint.directory import (
    begin_checkpoint,
    clean_leftovers,
    discard_temporary,
    list_checkpoints,
    read_best,
    require_room,
    tracked_checkpoint,
)
from fugaku_gpt.checkpoint.file_list import PartedFiles
from fugaku_gpt.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from fugaku_gpt.checkpoint.reader import Checkpoint, open_checkpoint
from fugaku_gpt.checkpoint.retention import (
    LOSS_SOURCES,
    LOSSES,
    checkpoints_at,
    named_checkpoints_at,
    newest_valid,
    remove_old_checkpoints,
    verify_checkpoint,
)
from fugaku_gpt.errors import CheckpointError, RunFailed
from fugaku_gpt.layout.regions import Region, full_region, rectangles
from tests.support.checkpoints import Arrays, Pieces, cut_flat, save, some_arrays


def cut_like_a_layout(draw: st.DrawFn, arrays: Arrays) -> List[Pieces]:
    """Cut each tensor along some dimension over tp ranks, and the memory of each part anywhere over dp replicas."""
    tp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    pieces_by_rank: List[Pieces] = [[] for _ in range(tp * dp)]
    for key, array in arrays.items():
        dims = [dim for dim, size in enumerate(array.shape) if size % tp == 0]
        dim = draw(st.sampled_from([*dims, None])) if tp > 1 else None
        for part in range(tp if dim is not None else 1):
            shape = tuple(size // tp if axis == dim else size for axis, size in enumerate(array.shape))
            start = tuple(part * shape[axis] if axis == dim else 0 for axis in range(array.ndim))
            size = math.prod(shape)
            inner = sorted(draw(st.lists(st.integers(0, size), min_size=dp - 1, max_size=dp - 1)))
            for replica, (first, stop) in enumerate(zip([0, *inner], [*inner, size])):
                pieces_by_rank[replica * tp + part] += [
                    (key, region) for region in rectangles(start, shape, first, stop)
                ]
    return [rank for rank in pieces_by_rank if rank]


@st.composite
def two_cuts(draw: st.DrawFn) -> Any:
    """Draw (arrays, the cut to save, ranks per file, files per part of the manifest, the cut to read)."""
    some = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    shapes = {f"t{index}": shape for index, shape in enumerate(draw(st.lists(some, min_size=1, max_size=3)))}
    arrays = some_arrays(draw(st.integers(0, 99)), shapes, draw(st.sampled_from(["F32", "F64"])))
    saved, read = cut_like_a_layout(draw, arrays), cut_like_a_layout(draw, arrays)
    return arrays, saved, draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, file_list.FILES_PER_PART])), read


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(two_cuts())
def test_a_checkpoint_is_read_back_in_another_cut(case: Any) -> None:
    arrays, saved, ranks_per_file, files_per_part, read = case
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_list, "FILES_PER_PART", files_per_part)
        path = save(Path(folder) / "checkpoints", 7, arrays, saved, ranks_per_file)
        assert verify_checkpoint(path) == []
        manifest = read_manifest(path)
        assert len(manifest.files) == -(-len(saved) // ranks_per_file)
        assert isinstance(manifest.files, PartedFiles) == (len(manifest.files) > files_per_part)
        with open_checkpoint(path) as checkpoint:
            loaded = {key: np.full(array.shape, np.nan, array.dtype) for key, array in arrays.items()}
            for key, region in (piece for rank in read for piece in rank):
                kind, _, name = key.partition("/")
                checkpoint.read_region(kind, name, region, loaded[key][region.within(full_region(arrays[key].shape))])
            assert all(np.array_equal(loaded[key], array) for key, array in arrays.items())


def test_a_rank_that_reads_the_pieces_it_wrote_opens_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, ranks = some_arrays(3), 40  # more files than a reader keeps open
    pieces_by_rank = cut_flat(arrays, ranks)
    path = save(tmp_path / "checkpoints", 7, arrays, pieces_by_rank)
    manifest, real, opened = read_manifest(path), file_system.open_to_read, []

    def open_to_read(file: Path) -> int:
        opened.append(file.name)
        return real(file)

    monkeypatch.setattr(file_system, "open_to_read", open_to_read)
    writers = [pieces for pieces in pieces_by_rank if pieces]
    assert len(writers) == len(manifest.files)
    for index, pieces in enumerate(writers):
        opened.clear()
        with Checkpoint(path, manifest, start_fraction=(index + 0.5) / len(writers)) as checkpoint:
            for key, region in pieces:
                kind, _, name = key.partition("/")
                checkpoint.read_region(kind, name, region, np.empty(region.shape, np.float32))
        assert opened == [manifest.files[index].name]


def test_everything_is_read_back(tmp_path: Path) -> None:
    arrays = some_arrays(1, dtype="F64")
    metadata = {"state": {"loss_scale": 0.1, "window": [1.5, None]}, "config": {"model": {"layers": 2}}}
    path = save(tmp_path / "checkpoints", 12, arrays, cut_flat(arrays, 3), data_fingerprint="f", **metadata)
    assert path.name == "step-00000012" and tracked_checkpoint(path.parent) == path
    with open_checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
        assert (manifest.iteration, manifest.consumed_samples, manifest.consumed_tokens) == (12, 96, 768)
        assert {"state": manifest.state, "config": manifest.config} == metadata and manifest.data_fingerprint == "f"
        for key, array in arrays.items():
            kind, _, name = key.partition("/")
            read = checkpoint.tensor(kind, name)
            assert read.dtype == array.dtype and np.array_equal(read, array)
        narrow = np.empty((3, 4, 5), np.float32)
        checkpoint.read_region("weights", "a.weight", Region((0, 0, 0), (3, 4, 5)), narrow)
        assert np.array_equal(narrow, arrays["weights/a.weight"].astype(np.float32))
        with pytest.raises(CheckpointError, match="holds no kept_weights of a.weight"):
            checkpoint.tensor("kept_weights", "a.weight")
        with pytest.raises(ValueError, match="tensor of"):
            checkpoint.read_region("weights", "a.bias", Region((1,), (7,)), np.empty(7, np.float32))


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed: make dev")
    arrays = some_arrays(2)
    pieces_by_rank = cut_flat(arrays, 3)
    path = save(tmp_path, 1, arrays, pieces_by_rank, ranks_per_file=2)
    seen: Dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        seen.update(safetensors.load_file(str(file)))
    assert len(seen) == sum(map(len, pieces_by_rank))
    for key, region in (piece for rank in pieces_by_rank for piece in rank):
        at = ",".join(map(str, region.start))
        assert np.array_equal(seen[f"{key}@{at}"], arrays[key][region.within(full_region(arrays[key].shape))])


def test_the_data_begins_at_a_cache_line() -> None:
    for length in range(1, 70):
        plan = plan_file([Entry("weights", "x" * length, Region((0,), (3,)))])
        assert plan.tensors[0].offset % 64 == 0 and plan.length == plan.tensors[0].offset + 12
    with pytest.raises(ValueError, match="twice"):
        plan_file([Entry("weights", "x", Region((0,), (3,)))] * 2)
    with pytest.raises(ValueError, match="empty"):
        plan_file([Entry("weights", "x", Region((0,), (0,)))])


def test_a_piece_of_another_shape_is_not_written(tmp_path: Path) -> None:
    plan = plan_file([Entry("weights", "x", Region((0,), (3,)))])
    with pytest.raises(ValueError, match="data of shape"):
        write_pieces(tmp_path / "file", plan, [(0, np.zeros((4,), np.float32))])


def test_the_newest_checkpoints_are_retained(tmp_path: Path) -> None:
    arrays = some_arrays(0)
    for iteration in (10, 20, 30, 30, 40):
        save(tmp_path, iteration, arrays, cut_flat(arrays, 2))
    assert [info.path.name for info in list_checkpoints(tmp_path)] == [
        "step-00000040", "step-00000030-2", "step-00000030", "step-00000020", "step-00000010",
    ]  # fmt: skip
    assert remove_old_checkpoints(tmp_path, 2, 10) == ["step-00000030"]
    assert remove_old_checkpoints(tmp_path, 2, 20) == ["step-00000010"]
    assert remove_old_checkpoints(tmp_path, 1) == ["step-00000030-2", "step-00000020"]
    assert newest_valid(checkpoints_at(tmp_path)) == (tmp_path / "step-00000040", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000040"]


def save_measured(
    directory: Path, iteration: int, loss: Optional[float], source: str = "", keep_best: Optional[str] = "news"
) -> None:
    arrays = some_arrays(0)
    state: Dict[str, Any] = {LOSSES: {"news": loss}} if loss is not None else {}
    if source:
        state[LOSS_SOURCES] = {"news": source}
    save(directory, iteration, arrays, cut_flat(arrays, 1), state=state)
    remove_old_checkpoints(directory, 1, keep_best=keep_best)


def test_the_checkpoint_with_the_lowest_loss_is_retained_and_named(tmp_path: Path) -> None:
    names = []
    for iteration, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.0), (50, None), (60, 1.5), (70, 9.0)):
        save_measured(tmp_path, iteration, loss)
        best = read_best(tmp_path)
        assert best is not None and best.loss == "news" and best.name == f"step-{best.iteration:08d}"
        names.append([best.iteration, *sorted(info.iteration for info in list_checkpoints(tmp_path))])
        assert named_checkpoints_at(tmp_path, "best") == [tmp_path / best.name]
    assert names == [
        [10, 10], [20, 20], [20, 20, 30], [20, 20, 40], [20, 20, 50], [60, 60], [60, 60, 70],
    ]  # fmt: skip
    assert named_checkpoints_at(tmp_path, "step-00000070") == [tmp_path / "step-00000070"]
    assert named_checkpoints_at(tmp_path, None) == checkpoints_at(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint step-00000010; valid: best, step-00000070, step-"):
        named_checkpoints_at(tmp_path, "step-00000010")


def test_of_two_attempts_at_the_best_iteration_the_newer_is_retained(tmp_path: Path) -> None:
    for iteration in (10, 10, 20):
        save_measured(tmp_path, iteration, 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.json", "latest.json", "step-00000010-2", "step-00000020",
    ]  # fmt: skip


def test_a_record_of_the_best_is_rebuilt_from_the_checkpoints(tmp_path: Path) -> None:
    save_measured(tmp_path, 10, 1.0)
    save_measured(tmp_path, 20, 2.0)
    (tmp_path / "best.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="best.json: .*remove it"):
        named_checkpoints_at(tmp_path, "best")
    save_measured(tmp_path, 30, 3.0)
    assert [path.name for path in named_checkpoints_at(tmp_path, "best")] == ["step-00000010"]


@pytest.mark.parametrize("keep_best", [None, "validation"])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_run_that_keeps_another_best_or_none_removes_the_record(
    tmp_path: Path, keep_best: Optional[str], is_damaged: bool
) -> None:
    save_measured(tmp_path, 10, 1.0)
    if is_damaged:
        (tmp_path / "best.json").write_text("{", encoding="utf-8")
    save_measured(tmp_path, 20, 2.0, keep_best=keep_best)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000020"]
    with pytest.raises(CheckpointError, match="holds no best.json"):
        named_checkpoints_at(tmp_path, "best")


def test_losses_of_other_texts_or_settings_are_not_compared(tmp_path: Path) -> None:
    names = []
    saves = (
        (10, 1.0, ""),
        (20, 3.0, "a"),
        (30, 2.0, "b"),
        (40, 4.0, "b"),
        (50, 0.5, "b"),
        (60, None, ""),
        (70, 9.0, "a"),
    )
    for iteration, loss, source in saves:
        save_measured(tmp_path, iteration, loss, source)
        best = read_best(tmp_path)
        assert best is not None
        names.append(best.iteration)
    # what is not known to be of other texts counts
    assert names == [10, 10, 10, 10, 50, 50, 70]
    (tmp_path / "second").mkdir()
    names = []
    for iteration, loss, source in saves[1:]:
        save_measured(tmp_path / "second", iteration, loss, source)
        best = read_best(tmp_path / "second")
        names.append(best.iteration if best is not None else 0)
    assert names == [20, 30, 30, 50, 50, 70]


def test_each_manifest_is_read_once_when_checkpoints_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration, some_arrays(0), cut_flat(some_arrays(0), 1), state={LOSSES: {"news": 1.0}})
    names: List[str] = []

    def read(path: Path) -> Manifest:
        names.append(path.name)
        return read_manifest(path)

    monkeypatch.setattr(retention, "read_manifest", read)
    remove_old_checkpoints(tmp_path, 3, keep_best="news")
    assert names == ["step-00000030", "step-00000020", "step-00000010"]


def test_a_checkpoint_itself_holds_no_best(tmp_path: Path) -> None:
    save_measured(tmp_path, 10, 1.0)
    (path,) = named_checkpoints_at(tmp_path, "best")
    assert named_checkpoints_at(path, path.name) == [path]
    for name in ("best", "step-00000011"):
        with pytest.raises(
            CheckpointError, match=f"step-00000010: is a checkpoint itself: to choose {name}, name its run"
        ):
            named_checkpoints_at(path, name)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "holds no best.json: a run writes it with checkpoint.keep_best"),
        ({"name": "../x", "loss": "news", "value": 1.0, "iteration": 1}, "not that of a checkpoint"),
        ({"name": "step-00000001", "loss": "news", "value": "1", "iteration": 1}, "not a number"),
        ({"name": "step-00000009", "loss": "news", "value": 1.0, "iteration": 9}, "names step-00000009, which is gone"),
    ],
)
def test_a_record_of_the_best_that_cannot_be_used_is_refused(tmp_path: Path, record: Any, message: str) -> None:
    save_measured(tmp_path, 10, None)
    if record is not None:
        (tmp_path / "best.json").write_text(json.dumps({"version": 1, **record}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        named_checkpoints_at(tmp_path, "best")


def test_a_damaged_checkpoint_neither_counts_nor_is_removed(tmp_path: Path) -> None:
    arrays = some_arrays(0)
    for iteration in (10, 20, 30, 40):
        save(tmp_path, iteration, arrays, cut_flat(arrays, 2))
    (tmp_path / "step-00000040" / "data-000001.safetensors").unlink()
    (tmp_path / "step-00000020" / MANIFEST).write_text("{}")
    assert remove_old_checkpoints(tmp_path, 1) == ["step-00000010"]
    path, rejected = newest_valid(checkpoints_at(tmp_path))
    assert path == tmp_path / "step-00000030"
    assert rejected == [("step-00000040", f"{tmp_path}/step-00000040/data-000001.safetensors: missing")]


def test_checkpoints_newer_than_the_last_written_neither_count_nor_are_removed(tmp_path: Path) -> None:
    arrays = some_arrays(0)
    for iteration in (10, 30, 40, 20):  # a run has resumed from 10, as the data of 30 and 40 is damaged
        save(tmp_path, iteration, arrays, cut_flat(arrays, 2))
    assert remove_old_checkpoints(tmp_path, 1) == ["step-00000010"]
    assert [info.iteration for info in list_checkpoints(tmp_path)] == [40, 30, 20]
    save(tmp_path, 30, arrays, cut_flat(arrays, 2))
    assert remove_old_checkpoints(tmp_path, 1) == ["step-00000030", "step-00000020"]
    assert [info.path.name for info in list_checkpoints(tmp_path)] == ["step-00000040", "step-00000030-2"]


def test_leftovers_are_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    for name in (".step-00000007.0af.tmp", ".step-00000008.0af.tmp"):
        (tmp_path / name / "deeper").mkdir(parents=True)
        (tmp_path / name / "data-000000.safetensors").write_text("half")
    (tmp_path / ".latest.json.0af.tmp").write_text("{")
    for name in ("step-00000003", ".step-00000003", ".notes.tmp"):
        (tmp_path / name).mkdir()
    gone = clean_leftovers(tmp_path)
    assert gone == [".latest.json.0af.tmp", ".step-00000007.0af.tmp", ".step-00000008.0af.tmp"]
    discard_temporary(begin_checkpoint(tmp_path, 8))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.tmp", ".step-00000003", "step-00000003"]
    assert clean_leftovers(tmp_path / "nowhere") == [] and list_checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        '{"version": 1, "name": "../x"}',
        '{"version": 2, "name": "step-00000001"}',
        f'{{"version": 1, "name": "step-{"0" * 300}"}}',  # no file can have this name
    ],
)
def test_a_tracker_that_cannot_be_used_is_ignored(tmp_path: Path, text: Any) -> None:
    save(tmp_path, 1, some_arrays(0), cut_flat(some_arrays(0), 1))
    (tmp_path / "latest.json").unlink()
    if text is not None:
        (tmp_path / "latest.json").write_text(text)
    assert tracked_checkpoint(tmp_path) is None
    save(tmp_path, 2, some_arrays(0), cut_flat(some_arrays(0), 1))
    assert json.loads((tmp_path / "latest.json").read_text()) == {"version": 1, "name": "step-00000002"}
    remove_old_checkpoints(tmp_path, 1)
    assert tracked_checkpoint(tmp_path) == tmp_path / "step-00000002"


def test_room_is_checked_before_the_directory_exists(tmp_path: Path) -> None:
    require_room(tmp_path / "a" / "b", 1000)
    free = file_system.free_bytes(tmp_path)
    with pytest.raises(RunFailed, match=r"a checkpoint needs [\d,]+ MiB, and [\d,]+ MiB are free"):
        require_room(tmp_path / "a" / "b", 2 * free)
