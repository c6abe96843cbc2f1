"""Saving a run while it trains.

A save has three phases:

1. Every rank copies its part of the state, which is all that training waits for, and a thread of the rank writes it.
2. When the sum at the end of some step says that all ranks have written, rank 0 gathers their checksums, and a thread
   of rank 0 makes the checkpoint visible.
3. When the sum says that this is done, the save is complete.

So no rank ever waits for another's disk, and no communication is added to a step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from fugaku_gpt.checkpoint.data_file import FilePlan, file_name, write_pieces
from fugaku_gpt.checkpoint.directory import (
    begin_checkpoint,
    clean_leftovers,
    commit_checkpoint,
    discard_temporary,
    require_room,
    update_tracker,
)
from fugaku_gpt.checkpoint.retention import remove_old_checkpoints
from fugaku_gpt.errors import FugakuGptError, RunFailed
from fugaku_gpt.parallel.buffers import nbytes
from fugaku_gpt.records.flight import CHECKPOINT
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.save_plan import FileSummary, Piece, SavePlan
from fugaku_gpt.training.startup import kernels_in_use
from fugaku_gpt.training.state import Storage
from fugaku_gpt.training.trainer import Step, Trainer

_POLL_SECONDS = 1.0  # between two looks at whether the writing thread is making progress


@dataclass
class _Source:
    """The state that this rank writes: views of the live tensors, and a copy of them.

    Attributes:
        file: plan of the data file to which this rank writes.
        summary: of the file, on the first rank that writes to it; None on the others.
        total_bytes: length of the data files of all ranks together.
        indices: of this rank's entries in the file.
    """

    plan: SavePlan
    file: FilePlan
    path: str
    summary: Optional[FileSummary]
    total_bytes: int
    indices: List[int]
    live: List[torch.Tensor]
    copies: Optional[List[torch.Tensor]] = None

    def copy(self) -> List[torch.Tensor]:
        """Copy the live state into buffers that are allocated once and reused."""
        if self.copies is None:
            self.copies = [torch.empty_like(view) for view in self.live]
        for copy, view in zip(self.copies, self.live):
            copy.copy_(view)
        return self.copies


class _Task:
    """An action that runs on a thread beside training, or at once. A failure is stored, not raised."""

    def __init__(self, action: Callable[[], Any], in_background: bool) -> None:
        self.value: Any = None
        self.error: Optional[str] = None
        self.seconds = 0.0
        self._action = action
        self._done = threading.Event()
        if in_background:
            threading.Thread(target=self._run, name="checkpoint", daemon=True).start()
        else:
            self._run()

    def _run(self) -> None:
        before = time.perf_counter()
        try:
            self.value = self._action()
        except Exception as error:  # whatever it is, it must reach all ranks
            self.error = _error_message(error)
        self.seconds = time.perf_counter() - before
        self._done.set()

    @property
    def status(self) -> Tuple[bool, bool]:
        """(is done, has failed)."""
        is_over = self._done.is_set()
        return is_over and self.error is None, is_over and self.error is not None

    def wait(self, on_poll: Callable[[], None]) -> None:
        """Wait until the action is over, calling ``on_poll`` about once a second."""
        while not self._done.wait(_POLL_SECONDS):
            on_poll()


@dataclass
class _Save:
    """A checkpoint that is being saved. Only on rank 0 does it hold a usable folder and manifest state."""

    iteration: int
    source: _Source
    temporary: Path
    task: Optional[_Task]
    state: Dict[str, Any]
    snapshot_seconds: float = 0.0
    write_seconds: float = 0.0
    committing: bool = False
    pieces_begun: int = 0


class CheckpointSaver:
    """Saves a trainer's state to a directory; every rank makes the same calls.

    Args:
        directory: the folder of the run's checkpoints.
        log: the run's log, on rank 0 only.
        data_fingerprint, build: recorded in the manifest; only rank 0's values count.
    """

    def __init__(
        self,
        trainer: Trainer,
        directory: Path,
        log: Optional[TrainingLog] = None,
        data_fingerprint: str = "",
        build: Optional[Mapping[str, Any]] = None,
    ) -> None:
        self._trainer = trainer
        self._world = trainer.grid.world
        self._settings = trainer.config.checkpoint
        self._directory = directory
        self._log = log
        self._facts = {"data_fingerprint": data_fingerprint, "build": dict(build or {})}
        self._shards: List[int] = []
        self._sources: Dict[Tuple[str, ...], _Source] = {}
        self._save: Optional[_Save] = None
        self.saved_iteration: Optional[int] = None  # of the last successful save
        self.failure: Optional[str] = None  # why the last checkpoint could not be written; None if it was
        trainer.save_status = self._status

    @property
    def copy_bytes(self) -> int:
        """Bytes of this rank's copies of what it saves; local, callable from any thread."""
        return sum(nbytes(*(source.copies or ())) for source in list(self._sources.values()))

    @property
    def iteration_being_saved(self) -> Optional[int]:
        """The iteration of the checkpoint that is being saved; None if there is none."""
        return self._save.iteration if self._save is not None else None

    def is_due(self, iteration: int) -> bool:
        """True if a checkpoint is to be started after this iteration."""
        return self._settings.interval is not None and iteration % self._settings.interval == 0

    def save(self, extra: Mapping[str, Any], *, wait: bool = False) -> None:
        """Start to save the current state, after waiting for a save that is still running. Collective.

        Args:
            extra: more scalars to save with the state.
            wait: return only when the checkpoint is visible.

        Raises:
            RunFailed: with ``wait``, the checkpoint could not be written. Without ``wait`` a failure is logged, and
                training continues.
        """
        if self._save is not None:
            if self._log is not None:
                self._log.print_line(
                    f"the checkpoint of iteration {self._save.iteration} is still being written: waiting"
                )
            self.finish()
        self._world.mark_phase(CHECKPOINT, micro_batch=-1)
        before = time.perf_counter()
        iteration = self._trainer.iteration
        source = self._source()
        temporary, error = self._world.broadcast_json(self._begin(iteration, source) if self._world.rank == 0 else None)
        if error is not None:
            self._report_failure(iteration, error, wait)
            return
        in_background = self._settings.asynchronous and not wait
        arrays = [tensor.numpy() for tensor in (source.copy() if in_background else source.live)]
        pieces = [
            (index, array.reshape(source.file.entries[index].region.shape))
            for index, array in zip(source.indices, arrays)
        ]
        state = {**self._trainer.state(), "kernels": kernels_in_use(self._trainer.config), **extra}
        save = self._save = _Save(iteration, source, Path(temporary), None, state)

        def counted_pieces() -> Iterator[Tuple[int, Any]]:
            for piece in pieces:
                save.pieces_begun += 1
                if not in_background:  # in the background this is not the thread that records progress
                    self._world.mark_phase(CHECKPOINT)
                yield piece

        def write() -> List[int]:
            if not source.file.entries:
                return []
            return write_pieces(
                save.temporary / source.path, source.file, counted_pieces(), header=source.summary is not None
            )

        save.snapshot_seconds = time.perf_counter() - before
        save.task = _Task(write, in_background)
        if not in_background:
            self.finish(must_succeed=wait)

    def advance(self, step: Step) -> None:
        """Start the next phase once a step's sum says that the phase before is over. Called after each step; collective
        when the sum says so."""
        save = self._save
        reports = step.written + step.not_written
        if save is None or reports != (1 if save.committing else self._world.size):
            return
        if save.committing:
            assert save.task is not None
            # only rank 0 knows the reason, and only rank 0 logs it
            self._conclude(save, None if step.written else save.task.error or "not written", must_succeed=False)
        else:
            self._start_commit(save, in_background=True)

    def finish(self, must_succeed: bool = False) -> None:
        """Wait for the save that is running, if any; collective.

        Args:
            must_succeed: the run cannot continue without this checkpoint.

        Raises:
            RunFailed: with ``must_succeed``, the checkpoint could not be written.
        """
        save = self._save
        if save is None:
            return
        assert save.task is not None
        self._world.mark_phase(CHECKPOINT, micro_batch=-1)
        if not save.committing:
            save.task.wait(self._progress_marker(save))
            self._start_commit(save, in_background=False)
        if self._world.rank == 0:
            save.task.wait(self._progress_marker(save))
        self._conclude(
            save, self._world.broadcast_json(save.task.error if self._world.rank == 0 else None), must_succeed
        )

    def _status(self) -> Tuple[bool, bool]:
        save = self._save
        if save is None or save.task is None or (save.committing and self._world.rank != 0):
            return False, False
        return save.task.status

    def _progress_marker(self, save: _Save) -> Callable[[], None]:
        """Return a function that reports progress to the watchdog if more pieces have been written."""
        pieces_begun = save.pieces_begun

        def mark_progress() -> None:
            nonlocal pieces_begun
            if save.pieces_begun != pieces_begun:
                pieces_begun = save.pieces_begun
                self._world.mark_phase(CHECKPOINT)

        return mark_progress

    def _begin(self, iteration: int, source: _Source) -> Tuple[str, Optional[str]]:
        """Return (folder to write to, error message or None); on rank 0."""
        try:
            clean_leftovers(self._directory)
            require_room(self._directory, source.total_bytes)
            return str(begin_checkpoint(self._directory, iteration)), None
        except (OSError, FugakuGptError) as error:
            return "", _error_message(error)

    def _start_commit(self, save: _Save, in_background: bool) -> None:
        """Gather the ranks' reports on rank 0, and have rank 0 commit or discard the checkpoint."""
        assert save.task is not None
        self._world.mark_phase(CHECKPOINT, micro_batch=-1)
        task = save.task
        reports = self._world.gather_json(
            [task.error, task.value, save.source.summary, task.seconds, save.snapshot_seconds]
        )
        save.committing = True
        if reports is None:
            return
        errors, checksums, summaries, written_in, copied_in = zip(*reports)
        save.write_seconds, save.snapshot_seconds = max(written_in), max(copied_in)
        first_error = next(((rank, error) for rank, error in enumerate(errors) if error is not None), None)

        def commit() -> Tuple[str, Optional[str]]:
            try:
                if first_error is not None:
                    raise RunFailed(f"rank {first_error[0]}: {first_error[1]}")
                files = [FileSummary(*summary) if summary is not None else None for summary in summaries]
                manifest = save.source.plan.manifest(save.state, files, checksums, **self._facts)
                path = commit_checkpoint(save.temporary, manifest)
            except BaseException:
                discard_temporary(save.temporary)
                raise
            try:
                update_tracker(path)
                settings = self._settings
                remove_old_checkpoints(self._directory, settings.keep_last, settings.keep_every, settings.keep_best)
            except (OSError, FugakuGptError) as error:  # the new checkpoint is visible all the same
                return path.name, _error_message(error)
            return path.name, None

        save.task = _Task(commit, in_background)

    def _conclude(self, save: _Save, error: Optional[str], must_succeed: bool) -> None:
        """End the save, and log its result."""
        self._save = None
        if error is not None:
            self._report_failure(save.iteration, error, must_succeed)
            return
        self.saved_iteration, self.failure = save.iteration, None
        if self._log is not None and save.task is not None:
            name, cleanup_error = save.task.value
            self._log.checkpoint(
                save.iteration,
                name,
                save.source.total_bytes,
                self._world.size,
                save.snapshot_seconds,
                save.write_seconds,
            )
            if cleanup_error is not None:
                self._log.print_line(f"{name} is whole; older checkpoints are kept: {cleanup_error}")

    def _report_failure(self, iteration: int, error: str, must_succeed: bool) -> None:
        self.failure = f"the checkpoint of iteration {iteration} could not be written: {error}"
        if self._log is not None:
            self._log.failed_checkpoint(iteration, error)
        if must_succeed:
            raise RunFailed(self.failure)

    def _source(self) -> _Source:
        kinds = self._trainer.state_kinds
        if kinds not in self._sources:
            world = self._world
            if not self._shards:
                shard = torch.tensor([self._trainer.grid.replicas.rank])
                self._shards = [int(index) for index in world.all_gather(shard)]
            plan = SavePlan(self._trainer.config, kinds, self._shards)
            group = world.rank // self._settings.ranks_per_file
            earlier_ranks = [rank for rank in plan.groups[group] if rank < world.rank]
            first = sum(len(plan.pieces(rank)) for rank in earlier_ranks)
            pieces, file = plan.pieces(world.rank), plan.data_file(group)
            summary = None if earlier_ranks else plan.summarize(file)
            length = file.length if summary is not None and summary.entries else 0
            total_bytes = int(world.all_gather(torch.tensor([length])).sum())
            live = _views(pieces, self._trainer.storages())
            indices = list(range(first, first + len(pieces)))
            # the set of kinds only grows, so the copies of an earlier, smaller set are dropped
            self._sources = {kinds: _Source(plan, file, file_name(group), summary, total_bytes, indices, live)}
        return self._sources[kinds]


def _views(pieces: Sequence[Piece], storages: Sequence[Storage]) -> List[torch.Tensor]:
    """Return the live elements of each piece; a piece never crosses the end of a storage."""
    by_kind: Dict[str, List[Storage]] = {}
    for storage in storages:
        by_kind.setdefault(storage.kind, []).append(storage)
    views = []
    for piece in pieces:
        size = piece.entry.region.size
        storage = next(
            candidate
            for candidate in by_kind[piece.entry.kind]
            if candidate.first <= piece.first and piece.first + size <= candidate.stop
        )
        start = piece.first - storage.first
        views.append(storage.values.detach()[start : start + size])
    return views


def _error_message(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return str(error) if isinstance(error, FugakuGptError) else f"{type(error).__name__}: {error}"
