"""Writes corpora byte by byte, independently of the package's own writer."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import List, Optional, Sequence

FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # data type code -> struct's letter


def write_megatron(
    prefix: Path,
    sequences: Sequence[Sequence[int]],
    code: int = 4,
    documents: Optional[Sequence[int]] = None,
    modes: bool = False,
) -> None:
    """Writes a ``.bin``/``.idx`` pair as Megatron-LM does; one document per sequence unless ``documents`` is given."""
    letter = FORMATS[code]
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    tokens = b""
    starts: List[int] = []
    for sequence in sequences:
        starts.append(len(tokens))
        tokens += struct.pack(f"<{len(sequence)}{letter}", *sequence)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(documents)}q", *documents)
    if modes:
        index += bytes(len(sequences))
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
