"""Tests that no garbage is collected while a process starts, and that its first objects are frozen."""

from __future__ import annotations

import gc
from typing import Iterator

import pytest

from fugaku_gpt.machine.garbage_collection import gc_paused


@pytest.fixture(autouse=True)
def restored_collector() -> Iterator[None]:
    """Unfreezes the objects that a test has frozen."""
    assert gc.isenabled()
    yield
    gc.enable()
    gc.unfreeze()


def test_nothing_is_collected_inside_and_remaining_objects_are_frozen() -> None:
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with gc_paused(), gc_paused():
            objects = [[number] for number in range(100_000)]
            assert not gc.isenabled()
        inside, frozen_count = len(collections), gc.get_freeze_count()
        more = [[number] for number in range(100_000)]
    finally:
        gc.callbacks.pop()
    assert inside == 0 and len(collections) > 0
    assert gc.isenabled() and frozen_count >= len(objects) == len(more)


def test_collection_resumes_after_a_failure_and_stays_off_where_it_was_off() -> None:
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()
