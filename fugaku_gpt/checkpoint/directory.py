"""Checkpoints of a run: folders ``step-<iteration>`` that are whole or not there.

A checkpoint is written in a hidden neighbour, ``.step-<iteration>.<token>.tmp``, and made visible by one rename after
everything in it is on the disk; the manifest goes in last, and the tracker ``latest.json`` is written after the rename.
No step changes a checkpoint that is there: a second one of the same iteration is called ``step-<iteration>-2``. So
whenever the writer dies, what is visible is whole, and what is hidden is cleaned away by the next save.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.manifest import MANIFEST, Manifest, manifest_text
from fugaku_gpt.errors import CheckpointError, RunFailed

TRACKER = "latest.json"
TRACKER_VERSION = 1
_VISIBLE = re.compile(r"step-(\d{8,})(?:-([2-9]|[1-9]\d+))?")
_HIDDEN = re.compile(r"\.(step-\d{8,}|latest\.json)\.[0-9a-z]+\.tmp")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that is visible.

    Attributes:
        path: its folder.
        iteration: by its name.
        attempt: 1, or which one of this iteration.
    """

    path: Path
    iteration: int
    attempt: int


def begin_checkpoint(directory: Path, iteration: int) -> Path:
    """Make the hidden folder to write a checkpoint's files to.

    Args:
        directory: of all checkpoints of the run; made too, but not its parents.

    Raises:
        OSError: it cannot be made.
    """
    if not file_system.exists(directory):
        file_system.make_folder(directory)
        file_system.sync_folder(directory.absolute().parent)
    path = directory / f".step-{iteration:08d}.{uuid.uuid4().hex}.tmp"
    file_system.make_folder(path)
    return path


def commit_checkpoint(temporary: Path, manifest: Manifest) -> Path:
    """Make a checkpoint visible, once all of its files are written; returns its folder. :func:`track` comes next.

    Raises:
        CheckpointError: a data file is missing or not of its length.
        OSError: as the file system says it; the checkpoint is then visible and whole, or not visible.
    """
    for file in manifest.files:
        size = file_system.size_of(temporary / file.name)
        if size != file.bytes:
            raise CheckpointError(f"{temporary / file.name}: {size:,} bytes were written, not {file.bytes:,}")
    file_system.write_file(temporary / MANIFEST, manifest_text(manifest))
    file_system.sync_folder(temporary)
    directory = temporary.parent
    taken = [info.attempt for info in list_checkpoints(directory) if info.iteration == manifest.iteration]
    attempt = max(taken, default=0) + 1
    path = directory / (f"step-{manifest.iteration:08d}" + (f"-{attempt}" if attempt > 1 else ""))
    file_system.rename(temporary, path)
    file_system.sync_folder(directory)
    return path


def update_tracker(checkpoint: Path) -> None:
    """Have the tracker name a checkpoint that is visible.

    Raises:
        OSError: as the file system says it; the tracker is then as it was, or names this one.
    """
    directory = checkpoint.parent
    temporary = directory / f".{TRACKER}.{uuid.uuid4().hex}.tmp"
    text = json.dumps({"version": TRACKER_VERSION, "name": checkpoint.name}, indent=2) + "\n"
    try:
        file_system.write_file(temporary, text.encode("utf-8"))
        file_system.rename(temporary, directory / TRACKER)
        file_system.sync_folder(directory)
    except OSError:
        discard_temporary(temporary)
        raise


def discard_temporary(temporary: Path) -> None:
    """Remove a hidden folder. What cannot be removed now is removed by the next save."""
    with contextlib.suppress(OSError):
        remove_tree(temporary)


def clean_leftovers(directory: Path) -> List[str]:
    """Remove what writers that were killed have left; returns the names of what is gone.

    Only one run at a time writes a directory. What cannot be removed costs room and nothing else, and is tried again at
    the next save: NFS keeps the files of a process that is not quite dead.

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
    """The visible checkpoints, newest first; empty where the directory is not there.

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
    """Whether a folder of this name is looked at as a checkpoint."""
    return _VISIBLE.fullmatch(name) is not None


def tracked_checkpoint(directory: Path) -> Optional[Path]:
    """The checkpoint that the tracker names: the one that was last written. None where there is no tracker that can be
    read, or its checkpoint is gone."""
    try:
        values = json.loads(file_system.read_file(directory / TRACKER).decode("utf-8"))
        name = values["name"] if values["version"] == TRACKER_VERSION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or not is_checkpoint_name(name) or not file_system.is_folder(directory / name):
        return None
    return directory / name


def require_room(directory: Path, needed: int) -> None:
    """Check that a checkpoint fits on the disk.

    Args:
        directory: of the checkpoints; need not be there yet.
        needed: bytes.

    Raises:
        RunFailed: it does not.
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
    """Remove a file, or a folder with what is in it."""
    if not file_system.is_folder(path):
        file_system.remove_file(path)
        return
    for name in file_system.names_in(path):
        remove_tree(path / name)
    file_system.remove_folder(path)
