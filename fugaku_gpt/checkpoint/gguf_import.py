"""Imports a GGUF file of llama.cpp as a checkpoint: its weights, and its tokenizer where it can be carried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Tuple

import numpy as np

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.gguf_file import GgufHeader, GgufTensor, NotGguf, read_header
from fugaku_gpt.checkpoint.gguf_models import (
    EMBEDDING,
    GPT2,
    LOGITS,
    ROTARY_FACTORS,
    model_of_gguf,
    unpermuted,
)
from fugaku_gpt.checkpoint.gguf_tokenizer import NotCarried, carried_tokenizer
from fugaku_gpt.checkpoint.imported import ForeignTensor, ImportedCheckpoint, check_tensors, write_imported
from fugaku_gpt.checkpoint.safetensors import NotSafetensors
from fugaku_gpt.errors import UsageError

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_METADATA = "its metadata"
_DERIVED = (".attn_rot_embd.weight",)  # rotary frequencies of older files, which follow from the metadata


class _PermutedTensor(NamedTuple):
    """A tensor whose rows are brought from llama.cpp's order into ours when it is read."""

    tensor: GgufTensor
    heads: int

    @property
    def path(self) -> Path:
        """The file."""
        return self.tensor.path

    @property
    def dtype(self) -> str:
        """As the file calls it."""
        return self.tensor.dtype

    @property
    def shape(self) -> Tuple[int, ...]:
        """As the file has it, the slowest dimension first."""
        return self.tensor.shape

    def read(self) -> "Array":
        """Read it, with the rows of each head in our order.

        Raises:
            UsageError: it cannot be read.
        """
        return unpermuted(self.tensor.read(), self.heads)


def import_gguf(path: Path, directory: Path) -> ImportedCheckpoint:
    """Make a checkpoint at iteration 0 from a GGUF file: only weights, so that the optimiser starts afresh.

    Quantised weights become float32, each tensor when its turn comes. The folder of the checkpoint also has the
    tokenizer's files, or a note says why it has not.

    Args:
        path: the file.
        directory: folder of checkpoints, such as that of a run that is to start from it; must hold no checkpoint yet.

    Raises:
        UsageError: the file holds no model with a counterpart of ours, or is damaged; or the directory cannot be used.
    """
    if list_checkpoints(directory):
        raise UsageError(f"{directory}: holds checkpoints already; choose another folder")
    try:
        descriptor = file_system.open_to_read(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        header = read_header(path, descriptor, file_system.size_of(path))
        return _import(path, header, directory)
    except NotGguf as error:
        raise UsageError(f"{path}: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    finally:
        file_system.close(descriptor)


def _import(path: Path, header: GgufHeader, directory: Path) -> ImportedCheckpoint:
    is_tied = _is_tied(path, header)
    found = model_of_gguf(path, header, is_tied)
    notes: List[str] = []
    if found.architecture == GPT2 and not is_tied:
        notes.append(
            f"{LOGITS} and {EMBEDDING}, which are one in a GPT-2, differ by their quantisation: the model has "
            "output weights of its own, and cannot be exported to Hugging Face"
        )
    tensors: Dict[str, ForeignTensor] = {}
    for name, tensor in header.tensors.items():
        if name == ROTARY_FACTORS or name.endswith(_DERIVED) or (name == LOGITS and is_tied):
            continue
        heads = found.permuted.get(name)
        tensors[name] = tensor if heads is None else _PermutedTensor(tensor, heads)
    check_tensors(path, found.pairs, tensors, _METADATA)
    files: Dict[str, bytes] = {}
    try:
        files = carried_tokenizer(header.values, found.model)
    except NotCarried as error:
        notes.append(f"its tokenizer is not carried: {error}")
    checkpoint = write_imported(directory, found.model, found.pairs, tensors, f"GGUF file {path.name}", files)
    return ImportedCheckpoint(checkpoint, found.model, notes)


def _is_tied(path: Path, header: GgufHeader) -> bool:
    """Whether the output weights are the token embedding; files of a GPT-2 may have the same matrix twice."""
    logits, embedding = header.tensors.get(LOGITS), header.tensors.get(EMBEDDING)
    if logits is None:
        return True
    architecture = header.values.get("general.architecture")  # in a forged file an array, which has no equality
    is_gpt2 = isinstance(architecture, str) and architecture == GPT2
    try:
        return is_gpt2 and embedding is not None and logits.has_same_data(embedding)
    except NotSafetensors as error:
        raise UsageError(f"{path}: {error}") from None
