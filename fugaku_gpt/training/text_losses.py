"""Computes the losses of texts by windows of the model's sequence length, distributed over replicas.

Windows are sorted by length, batched, and batches dealt to replicas, in the same way for every layout; so results are
equal in all layouts, up to rounding, and to the last bit for any number of replicas.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Protocol, Sequence

import numpy as np
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.scored_text import ScoredText, TextLoss, TokenIds, Window, windows_of


class ScoringModel(Protocol):
    """A model over tensor- and pipeline-parallel ranks, and replicas of it, that computes the losses of tokens."""

    config: RunConfig
    grid: ProcessGrid

    def token_losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the cross-entropy [b, s] of ``targets`` after ``tokens``, both [b, s]; None but on the last stage;
        collective over the replica."""


def batches_of(windows: Sequence[Window], batch: int) -> List[List[int]]:
    """The batches in which windows are computed together, longest windows first: the indices of each."""
    order = sorted(range(len(windows)), key=lambda index: (windows[index].start - windows[index].stop, index))
    return [order[at : at + batch] for at in range(0, len(order), batch)]


def text_losses(
    model: ScoringModel,
    texts: Sequence[ScoredText],
    stride: Optional[int] = None,
    batch: int = 8,
    on_done: Callable[[int], None] = lambda tokens: None,
) -> List[TextLoss]:
    """Return the loss of each text, on every rank; collective over all ranks.

    Args:
        stride: tokens between the beginnings of windows, at most the model's sequence length; None: that length.
        batch: windows that are computed together.
        on_done: called with the number of tokens predicted so far by this replica and those beside it.
    """
    grid, seq_len = model.grid, model.config.model.seq_len
    windows = windows_of(texts, seq_len, stride or seq_len)
    batches = batches_of(windows, batch)
    sums = torch.zeros(len(windows), dtype=torch.float64)
    done, length, kept = 0, 0, ops.pooled_sizes()
    with torch.no_grad():
        for number, members in enumerate(batches):
            if number % grid.dp.size == grid.coordinates.dp:
                longest = windows[members[0]].stop - windows[members[0]].start
                if longest != length:  # else the pool would keep blocks for each of all lengths
                    ops.release_tensor_pool(kept)
                length = longest
                _add_losses(model, [windows[index] for index in members], texts, members, sums)
            done += sum(windows[index].stop - windows[index].first for index in members)
            on_done(done)
    ops.release_tensor_pool(kept)
    grid.dp.all_reduce(sums)  # of each window one replica has the sum, the others zeros
    grid.pp.broadcast(sums, root=grid.pp.size - 1)
    nats = [0.0] * len(texts)
    for window, loss in zip(windows, sums.tolist()):
        nats[window.text] += loss
    return [TextLoss(text.name, n, len(text.ids) - text.first, text.bytes) for text, n in zip(texts, nats)]


def _add_losses(
    model: ScoringModel,
    windows: Sequence[Window],
    texts: Sequence[ScoredText],
    members: Sequence[int],
    sums: torch.Tensor,
) -> None:
    """Compute a batch of windows, and set the sums of the losses of their predicted tokens, on the last stage."""
    ids = pad_batch([texts[window.text].ids[window.start : window.stop] for window in windows], filler=0)
    losses = model.token_losses(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    if losses is None:
        return
    for index, window, row in zip(members, windows, losses.double()):
        sums[index] = row[window.first - window.start - 1 : window.stop - window.start - 1].sum()


def pad_batch(sequences: Sequence[TokenIds], filler: int) -> torch.Tensor:
    """Return token ids [b, longest], filled up on the right, where causal attention reads nothing."""
    longest = max(map(len, sequences))
    padded = torch.full((len(sequences), longest), filler, dtype=torch.int64)
    for row, sequence in zip(padded, sequences):
        row[: len(sequence)] = torch.as_tensor(np.asarray(sequence, dtype=np.int64))
    return padded
