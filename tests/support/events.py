"""Reads event files with the package ``tensorboard``, where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Dict, List, Tuple


def has_reader_of_events() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def read_curves(directory: Path) -> Dict[str, List[Tuple[int, float]]]:
    """Tag → (step, value) of each event of a folder, without those that TensorBoard takes for superseded."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={SCALARS: 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}
