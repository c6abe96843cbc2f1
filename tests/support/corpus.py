"""Writes small real corpora to disk, in Megatron's format, without a tokenizer: bytes of standard-library sources,
which differ from one Python to the next, and letters of a text."""

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
LETTERS = "\n abcdefghijklmnopqrstuvwxyz,.'-"  # 32 tokens; other characters become blanks


def write_byte_corpus(prefix: Path) -> Path:
    """Write PREFIX.bin and PREFIX.idx with some hundred documents; returns the prefix."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for module in (argparse, ast, textwrap, tokenize):
            text = inspect.getsource(module).encode("utf-8")
            for start in range(0, len(text), DOCUMENT_BYTES):
                writer.add_document(np.frombuffer(text[start : start + DOCUMENT_BYTES], dtype=np.uint8))
    return prefix


def write_letters(prefix: Path, text: Path) -> Path:
    """Write PREFIX.bin and PREFIX.idx with each line of an ASCII text as a document; returns the prefix."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for line in text.read_text(encoding="ascii").splitlines(keepends=True):
            letters = [letter if letter in LETTERS else " " for letter in line.lower()]
            writer.add_document(np.array([LETTERS.index(letter) for letter in letters]))
    return prefix
