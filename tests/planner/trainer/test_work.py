"""Tests of the counts of operations of a step, by hand."""

from __future__ import annotations

from typing import Tuple

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.layout.flat import FlatLayout, flat_layout_of
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fugaku_gpt.machine.probed import NARROW_ALL_REDUCE, SCORES, VALUES
from fugaku_gpt.planner.trainer.work import StageWork, Tally, count_chunk_work, count_stage_work, message_bytes

TOKENS, HIDDEN = 2 * 64, 128
SETTINGS = (
    "model.layers=1", f"model.hidden={HIDDEN}", "model.heads=4", "model.seq_len=64", "model.vocab_size=512",
    "training.micro_batch=2", "training.global_batch=16", "training.dtype=float32",
)  # fmt: skip


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_share_the_vocabulary_exchange_terms_of_the_loss(sequence_parallel: bool) -> None:
    """The head gathers 3 numbers of each token and rank, the largest logit, the sum and the target's, and sums up the
    gradient of its input; a rank that holds the full vocabulary sends nothing."""
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


def stage_work(*settings: str, stage: int = 0) -> Tuple[StageWork, FlatLayout]:
    config = load_run_config(overrides=[*SETTINGS, "training.bucket_mib=0.1", *settings])
    return count_stage_work(config, stage), flat_layout_of(config, stage)


@pytest.mark.parametrize(
    ("settings", "operation", "item", "gathered"),
    [
        ((), ALL_REDUCE, 4, 0),
        (("training.gradient_dtype=bfloat16", "training.dtype=bfloat16"), NARROW_ALL_REDUCE, 2, 0),
        (("training.dtype=float64",), ALL_REDUCE, 8, 0),
        (("layout.zero=1",), REDUCE_SCATTER, 4, 4),
        (("layout.zero=1", "training.dtype=bfloat16"), REDUCE_SCATTER, 4, 2),
    ],
)
def test_replicas_sum_each_bucket_and_gather_sharded_parameters(
    settings: "tuple[str, ...]", operation: str, item: int, gathered: int
) -> None:
    work, flat = stage_work("layout.dp=2", *settings)
    sizes = [bucket.stop - bucket.start for bucket in flat.buckets]
    assert len(sizes) > 1 and sum(sizes) == flat.elements
    expected = [(operation, item * size) for size in sizes]
    assert list(work.replicas) == expected + ([(ALL_GATHER, gathered * size) for size in sizes] if gathered else [])
    assert stage_work(*settings)[0].replicas == ()  # a single replica


def test_the_optimiser_passes_over_the_elements_that_a_replica_owns() -> None:
    work, flat = stage_work("layout.dp=2")
    passes = dict(work.passes.passes.keys())
    assert passes == {"zero": flat.elements, "squares": flat.elements, "optimiser": flat.elements}
    work, flat = stage_work("layout.dp=2", "layout.zero=1", "training.dtype=bfloat16")
    passes = dict(work.passes.passes.keys())
    half = flat.elements // 2
    assert passes == {"zero": flat.elements, "squares": half, "optimiser": half, "round": half}
    work, flat = stage_work("layout.dp=2", "training.gradient_dtype=bfloat16", "training.dtype=bfloat16")
    assert work.passes.passes["round", flat.elements] == 3  # before and after the sum, and of the weights


def test_copies_of_parameters_are_summed_between_stages_and_tensor_parallel_ranks() -> None:
    alone, _ = stage_work()
    assert (alone.tied_bytes, alone.replicated_bytes, alone.copied_bytes) == (0, 0, 0)
    staged = ("model.layers=2", "layout.pp=2", "layout.dp=2")
    assert stage_work(*staged, stage=1)[0].tied_bytes == 4 * 512 * HIDDEN
    assert stage_work(*staged, "layout.zero=1")[0].tied_bytes == 4 * 512 * HIDDEN // 2
    shared, flat = stage_work("layout.tp=2", "layout.sequence_parallel=true")
    assert shared.replicated_bytes == 4 * (flat.tp_replicated.stop - flat.tp_replicated.start) > 0
    copied, flat = stage_work("layout.tp=2", "model.kv_heads=1")
    assert copied.copied_bytes == 4 * (flat.copied.stop - flat.copied.start) > 0


def test_messages_between_stages_are_hidden_states_or_their_shares() -> None:
    settings = ("layout.tp=2", "layout.pp=2", "model.layers=2")
    full = load_run_config(overrides=[*SETTINGS, *settings])
    shared = load_run_config(
        overrides=[*SETTINGS, *settings, "layout.sequence_parallel=true", "training.dtype=bfloat16"]
    )
    assert message_bytes(full) == 4 * TOKENS * HIDDEN
    assert message_bytes(shared) == 2 * TOKENS * HIDDEN // 2


def test_recompute_adds_a_forward_pass_or_the_flags_of_dropout() -> None:
    def backward(*settings: str) -> Tally:
        (work,) = count_chunk_work(load_run_config(overrides=[*SETTINGS, "model.attention_dropout=0.1", *settings]))
        return work.backward

    plain, selective, full = backward(), backward("training.recompute=selective"), backward("training.recompute=full")
    assert (plain.layers, full.layers) == (0, 1) and not any(name == "flags" for name, _ in plain.passes)
    flags = {size for name, size in selective.passes if name == "flags"}
    assert flags == {2 * 4 * 64 * 64} and selective.products == plain.products
    forward_products = sum((full.products - plain.products).values())
    (work,) = count_chunk_work(load_run_config(overrides=[*SETTINGS, "model.attention_dropout=0.1"]))
    head = 3 * 1  # the logits and both gradients, in one chunk of tokens
    assert forward_products == sum(work.forward.products.values()) - head
