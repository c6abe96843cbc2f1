"""Writes the weights of foreign files as a checkpoint at iteration 0, one tensor after the other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Protocol, Sequence, Tuple

import numpy as np

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.data_file import Entry, file_name, plan_file
from fugaku_gpt.checkpoint.directory import (
    begin_checkpoint,
    commit_checkpoint,
    discard_temporary,
    require_room,
    update_tracker,
)
from fugaku_gpt.checkpoint.hugging_face_models import TensorPair
from fugaku_gpt.checkpoint.manifest import LogicalTensor, Manifest, describe_file
from fugaku_gpt.checkpoint.safetensors import BFLOAT16, write_tensor
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.layout.regions import full_region
from fugaku_gpt.limits import cut

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

IMPORTED_DTYPE = "imported_dtype"  # in an imported checkpoint's `build`: the type in which the weights were
DTYPES = {"float32": "F32", "bfloat16": BFLOAT16, "float16": "F16"}  # of exported weights


class ForeignTensor(Protocol):
    """A tensor in a file of another program."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def dtype(self) -> str:
        """The type of its elements, as safetensors calls it, or the format of quantised ones."""

    @property
    def shape(self) -> Tuple[int, ...]:
        """The sizes of its dimensions, the slowest first."""

    def read(self) -> "Array":
        """Read its elements.

        Raises:
            UsageError: they cannot be read.
        """


class ImportedCheckpoint(NamedTuple):
    """The result of an import: the checkpoint, the model's settings, and notes for the user."""

    checkpoint: Path
    model: ModelConfig
    notes: List[str]


def check_tensors(source: Path, pairs: Sequence[TensorPair], theirs: Mapping[str, ForeignTensor], by: str) -> None:
    """Check that a model has all tensors of ours, in their shapes, and no others.

    Args:
        by: what says which tensors it has, as a message names it.

    Raises:
        UsageError: a tensor is missing, has another shape, or is one that the model has not.
    """
    needed = {name: pair.their_shape for pair in pairs for name in pair.theirs}
    for name, shape in needed.items():
        if name not in theirs:
            raise UsageError(f"{source}: holds no {name}")
        if theirs[name].shape != shape:
            raise UsageError(f"{theirs[name].path}: {name} is {theirs[name].shape}, and by {by} {shape}")
    unknown = sorted(set(theirs) - set(needed))
    if unknown:
        raise UsageError(f"{source}: holds {cut(unknown[0])}, which the model of {by} has not")


def write_imported(
    directory: Path,
    model: ModelConfig,
    pairs: Sequence[TensorPair],
    theirs: Mapping[str, ForeignTensor],
    origin: str,
    files: Mapping[str, bytes],
) -> Path:
    """Write a checkpoint at iteration 0 and return its folder: only weights, so that the optimiser starts afresh.

    Args:
        directory: folder of the checkpoints.
        pairs: every tensor of the model.
        theirs: their tensors by name; each is read when its turn comes.
        origin: where they come from, for the manifest.
        files: further files of the checkpoint's folder, such as the tokenizer's, by name.

    Raises:
        RunFailed: the checkpoint does not fit on the disk.
        UsageError: it cannot be written, or a tensor cannot be read.
    """
    sources = {pair.ours: [theirs[name] for name in pair.theirs] for pair in pairs}
    dtypes = {ours: "F64" if tensors[0].dtype == "F64" else "F32" for ours, tensors in sources.items()}
    plan = plan_file([Entry("weights", pair.ours, full_region(pair.shape), dtypes[pair.ours]) for pair in pairs])
    require_room(directory, plan.length)
    try:
        directory.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = begin_checkpoint(directory, 0)
        try:
            with file_system.synced_file(temporary / file_name(0)) as descriptor:
                file_system.write_all(descriptor, memoryview(plan.header.content), 0)
                checksums = [
                    write_tensor(descriptor, info, pair.to_ours([tensor.read() for tensor in sources[pair.ours]]))
                    for pair, info in zip(pairs, plan.tensors)
                ]
            for name, content in files.items():
                file_system.write_file(temporary / name, content)
            logical = {pair.ours: LogicalTensor(pair.shape, {"weights": dtypes[pair.ours]}) for pair in pairs}
            file = describe_file(file_name(0), plan, checksums, sorted(logical))
            config, build = {"model": asdict(model)}, {"imported_from": origin, **_imported_dtype(sources)}
            path = commit_checkpoint(temporary, Manifest(0, 0, 0, logical, (file,), config=config, build=build))
            update_tracker(path)
            return path
        finally:
            discard_temporary(temporary)
    except OSError as error:
        raise UsageError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None


def _imported_dtype(sources: Mapping[str, Sequence[ForeignTensor]]) -> Dict[str, str]:
    """The type of imported weights, if all have the same one that can be exported; in float32 nothing of it is lost."""
    kinds = {tensor.dtype for tensors in sources.values() for tensor in tensors}
    name = next((name for name, kind in DTYPES.items() if kinds == {kind}), None)
    return {IMPORTED_DTYPE: name} if name is not None else {}
