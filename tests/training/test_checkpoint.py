"""Saving and exact resume on one rank: a run that was saved and loaded is the run that was not."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.directory import TRACKER, list_checkpoints
from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.records.run import MetricsWriter, Result, RunDirectory
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.health import SPIKE
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.resume import ResumePlan, broadcast_plan, find_checkpoint, load_checkpoint, resume_from
from fugaku_gpt.training.run import run_loop
from fugaku_gpt.training.trainer import Step, Trainer
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

FAST = ("training.micro_batch=8", "training.lr=1e-2")
GROWING = (
    "training.ramp_start=2",
    "training.ramp_increment=2",
    "training.ramp_samples=18",
    "training.seq_ramp_start=8",
    "training.seq_ramp_increment=8",
    "training.seq_ramp_iterations=6",
    "training.skip_samples=[3, 9-12, 40-44]",
)
ROLLBACK = ("training.rollback_every=2", "training.spike_window=3", "training.spike_ratio=1.2")
# the scale halves until gradients do not overflow any more, and then doubles every second iteration
SCALED = ("training.dtype=float16", "training.loss_scale=16777216", "training.loss_scale_window=2")


def trainer(*overrides: str) -> Trainer:
    config = tiny_config(*overrides)
    samples = ByteSamples(config.model.seq_len)
    return Trainer(config, ProcessGrid.alone(), samples, samples)


def tensors(run: Trainer) -> Dict[Tuple[str, int], torch.Tensor]:
    found = {(storage.kind, storage.first): storage.values.clone() for storage in run.storages()}
    found["parameters", 0] = run.buffers.parameters.clone()
    return found


def assert_equal(run: Trainer, judge: Trainer) -> None:
    ours, theirs = tensors(run), tensors(judge)
    assert ours.keys() == theirs.keys() and run.state() == judge.state()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def loaded(path: Path, *overrides: str) -> Trainer:
    run = trainer(*overrides)
    run.step()  # what was there before does not matter
    assert load_checkpoint(run, path, read_manifest(path)) is None
    return run


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("training.dtype=float64", *FAST),
        ("training.dtype=bfloat16", *FAST),
        (*SCALED, *FAST),
        GROWING,
        ("model.dropout=0", "training.non_finite=skip", *FAST),
    ],
    ids=["dropout", "float64", "bfloat16", "float16", "growing", "skip"],
)
def test_three_resumes_in_a_row_are_the_run_bit_for_bit(tmp_path: Path, settings: Tuple[str, ...]) -> None:
    judge, run = trainer(*settings), trainer(*settings)
    for leg, count in enumerate((3, 2, 2, 2)):
        if leg:
            checkpoints = CheckpointSaver(run, tmp_path / "checkpoints")
            checkpoints.save({})
            checkpoints.advance(run.step())  # training goes on, and the checkpoint knows nothing of it
            checkpoints.finish()
            run = loaded(list_checkpoints(tmp_path / "checkpoints")[0].path, *settings)
        steps: List[Tuple[Step, Step]] = [(run.step(), judge.step()) for _ in range(count)]
        assert all(repr(ours) == repr(theirs) for ours, theirs in steps)  # a norm that is not a number is equal too
    assert_equal(run, judge)
    if settings[:1] == SCALED[:1]:
        assert judge.loss_scale.overflows > 0 and judge.loss_scale.value != 16777216


def test_a_spike_after_the_resume_returns_to_the_copy_from_before(tmp_path: Path) -> None:
    judge, run = trainer(*FAST, *ROLLBACK), trainer(*FAST, *ROLLBACK)
    for _ in range(5):
        assert run.step() == judge.step()
    CheckpointSaver(run, tmp_path).save({}, wait=True)
    run = loaded(list_checkpoints(tmp_path)[0].path, *FAST, *ROLLBACK)
    assert_equal(run, judge)
    for one in (run, judge):
        one.buffers.parameters.mul_(10.0)
    spike = run.step()
    assert spike == judge.step() and (spike.skip_reason, spike.returned_to) == (SPIKE, 4)
    assert all(run.step() == judge.step() for _ in range(2))
    assert_equal(run, judge)


def test_copies_that_are_asked_for_later_begin_where_the_run_goes_on(tmp_path: Path) -> None:
    run = trainer(*FAST, *ROLLBACK[1:])
    for _ in range(5):
        run.step()
    CheckpointSaver(run, tmp_path).save({}, wait=True)
    run = loaded(list_checkpoints(tmp_path)[0].path, *FAST, *ROLLBACK)
    before = run.buffers.parameters.clone()
    run.buffers.parameters.mul_(10.0)
    step = run.step()
    assert (step.skip_reason, step.returned_to) == (SPIKE, 5) and torch.equal(run.buffers.parameters, before)


def test_masters_go_on_in_another_precision(tmp_path: Path) -> None:
    run = trainer("training.dtype=bfloat16", *FAST)
    for _ in range(3):
        run.step()
    CheckpointSaver(run, tmp_path).save({}, wait=True)
    assert run.masters is not None
    wide = loaded(list_checkpoints(tmp_path)[0].path, *FAST)
    for placement in wide.buffers.placements:  # the flat tensors of a wider type have other gaps
        name, part = placement.spec.name, placement.span
        narrow = next(one for one in run.buffers.placements if one.spec.name == name)
        assert torch.equal(wide.buffers.parameters[part], run.masters.values[narrow.span])
    assert wide.step().loss == pytest.approx(run.step().loss, rel=1e-2)


class Logged:
    """A trainer with a log, as rank 0 has one."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.trainer = trainer(*FAST, *overrides)
        self.directory = RunDirectory(folder)
        self.said = io.StringIO()
        self.log = TrainingLog(self.trainer.config, MetricsWriter(self.directory.metrics_file), self.said)
        self.checkpoints = CheckpointSaver(self.trainer, self.directory.checkpoints_dir, self.log)

    def names(self) -> List[str]:
        return sorted(os.listdir(self.directory.checkpoints_dir))


def fail_writes(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The disk is full for the next writes of data."""
    real, left = file_system.write_at, [times]

    def write_at(*arguments: Any) -> int:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(file_system, "write_at", write_at)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Logged(tmp_path, "training.iterations=6", "checkpoint.interval=2")
    fail_writes(monkeypatch, 1)
    assert not run_loop(run.trainer, run.log, run.checkpoints)
    lines = run.directory.metrics("checkpoint")
    assert [line["iteration"] for line in lines] == [2, 4, 6] and "No space left" in lines[0]["error"]
    assert "checkpoint at iteration 2 FAILED, nothing of it is kept: rank 0: " in run.said.getvalue()
    assert run.names() == ["latest.json", "step-00000004", "step-00000006"]
    assert all(verify_checkpoint(info.path) == [] for info in list_checkpoints(run.directory.checkpoints_dir))


def test_a_checkpoint_that_only_the_tracker_does_not_name_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Logged(tmp_path, "training.iterations=4", "checkpoint.interval=2", "checkpoint.keep_last=1")
    real = file_system.rename

    def rename(source: Path, target: Path) -> None:
        if target.name == TRACKER and len(list_checkpoints(target.parent)) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        real(source, target)

    monkeypatch.setattr(file_system, "rename", rename)
    assert not run_loop(run.trainer, run.log, run.checkpoints)
    assert all("error" not in line for line in run.directory.metrics("checkpoint"))
    assert "step-00000004 is whole; older checkpoints are kept: " in run.said.getvalue()
    assert run.names() == ["latest.json", "step-00000002", "step-00000004"]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_without_its_last_checkpoint_a_run_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: str
) -> None:
    at_end = ("checkpoint.at_end=true", f"checkpoint.asynchronous={asynchronous}")
    run = Logged(tmp_path, "training.iterations=2", *at_end)
    fail_writes(monkeypatch, 1)
    with pytest.raises(RunFailed, match="the checkpoint of iteration 2 could not be written: rank 0: .*No space left"):
        run_loop(run.trainer, run.log, run.checkpoints)
    assert run.names() == []


def test_a_run_that_is_told_to_stop_saves_and_says_so(tmp_path: Path) -> None:
    run = Logged(tmp_path, "training.iterations=9", "training.log_interval=2")
    run.trainer.should_stop = lambda: run.trainer.iteration == 2  # asked in the middle of the third
    assert run_loop(run.trainer, run.log, run.checkpoints)
    assert (run.trainer.iteration, run.checkpoints.saved_iteration, run.names()) == (
        3,
        3,
        ["latest.json", "step-00000003"],
    )


def test_a_stop_in_the_last_iteration_is_the_end(tmp_path: Path) -> None:
    run = Logged(tmp_path, "training.iterations=2")
    run.trainer.should_stop = lambda: run.trainer.iteration == 1
    assert not run_loop(run.trainer, run.log, run.checkpoints)


def test_a_slow_disk_makes_the_next_checkpoint_wait_and_not_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_write = Logged(tmp_path), threading.Event()
    real = file_system.write_at

    def write_at(*arguments: Any) -> int:
        assert may_write.wait(60)
        return real(*arguments)

    monkeypatch.setattr(file_system, "write_at", write_at)
    run.trainer.step()
    run.checkpoints.save({})
    for _ in range(3):
        run.checkpoints.advance(run.trainer.step())
    assert run.checkpoints.saved_iteration is None
    threading.Timer(0.1, may_write.set).start()
    run.checkpoints.save({})
    assert run.checkpoints.saved_iteration == 1
    assert "the checkpoint of iteration 1 is still being written: waiting" in run.said.getvalue()
    run.checkpoints.finish()
    assert run.checkpoints.saved_iteration == 4


def test_old_checkpoints_go_as_the_settings_say(tmp_path: Path) -> None:
    keep = ("checkpoint.interval=2", "checkpoint.keep_last=1", "checkpoint.keep_every=4")
    run = Logged(tmp_path, "training.iterations=10", *keep)
    run_loop(run.trainer, run.log, run.checkpoints)
    assert run.names() == ["latest.json", "step-00000004", "step-00000008", "step-00000010"]


class Saved:
    """A run directory with checkpoints of iterations 2 and 4."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "run"
        self.out.mkdir()
        self.settings = (*FAST, "training.iterations=4", "checkpoint.interval=2")
        self.run = trainer(*self.settings)
        directory = RunDirectory(self.out).checkpoints_dir
        run_loop(self.run, None, CheckpointSaver(self.run, directory, None, "samples", {"torch": torch.__version__}))
        self.newest, self.older = (info.path for info in list_checkpoints(directory))

    def look(
        self, wanted: str = "auto", *overrides: str, fingerprint: str = "samples", force: bool = False
    ) -> ResumePlan:
        config = tiny_config(*self.settings, *overrides)
        return broadcast_plan(find_checkpoint(config, self.out, wanted, fingerprint, force), ProcessGrid.alone().world)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def test_auto_takes_the_newest(saved_once: Saved) -> None:
    found = saved_once.look()
    assert found.candidates == (saved_once.newest, saved_once.older) and found.in_same_directory and not found.messages
    assert saved_once.look("none") == ResumePlan()
    assert saved_once.look(str(saved_once.newest)).in_same_directory
    assert saved_once.look(str(saved_once.out)).candidates[0] == saved_once.newest
    assert find_checkpoint(saved_once.run.config, saved_once.out / "empty", "auto", "", False) == ResumePlan(
        in_same_directory=True
    )


def test_a_run_that_has_done_its_iterations_is_left_alone(tmp_path: Path) -> None:
    config = tiny_config("training.iterations=4")
    RunDirectory(tmp_path).write_result(Result("ok", "", 0.0, 1.0, 4))
    assert find_checkpoint(config, tmp_path, "auto", "", False).is_finished
    assert not find_checkpoint(tiny_config("training.iterations=5"), tmp_path, "auto", "", False).is_finished


@pytest.mark.parametrize(
    ("overrides", "fingerprint", "why"),
    [
        (("model.layers=3", "model.heads=2"), "samples", r"model.layers: 3, but 2 there; model.heads: 2, but 4 there"),
        ((), "others", r"the corpus, data.weights or data.split is not that.* 32 consumed samples .*--force-data"),
        (("training.seed=7",), "samples", r"training.seed 7 gives another order of samples than .* 1234.*--force-data"),
    ],
)
def test_what_does_not_fit_is_refused(
    saved_once: Saved, overrides: Tuple[str, ...], fingerprint: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        saved_once.look("auto", *overrides, fingerprint=fingerprint)


def test_what_may_change_is_said(saved_once: Saved) -> None:
    found = saved_once.look(
        "auto", "training.lr=0.5", "layout.dp=2", "training.micro_batch=4", fingerprint="x", force=True
    )
    assert "training.lr 0.01 -> 0.5" in found.messages[0] and "layout.dp 1 -> 2" in found.messages[0]
    assert found.messages[1].endswith("resuming all the same")


def test_an_older_checkpoint_of_the_same_run_needs_another_folder(saved_once: Saved) -> None:
    with pytest.raises(
        UsageError, match=r"holds a newer checkpoint, step-00000004; resume from step-00000002 in anoth"
    ):
        saved_once.look(str(saved_once.older))


@pytest.mark.parametrize("what", ["data", "header", "manifest", "missing"])
def test_a_damaged_newest_gives_way_to_the_older_and_is_named(tmp_path: Path, what: str) -> None:
    there = Saved(tmp_path)
    file = there.newest / ("manifest.json" if what == "manifest" else "data-000000.safetensors")
    content = bytearray(file.read_bytes())
    content[{"data": -5, "header": 40, "manifest": 200, "missing": 0}[what]] ^= 4
    file.unlink()
    if what != "missing":
        file.write_bytes(content)
    found = there.look()
    again = trainer(*there.settings)
    path, manifest, rejected = resume_from(again, found)
    assert (path, manifest.iteration, again.iteration, again.consumed_samples) == (there.older, 2, 2, 16)
    (why,) = [line for line in (*found.messages, *rejected) if "rejected" in line]
    assert why.startswith("checkpoint step-00000004 was rejected: ") and file.name in why
    if what == "data":
        assert "damaged: second_moment of " in why
    judge = trainer(*there.settings)
    for _ in range(2):
        judge.step()
    assert_equal(again, judge)


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    there = Saved(tmp_path)
    for path in (there.newest, there.older):
        content = bytearray((path / "data-000000.safetensors").read_bytes())
        content[-5] ^= 4
        (path / "data-000000.safetensors").write_bytes(content)
    with pytest.raises(
        RunFailed, match="step-00000004 was rejected: .*; checkpoint step-00000002 was rejected: .*anew"
    ):
        resume_from(trainer(*there.settings), there.look())
    for path in (there.newest, there.older):
        (path / "data-000000.safetensors").unlink()
    with pytest.raises(UsageError, match="no checkpoint is whole"):
        there.look()
