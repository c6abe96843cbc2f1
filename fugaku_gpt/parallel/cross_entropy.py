"""Logits and their cross-entropy in one operation, over a vocabulary that is cut over ranks; the full logits never
exist.

It works on a chunk of a few hundred tokens at a time. One matrix product computes this rank's logits of the chunk, and
one all-gather of three numbers per token (largest logit, sum of exponentials, logit of the target) gives the loss on
every rank. Because the gradient of a sum of losses does not depend on what comes after it, the gradients are computed
at once from the same buffer: that of the weight is added to its ``main_grad`` if there is one (``gradient_path.py``),
and the backward pass only passes the others on. Memory is one chunk × (vocabulary / tp) instead of tokens ×
vocabulary, without an extra product.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple

import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.layout.communications import CHUNK_TOKENS
from fugaku_gpt.parallel.gradient_path import main_grad
from fugaku_gpt.parallel.sequence import gather, scatter

NO_TARGET = -1  # in the place of the target of a token that has none
_CACHED_ROWS = 16  # rows of logits per thread; measured with 50304 columns: 8 to 16 are best


class CorrectCount:
    """Counts the tokens, or grids, whose target had the largest logit, the first of equal ones; the same on every rank
    of a tensor-parallel group."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, is_largest: torch.Tensor) -> None:
        """Count the ones of [n] ones and zeros."""
        self._count += int(is_largest.sum())

    def take(self) -> int:
        """Return the count since the last call."""
        count, self._count = self._count, 0
        return count


class LossOptions(NamedTuple):
    """Settings of the cross-entropy beside its tensors.

    Attributes:
        sequence_parallel: the ranks have different tokens, which are gathered, and their gradients scattered.
        gradient_scale: factor of the gradients, applied before they are rounded to the type of the hidden states.
        correct: counts the tokens whose target has the largest logit.
        has_gaps: some targets may be ``NO_TARGET``: their tokens have no loss and no gradient.
    """

    sequence_parallel: bool = False
    gradient_scale: float = 1.0
    correct: Optional[CorrectCount] = None
    has_gaps: bool = False


_DEFAULTS = LossOptions()


def vocab_parallel_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    tp: Communicator,
    vocab_size: int,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    options: LossOptions = _DEFAULTS,
) -> torch.Tensor:
    """Return the sum over tokens of -log softmax(hidden weightᵀ)[target].

    Args:
        hidden: [tokens, h], equal on every rank of ``tp``; if sequence-parallel [tokens / tp, h], this rank's.
        weight: [padded vocabulary / tp, h], this rank's rows; rows from ``vocab_size`` on are padding and take no part.
        targets: [tokens] int64, below ``vocab_size``; equal on every rank, rank after rank if sequence-parallel. With
            ``options.has_gaps`` some are ``NO_TARGET``.
        tp: the ranks that hold the other rows.
        vocab_size: the true vocabulary.
        chunk_tokens: tokens whose logits exist at one time.
        options: what else it does; default: nothing.

    Returns:
        A scalar, equal on every rank of ``tp``. For 16-bit types it is float32, in which everything but the products is
        computed.
    """
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropy.apply(hidden, weight, targets, tp, vocab_size, chunk_tokens, wants_gradient, options)


def vocab_parallel_token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, tp: Communicator, vocab_size: int
) -> torch.Tensor:
    """Return -log softmax(hidden weightᵀ)[target] of each token, [tokens], in float32 at least, without gradients.

    Arguments are those of :func:`vocab_parallel_cross_entropy`, which returns the sum of these.
    """
    first_row = tp.rank * weight.shape[0]
    used = max(0, min(weight.shape[0], vocab_size - first_row))
    losses = []
    for start in range(0, len(hidden), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        logits = ops.linear(hidden[rows], weight)
        losses.append(losses_of_logits(logits[:, :used], targets[rows] - first_row, tp, False, 1.0))
    return torch.cat(losses)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        tp: Communicator,
        vocab_size: int,
        chunk_tokens: int,
        wants_gradient: bool,
        options: LossOptions,
    ) -> torch.Tensor:
        sequence_parallel, gradient_scale, correct, has_gaps = options
        if sequence_parallel:
            hidden = gather(hidden, tp)
        dtype, tokens = hidden.dtype, hidden.shape[0]
        wide = dtype in (torch.float32, torch.float64)
        first_row = tp.rank * weight.shape[0]
        used = max(0, min(weight.shape[0], vocab_size - first_row))
        loss = hidden.new_zeros((), dtype=torch.float64)  # thousands of terms: the sum itself should not round
        sums = main_grad(weight)
        grad_hidden = ops.pooled_empty(hidden.shape, dtype) if wants_gradient else None
        grad_weight = sums
        if wants_gradient and sums is None:
            grad_weight = torch.zeros_like(weight, dtype=dtype if wide else torch.float32)
        # padding included: rows of logits that do not begin at a cache line made the first product 1.4 times as slow
        buffer = ops.pooled_empty((min(chunk_tokens, tokens), weight.shape[0]), dtype)
        for start in range(0, tokens, chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, tokens))
            chunk, local = hidden[rows], targets[rows] - first_row
            logits = ops.linear_into(buffer[: chunk.shape[0]], chunk, weight)
            logits[:, used:] = 0.0  # the gradient of padding
            losses = losses_of_logits(logits[:, :used], local, tp, wants_gradient, gradient_scale, correct)
            if has_gaps:
                gaps = (targets[rows] == NO_TARGET).nonzero(as_tuple=True)[0]
                losses[gaps] = 0.0  # PyTorch 1.7 has no index_fill_ of 16-bit types
                logits[gaps] = 0.0  # their gradient
            loss += losses.sum(dtype=torch.float64)
            if grad_hidden is not None and grad_weight is not None:
                # without padding, whatever its rows hold; as fast
                ops.matmul_into(grad_hidden[rows], logits[:, :used], weight[:used])
                ops.add_product(grad_weight, logits.t(), chunk)
        if grad_hidden is not None and sequence_parallel:
            grad_hidden = scatter(grad_hidden, tp).clone()  # a tensor of its own, so that the whole one is freed
        elif grad_hidden is not None:
            tp.all_reduce(grad_hidden)
        ctx.gradients = (grad_hidden, grad_weight.to(dtype) if grad_weight is not None and sums is None else None)
        return loss.to(dtype if wide else torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the cross-entropy's backward pass was run twice: its gradients were passed on the first time"
            )
        grad_hidden, grad_weight = ctx.gradients
        ctx.gradients = None  # the caller may change them in place
        if float(grad_loss) != 1.0:  # 1 when the sum itself is differentiated, as training does
            if grad_weight is None:
                raise RuntimeError(
                    "the cross-entropy has added the weight's gradient to its sum already: differentiate the "
                    "cross-entropy itself, and pass the factor as gradient_scale"
                )
            grad_hidden.mul_(grad_loss)
            grad_weight.mul_(grad_loss)
        return (grad_hidden, grad_weight, *(None,) * 6)


def losses_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    tp: Communicator,
    wants_gradient: bool,
    gradient_scale: float,
    correct: Optional[CorrectCount] = None,
) -> torch.Tensor:
    """Return the loss of each of [n, rows] logits, [n] in float32 at least, and overwrite the logits with
    ``gradient_scale`` times the gradient of their sum (undefined without ``wants_gradient``). ``targets`` are row
    numbers of this rank, out of range if another rank has the target. ``correct`` counts those with the largest
    logit."""
    n, rows = logits.shape
    dtype = logits.dtype if logits.dtype in (torch.float32, torch.float64) else torch.float32
    is_local = (targets >= 0) & (targets < rows)
    token, row = is_local.nonzero(as_tuple=True)[0], targets[is_local]
    target_logit, log_sum = torch.zeros(n, dtype=dtype), torch.empty(n, dtype=dtype)
    target_logit[token] = logits[token, row].to(dtype)
    # of this rank's rows, and of all ranks' once their figures are combined
    is_largest = _is_target_largest(logits.to(dtype), targets).to(dtype) if correct is not None else None
    if ops.has_native_loss(logits):
        if tp.size == 1:
            log_sum = ops.loss_full_rows_(logits, gradient_scale, wants_gradient)
        else:
            log_sum, target_logit = _combine_over_ranks(*ops.loss_sums(logits), target_logit, tp, is_largest)
            if wants_gradient:
                ops.loss_gradient_(logits, log_sum, gradient_scale)
    else:
        target_logit = _losses_by_operators(
            logits, log_sum, target_logit, tp, wants_gradient, gradient_scale, is_largest
        )
    if correct is not None and is_largest is not None:
        correct.add(is_largest)
    if wants_gradient:  # the gradient at the target is probability - 1
        logits[token, row] = (target_logit - log_sum).expm1_().mul_(gradient_scale)[token].to(logits.dtype)
    return log_sum - target_logit


def _losses_by_operators(
    logits: torch.Tensor,
    log_sum: torch.Tensor,
    target_logit: torch.Tensor,
    tp: Communicator,
    wants_gradient: bool,
    gradient_scale: float,
    is_largest: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Do the work of :func:`losses_of_logits` with PyTorch's operators: write ``log_sum`` [n], and overwrite the logits
    except for the targets; returns the target's logit of each token, whichever rank has it."""
    n, dtype = logits.shape[0], log_sum.dtype
    # a rank that waits for others does so once for all tokens; alone, few tokens at a time stay in the cache
    at_once = _CACHED_ROWS * torch.get_num_threads() if tp.size == 1 else n
    for start in range(0, n, at_once):
        part = slice(start, start + at_once)
        exponentials = logits[part].to(dtype)  # the logits themselves, or a copy in float32
        largest, sums = _exponentials(exponentials)
        of_part = is_largest[part] if is_largest is not None else None
        log_sum[part], target_logit[part] = _combine_over_ranks(largest, sums, target_logit[part], tp, of_part)
        if wants_gradient:  # exp(logit - largest of this rank) to probabilities
            exponentials.mul_(largest.sub_(log_sum[part]).exp_().mul_(gradient_scale).unsqueeze(1))
            if dtype != logits.dtype:
                logits[part].copy_(exponentials)
    return target_logit


def _exponentials(logits: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Turn [n, rows] logits into exp(logit - largest of its n) in place; returns the largest, and the sums."""
    if logits.shape[1] == 0:  # this rank holds padding only
        largest = logits.new_full((logits.shape[0],), torch.finfo(logits.dtype).min)
        return largest, torch.zeros_like(largest)
    largest = logits.amax(dim=1)  # max() finds the index too, which takes 6 times as long
    return largest, logits.sub_(largest.unsqueeze(1)).exp_().sum(dim=1)


def _is_target_largest(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return for each of [n, rows] logits whether its target's is the largest, the first of equal ones, [n] bool."""
    if logits.shape[1] == 0:  # this rank holds padding only
        return torch.zeros_like(targets, dtype=torch.bool)
    return logits.max(dim=1)[1] == targets


def _combine_over_ranks(
    largest: torch.Tensor,
    sums: torch.Tensor,
    target_logit: torch.Tensor,
    tp: Communicator,
    is_largest: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return, for each token, the logarithm of the sum of all exponentials, and the target's logit, combined from each
    rank's share; the logit is 0 on all ranks but one.

    Args:
        is_largest: 1 where the target's logit is the largest of this rank, [n]; it is overwritten with those of all
            ranks.
    """
    if tp.size == 1:
        return sums.log_().add_(largest), target_logit
    figures = (largest, sums, target_logit) if is_largest is None else (largest, sums, target_logit, is_largest)
    gathered = tp.all_gather(torch.stack(figures))  # [tp, 3 or 4, n]
    all_largest, first_rank = gathered[:, 0].max(dim=0)  # the first of the ranks whose largest logits are equal
    if is_largest is not None:
        is_largest.copy_(gathered[:, 3].gather(0, first_rank.unsqueeze(0)).squeeze(0))
    all_sums = (gathered[:, 1] * (gathered[:, 0] - all_largest).exp_()).sum(dim=0)
    return all_largest + all_sums.log(), gathered[:, 2].sum(dim=0)
