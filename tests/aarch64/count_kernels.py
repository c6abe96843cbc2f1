"""Trains one run on one rank, and counts the calls of each native kernel.

    python -m tests.aarch64.count_kernels OUT SETTING...

The last line that it prints is, as JSON, kernel → number of calls; the names of attention's have the numbers of its
heads and of its heads of keys.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any, Callable, Counter

from fugaku_gpt.config import load_run_config
from fugaku_gpt.kernels.library import AttentionShape, Library
from fugaku_gpt.ops import native
from fugaku_gpt.training.run import train


class CountedLibrary:
    """Passes calls on to the native kernels and counts them.

    Attributes:
        calls: number of calls by kernel.
    """

    def __init__(self, library: Library) -> None:
        self.calls: Counter[str] = collections.Counter()
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            shape = arguments[0] if arguments else None
            heads = f" {shape.heads}/{shape.kv_heads}" if isinstance(shape, AttentionShape) else ""
            self.calls[name + heads] += 1
            return kernel(*arguments)

        return call


if __name__ == "__main__":
    library = CountedLibrary(native._library())
    native._library = lambda: library  # type: ignore[assignment, return-value]
    code = train(load_run_config(preset="llama-tiny", overrides=sys.argv[2:]), Path(sys.argv[1]), threads=1)
    print(json.dumps(library.calls))
    sys.exit(code)
