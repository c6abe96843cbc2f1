"""The vocabulary of a run that does not state one: that of its corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Collection, NamedTuple, Optional, Sequence

from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.corpus import prepared_folder, read_manifest

VOCABULARY_KEY = "model.vocab_size"


class Vocabulary(NamedTuple):
    """A vocabulary for ``model.vocab_size``, and where it is from."""

    size: int
    origin: str

    @property
    def note(self) -> str:
        """The line that reports the choice."""
        return f"{VOCABULARY_KEY} is {self.size}, that of {self.origin}"


def is_vocabulary_stated(written: Collection[str]) -> bool:
    """True if the keys that a run file and the command line set contain a vocabulary."""
    return VOCABULARY_KEY in written or "model.padded_vocab_size" in written


def vocabulary_of_corpora(
    config: RunConfig, written: Collection[str], base: Optional[Path] = None
) -> Optional[Vocabulary]:
    """The vocabulary that a run is to have in place of ``model.vocab_size``; None if that one stays.

    A size that the user states stays, and so does that of a preset if the corpora fit into it.

    Args:
        config: the run.
        written: the dotted keys that the user sets, and ``preset`` where a preset is named.
        base: folder to which the corpora's relative paths refer; default: the present one.

    Raises:
        DataError: a corpus is damaged.
    """
    if is_vocabulary_stated(written) or config.model.is_grid_classifier:
        return None
    size, largest = config.model.vocab_size, _largest_vocabulary(config.data.paths, base)
    if largest is None or largest.size == size or ("preset" in written and largest.size < size):
        return None
    return largest


def _largest_vocabulary(paths: Sequence[str], base: Optional[Path]) -> Optional[Vocabulary]:
    """The largest vocabulary of the corpora's tokenizers; None if they are Megatron pairs, or missing."""
    folders = {path: prepared_folder(str((base or Path()) / path)) for path in paths}
    sizes = [
        Vocabulary(int(read_manifest(folder)["vocab_size"]), f"the corpus {path}")
        for path, folder in folders.items()
        if folder is not None
    ]
    return max(sizes, default=None)
