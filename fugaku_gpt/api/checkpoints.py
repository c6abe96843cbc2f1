"""Checkpoints: what they hold, their tensors, whether they are whole, and other formats."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, List, Optional, Tuple, Type

from fugaku_gpt.api.settings import FilePath
from fugaku_gpt.checkpoint import reader
from fugaku_gpt.checkpoint.hugging_face import ExportOptions, export_model
from fugaku_gpt.checkpoint.manifest import Manifest
from fugaku_gpt.checkpoint.recorded_model import recorded_model
from fugaku_gpt.checkpoint.retention import named_checkpoints_at, newest_valid, verify_checkpoint
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np


class Checkpoint:
    """A checkpoint, open for reading by the names of its tensors, whatever layout has written it.

    Attributes:
        path: its folder.
    """

    def __init__(self, path: FilePath, name: Optional[str] = None) -> None:
        """Open the newest complete checkpoint at a path.

        Args:
            path: a checkpoint, a run directory, or a folder of checkpoints.
            name: ``best``, or the name of one of them, such as ``step-00000100``; default: the newest complete one.

        Raises:
            CheckpointError: there is none.
        """
        newest, rejected = newest_valid(named_checkpoints_at(Path(path), name), deep=False)
        if newest is None:
            reasons = "; ".join(f"{rejected_name}: {reason}" for rejected_name, reason in rejected)
            raise CheckpointError(f"{path}: none of its checkpoints is complete: {reasons}")
        self.path = newest
        self._reader = reader.Checkpoint(newest)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    def close(self) -> None:
        """Close its files; they are opened again when something is read."""
        self._reader.close()

    @property
    def manifest(self) -> Manifest:
        """The contents: iteration, samples, tokens, the run's configuration, tensors and files."""
        return self._reader.manifest

    @property
    def iteration(self) -> int:
        """Number of finished iterations."""
        return self.manifest.iteration

    @property
    def model(self) -> ModelConfig:
        """The model whose weights it holds.

        Raises:
            CheckpointError: its configuration is damaged.
        """
        return recorded_model(self.path, self.manifest)

    @property
    def tensors(self) -> Tuple[str, ...]:
        """The names of its tensors."""
        return tuple(self.manifest.tensor_names)

    def tensor(self, name: str, kind: str = "weights") -> "np.ndarray[Any, Any]":
        """Read a whole tensor; its pieces are checked against their checksums.

        Args:
            kind: ``weights``, or another kind that the manifest states for the tensor.

        Raises:
            CheckpointError: there is no such tensor, or a file is missing or damaged.
        """
        return self._reader.tensor(kind, name)

    def verify(self, *, deep: bool = True) -> List[str]:
        """The damage of its files, one line each; empty if it is whole.

        Args:
            deep: whether all data are read; else manifest, lengths and headers alone.
        """
        return verify_checkpoint(self.path, deep=deep)

    def export(self, out: FilePath, *, dtype: Optional[str] = None) -> Path:
        """Export the weights as a Hugging Face folder, with the tokenizer that the checkpoint carries, if it does.

        Args:
            dtype: type of the exported weights; default: that in which they were imported, else float32.

        Raises:
            CheckpointError: it is damaged, or no model of Hugging Face is like its own.
        """
        export_model(self.path, Path(out), ExportOptions(None, dtype))
        return Path(out)
