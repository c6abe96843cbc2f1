"""The angles by which rotary embeddings turn queries and keys (Su et al. 2021, "RoFormer", section 3.4.2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fugaku_gpt.config import ModelConfig

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]


def rotary_frequencies(model: ModelConfig) -> "Array":
    """Angle per position of each pair of coordinates, float64 [d / 2]; of a grid classifier [d / 4], since half of the
    pairs turn by the row and half by the column.

    ``rope_scaling`` stretches the wavelengths: ``linear`` all of them (Chen et al. 2023, "Extending Context Window of
    Large Language Models via Positional Interpolation"), ``llama3`` those that are long beside the sequence length
    before the stretching, with a blend between (Llama Team 2024, "The Llama 3 Herd of Models", section 3.4.1).
    """
    half = model.head_size // (4 if model.is_grid_classifier else 2)
    frequencies: Array = model.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
    if model.rope_scaling == "linear":
        frequencies /= model.rope_factor
    elif model.rope_scaling == "llama3":
        # the number of wavelengths in a sequence says how much of the stretching is left out
        assert model.rope_original_seq_len is not None  # by the checks of a configuration
        turns = model.rope_original_seq_len * frequencies / (2.0 * math.pi)
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / model.rope_factor)
    return frequencies
