"""Which samples a replica reads, how many and how much of each: pure functions of the samples consumed and the
iteration, so any layout reads the same global batch.

Samples are numbered. ``consumed`` counts those that are behind: used, or left out by ``training.skip_samples``. Of the
samples that are not left out, number ``used`` (counted from 0) is used by all layouts in the same place; dropout is
keyed by that count, so that the samples of one micro-batch follow one another there.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.config.schema import RunConfig


def first_sample(config: RunConfig, used: int, micro_batch: int, dp_rank: int) -> int:
    """The first of the ``training.micro_batch`` consecutive samples of one micro-batch of one replica, counted without
    those that are left out.

    Args:
        used: samples that all earlier iterations have used.
        micro_batch: index within the iteration, from 0.
        dp_rank: the replica.
    """
    return used + (micro_batch * config.layout.dp + dp_rank) * config.training.micro_batch


def global_batch(config: RunConfig, consumed: int) -> int:
    """Samples of the iteration that begins when ``consumed`` samples are behind.

    From ``training.ramp_start`` in steps of ``ramp_increment``, each for an equal share of ``ramp_samples``, to the
    full size: Megatron-LM's meaning of its option --rampup-batch-size.
    """
    training = config.training
    return _ramp(training.global_batch, training.ramp_start, training.ramp_increment, training.ramp_samples, consumed)


def sequence_length(config: RunConfig, iteration: int) -> int:
    """Tokens of each sample in an iteration, counted from 0: the same ramp over ``training.seq_ramp_iterations``.

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
    """(global batch, sequence length) of the run's iterations, each once, in the order in which they come; the last is
    the full size, in which a run validates even where no iteration gets there."""
    full = (config.training.global_batch, config.model.seq_len)
    left_out = SkippedSamples(config.training.skip_samples)
    sizes: Dict[Tuple[int, int], None] = {}  # keeps their order
    consumed = 0
    for iteration in range(config.training.iterations):
        size = (global_batch(config, consumed), sequence_length(config, iteration))
        if size == full:
            break
        sizes[size] = None
        consumed = left_out.number(left_out.count_used(consumed) + size[0] - 1) + 1
    return [*sizes, full]


def _ramp(full: int, start: Optional[int], increment: Optional[int], length: Optional[int], done: int) -> int:
    if start is None or increment is None or length is None or done >= length:
        return full
    steps = (full - start) // increment
    return start + increment * (done * steps // length)


class SkippedSamples:
    """The samples that a run leaves out (``training.skip_samples``), as disjoint ranges in order."""

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
        # [k]: how many are left out before range k; the last: all of them
        self._before = [0]
        for first, end in ranges:
            self._before.append(self._before[-1] + end - first)
        self._first_used = [first - before for first, before in zip(self._firsts, self._before)]

    def count_used(self, consumed: int) -> int:
        """How many of the first ``consumed`` samples are not left out."""
        k = bisect_right(self._ends, consumed)
        within = max(0, consumed - self._firsts[k]) if k < len(self._firsts) else 0
        return consumed - self._before[k] - within

    def number(self, used: int) -> int:
        """The number of the sample before which ``used`` samples are used."""
        return used + self._before[bisect_right(self._first_used, used)]


def _range(text: str) -> Tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first) + 1
