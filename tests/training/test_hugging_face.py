"""Tests of training that starts from Hugging Face's weights, and of exporting the trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fugaku_gpt.checkpoint.hugging_face import export_model, import_model
from fugaku_gpt.checkpoint.manifest import read_manifest
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.resume import load_checkpoint
from fugaku_gpt.training.trainer import Trainer
from tests.support.text import VOCABULARY, ByteSamples
from tests.support.tiny import tiny_config


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library, which takes seconds to import: only where a test of this file runs, not where it is collected."""
    return pytest.importorskip("transformers", reason="transformers is not installed: make dev")


def their_loss(model: Any, first: int, count: int) -> float:
    """Mean cross-entropy of some of the samples, in float64."""
    tokens = torch.from_numpy(ByteSamples(24).batch(first, count))
    with torch.no_grad():
        logits = model.eval().double()(tokens[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)))


def test_losses_after_import_and_after_export_equal_those_of_transformers(transformers: Any, tmp_path: Path) -> None:
    torch.manual_seed(2)
    shape = {"vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, initializer_range=0.2)
    )
    theirs.save_pretrained(tmp_path / "before")
    checkpoint, model, _ = import_model(tmp_path / "before", tmp_path / "imported")
    config = tiny_config(
        "model.dropout=0", "model.attention_dropout=0", "model.embedding_layernorm=false", f"model.gelu={model.gelu}"
    )
    samples = ByteSamples(config.model.seq_len)
    trainer = Trainer(config, ProcessGrid.alone(), samples, samples)

    assert load_checkpoint(trainer, checkpoint, read_manifest(checkpoint)) is None
    assert trainer.iteration == 0
    assert trainer.step().loss == pytest.approx(their_loss(theirs, 0, 8), rel=1e-6)
    for _ in range(4):
        trainer.step()
    (tmp_path / "run").mkdir()
    CheckpointSaver(trainer, tmp_path / "run" / "checkpoints").save({}, wait=True)
    export_model(tmp_path / "run" / "checkpoints" / "step-00000005", tmp_path / "after")
    learned = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "after")
    assert trainer.step().loss == pytest.approx(their_loss(learned, 40, 8), rel=1e-6)
    assert their_loss(learned, 0, 8) < their_loss(theirs, 0, 8)
