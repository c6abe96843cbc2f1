"""The figures of a classifier of grids for the log: images per second, and loss and accuracy of each bucket."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Sequence

from fugaku_gpt.training.trainer import SizeFigures, Step


def grid_figures(steps: Sequence[Step], elapsed: float) -> Dict[str, Any]:
    """Return the figures of the iterations since the last line, which took ``elapsed`` seconds; loss and accuracy of a
    bucket are means over its grids."""
    samples = sum(step.samples for step in steps)
    by_side: Dict[int, List[Step]] = {}
    for step in steps:
        by_side.setdefault(math.isqrt(step.seq_len), []).append(step)
    buckets = {
        str(side): {
            "iterations": len(of_side),
            "loss": _finite(sum(step.loss for step in of_side) / len(of_side)),
            "accuracy": sum(step.correct for step in of_side) / sum(step.samples for step in of_side),
        }
        for side, of_side in sorted(by_side.items())
    }
    return {
        "images_per_second": samples / elapsed,
        "accuracy": sum(step.correct for step in steps) / samples,
        "buckets": buckets,
    }


def validation_figures(sizes: Sequence[SizeFigures]) -> Dict[str, Any]:
    """Return the figures of a validation: accuracy over all grids, and images, loss and accuracy of each bucket."""
    buckets = {
        str(math.isqrt(size.seq_len)): {
            "images": size.samples,
            "loss": _finite(size.losses / size.samples),
            "accuracy": size.correct / size.samples,
        }
        for size in sizes
    }
    samples = sum(size.samples for size in sizes)
    return {"accuracy": sum(size.correct for size in sizes) / samples, "buckets": buckets}


def grid_validation_line(iteration: int, loss: float, figures: Mapping[str, Any], change: str) -> str:
    """Return the line of the log for a validation.

    Args:
        figures: of :func:`validation_figures`.
        change: text about the loss since the last validation.
    """
    images = sum(bucket["images"] for bucket in figures["buckets"].values())
    sizes = "".join(
        f" | {side} x {side}: loss {math.nan if bucket['loss'] is None else bucket['loss']:.4f}, "
        f"accuracy {bucket['accuracy']:.2%} of {bucket['images']}"
        for side, bucket in figures["buckets"].items()
    )
    start = f"validation at iteration {iteration} | lm loss: {loss:.6f} | accuracy: {figures['accuracy']:.2%}"
    return f"{start} | images: {images}{sizes}{change} |"


def _finite(value: float) -> Any:
    """Return a number, or None in place of one that JSON cannot represent."""
    return value if math.isfinite(value) else None
