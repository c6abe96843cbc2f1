"""Tests of saving and exact resume on one rank: a run that was saved and loaded equals a run that was not."""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import os
import threading
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.directory import TRACKER, BestCheckpoint, list_checkpoints, read_best
from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.checkpoint.retention import LOSS_SOURCES, LOSSES, verify_checkpoint
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.data.scored_text import ScoredText, TextLoss
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import Result, RunDirectory
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.eval_files import EvalFiles
from fugaku_gpt.training.health import SPIKE
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.resume import (
    ResumePlan,
    _check_config,
    broadcast_plan,
    find_checkpoint,
    load_checkpoint,
    resume_from,
)
from fugaku_gpt.training.run import run_loop
from fugaku_gpt.training.trainer import Step, Trainer
from fugaku_gpt.training.validation import Validation
from tests.support.tiny import tiny_config
from tests.training.trainers import tiny_trainer

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


def tensors(run: Trainer) -> Dict[Tuple[str, int], torch.Tensor]:
    values_by_storage = {(storage.kind, storage.first): storage.values.clone() for storage in run.storages()}
    values_by_storage["parameters", 0] = run.buffers.parameters.clone()
    return values_by_storage


def assert_equal(run: Trainer, judge: Trainer) -> None:
    ours, theirs = tensors(run), tensors(judge)
    assert ours.keys() == theirs.keys() and run.state() == judge.state()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def loaded(path: Path, *overrides: str) -> Trainer:
    run = tiny_trainer(*overrides)
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
def test_a_run_with_three_resumes_equals_an_uninterrupted_run_bit_for_bit(
    tmp_path: Path, settings: Tuple[str, ...]
) -> None:
    judge, run = tiny_trainer(*settings), tiny_trainer(*settings)
    for leg, count in enumerate((3, 2, 2, 2)):
        if leg:
            checkpoints = CheckpointSaver(run, tmp_path / "checkpoints")
            checkpoints.save({})
            checkpoints.advance(run.step())  # training continues, and the checkpoint does not change
            checkpoints.finish()
            run = loaded(list_checkpoints(tmp_path / "checkpoints")[0].path, *settings)
        steps: List[Tuple[Step, Step]] = [(run.step(), judge.step()) for _ in range(count)]
        assert all(repr(ours) == repr(theirs) for ours, theirs in steps)  # a norm that is not a number is equal too
    assert_equal(run, judge)
    if settings[:1] == SCALED[:1]:
        assert judge.loss_scale.overflows > 0 and judge.loss_scale.value != 16777216


def test_a_spike_after_the_resume_returns_to_the_copy_from_before(tmp_path: Path) -> None:
    judge, run = tiny_trainer(*FAST, *ROLLBACK), tiny_trainer(*FAST, *ROLLBACK)
    for _ in range(5):
        assert run.step() == judge.step()
    CheckpointSaver(run, tmp_path).save({}, wait=True)
    run = loaded(list_checkpoints(tmp_path)[0].path, *FAST, *ROLLBACK)
    assert_equal(run, judge)
    for disturbed in (run, judge):
        disturbed.buffers.parameters.mul_(10.0)
    spike = run.step()
    assert spike == judge.step() and (spike.skip_reason, spike.returned_to) == (SPIKE, 4)
    assert all(run.step() == judge.step() for _ in range(2))
    assert_equal(run, judge)


def test_copies_that_are_enabled_at_a_resume_begin_with_the_resumed_state(tmp_path: Path) -> None:
    run = tiny_trainer(*FAST, *ROLLBACK[1:])
    for _ in range(5):
        run.step()
    CheckpointSaver(run, tmp_path).save({}, wait=True)
    run = loaded(list_checkpoints(tmp_path)[0].path, *FAST, *ROLLBACK)
    before = run.buffers.parameters.clone()
    run.buffers.parameters.mul_(10.0)
    step = run.step()
    assert (step.skip_reason, step.returned_to) == (SPIKE, 5) and torch.equal(run.buffers.parameters, before)


def test_master_weights_are_resumed_in_another_precision(tmp_path: Path) -> None:
    run = tiny_trainer("training.dtype=bfloat16", *FAST)
    for _ in range(3):
        run.step()
    CheckpointSaver(run, tmp_path).save({}, wait=True)
    assert run.masters is not None
    wide = loaded(list_checkpoints(tmp_path)[0].path, *FAST)
    for placement in wide.buffers.placements:  # the flat tensors of a wider type have other gaps
        name, span = placement.spec.name, placement.span
        narrow = next(other for other in run.buffers.placements if other.spec.name == name)
        assert torch.equal(wide.buffers.parameters[span], run.masters.values[narrow.span])
    assert wide.step().loss == pytest.approx(run.step().loss, rel=1e-2)


class LoggedRun:
    """A trainer with a log, as rank 0 has one."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.trainer = tiny_trainer(*FAST, *overrides)
        self.directory = RunDirectory(folder)
        self.log_stream = io.StringIO()
        self.log = TrainingLog(self.trainer.config, MetricsWriter(self.directory.metrics_file), self.log_stream)
        self.checkpoints = CheckpointSaver(self.trainer, self.directory.checkpoints_dir, self.log)

    def names(self) -> List[str]:
        return sorted(os.listdir(self.directory.checkpoints_dir))


def fail_writes(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let the next writes of data fail as on a full disk."""
    real, left = file_system.write_at, [times]

    def write_at(*arguments: Any) -> int:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(file_system, "write_at", write_at)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LoggedRun(tmp_path, "training.iterations=6", "checkpoint.interval=2")
    fail_writes(monkeypatch, 1)
    assert not run_loop(run.trainer, run.log, run.checkpoints)
    lines = run.directory.metrics("checkpoint")
    assert [line["iteration"] for line in lines] == [2, 4, 6] and "No space left" in lines[0]["error"]
    assert "checkpoint at iteration 2 FAILED, nothing of it is kept: rank 0: " in run.log_stream.getvalue()
    assert run.names() == ["latest.json", "step-00000004", "step-00000006"]
    assert all(verify_checkpoint(info.path) == [] for info in list_checkpoints(run.directory.checkpoints_dir))


def test_a_checkpoint_counts_even_if_the_tracker_cannot_be_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LoggedRun(tmp_path, "training.iterations=4", "checkpoint.interval=2", "checkpoint.keep_last=1")
    real = file_system.rename

    def rename(source: Path, target: Path) -> None:
        if target.name == TRACKER and len(list_checkpoints(target.parent)) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        real(source, target)

    monkeypatch.setattr(file_system, "rename", rename)
    assert not run_loop(run.trainer, run.log, run.checkpoints)
    assert all("error" not in line for line in run.directory.metrics("checkpoint"))
    assert "step-00000004 is whole; older checkpoints are kept: " in run.log_stream.getvalue()
    assert run.names() == ["latest.json", "step-00000002", "step-00000004"]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_without_the_final_checkpoint_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: str
) -> None:
    at_end = ("checkpoint.at_end=true", f"checkpoint.asynchronous={asynchronous}")
    run = LoggedRun(tmp_path, "training.iterations=2", *at_end)
    fail_writes(monkeypatch, 1)
    with pytest.raises(RunFailed, match="the checkpoint of iteration 2 could not be written: rank 0: .*No space left"):
        run_loop(run.trainer, run.log, run.checkpoints)
    assert run.names() == []


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_whose_last_due_checkpoint_was_not_written_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: str
) -> None:
    settings = ("training.iterations=5", "checkpoint.interval=2", f"checkpoint.asynchronous={asynchronous}")
    run = LoggedRun(tmp_path, *settings, "checkpoint.at_end=false")
    fail_writes(monkeypatch, 10**6)
    with pytest.raises(RunFailed, match="the checkpoint of iteration 4 could not be written: rank 0: .*No space left"):
        run_loop(run.trainer, run.log, run.checkpoints)
    assert run.trainer.iteration == 5
    assert [line["iteration"] for line in run.directory.metrics("checkpoint")] == [2, 4]


def test_a_run_that_is_asked_to_stop_saves_a_checkpoint_and_reports_the_stop(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path, "training.iterations=9", "training.log_interval=2")
    run.trainer.should_stop = lambda: run.trainer.iteration == 2  # asked in the middle of the third
    assert run_loop(run.trainer, run.log, run.checkpoints)
    assert (run.trainer.iteration, run.checkpoints.saved_iteration, run.names()) == (
        3,
        3,
        ["latest.json", "step-00000003"],
    )


def test_a_stop_in_the_last_iteration_is_a_normal_end(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path, "training.iterations=2")
    run.trainer.should_stop = lambda: run.trainer.iteration == 1
    assert not run_loop(run.trainer, run.log, run.checkpoints)


def test_a_slow_disk_makes_the_next_checkpoint_wait_and_not_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_write = LoggedRun(tmp_path), threading.Event()
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
    assert "the checkpoint of iteration 1 is still being written: waiting" in run.log_stream.getvalue()
    run.checkpoints.finish()
    assert run.checkpoints.saved_iteration == 4


def test_old_checkpoints_are_removed_according_to_the_settings(tmp_path: Path) -> None:
    keep = ("checkpoint.interval=2", "checkpoint.keep_last=1", "checkpoint.keep_every=4")
    run = LoggedRun(tmp_path, "training.iterations=10", *keep)
    run_loop(run.trainer, run.log, run.checkpoints)
    assert run.names() == ["latest.json", "step-00000004", "step-00000008", "step-00000010"]


def test_the_checkpoint_with_the_lowest_loss_is_kept_over_a_resume(tmp_path: Path) -> None:
    keep = ("checkpoint.interval=2", "checkpoint.keep_last=1", "checkpoint.keep_best=text", "training.eval_interval=2")
    keep += ("training.eval_files=[text.txt]", "training.iterations=8")
    losses = iter([9.0, 4.0, 3.0, math.nan, 3.5])  # at the start, and after 2, 4, 6 and 8 iterations

    class Files(EvalFiles):
        def losses(self, trainer: Trainer) -> List[TextLoss]:
            assert [loss.name for loss in super().losses(trainer)] == ["text"]
            return [TextLoss("text", 2 * next(losses), 2, 8)]

    files = Files(("text",), [[ScoredText("", [1, 2, 3], 1, 8)]])
    run = LoggedRun(tmp_path, *keep)
    run.trainer.should_stop = lambda: run.trainer.iteration + 1 == 5
    assert run_loop(run.trainer, run.log, run.checkpoints, Validation(run.trainer, run.log, files))
    assert run.names() == ["best.json", "latest.json", "step-00000004", "step-00000005"]
    line = run.log_stream.getvalue().split("text after 4 iterations: ")[1].splitlines()[0]
    assert line == "loss 3.000000, 1.082021 bits per byte, 2 tokens"
    again = LoggedRun(tmp_path, *keep)
    newest = list_checkpoints(run.directory.checkpoints_dir)[0].path
    assert load_checkpoint(again.trainer, newest, read_manifest(newest)) is None
    state = read_manifest(newest).state
    run_loop(again.trainer, again.log, again.checkpoints, Validation(again.trainer, again.log, files, state))
    assert again.names() == ["best.json", "latest.json", "step-00000004", "step-00000008"]
    best = read_best(run.directory.checkpoints_dir)
    assert best == BestCheckpoint("step-00000004", "text", 3.0, 4)
    evaluations = run.directory.metrics("evaluation")
    assert [(line["iteration"], line["name"], line["loss"]) for line in evaluations] == [
        (0, "text", 9.0), (2, "text", 4.0), (4, "text", 3.0), (6, "text", None), (8, "text", 3.5),
    ]  # fmt: skip


def test_a_loss_is_recorded_with_what_it_was_measured_by() -> None:
    def sources(length: int, *settings: str, fingerprint: str = "samples") -> Dict[str, str]:
        files = EvalFiles(("text",), [[ScoredText("", list(range(length)), 1, 8)]])
        trainer = tiny_trainer("training.eval_interval=1", *settings)
        validation = Validation(trainer, None, files, None, fingerprint)
        validation.run()
        state = validation.state()
        assert sorted(state[LOSSES]) == ["text", "validation"]
        result: Dict[str, str] = state[LOSS_SOURCES]
        return result

    first = sources(5)
    assert sources(5, "training.micro_batch=1", "training.lr=0.1") == first
    for length, settings, fingerprint, differing in (
        (6, (), "samples", ["text"]),
        (5, ("training.eval_batches=3",), "samples", ["validation"]),
        (5, (), "others", ["validation"]),
        (5, ("model.seq_len=12",), "samples", ["text", "validation"]),
    ):
        other = sources(length, *settings, fingerprint=fingerprint)
        assert [name for name in sorted(other) if other[name] != first[name]] == differing


def test_a_run_that_is_to_stop_measures_due_losses_once_it_is_resumed(tmp_path: Path) -> None:
    settings = ("training.iterations=6", "training.eval_interval=2")
    run = LoggedRun(tmp_path, *settings)
    run.trainer.should_stop = lambda: run.trainer.iteration + 1 == 4
    assert run_loop(run.trainer, run.log, run.checkpoints)
    assert [line["iteration"] for line in run.directory.metrics("validation")] == [0, 2]
    assert "the run measures no losses after iteration 4" in run.log_stream.getvalue()
    again = LoggedRun(tmp_path, *settings)
    newest = list_checkpoints(run.directory.checkpoints_dir)[0].path
    assert load_checkpoint(again.trainer, newest, read_manifest(newest)) is None
    validation = Validation(again.trainer, again.log, state=read_manifest(newest).state)
    assert not run_loop(again.trainer, again.log, again.checkpoints, validation)
    assert [line["iteration"] for line in run.directory.metrics("validation")] == [0, 2, 4, 6]
    state = read_manifest(list_checkpoints(run.directory.checkpoints_dir)[0].path).state
    assert "evaluation_is_overdue" not in state


def test_the_time_of_the_next_evaluation_is_that_of_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LoggedRun(tmp_path, "training.iterations=6", "training.eval_interval=3")
    validation, measured = Validation(run.trainer, run.log), []
    validation.on_measured = measured.append
    validation.run()
    expected = []
    for _ in range(4):
        expected.append(validation.time_before_next_step())
        run.trainer.step()
    assert expected == [0.0, 0.0, *measured, 0.0] and measured[0] > 0


def test_a_resumed_run_expects_the_time_that_an_evaluation_took_before(tmp_path: Path) -> None:
    settings = ("training.iterations=6", "training.eval_interval=3", "checkpoint.interval=2")
    run = LoggedRun(tmp_path, *settings)
    run.trainer.should_stop = lambda: run.trainer.iteration + 1 == 2
    validation, measured = Validation(run.trainer, run.log), []
    validation.on_measured = measured.append
    assert run_loop(run.trainer, run.log, run.checkpoints, validation)
    newest = list_checkpoints(run.directory.checkpoints_dir)[0].path
    again, state = LoggedRun(tmp_path, *settings), read_manifest(newest).state
    load_checkpoint(again.trainer, newest, read_manifest(newest))
    assert Validation(again.trainer, state=state).time_before_next_step() == measured[-1] > 0
    del state["evaluation_seconds"]  # as an older version writes it
    for unusable in ({}, {"evaluation_seconds": None}, {"evaluation_seconds": -1.0}, {"evaluation_seconds": "1"}):
        assert Validation(again.trainer, state={**state, **unusable}).time_before_next_step() == 0.0


class SavedRun:
    """A run directory with checkpoints of iterations 2 and 4."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "run"
        self.out.mkdir()
        self.settings = (*FAST, "training.iterations=4", "checkpoint.interval=2")
        self.run = tiny_trainer(*self.settings)
        directory = RunDirectory(self.out).checkpoints_dir
        run_loop(self.run, None, CheckpointSaver(self.run, directory, None, "samples", {"torch": torch.__version__}))
        self.newest, self.older = (info.path for info in list_checkpoints(directory))

    def resume_plan(
        self, resume: str = "auto", *overrides: str, fingerprint: str = "samples", force: bool = False
    ) -> ResumePlan:
        config = tiny_config(*self.settings, *overrides)
        plan = find_checkpoint(config, self.out, resume, fingerprint.__eq__, force)
        return broadcast_plan(plan, ProcessGrid.alone().world)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return SavedRun(tmp_path_factory.mktemp("saved"))


def test_auto_takes_the_newest(saved_once: SavedRun) -> None:
    plan = saved_once.resume_plan()
    assert plan.candidates == (saved_once.newest, saved_once.older) and plan.in_same_directory and not plan.messages
    assert saved_once.resume_plan("none") == ResumePlan()
    assert saved_once.resume_plan(str(saved_once.newest)).in_same_directory
    assert saved_once.resume_plan(str(saved_once.out)).candidates[0] == saved_once.newest
    assert find_checkpoint(saved_once.run.config, saved_once.out / "empty", "auto", "".__eq__, False) == ResumePlan(
        in_same_directory=True
    )


def test_a_run_that_has_done_all_iterations_is_finished(tmp_path: Path) -> None:
    config = tiny_config("training.iterations=4")
    RunDirectory(tmp_path).write_result(Result("ok", "", 0.0, 1.0, 4))
    for resume in ("auto", str(tmp_path), str(tmp_path / "checkpoints")):
        assert find_checkpoint(config, tmp_path, resume, "".__eq__, False).is_finished
    assert not find_checkpoint(tiny_config("training.iterations=5"), tmp_path, "auto", "".__eq__, False).is_finished


@pytest.mark.parametrize(
    ("overrides", "fingerprint", "why"),
    [
        (("model.layers=3", "model.heads=2"), "samples", r"model.layers: 3, but 2 there; model.heads: 2, but 4 there"),
        (("model.norm=rmsnorm",), "samples", "model.norm: rmsnorm, but layernorm there"),
        (("model.biases=none",), "samples", "model.biases: none, but all there"),
        (("model.positions=rope",), "samples", "model.positions: rope, but learned there"),
        (("model.tied_embeddings=false",), "samples", "model.tied_embeddings: False, but True there"),
        (("model.kv_heads=2",), "samples", "model.kv_heads: 2, but 4 there"),
        (("model.seq_len=16",), "samples", "model.seq_len: 16, but 24 there"),
        ((), "others", r"the corpus, data.weights, .* is not that.* 32 consumed samples .*--force-data"),
        (("training.seed=7",), "samples", r"training.seed 7 gives another order of samples than .* 1234.*--force-data"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_run_is_refused(
    saved_once: SavedRun, overrides: Tuple[str, ...], fingerprint: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        saved_once.resume_plan("auto", *overrides, fingerprint=fingerprint)


def test_a_model_that_an_older_version_recorded_without_its_later_fields_is_a_gpt2(saved_once: SavedRun) -> None:
    manifest = read_manifest(saved_once.newest)
    fields = ("layers", "hidden", "heads", "ffn_hidden", "seq_len", "vocab_size", "embedding_layernorm")
    old = {"model": {key: manifest.config["model"][key] for key in fields}}
    older = dataclasses.replace(manifest, config=old)
    assert _check_config(tiny_config(*saved_once.settings), saved_once.newest, older, "samples".__eq__, False) == []
    with pytest.raises(UsageError, match="model.norm: rmsnorm, but layernorm there"):
        _check_config(tiny_config("model.norm=rmsnorm"), saved_once.newest, older, "samples".__eq__, False)
    nothing = dataclasses.replace(manifest, config={})
    with pytest.raises(UsageError, match=r"it holds blocks\.0\.attention\.out\.bias, which this one has not"):
        _check_config(tiny_config("model.biases=none"), saved_once.newest, nothing, "samples".__eq__, False)


def test_with_rotary_positions_the_sequence_length_may_change(tmp_path: Path) -> None:
    settings = (*FAST, "model.positions=rope", "training.iterations=2")
    run = tiny_trainer(*settings)
    CheckpointSaver(run, tmp_path).save({}, wait=True)
    (info,) = list_checkpoints(tmp_path)
    longer = tiny_config(*settings, "model.seq_len=48")
    messages = _check_config(longer, info.path, read_manifest(info.path), "".__eq__, True)
    assert messages == ["changed since the checkpoint: model.seq_len 24 -> 48"]


def test_permitted_changes_are_reported(saved_once: SavedRun) -> None:
    plan = saved_once.resume_plan(
        "auto", "training.lr=0.5", "layout.dp=2", "training.micro_batch=4", fingerprint="x", force=True
    )
    assert "training.lr 0.01 -> 0.5" in plan.messages[0] and "layout.dp 1 -> 2" in plan.messages[0]
    assert plan.messages[1].endswith("resuming all the same")


def test_an_older_checkpoint_of_the_same_run_needs_another_folder(saved_once: SavedRun) -> None:
    with pytest.raises(
        UsageError, match=r"holds a newer checkpoint, step-00000004; resume from step-00000002 in anoth"
    ):
        saved_once.resume_plan(str(saved_once.older))


@pytest.mark.parametrize("damage", ["data", "header", "manifest", "missing"])
def test_a_damaged_newest_checkpoint_is_named_and_the_older_is_resumed(tmp_path: Path, damage: str) -> None:
    saved = SavedRun(tmp_path)
    file = saved.newest / ("manifest.json" if damage == "manifest" else "data-000000.safetensors")
    content = bytearray(file.read_bytes())
    content[{"data": -5, "header": 40, "manifest": 200, "missing": 0}[damage]] ^= 4
    file.unlink()
    if damage != "missing":
        file.write_bytes(content)
    plan = saved.resume_plan()
    resumed = tiny_trainer(*saved.settings)
    path, manifest, rejected = resume_from(resumed, plan)
    assert (path, manifest.iteration, resumed.iteration, resumed.consumed_samples) == (saved.older, 2, 2, 16)
    (why,) = [line for line in (*plan.messages, *rejected) if "rejected" in line]
    assert why.startswith("checkpoint step-00000004 was rejected: ") and file.name in why
    if damage == "data":
        assert "damaged: second_moment of " in why
    judge = tiny_trainer(*saved.settings)
    for _ in range(2):
        judge.step()
    assert_equal(resumed, judge)


def test_a_run_without_a_valid_checkpoint_fails_and_does_not_start_anew(tmp_path: Path) -> None:
    saved = SavedRun(tmp_path)
    for path in (saved.newest, saved.older):
        content = bytearray((path / "data-000000.safetensors").read_bytes())
        content[-5] ^= 4
        (path / "data-000000.safetensors").write_bytes(content)
    with pytest.raises(
        RunFailed, match="step-00000004 was rejected: .*; checkpoint step-00000002 was rejected: .*anew"
    ):
        resume_from(tiny_trainer(*saved.settings), saved.resume_plan())
    for path in (saved.newest, saved.older):
        (path / "data-000000.safetensors").unlink()
    with pytest.raises(UsageError, match="no checkpoint is whole"):
        saved.resume_plan()
