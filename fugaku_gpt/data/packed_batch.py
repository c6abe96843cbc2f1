"""Samples that say where documents begin in them, in whatever order they come."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fugaku_gpt.config.schema import DataConfig


class PackedBatch(NamedTuple):
    """Samples, and where the documents in them begin.

    Attributes:
        tokens: int64 [count, seq_len + 1] token ids.
        begins: bool [count, seq_len + 1], whether the first token of a document is there.
    """

    tokens: "np.ndarray[Any, np.dtype[np.int64]]"
    begins: "np.ndarray[Any, np.dtype[np.bool_]]"


def fingerprint_of_documents(data: DataConfig) -> bytes:
    """Return what the fingerprint of samples has for the fields of ``data.document_mask``; nothing without the mask, so
    that the fingerprints of such runs are those of versions that had no mask."""
    if not data.document_mask:
        return b""
    return repr(("documents", data.reset_positions, data.loss_across_documents)).encode()
