"""Nothing is collected while a process starts, and what it started with is never gone through again."""

from __future__ import annotations

import gc
from typing import Iterator

import pytest

from fugaku_gpt.machine.garbage_collection import gc_paused


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    """These tests freeze what is there."""
    assert gc.isenabled()
    yield
    gc.enable()
    gc.unfreeze()


def test_nothing_is_collected_inside_and_what_is_left_is_kept_for_good() -> None:
    collections = []
    gc.callbacks.append(lambda phase, found: collections.append(phase))
    try:
        with gc_paused(), gc_paused():
            kept = [[number] for number in range(100_000)]
            assert not gc.isenabled()
        inside, there = len(collections), gc.get_freeze_count()
        more = [[number] for number in range(100_000)]
    finally:
        gc.callbacks.pop()
    assert inside == 0 and len(collections) > 0
    assert gc.isenabled() and there >= len(kept) == len(more)


def test_it_collects_again_after_a_failure_and_not_where_it_did_not_before() -> None:
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()
