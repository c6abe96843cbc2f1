"""Computes which samples a replica reads, how many, and how many tokens of each, as pure functions of the samples
consumed and the iteration, so that every layout reads the same global batch.

Samples are numbered. ``consumed`` counts the samples that are done: used, or skipped by ``training.skip_samples``.
Every layout uses the ``used``-th sample that is not skipped (counted from 0) at the same position; dropout is keyed by
that count, in which the samples of one micro-batch are consecutive.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import RunConfig


def first_sample(config: RunConfig, used: int, micro_batch: int, dp_rank: int) -> int:
    """The first of the ``training.micro_batch`` consecutive samples of one micro-batch of one replica, not counting
    skipped samples.

    Args:
        used: number of samples used by all earlier iterations.
        micro_batch: index within the iteration, from 0.
        dp_rank: the replica.
    """
    return used + (micro_batch * config.layout.dp + dp_rank) * config.training.micro_batch


def global_batch(config: RunConfig, consumed: int) -> int:
    """Number of samples in the iteration that begins after ``consumed`` samples.

    From ``training.ramp_start`` in steps of ``ramp_increment``, each for an equal share of ``ramp_samples``, to the
    full size: Megatron-LM's meaning of its option --rampup-batch-size.
    """
    training = config.training
    return _ramp(training.global_batch, training.ramp_start, training.ramp_increment, training.ramp_samples, consumed)


def sequence_length(config: RunConfig, iteration: int) -> int:
    """Tokens per sample in an iteration, counted from 0: the same kind of ramp over ``training.seq_ramp_iterations``.

    Shorter samples are the beginnings of the same samples (Li et al. 2022, "The Stability-Efficiency Dilemma", sequence
    length warm-up).
    """
    training = config.training
    return _ramp(
        config.model.seq_len,
        training.seq_ramp_start,
        training.seq_ramp_increment,
        training.seq_ramp_iterations,
        iteration,
    )


def batch_sizes(config: RunConfig) -> List[Tuple[int, int]]:
    """The (global batch, sequence length) pairs of the run's iterations, each once, in order. The last is the full
    size, which validation uses even if no iteration reaches it. Batches of grids have the cells of a bucket."""
    if config.model.is_grid_classifier:
        return [(config.training.global_batch, side * side) for side in config.data.buckets]
    full = (config.training.global_batch, config.model.seq_len)
    sizes: Dict[Tuple[int, int], None] = {}  # keeps their order
    for size in iteration_sizes(config):
        if size == full:
            break
        sizes[size] = None
    return [*sizes, full]


def iteration_sizes(config: RunConfig) -> Iterator[Tuple[int, int]]:
    """Yield the (global batch, sequence length) of each iteration of the run, from the first."""
    left_out = SkippedSamples(config.training.skip_samples)
    consumed = 0
    for iteration in range(config.training.iterations):
        samples = global_batch(config, consumed)
        yield samples, sequence_length(config, iteration)
        consumed = left_out.number(left_out.count_used(consumed) + samples - 1) + 1


def _ramp(full: int, start: Optional[int], increment: Optional[int], length: Optional[int], done: int) -> int:
    if start is None or increment is None or length is None or done >= length:
        return full
    steps = (full - start) // increment
    return start + increment * (done * steps // length)


class SkippedSamples:
    """The samples that a run skips (``training.skip_samples``), as disjoint ranges in order."""

    def __init__(self, texts: Sequence[str]) -> None:
        """``texts``: such as "1000-1999", or one number; may overlap, in any order."""
        ranges: List[List[int]] = []
        for first, end in sorted(_range(text) for text in texts):
            if ranges and first <= ranges[-1][1]:
                ranges[-1][1] = max(ranges[-1][1], end)
            else:
                ranges.append([first, end])
        self._ends = [end for _, end in ranges]
        self._firsts = [first for first, _ in ranges]
        # [k]: number of samples skipped before range k; the last entry counts all of them
        self._before = [0]
        for first, end in ranges:
            self._before.append(self._before[-1] + end - first)
        self._first_used = [first - before for first, before in zip(self._firsts, self._before)]

    def count_used(self, consumed: int) -> int:
        """Number of samples among the first ``consumed`` that are not skipped."""
        k = bisect_right(self._ends, consumed)
        within = max(0, consumed - self._firsts[k]) if k < len(self._firsts) else 0
        return consumed - self._before[k] - within

    def number(self, used: int) -> int:
        """The number of the sample that follows ``used`` used samples."""
        return used + self._before[bisect_right(self._first_used, used)]


def _range(text: str) -> Tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first) + 1
