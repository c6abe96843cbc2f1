"""Looks up the measured verdict on how layers' products are computed, before the ranks of a run have agreed on one."""

from __future__ import annotations

import functools
import hashlib
from typing import List, Optional, Tuple

from fugaku_gpt.compat.build import build_fingerprint
from fugaku_gpt.kernels.build import library_file
from fugaku_gpt.kernels.product_verdicts import (
    ProductVerdict,
    Stamp,
    Verdicts,
    read_settings,
    read_verdicts,
    verdict_file,
)
from fugaku_gpt.machine.local import processor_name

_HASH_DIGITS = 16


@functools.lru_cache(maxsize=None)
def current_stamp() -> Stamp:
    """The stamp in force in this process."""
    library = library_file()
    content_hash = hashlib.sha256(library.read_bytes()).hexdigest()[:_HASH_DIGITS] if library.exists() else ""
    library_text = f"{library.name} {content_hash}" if content_hash else ""
    return Stamp(processor_name(), library_text, build_fingerprint(), read_settings())


def recorded_verdict(dtype: str, threads: int) -> Tuple[Optional[ProductVerdict], str]:
    """The verdict for a number type of training and a number of threads, and if there is none, why not."""
    verdicts, reason = _recorded()
    verdict = verdicts.get((dtype, threads))
    if verdict is not None:
        return verdict, ""
    return None, reason or f"products have not been measured in {dtype} with {threads} threads"


def describe_recorded() -> Tuple[List[str], str]:
    """Return a line for each number type and number of threads in the file, and why not if nothing counts."""
    verdicts, reason = _recorded()
    return [f"{verdict.name_ways()}; {verdict.describe()}" for _, verdict in sorted(verdicts.items())], reason


def forget_recorded() -> None:
    """Have the file read again at the next look-up: it has changed."""
    _recorded.cache_clear()


@functools.lru_cache(maxsize=None)
def _recorded() -> Tuple[Verdicts, str]:
    return read_verdicts(verdict_file(current_stamp()), current_stamp())
