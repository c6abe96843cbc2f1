"""Tests of the counts of operations of a step, by hand."""

from __future__ import annotations

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.layout.operations import ALL_GATHER, REDUCE_SCATTER
from fugaku_gpt.machine.probed import SCORES, VALUES
from fugaku_gpt.planner.trainer.work import count_chunk_work

TOKENS, HIDDEN = 2 * 64, 128
SETTINGS = (
    "model.layers=1", f"model.hidden={HIDDEN}", "model.heads=4", "model.seq_len=64", "model.vocab_size=512",
    "training.micro_batch=2", "training.global_batch=16", "training.dtype=float32",
)  # fmt: skip


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_share_the_vocabulary_exchange_the_parts_of_the_loss(sequence_parallel: bool) -> None:
    """The head gathers 3 numbers of each token and rank, the largest logit, the sum and the target's, and sums up the
    gradient of its input; a rank that holds the whole vocabulary sends nothing."""
    (alone,) = count_chunk_work(load_run_config(overrides=SETTINGS))
    assert not alone.forward.messages and not alone.backward.messages
    settings = [*SETTINGS, "layout.tp=2", f"layout.sequence_parallel={str(sequence_parallel).lower()}"]
    (shared,) = count_chunk_work(load_run_config(overrides=settings))
    size = 4 * TOKENS * HIDDEN
    assert sum(count for (_, sent), count in shared.forward.messages.items() if sent != size) == 1
    assert shared.forward.messages[ALL_GATHER, 4 * 3 * TOKENS * 2] == 1
    if sequence_parallel:  # the embedding scatters, the head gathers and scatters, and two layers' halves do both
        assert shared.forward.messages[REDUCE_SCATTER, size] == 1 + 1 + 2
        assert shared.forward.messages[ALL_GATHER, size] == 1 + 2
    else:
        assert sum(count for (_, sent), count in shared.forward.messages.items() if sent == size) == 1 + 1 + 2


@pytest.mark.parametrize(("samples", "length"), [(1, 64), (2, 64), (3, 64), (2, 256)])
def test_scores_and_values_are_those_of_all_samples_heads_and_blocks(samples: int, length: int) -> None:
    settings = (f"training.micro_batch={samples}", f"training.global_batch={samples}", f"model.seq_len={length}")
    (work,) = count_chunk_work(load_run_config(overrides=[*SETTINGS, *settings]))
    blocks = [64 * (number + 1) for number in range(length // 64)]  # keys up to the last query of each block of 64
    for kind in (SCORES, VALUES):
        products = [(key, count) for key, count in work.forward.products.items() if key[0] == kind]
        elements = sum(count * batch * rows * inner * columns for (_, batch, rows, inner, columns), count in products)
        assert elements == samples * 4 * 64 * sum(blocks) * (HIDDEN // 4)
