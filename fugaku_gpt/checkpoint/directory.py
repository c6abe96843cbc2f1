"""Checkpoints of a run: folders ``step-<iteration>`` that are either complete or absent.

A checkpoint is written in a hidden neighbour, ``.step-<iteration>.<token>.tmp``, and made visible by one rename after
all its files are on the disk; the manifest is written last, and the tracker ``latest.json`` after the rename, as is
``best.json``, which names the checkpoint with the lowest of some loss, where a run keeps it. No step
changes an existing checkpoint: a second one of the same iteration is called ``step-<iteration>-2``. So whenever the
writer dies, visible folders are complete, and hidden ones are removed by the next save.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, List, Mapping, Optional

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.file_list import parts_of
from fugaku_gpt.checkpoint.manifest import MANIFEST, Manifest, manifest_text
from fugaku_gpt.errors import CheckpointError, RunFailed
from fugaku_gpt.typed_json import is_number
from fugaku_gpt.versioned_json import parse_versioned_json

TRACKER = "latest.json"
TRACKER_VERSION = 1
BEST = "best.json"
BEST_VERSION = 1
_VISIBLE = re.compile(r"step-(\d{8,20})(?:-([2-9]|[1-9]\d{1,9}))?")  # no longer than any name of a file may be
_HIDDEN = re.compile(r"\.(step-\d{8,}|latest\.json|best\.json)\.[0-9a-z]+\.tmp")


@dataclass(frozen=True)
class CheckpointInfo:
    """A visible checkpoint.

    Attributes:
        path: its folder.
        iteration: iteration according to its name.
        attempt: number among the checkpoints of this iteration, from 1.
    """

    path: Path
    iteration: int
    attempt: int


def begin_checkpoint(directory: Path, iteration: int) -> Path:
    """Make the hidden folder into which a checkpoint's files are written.

    Args:
        directory: folder of all checkpoints of the run; made as well, but not its parents.

    Raises:
        OSError: a folder cannot be made.
    """
    if not file_system.exists(directory):
        file_system.make_folder(directory)
        file_system.sync_folder(directory.absolute().parent)
    path = directory / f".step-{iteration:08d}.{uuid.uuid4().hex}.tmp"
    file_system.make_folder(path)
    return path


def commit_checkpoint(temporary: Path, manifest: Manifest) -> Path:
    """Make a checkpoint visible after all its files are written; returns its folder. Call :func:`update_tracker` next.

    Raises:
        CheckpointError: a data file is missing or does not have its length.
        OSError: as reported by the file system; the checkpoint is then visible and complete, or not visible.
    """
    for file in manifest.files:
        size = file_system.size_of(temporary / file.name)
        if size != file.bytes:
            raise CheckpointError(f"{temporary / file.name}: {size:,} bytes were written, not {file.bytes:,}")
    parts = parts_of(manifest.files)
    for part, content in parts:
        file_system.write_file(temporary / part.name, content)
    file_system.write_file(temporary / MANIFEST, manifest_text(manifest, [part for part, _ in parts]))
    file_system.sync_folder(temporary)
    directory = temporary.parent
    taken = [info.attempt for info in list_checkpoints(directory) if info.iteration == manifest.iteration]
    attempt = max(taken, default=0) + 1
    path = directory / (f"step-{manifest.iteration:08d}" + (f"-{attempt}" if attempt > 1 else ""))
    file_system.rename(temporary, path)
    file_system.sync_folder(directory)
    return path


def update_tracker(checkpoint: Path) -> None:
    """Make the tracker name a visible checkpoint.

    Raises:
        OSError: as reported by the file system; the tracker is then unchanged, or names this checkpoint.
    """
    _replace_record(checkpoint.parent, TRACKER, {"version": TRACKER_VERSION, "name": checkpoint.name})


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the lowest value of a loss.

    Attributes:
        name: name of its folder.
        loss: name of the loss (``checkpoint.keep_best``).
        value: that of this checkpoint.
        iteration: that after which it was written.
    """

    name: str
    loss: str
    value: float
    iteration: int


def write_best(directory: Path, best: BestCheckpoint) -> None:
    """Record which checkpoint of a directory is the best; nothing is written if that is recorded already.

    Raises:
        OSError: as reported by the file system; the record is then unchanged, or names this checkpoint.
    """
    try:
        if read_best(directory) == best:
            return
    except CheckpointError:  # a damaged record is replaced
        pass
    _replace_record(directory, BEST, {"version": BEST_VERSION, **asdict(best)})


def remove_best(directory: Path) -> None:
    """Remove the record of the best checkpoint, if there is one.

    Raises:
        OSError: as reported by the file system.
    """
    try:
        file_system.remove_file(directory / BEST)
    except FileNotFoundError:
        return
    file_system.sync_folder(directory)


def read_best(directory: Path) -> Optional[BestCheckpoint]:
    """Return the recorded best checkpoint of a directory, which may be gone; None if there is no record.

    Raises:
        CheckpointError: the record cannot be read, or is damaged.
    """
    path = directory / BEST
    try:
        text = file_system.read_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_versioned_json(
        text, path, "the record of a best checkpoint", [BEST_VERSION], _best_of, mend="remove it", error=CheckpointError
    )


def _best_of(values: Mapping[str, Any]) -> BestCheckpoint:
    name, loss, value, iteration = (values[key] for key in ("name", "loss", "value", "iteration"))
    if not isinstance(name, str) or not is_checkpoint_name(name):
        raise ValueError("its name is not that of a checkpoint")
    if not isinstance(loss, str) or not is_number(value) or type(iteration) is not int:
        raise ValueError("its loss is not a name, or its value or iteration not a number")
    return BestCheckpoint(name, loss, float(value), iteration)


def _replace_record(directory: Path, name: str, values: Mapping[str, Any]) -> None:
    """Write a small record by one rename; the one before is complete until then."""
    temporary = directory / f".{name}.{uuid.uuid4().hex}.tmp"
    text = json.dumps(values, indent=2) + "\n"
    try:
        file_system.write_file(temporary, text.encode("utf-8"))
        file_system.rename(temporary, directory / name)
        file_system.sync_folder(directory)
    except OSError:
        discard_temporary(temporary)
        raise


def discard_temporary(temporary: Path) -> None:
    """Remove a hidden folder or file. If it cannot be removed, the next save tries again."""
    with contextlib.suppress(OSError):
        remove_tree(temporary)


def clean_leftovers(directory: Path) -> List[str]:
    """Remove hidden folders and files of writers that were killed; returns the names of those that were removed.

    Only one run at a time writes a directory. Leftovers that cannot be removed only take up space, and are tried again
    at the next save: NFS keeps the files of a process that is not quite dead.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        names = [name for name in file_system.names_in(directory) if _HIDDEN.fullmatch(name)]
    except FileNotFoundError:
        return []
    gone = []
    for name in names:
        with contextlib.suppress(OSError):
            remove_tree(directory / name)
            gone.append(name)
    return gone


def list_checkpoints(directory: Path) -> List[CheckpointInfo]:
    """List the visible checkpoints, newest first; empty if the directory does not exist.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    try:
        names = file_system.names_in(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}") from None
    checkpoints = []
    for name in names:
        matched = _VISIBLE.fullmatch(name)
        if matched is not None:
            checkpoints.append(CheckpointInfo(directory / name, int(matched[1]), int(matched[2] or 1)))
    return sorted(checkpoints, key=lambda info: (info.iteration, info.attempt), reverse=True)


def is_checkpoint_name(name: str) -> bool:
    """True if a folder of this name is a visible checkpoint."""
    return _VISIBLE.fullmatch(name) is not None


def tracked_checkpoint(directory: Path) -> Optional[Path]:
    """The checkpoint that the tracker names, which is the one written last. None if there is no readable tracker, or if
    its checkpoint is gone."""
    tracker = directory / TRACKER
    try:
        name = parse_versioned_json(
            file_system.read_file(tracker),
            tracker,
            "a tracker of checkpoints",
            [TRACKER_VERSION],
            itemgetter("name"),
            mend="remove it",
            error=CheckpointError,
        )
    except (OSError, CheckpointError):
        return None
    if not isinstance(name, str) or not is_checkpoint_name(name) or not file_system.is_folder(directory / name):
        return None
    return directory / name


def require_room(directory: Path, needed: int) -> None:
    """Check that a checkpoint fits on the disk.

    Args:
        directory: folder of the checkpoints; need not exist yet.
        needed: number of bytes.

    Raises:
        RunFailed: the checkpoint does not fit.
    """
    there = directory.absolute()
    while not file_system.exists(there):
        there = there.parent
    free = file_system.free_bytes(there)
    if needed > free:
        raise RunFailed(
            f"{directory}: a checkpoint needs {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free; make "
            "room, keep fewer checkpoints (checkpoint.keep_last), or choose another --out"
        )


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder with its content."""
    if not file_system.is_folder(path):
        file_system.remove_file(path)
        return
    for name in file_system.names_in(path):
        remove_tree(path / name)
    file_system.remove_folder(path)
