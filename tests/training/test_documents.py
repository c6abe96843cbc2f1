"""Tests of training steps on samples whose documents are apart."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import pytest
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.data.packed_batch import PackedBatch
from fugaku_gpt.layout.batch import SkippedSamples
from fugaku_gpt.model import build_model
from fugaku_gpt.model.documents import Documents
from fugaku_gpt.training.trainer import Trainer
from fugaku_gpt.training.workload import RemainingSamples
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config
from tests.training.trainers import tiny_trainer

MASK = "data.document_mask=true"
FIXED = ("training.dtype=float64", "model.dropout=0", "model.attention_dropout=0")


class SingleTokens(ByteSamples):
    """Samples all of whose documents have one token."""

    def packed_batch(self, first: int, count: int) -> PackedBatch:
        tokens = super().packed_batch(first, count).tokens
        return PackedBatch(tokens, np.ones(tokens.shape, dtype=np.bool_))


def losses_by_definition(begins: "np.ndarray[Any, np.dtype[np.bool_]]") -> Tuple[float, int]:
    """Returns the sum of losses of the tokens of the first batch that have a target, and their number."""
    config = tiny_config(*FIXED, MASK)
    model = build_model(config, Communicator.alone()).eval()
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 8))
    documents = Documents.of(config.model, begins[:, :-1], False, torch.float64)
    with torch.no_grad():
        losses = model.token_losses(model.hidden_states(tokens[:, :-1], documents=documents), tokens[:, 1:])
    has_target = torch.from_numpy(~begins[:, 1:])
    return float(losses[has_target].sum()), int(has_target.sum())


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_the_loss_is_the_mean_over_the_targets_of_all_micro_batches(micro_batch: int) -> None:
    begins = ByteSamples(24).packed_batch(0, 8).begins
    total, targets = losses_by_definition(begins)
    assert len({int(row[1:].sum()) for row in begins}) > 2, "micro-batches have unequal numbers of targets"
    run = tiny_trainer(*FIXED, MASK, f"training.micro_batch={micro_batch}")
    assert run.validate() == pytest.approx(total / targets, rel=1e-12)
    assert run.step().loss == pytest.approx(total / targets, rel=1e-12)
    assert run.validate() != pytest.approx(total / targets, rel=1e-12)


def test_the_first_tokens_of_documents_are_targets_if_the_run_says_so() -> None:
    run = tiny_trainer(*FIXED, MASK, "data.loss_across_documents=true")
    begins = ByteSamples(24).packed_batch(0, 8).begins
    config = tiny_config(*FIXED)
    model = build_model(config, Communicator.alone()).eval()
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 8))
    documents = Documents.of(config.model, begins[:, :-1], False, torch.float64)
    with torch.no_grad():
        losses = model.token_losses(model.hidden_states(tokens[:, :-1], documents=documents), tokens[:, 1:])
    assert run.step().loss == pytest.approx(float(losses.mean()), rel=1e-12)


def test_a_batch_without_any_target_changes_nothing_but_the_decay() -> None:
    config = tiny_config(*FIXED, MASK, "training.weight_decay=0")
    run = Trainer(config, ProcessGrid.alone(), SingleTokens(24), SingleTokens(24))
    before = run.buffers.parameters.clone()
    step = run.step()
    assert (step.loss, step.grad_norm, run.validate()) == (0.0, 0.0, 0.0)
    assert torch.equal(run.buffers.parameters, before)


def test_documents_follow_samples_that_are_left_out() -> None:
    samples = ByteSamples(24)
    remaining = RemainingSamples(
        samples, SkippedSamples(tiny_config("training.skip_samples=[2-4]").training.skip_samples)
    )
    batch, before, after = remaining.packed_batch(1, 2), samples.packed_batch(1, 1), samples.packed_batch(5, 1)
    assert np.array_equal(batch.begins, np.concatenate([before.begins, after.begins]))
    assert np.array_equal(batch.tokens, remaining.batch(1, 2))
