"""Finds documents that are equal to an earlier one, byte for byte."""

from __future__ import annotations

import hashlib
from typing import Set

_DIGEST_BYTES = 16  # two of 10**12 different documents have the same digest with a chance of 1 in 10**14


class SeenDocuments:
    """Digests of the documents so far: 16 bytes of each, about 100 of memory, however long the documents are."""

    def __init__(self) -> None:
        self._digests: Set[bytes] = set()

    def has_seen(self, document: bytes) -> bool:
        """Whether a document is equal to an earlier one; from now on it is an earlier one itself."""
        digest = hashlib.blake2b(document, digest_size=_DIGEST_BYTES).digest()
        count = len(self._digests)
        self._digests.add(digest)
        return len(self._digests) == count
