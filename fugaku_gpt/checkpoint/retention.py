"""Verifies the checkpoints of a run, and removes old ones."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from fugaku_gpt.checkpoint import CHECKPOINTS, file_system
from fugaku_gpt.checkpoint.directory import (
    CheckpointInfo,
    is_checkpoint_name,
    list_checkpoints,
    remove_tree,
    tracked_checkpoint,
)
from fugaku_gpt.checkpoint.manifest import MANIFEST, DataFile, read_manifest
from fugaku_gpt.checkpoint.reader import damage_message, open_shard
from fugaku_gpt.checkpoint.safetensors import NotSafetensors, checksum
from fugaku_gpt.errors import CheckpointError
from fugaku_gpt.layout.regions import Region, tiles

Kinds = Mapping[str, Mapping[str, str]]  # tensor → kind → dtype


class NewestValid(NamedTuple):
    """The newest valid checkpoint, if any; and (name, reason) of newer ones that are not valid."""

    path: Optional[Path]
    rejected: List[Tuple[str, str]]


def verify_checkpoint(checkpoint: Path, deep: bool = True) -> List[str]:
    """List the problems of a checkpoint, naming file, tensor and coordinates; empty if it is valid.

    Args:
        deep: whether to read all data and compare checksums, too. Otherwise only the manifest, lengths and headers are
            checked, and that the pieces make up every tensor exactly once.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    problems: List[str] = []
    pieces: Dict[Tuple[str, str], List[Region]] = {
        (kind, name): [] for name, tensor in manifest.tensors.items() for kind in tensor.kinds
    }
    names = manifest.tensor_names
    for file in manifest.files:
        kinds_in_file = {names[index]: manifest.tensors[names[index]].kinds for index in file.tensors}
        problems += _verify_file(checkpoint / file.name, file, kinds_in_file, pieces, deep)
    if not problems:  # otherwise missing pieces are reported already
        for (kind, name), regions in pieces.items():
            if not tiles(regions, manifest.tensors[name].shape):
                problems.append(f"{checkpoint / MANIFEST}: the pieces of {kind} of {name} do not make up the whole")
    return problems


def _verify_file(
    path: Path, file: DataFile, kinds_in_file: Kinds, pieces: Dict[Tuple[str, str], List[Region]], deep: bool
) -> List[str]:
    """Verify one data file, and add its regions to ``pieces``.

    Args:
        kinds_in_file: the kinds of the tensors of which this file may hold pieces, by name.
    """
    try:
        descriptor, plan = open_shard(path.parent, file)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    try:
        for entry, info, crc32 in zip(plan.entries, plan.tensors, file.crc32):
            if kinds_in_file.get(entry.tensor, {}).get(entry.kind) != entry.dtype:
                problems.append(f"{path}: {entry}: not in the manifest")
                continue
            pieces[entry.kind, entry.tensor].append(entry.region)
            if deep and checksum(descriptor, info) != crc32:
                problems.append(f"{path}: {damage_message(entry)}")
    except NotSafetensors as error:
        problems.append(f"{path}: {error}")
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    finally:
        file_system.close(descriptor)
    return problems


def checkpoints_at(path: Path) -> List[Path]:
    """Resolve a user's path: a checkpoint itself, or all checkpoints of a run or a folder of them, newest first.

    Raises:
        CheckpointError: there are none.
    """
    if file_system.exists(path / MANIFEST) or is_checkpoint_name(path.absolute().name):
        return [path]
    for directory in (path / CHECKPOINTS, path):
        checkpoints = [info.path for info in list_checkpoints(directory)]
        if checkpoints:
            return checkpoints
    there = "holds no checkpoint" if file_system.exists(path) else "there is no such folder"
    raise CheckpointError(f"{path}: {there}; a run keeps its own in RUN_DIR/{CHECKPOINTS}/step-<iteration>")


def newest_valid(checkpoints: Sequence[Path], deep: bool = True) -> NewestValid:
    """Find the first valid one of some checkpoints; with :func:`checkpoints_at`, the newest."""
    rejected: List[Tuple[str, str]] = []
    for path in checkpoints:
        why = summary_line(verify_checkpoint(path, deep))
        if why is None:
            return NewestValid(path, rejected)
        rejected.append((path.name, why))
    return NewestValid(None, rejected)


def summary_line(problems: Sequence[str]) -> Optional[str]:
    """Summarise problems on one line; None if there are none."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more if problems else None


def remove_old_checkpoints(directory: Path, keep_last: int, keep_every: Optional[int] = None) -> List[str]:
    """Remove old checkpoints after a new one is written; returns their names.

    Checkpoints that are damaged, judging by the manifest and the lengths of files, neither count nor are removed: a
    lost file may come back. The same holds for checkpoints newer than the one written last: the run has rejected them
    when it began.

    Args:
        keep_last: number of the newest checkpoints to keep, at least 1.
        keep_every: also keep checkpoints of iterations that are multiples of this.

    Raises:
        OSError: a checkpoint cannot be removed.
        CheckpointError: the directory cannot be read.
    """
    checkpoints = list_checkpoints(directory)
    written = tracked_checkpoint(directory)
    first = next((index for index, info in enumerate(checkpoints) if info.path == written), 0)
    sound = [info for info in checkpoints[first:] if _has_complete_files(info.path)]
    gone = _superfluous(sound, max(1, keep_last), keep_every)
    for info in gone:
        hidden = directory / f".step-{info.iteration:08d}.{uuid.uuid4().hex}.tmp"
        file_system.rename(info.path, hidden)  # a kill in the middle leaves nothing that looks like a checkpoint
        remove_tree(hidden)
    return [info.path.name for info in gone]


def _has_complete_files(checkpoint: Path) -> bool:
    try:
        files = read_manifest(checkpoint).files
        return all(file_system.size_of(checkpoint / file.name) == file.bytes for file in files)
    except (CheckpointError, OSError):
        return False


def _superfluous(
    newest_first: Sequence[CheckpointInfo], keep_last: int, keep_every: Optional[int]
) -> List[CheckpointInfo]:
    retained: Set[int] = set()
    gone = []
    for info in newest_first:
        if info.iteration in retained:  # an earlier attempt at the same iteration
            gone.append(info)
        elif len(retained) < keep_last or (keep_every is not None and info.iteration % keep_every == 0):
            retained.add(info.iteration)
        else:
            gone.append(info)
    return gone
