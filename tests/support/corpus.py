"""A small real corpus on disk, in Megatron's form, without a tokenizer: bytes of standard-library sources."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
import tokenize
from pathlib import Path

import numpy as np

from fugaku_gpt.data.indexed import IndexedWriter

DOCUMENT_BYTES = 2000


def write_byte_corpus(prefix: Path) -> Path:
    """Write PREFIX.bin and PREFIX.idx with some hundred documents; returns the prefix."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for module in (argparse, ast, textwrap, tokenize):
            text = inspect.getsource(module).encode("utf-8")
            for start in range(0, len(text), DOCUMENT_BYTES):
                writer.add_document(np.frombuffer(text[start : start + DOCUMENT_BYTES], dtype=np.uint8))
    return prefix
