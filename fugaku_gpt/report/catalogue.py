"""The models and machines that tables name, with the sources of their figures.

Shapes are those of the presets and of other runs in the notes that carry the same name. Peaks: A64FX has 48 compute
cores with two 512-bit pipes each, 6.144 TFLOP/s in FP32 at 2.0 GHz, half of it with eco_state 1 or 2, and 32 GiB for
each node; the GPUs' figures are the vendors' for dense FP16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, Mapping, Optional, Tuple

from fugaku_gpt.config import ModelConfig, load_run_config, preset_names
from fugaku_gpt.formulas.parameters import size_name

_OTHER_SHAPES: Tuple[Tuple[str, int, int, int], ...] = (  # name, layers, hidden, heads
    ("1.3B", 24, 2048, 16),
    ("13B", 40, 5120, 40),
    ("30B", 48, 7176, 78),
)
_VOCABULARY = 50257


@dataclass(frozen=True)
class Machine:
    """Capabilities of one unit (a node, or a GPU).

    Attributes:
        label: name for messages.
        peak_tflops: peak TFLOP/s in the precision of the tables; None if unknown.
        clock_ghz: clock at which the peak holds; None if it does not depend on a knob.
        memory_bytes: memory of the unit; None if unknown.
    """

    label: str
    peak_tflops: Optional[float] = None
    clock_ghz: Optional[float] = None
    memory_bytes: Optional[float] = None


MACHINES: Mapping[str, Machine] = {
    "a64fx": Machine("A64FX, FP32", 6.144, 2.0, 32 * 2.0**30),
    "v100": Machine("V100, FP16", 125.0, None, 32 * 2.0**30),
    "a100": Machine("A100, FP16", 312.0, None, 80 * 2.0**30),
    "h100": Machine("H100, FP16", 989.5, None, 80 * 2.0**30),
    "other": Machine("any machine"),
}


MACHINE_NAMES = tuple(MACHINES)


@lru_cache(maxsize=None)
def _shapes() -> Dict[str, Tuple[ModelConfig, ...]]:
    shapes_of_size: Dict[str, Tuple[ModelConfig, ...]] = {}
    for name in preset_names():
        model = load_run_config(preset=name).model
        if model.settings_unlike_gpt2:  # tables without settings are of GPT-2s
            continue
        shapes_of_size[size_name(model)] = (*shapes_of_size.get(size_name(model), ()), model)
    for size, layers, hidden, heads in _OTHER_SHAPES:
        other = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab_size=_VOCABULARY)
        shapes_of_size[size] = (*shapes_of_size.get(size, ()), other)
    return shapes_of_size


def size_label(model: ModelConfig) -> str:
    """Label of a model of this shape in tables, such as 13B; empty if tables have no name for it."""
    for size, shapes in _shapes().items():
        if any((shape.layers, shape.hidden) == (model.layers, model.hidden) for shape in shapes):
            return size
    return ""


def named_shape(layers: int, hidden: int) -> Optional[ModelConfig]:
    """The model of this shape that tables have a name for; None if there is none."""
    every = (shape for shapes in _shapes().values() for shape in shapes)
    return next((shape for shape in every if (shape.layers, shape.hidden) == (layers, hidden)), None)


def shapes_of(size: str) -> Tuple[ModelConfig, ...]:
    """The models that tables mean by a size such as 13B; empty for an unknown size."""
    return _shapes().get(size, ())
