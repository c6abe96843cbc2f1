"""Saving a run while it trains.

A save has three phases. First every rank copies its part of the state (the only time for which training waits), and a
thread of each rank writes it. When the sum at the end of some step says that all have written, rank 0 gets their
check sums, and a thread of it makes the checkpoint visible. When the sum says that this is done, so is the save. So
no rank ever waits for another's disk, and no communication is added to a step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from fugaku_gpt.checkpoint.data_file import Entry, FilePlan, file_name, plan_file, write_pieces
from fugaku_gpt.checkpoint.directory import (
    begin_checkpoint,
    clean_leftovers,
    commit_checkpoint,
    discard_temporary,
    require_room,
    update_tracker,
)
from fugaku_gpt.checkpoint.manifest import DataFile, LogicalTensor, Manifest, describe_file
from fugaku_gpt.checkpoint.retention import remove_old_checkpoints
from fugaku_gpt.config import RunConfig, config_values
from fugaku_gpt.errors import FugakuGptError, RunFailed
from fugaku_gpt.layout.grid import coordinates_of
from fugaku_gpt.layout.shards import logical_shapes, regions_to_write
from fugaku_gpt.parallel.buffers import nbytes
from fugaku_gpt.records.flight import CHECKPOINT
from fugaku_gpt.training.log import TrainingLog
from fugaku_gpt.training.startup import kernels_in_use
from fugaku_gpt.training.state import Storage
from fugaku_gpt.training.trainer import Step, Trainer

_LOOK_SECONDS = 1.0  # that a rank waits before it looks whether its thread has come further


class Piece(NamedTuple):
    """An entry of a data file, and where it begins in the flat tensors of the rank that writes it."""

    entry: Entry
    first: int


class SavePlan:
    """Who writes what into which file: the same on every rank, and for every save of a run.

    Args:
        kinds: of state.
        shards: of each rank, its place among the replicas in the order of shares.
    """

    def __init__(self, config: RunConfig, kinds: Sequence[str], shards: Sequence[int]) -> None:
        self._config = config
        self._kinds = tuple(kinds)
        self._shards = list(shards)
        self._dtype = "F64" if config.training.dtype == "float64" else "F32"
        self._described: List[DataFile] = []
        self._shapes = logical_shapes(config.model)
        per_file = config.checkpoint.ranks_per_file
        ranks = range(config.layout.ranks)
        self.groups = [ranks[first : first + per_file] for first in range(0, len(ranks), per_file)]

    def pieces(self, rank: int) -> List[Piece]:
        """What a rank writes, in the order in which its file holds it."""
        layout = self._config.layout
        parts = regions_to_write(self._config, coordinates_of(rank, layout, layout.order), self._shards[rank])
        return [
            Piece(Entry(kind, part.name, part.region, self._dtype), part.first)
            for kind in self._kinds
            for part in parts
        ]

    def file(self, group: int) -> FilePlan:
        """A data file: the entries of its ranks one after the other."""
        return plan_file([piece.entry for rank in self.groups[group] for piece in self.pieces(rank)])

    @property
    def described(self) -> List[DataFile]:
        """All data files but for their sums, which are zeros: what is kept of them, as thousands of ranks have millions
        of entries."""
        if not self._described:
            names = sorted(self._shapes)
            for group in range(len(self.groups)):
                plan = self.file(group)
                self._described.append(describe_file(file_name(group), plan, [0] * len(plan.entries), names))
        return self._described

    @property
    def bytes(self) -> int:
        """Of all data files."""
        return sum(file.bytes for file in self.described if file.crc32)

    def manifest(self, state: Mapping[str, Any], sums: Sequence[Sequence[int]], **facts: Any) -> Manifest:
        """The manifest of a save.

        Args:
            state: of the trainer.
            sums: CRC-32 of each rank's pieces.
            facts: fields of the manifest that are known elsewhere.
        """
        kinds = dict.fromkeys(self._kinds, self._dtype)
        tensors = {name: LogicalTensor(shape, kinds) for name, shape in self._shapes.items()}
        files = []
        for file, ranks in zip(self.described, self.groups):
            own = tuple(one for rank in ranks for one in sums[rank])
            if len(own) != len(file.crc32):
                raise ValueError(f"{file.name}: {len(own)} sums for {len(file.crc32)} entries")
            if own:
                files.append(replace(file, crc32=own))
        return Manifest(
            iteration=state["iteration"],
            consumed_samples=state["consumed_samples"],
            consumed_tokens=state["consumed_tokens"],
            tensors=tensors,
            files=tuple(files),
            state=state,
            config=config_values(self._config),
            **facts,
        )


@dataclass
class _Source:
    """What this rank writes: views of the live state, and a copy of it."""

    plan: SavePlan
    file: FilePlan
    path: str
    header: bool
    indices: List[int]
    live: List[torch.Tensor]
    copies: Optional[List[torch.Tensor]] = None

    def copy(self) -> List[torch.Tensor]:
        """The state as it is now, in memory of its own that is used again and again."""
        if self.copies is None:
            self.copies = [torch.empty_like(view) for view in self.live]
        for copy, view in zip(self.copies, self.live):
            copy.copy_(view)
        return self.copies


class _Task:
    """Something that is done beside training, or at once. Its failure is kept, not raised."""

    def __init__(self, action: Callable[[], Any], beside: bool) -> None:
        self.value: Any = None
        self.error: Optional[str] = None
        self.seconds = 0.0
        self._action = action
        self._over = threading.Event()
        if beside:
            threading.Thread(target=self._run, name="checkpoint", daemon=True).start()
        else:
            self._run()

    def _run(self) -> None:
        before = time.perf_counter()
        try:
            self.value = self._action()
        except Exception as error:  # whatever it is, all ranks must hear of it
            self.error = _words(error)
        self.seconds = time.perf_counter() - before
        self._over.set()

    @property
    def state(self) -> Tuple[bool, bool]:
        """Whether it is done, and whether it has failed."""
        over = self._over.is_set()
        return over and self.error is None, over and self.error is not None

    def wait(self, look: Callable[[], None]) -> None:
        """Until it is over, looking round now and then."""
        while not self._over.wait(_LOOK_SECONDS):
            look()


@dataclass
class _Save:
    """A checkpoint on its way; on ranks other than 0 without what concerns the folder."""

    iteration: int
    source: _Source
    temporary: Path
    task: Optional[_Task]
    state: Dict[str, Any]
    snapshot_seconds: float = 0.0
    write_seconds: float = 0.0
    committing: bool = False
    begun: int = 0  # pieces


class Checkpoints:
    """Saves a trainer's state to a directory; every rank makes the same calls.

    Args:
        directory: of the run's checkpoints.
        log: of rank 0.
        data_fingerprint, build: for the manifest; asked of rank 0 alone.
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
        self.saved_iteration: Optional[int] = None  # of the last one that went well
        trainer.saving = self._progress

    @property
    def copy_bytes(self) -> int:
        """Memory of this rank's copies of what it saves; asks nobody, from any thread."""
        return sum(nbytes(*(source.copies or ())) for source in list(self._sources.values()))

    @property
    def on_its_way(self) -> Optional[int]:
        """The iteration of the checkpoint that is being written, if one is."""
        return self._save.iteration if self._save is not None else None

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint is to be begun after an iteration."""
        return self._settings.interval is not None and iteration % self._settings.interval == 0

    def save(self, extra: Mapping[str, Any], *, wait: bool = False) -> None:
        """Begin to save the state as it is now. One that is still being written is waited for. Collective.

        Args:
            extra: more scalars to keep, for whoever loads.
            wait: until it is visible.

        Raises:
            RunFailed: with ``wait``: it could not be written. Without, a failure is said, and training goes on.
        """
        if self._save is not None:
            if self._log is not None:
                self._log.say(f"the checkpoint of iteration {self._save.iteration} is still being written: waiting")
            self.finish()
        self._world.mark_phase(CHECKPOINT, micro_batch=-1)
        before = time.perf_counter()
        iteration = self._trainer.iteration
        source = self._source()
        temporary, error = self._world.broadcast_json(self._begin(iteration, source) if self._world.rank == 0 else None)
        if error is not None:
            self._failed(iteration, error, wait)
            return
        beside = self._settings.asynchronous and not wait
        arrays = [tensor.numpy() for tensor in (source.copy() if beside else source.live)]
        pieces = [
            (index, array.reshape(source.file.entries[index].region.shape))
            for index, array in zip(source.indices, arrays)
        ]
        state = {**self._trainer.state(), "kernels": kernels_in_use(self._trainer.config), **extra}
        save = self._save = _Save(iteration, source, Path(temporary), None, state)

        def counted() -> Iterator[Tuple[int, Any]]:
            for piece in pieces:
                save.begun += 1
                if not beside:  # else this is another thread than the one that records progress
                    self._world.mark_phase(CHECKPOINT)
                yield piece

        def write() -> List[int]:
            if not source.file.entries:
                return []
            return write_pieces(save.temporary / source.path, source.file, counted(), header=source.header)

        save.snapshot_seconds = time.perf_counter() - before
        save.task = _Task(write, beside)
        if not beside:
            self.finish(must=wait)

    def advance(self, step: Step) -> None:
        """After each step: go on to the next phase once the step's sum says that the one before is over; collective
        where it says so."""
        save = self._save
        over = step.written + step.not_written
        if save is None or over != (1 if save.committing else self._world.size):
            return
        if save.committing:
            assert save.task is not None
            # rank 0 alone knows why, and speaks of it
            self._end(save, None if step.written else save.task.error or "not written", must=False)
        else:
            self._gather(save, beside=True)

    def finish(self, must: bool = False) -> None:
        """Wait for what is being written; collective.

        Args:
            must: whether the run cannot go on without it.

        Raises:
            RunFailed: with ``must``: it could not be written.
        """
        save = self._save
        if save is None:
            return
        assert save.task is not None
        self._world.mark_phase(CHECKPOINT, micro_batch=-1)
        if not save.committing:
            save.task.wait(self._look(save))
            self._gather(save, beside=False)
        if self._world.rank == 0:
            save.task.wait(self._look(save))
        self._end(save, self._world.broadcast_json(save.task.error if self._world.rank == 0 else None), must)

    def _progress(self) -> Tuple[bool, bool]:
        save = self._save
        if save is None or save.task is None or (save.committing and self._world.rank != 0):
            return False, False
        return save.task.state

    def _look(self, save: _Save) -> Callable[[], None]:
        """What tells the watchdog that the writing goes on, as long as it does."""
        begun = save.begun

        def look() -> None:
            nonlocal begun
            if save.begun != begun:
                begun = save.begun
                self._world.mark_phase(CHECKPOINT)

        return look

    def _begin(self, iteration: int, source: _Source) -> Tuple[str, Optional[str]]:
        """(folder to write to, why there is none); on rank 0."""
        try:
            clean_leftovers(self._directory)
            require_room(self._directory, source.plan.bytes)
            return str(begin_checkpoint(self._directory, iteration)), None
        except (OSError, FugakuGptError) as error:
            return "", _words(error)

    def _gather(self, save: _Save, beside: bool) -> None:
        """Give rank 0 what the ranks have to say of their writing, and have it make an end."""
        assert save.task is not None
        self._world.mark_phase(CHECKPOINT, micro_batch=-1)
        task = save.task
        reports = self._world.gather_json([task.error, task.value, task.seconds, save.snapshot_seconds])
        save.committing = True
        if reports is None:
            return
        errors, sums, written_in, copied_in = zip(*reports)
        save.write_seconds, save.snapshot_seconds = max(written_in), max(copied_in)
        first = next(((rank, error) for rank, error in enumerate(errors) if error is not None), None)

        def finish() -> Tuple[str, Optional[str]]:
            try:
                if first is not None:
                    raise RunFailed(f"rank {first[0]}: {first[1]}")
                path = commit_checkpoint(save.temporary, save.source.plan.manifest(save.state, sums, **self._facts))
            except BaseException:
                discard_temporary(save.temporary)
                raise
            try:
                update_tracker(path)
                remove_old_checkpoints(self._directory, self._settings.keep_last, self._settings.keep_every)
            except (OSError, FugakuGptError) as error:  # the new one is there all the same
                return path.name, _words(error)
            return path.name, None

        save.task = _Task(finish, beside)

    def _end(self, save: _Save, error: Optional[str], must: bool) -> None:
        """The last phase is over: tell what came of it."""
        self._save = None
        if error is not None:
            self._failed(save.iteration, error, must)
            return
        self.saved_iteration = save.iteration
        if self._log is not None and save.task is not None:
            name, kept = save.task.value
            self._log.checkpoint(
                save.iteration,
                name,
                save.source.plan.bytes,
                self._world.size,
                save.snapshot_seconds,
                save.write_seconds,
            )
            if kept is not None:
                self._log.say(f"{name} is whole; older checkpoints are kept: {kept}")

    def _failed(self, iteration: int, error: str, must: bool) -> None:
        if self._log is not None:
            self._log.no_checkpoint(iteration, error)
        if must:
            raise RunFailed(f"the checkpoint of iteration {iteration} could not be written: {error}")

    def _source(self) -> _Source:
        kinds = self._trainer.state_kinds
        if kinds not in self._sources:
            world = self._world
            if not self._shards:
                shard = torch.tensor([self._trainer.grid.replicas.rank])
                self._shards = [int(one) for one in world.all_gather(shard)]
            plan = SavePlan(self._trainer.config, kinds, self._shards)
            group = world.rank // self._settings.ranks_per_file
            before = [rank for rank in plan.groups[group] if rank < world.rank]
            first = sum(len(plan.pieces(rank)) for rank in before)
            pieces = plan.pieces(world.rank)
            live = _views(pieces, self._trainer.storages())
            indices = list(range(first, first + len(pieces)))
            # kinds never become fewer, and the copies of fewer are of no use
            self._sources = {kinds: _Source(plan, plan.file(group), file_name(group), not before, indices, live)}
        return self._sources[kinds]


def _views(pieces: Sequence[Piece], storages: Sequence[Storage]) -> List[torch.Tensor]:
    """The live elements of each piece; a piece never crosses the end of a storage."""
    by_kind: Dict[str, List[Storage]] = {}
    for storage in storages:
        by_kind.setdefault(storage.kind, []).append(storage)
    views = []
    for piece in pieces:
        size = piece.entry.region.size
        storage = next(
            one for one in by_kind[piece.entry.kind] if one.first <= piece.first and piece.first + size <= one.stop
        )
        start = piece.first - storage.first
        views.append(storage.values.detach()[start : start + size])
    return views


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return str(error) if isinstance(error, FugakuGptError) else f"{type(error).__name__}: {error}"
