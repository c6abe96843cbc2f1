"""Dropout whose mask depends on what is dropped, not on the rank that computes it.

The mask of element i of a site is a pure function of (seed, site, i), with i counted over all samples ever consumed:
the counter of a Philox generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). A rank that holds
a slice draws exactly the slice's bits, so every layout, micro-batch size and PyTorch drops the same elements.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fugaku_gpt.parallel.sequence import UNSHARDED, Shard

_PER_BLOCK = 16  # 16-bit draws in one Philox block of 256 bits


def keep_mask(
    seed: int, site: int, first: int, count: int, probability: float
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Return flags, True for each of the elements [first, first + count) of a site that is not dropped; each is dropped
    with ``probability`` to within 2⁻¹⁷."""
    block, skip = divmod(first, _PER_BLOCK)
    generator = np.random.Philox(key=(site << 64) | (seed & (2**64 - 1)), counter=block)
    raw_draws = generator.random_raw(-(-(skip + count) // 4))
    draws = raw_draws.astype("<u8", copy=False).view("<u2")[skip : skip + count]
    keep_flags: np.ndarray[tuple[int], np.dtype[np.bool_]] = draws >= threshold(probability)
    return keep_flags


def threshold(probability: float) -> int:
    """Return the number below which draws of 16 bits mean that an element is dropped."""
    return round(probability * 65536)


def dropped_share(probability: float) -> float:
    """Return the share of elements that is dropped, ``probability`` to within 2⁻¹⁷."""
    return threshold(probability) / 65536.0


def scaled_mask(keep_flags: np.ndarray, probability: float, like: torch.Tensor) -> torch.Tensor:
    """Return the factors of elements: 0 if dropped, else 1 / (1 - dropped share), so that the mean does not change."""
    scale = 1.0 / (1.0 - dropped_share(probability))
    return torch.from_numpy(keep_flags).to(like.dtype).mul_(scale)


class KeyedDropout(nn.Module):
    """Dropout on activations of consecutive samples: [b, s, h], or this rank's ``shard`` of each sample."""

    def __init__(self, probability: float, seed: int, site: int, shard: Shard = UNSHARDED) -> None:
        super().__init__()
        self.probability = probability
        self._seed = seed
        self._site = site
        self._shard = shard

    def forward(self, x: torch.Tensor, first_sample: int) -> torch.Tensor:
        """Apply dropout. ``first_sample``: number of the first of the b samples, counted from the start of training."""
        if self.probability == 0.0 or not self.training:
            return x
        return x * scaled_mask(self._keep_flags(x, first_sample), self.probability, x).view(x.shape)

    def _keep_flags(self, x: torch.Tensor, first_sample: int) -> np.ndarray:
        size, count = x[0].numel(), self._shard.count  # elements of a sample on this rank, and ranks
        if count == 1:
            return keep_mask(self._seed, self._site, first_sample * size, x.numel(), self.probability)
        firsts = [((first_sample + i) * count + self._shard.index) * size for i in range(x.shape[0])]
        return np.concatenate([keep_mask(self._seed, self._site, first, size, self.probability) for first in firsts])
