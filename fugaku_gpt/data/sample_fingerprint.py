"""The fingerprint of samples, which a checkpoint records: other samples than those that it has consumed are refused."""

from __future__ import annotations

import hashlib
from typing import Iterable, Sequence

from fugaku_gpt.data.corpus import Corpus


class SampleFingerprint:
    """SHA-256 over settings that decide on the samples, and the fingerprints of the corpora.

    Attributes:
        value: the digest, in hexadecimal.
    """

    def __init__(self, before: bytes, corpora: Sequence[Corpus], after: bytes = b"") -> None:
        """``before``, ``after``: the settings, as they precede and follow the corpora."""
        self._before, self._corpora, self._after = before, corpora, after
        self.value = self._digest(corpus.fingerprint for corpus in corpora)

    def is_recorded_as(self, recorded: str) -> bool:
        """Whether this or an older version has recorded these samples so.

        Only where the digest of this version is another one does it compute that of an older version, which reads large
        indices as a whole.
        """
        if recorded == self.value:
            return True
        return recorded == self._digest(corpus.older_fingerprint() for corpus in self._corpora)

    def _digest(self, fingerprints: Iterable[str]) -> str:
        digest = hashlib.sha256(self._before)
        for fingerprint in fingerprints:
            digest.update(fingerprint.encode())
        digest.update(self._after)
        return digest.hexdigest()
