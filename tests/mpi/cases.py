"""The matrix of layouts whose training is held equal to one rank's: what is switched on in each, as words.

``tests/test_matrix.py`` proves that it has every pair of features that can meet, and the triples that matter most.
"""

from __future__ import annotations

from typing import Dict, Iterator, Tuple

from fugaku_gpt.config.schema import RECOMPUTE

Words = Tuple[str, ...]
BASE = ("model.layers=4", "training.warmup_iterations=1", "training.decay_iterations=5")
MEANINGS: Dict[str, Words] = {
    "batch-ramp": ("training.ramp_start=4", "training.ramp_increment=4", "training.ramp_samples=8"),
    "length-ramp": (
        "training.seq_ramp_start=8",
        "training.seq_ramp_increment=8",
        "training.seq_ramp_iterations=4",
    ),
    "leave-samples": ("training.skip_samples=[3, 9-12]",),
    "leave-step": ("training.non_finite=skip",),  # and the test makes one step not finite
    "rollback": ("training.rollback_every=1", "training.spike_window=2", "training.spike_ratio=1.0005"),
    "linear": ("training.lr_schedule=linear",),
    "constant": ("training.lr_schedule=constant",),
    "wsd": ("training.lr_schedule=wsd", "training.decay_fraction=0.5"),
    "interleaved": ("layout.schedule=interleaved", "layout.chunks=2"),
    "gpipe": ("layout.schedule=gpipe",),
    "sp": ("layout.sequence_parallel=true",),
    "zero": ("layout.zero=1",),
    "node-first": ("layout.hierarchical_sum=true",),
    **{kind: (f"training.recompute={kind}",) for kind in RECOMPUTE},
}


def settings_of(words: Words) -> Iterator[str]:
    """``key=value`` of some words: those above, ``dp=2`` and the like of the layout, ``layers=1`` and ``budget=0.4`` of
    recomputing, the types."""
    for word in words:
        key, _, value = word.partition("=")
        if key in MEANINGS:
            yield from MEANINGS[key]
        elif key in ("layers", "budget"):
            yield f"training.recompute_{'layers' if key == 'layers' else 'budget_mib'}={value}"
        elif key in ("dtype", "gradient_dtype", "micro_batch"):
            yield f"training.{word}"
        else:
            yield f"layout.{word}"
