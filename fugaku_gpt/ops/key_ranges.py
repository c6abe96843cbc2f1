"""Which keys each query of attention sees: one range of positions for each query, as two vectors of numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Optional, Sequence

import torch


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """Query i of a sample sees the keys at positions first[i] to end[i] - 1.

    Neither number decreases from a query to the next: then the queries that see any key of a block of keys lie beside
    each other, and the kernels leave out the others without a look at each. An empty range, first[i] = end[i], is that
    of a query that sees nothing; its output and its gradients are 0.

    Attributes:
        first, end: int32 [samples, queries], or [1, queries] if all samples have the same ranges.
        keys: number of keys of a sample.
    """

    first: torch.Tensor
    end: torch.Tensor
    keys: int

    def __post_init__(self) -> None:
        first, end = self.first, self.end
        for x in (first, end):
            if x.dtype != torch.int32 or x.dim() != 2 or not x.is_contiguous() or x.shape != first.shape:
                raise ValueError("ranges of keys are two contiguous int32 tensors [samples, queries] of the same shape")
        if not bool(((first >= 0) & (first <= end) & (end <= self.keys)).all()):
            raise ValueError(f"a range of keys does not lie within [0, {self.keys}]")
        if any(bool((x[:, 1:] < x[:, :-1]).any()) for x in (first, end)):
            raise ValueError("a range of keys begins or ends before that of the query before it")

    @property
    def queries(self) -> int:
        """Number of queries of a sample."""
        return self.first.shape[1]

    def suits(self, samples: int, queries: int, keys: int) -> bool:
        """Whether there is a range for each query of each sample."""
        return self.first.shape[0] in (1, samples) and (self.queries, self.keys) == (queries, keys)

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def causal(queries: int, keys: Optional[int] = None) -> "KeyRanges":
        """Each query sees its own position and those before it. The queries are the last ones of the keys; default: as
        many as these."""
        keys = queries if keys is None else keys
        end = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32).unsqueeze(0)
        return KeyRanges(torch.zeros_like(end), end, keys)

    @staticmethod
    def bidirectional(lengths: Sequence[int], queries: int) -> "KeyRanges":
        """All tokens of a sample see each other, and none sees the padding that follows them.

        Args:
            lengths: of each sample, the tokens before its padding.
            queries: tokens of a sample, padding included.
        """
        end = torch.tensor(lengths, dtype=torch.int32).unsqueeze(1).expand(-1, queries).contiguous()
        is_padding = torch.arange(queries, dtype=torch.int32) >= end
        return KeyRanges(torch.where(is_padding, end, torch.zeros_like(end)), end, queries)

    @staticmethod
    def documents(starts: Sequence[Sequence[int]], queries: int, is_causal: bool = True) -> "KeyRanges":
        """Tokens see the tokens of their own document: those up to themselves, or all of them.

        Args:
            starts: of each sample, the positions at which its documents begin; its first begins at 0.
            queries: tokens of a sample.
        """
        begins = torch.zeros(len(starts), queries + 1, dtype=torch.int64)
        for sample, positions in enumerate(starts):
            begins[sample, list(positions)] = 1
        positions_of_starts = torch.arange(queries) * begins[:, :queries]
        first = positions_of_starts.cummax(1).values
        if is_causal:
            end = torch.arange(1, queries + 1).expand(len(starts), -1)
        else:  # where the next document begins
            following = torch.where(begins[:, 1:].bool(), torch.arange(1, queries + 1), torch.tensor(queries))
            end = following.flip(1).cummin(1).values.flip(1)
        return KeyRanges(first.int().contiguous(), end.int().contiguous(), queries)
