"""Verifies the checkpoints of a run, and removes old ones."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from fugaku_gpt.checkpoint import CHECKPOINTS, file_system
from fugaku_gpt.checkpoint.directory import (
    BEST,
    BestCheckpoint,
    CheckpointInfo,
    is_checkpoint_name,
    list_checkpoints,
    read_best,
    remove_best,
    remove_tree,
    tracked_checkpoint,
    write_best,
)
from fugaku_gpt.checkpoint.file_list import DataFile
from fugaku_gpt.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from fugaku_gpt.checkpoint.reader import damage_message, open_shard
from fugaku_gpt.checkpoint.safetensors import NotSafetensors, checksum
from fugaku_gpt.errors import CheckpointError
from fugaku_gpt.layout.regions import Region, tiles
from fugaku_gpt.limits import cut
from fugaku_gpt.typed_json import is_number

LOSSES = "losses"  # in a checkpoint's state: the losses that were measured of exactly its weights, by name
LOSS_SOURCES = "loss_sources"  # beside them: a digest, by name, of the texts and settings with which each was measured
BEST_NAME = "best"  # by which a user names the best checkpoint
MOST_NAMED = 8  # checkpoints that a message names
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
    try:
        for file in manifest.files:
            kinds_in_file = {names[index]: manifest.tensors[names[index]].kinds for index in file.tensors}
            problems += _verify_file(checkpoint / file.name, file, kinds_in_file, pieces, deep)
    except CheckpointError as error:  # a part of the manifest is missing or damaged
        problems.append(str(error))
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
    if _is_checkpoint(path):
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


def remove_old_checkpoints(
    directory: Path, keep_last: int, keep_every: Optional[int] = None, keep_best: Optional[str] = None
) -> List[str]:
    """Remove old checkpoints after a new one is written; returns their names.

    Checkpoints that are damaged, judging by the manifest and the lengths of files, neither count nor are removed: a
    lost file may come back. The same holds for checkpoints newer than the one written last: the run has rejected them
    when it began.

    Args:
        keep_last: number of the newest checkpoints to keep, at least 1.
        keep_every: also keep checkpoints of iterations that are multiples of this.
        keep_best: also keep the checkpoint of which this loss is lowest, and record it, before any is removed. A record
            of another loss is removed.

    Raises:
        OSError: a checkpoint cannot be removed, or the record cannot be written.
        CheckpointError: the directory cannot be read.
    """
    checkpoints = list_checkpoints(directory)
    written = tracked_checkpoint(directory)
    first = next((index for index, info in enumerate(checkpoints) if info.path == written), 0)
    manifests = [(info, _manifest_of_complete(info.path)) for info in checkpoints[first:]]
    sound = [(info, manifest) for info, manifest in manifests if manifest is not None]
    best = _best_of(sound, keep_best) if keep_best is not None else None
    if best is not None:
        write_best(directory, best)
    else:
        _remove_outdated_best(directory, keep_best)
    gone = [
        info
        for info in _superfluous([info for info, _ in sound], max(1, keep_last), keep_every)
        if best is None or info.path.name != best.name
    ]
    for info in gone:
        hidden = directory / f".step-{info.iteration:08d}.{uuid.uuid4().hex}.tmp"
        file_system.rename(info.path, hidden)  # a kill in the middle leaves nothing that looks like a checkpoint
        remove_tree(hidden)
    return [info.path.name for info in gone]


def _best_of(newest_first: Sequence[Tuple[CheckpointInfo, Manifest]], loss: str) -> Optional[BestCheckpoint]:
    """The checkpoint with the lowest recorded value of a loss, the earliest of equal ones; None if none has any.

    Values that were measured with other texts or settings than the newest cannot be compared with it, and do not count;
    older versions did not record with which.
    """
    measured, newest_source = [], None
    for info, manifest in newest_first:
        losses, sources = manifest.state.get(LOSSES), manifest.state.get(LOSS_SOURCES)
        value = losses.get(loss) if isinstance(losses, dict) else None
        source = sources.get(loss) if isinstance(sources, dict) else None
        newest_source = newest_source or source
        if value is not None and is_number(value) and source in (None, newest_source):
            measured.append(BestCheckpoint(info.path.name, loss, float(value), info.iteration))
    # of several attempts at one iteration the newest, which comes first, is the one that is kept in any case
    return min(measured, key=lambda best: (best.value, best.iteration), default=None)


def _remove_outdated_best(directory: Path, keep_best: Optional[str]) -> None:
    """Remove a record of the best that nothing keeps up any more: of another loss, or of a checkpoint that is gone."""
    try:
        best = read_best(directory)
    except CheckpointError:
        best = None
    if best is None or best.loss != keep_best or not file_system.is_folder(directory / best.name):
        remove_best(directory)


def named_checkpoints_at(path: Path, name: Optional[str]) -> List[Path]:
    """Resolve a user's path as :func:`checkpoints_at`, and the name of one of the checkpoints there.

    Args:
        name: ``best`` for the recorded best one, or the name of a folder, such as step-00000100; None: all of them.

    Raises:
        CheckpointError: there are none, or none of this name.
    """
    if name is None:
        return checkpoints_at(path)
    if _is_checkpoint(path) and name != path.absolute().name:
        raise CheckpointError(f"{path}: is a checkpoint itself: to choose {cut(name)}, name its run or its folder")
    if name == BEST_NAME:
        return [_best_checkpoint_at(path)]
    checkpoints = checkpoints_at(path)
    named = [checkpoint for checkpoint in checkpoints if checkpoint.absolute().name == name]
    if not named:
        there = ", ".join(checkpoint.absolute().name for checkpoint in checkpoints[:MOST_NAMED])
        more = len(checkpoints) - MOST_NAMED
        there += f" and {more} more" if more > 0 else ""
        raise CheckpointError(f"{path}: holds no checkpoint {cut(name)}; valid: {BEST_NAME}, {there}")
    return named


def _best_checkpoint_at(path: Path) -> Path:
    """The checkpoint that is recorded as the best of a run or a folder of checkpoints.

    Raises:
        CheckpointError: there is no record, or its checkpoint is gone.
    """
    for directory in (path / CHECKPOINTS, path):
        best = read_best(directory)
        if best is not None:
            if not file_system.is_folder(directory / best.name):
                raise CheckpointError(f"{directory / BEST}: names {best.name}, which is gone")
            return directory / best.name
    raise CheckpointError(f"{path}: holds no {BEST}: a run writes it with checkpoint.keep_best, such as validation")


def _is_checkpoint(path: Path) -> bool:
    return file_system.exists(path / MANIFEST) or is_checkpoint_name(path.absolute().name)


def _manifest_of_complete(checkpoint: Path) -> Optional[Manifest]:
    """The manifest of a checkpoint; None if it cannot be read, or some file does not have its length."""
    try:
        manifest = read_manifest(checkpoint)
        is_complete = all(file_system.size_of(checkpoint / file.name) == file.bytes for file in manifest.files)
        return manifest if is_complete else None
    except (CheckpointError, OSError):
        return None


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
