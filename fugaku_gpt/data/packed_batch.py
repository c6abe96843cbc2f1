"""Samples that say where documents begin in them, in whatever order they come."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class PackedBatch(NamedTuple):
    """Samples, and where the documents in them begin.

    Attributes:
        tokens: int64 [count, seq_len + 1] token ids.
        begins: bool [count, seq_len + 1], whether the first token of a document is there.
    """

    tokens: "np.ndarray[Any, np.dtype[np.int64]]"
    begins: "np.ndarray[Any, np.dtype[np.bool_]]"
