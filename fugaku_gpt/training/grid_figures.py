"""The figures of a classifier of grids for the log: images per second, and loss and accuracy of each bucket."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Sequence

from fugaku_gpt.training.trainer import SizeFigures, Step

_COUNTS = ("images", "distinct_images")


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
            "loss": sum(step.loss for step in of_side) / len(of_side),
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
    """Return the figures of a validation: accuracy over all images, and of each bucket the number of images and of
    different ones among them, loss and accuracy."""
    buckets = {
        str(math.isqrt(size.seq_len)): {
            "images": size.samples,
            "distinct_images": size.distinct,
            "loss": size.losses / size.samples,
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
    images, distinct = (sum(bucket[key] for bucket in figures["buckets"].values()) for key in _COUNTS)
    repeats = f", {distinct} different" if distinct < images else ""
    sizes = "".join(
        f" | {side} x {side}: loss {bucket['loss']:.4f}, accuracy {bucket['accuracy']:.2%} of {bucket['images']}"
        for side, bucket in figures["buckets"].items()
    )
    start = f"validation at iteration {iteration} | lm loss: {loss:.6f} | accuracy: {figures['accuracy']:.2%}"
    return f"{start} | images: {images}{repeats}{sizes}{change} |"
