"""Tests of the losses of texts."""

from __future__ import annotations

from pathlib import Path
from typing import List

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.data.scored_text import ScoredText, windows_of
from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.continuation import GenerationLimits
from fugaku_gpt.inference.generation import Generator
from fugaku_gpt.inference.model_source import ReplicaLayout, find_model, inference_config
from fugaku_gpt.inference.replica import ModelReplica
from fugaku_gpt.inference.sampling import Sampling
from fugaku_gpt.ops import tensor_pool
from fugaku_gpt.ops.tensor_pool import TensorPool
from fugaku_gpt.training.text_losses import text_losses
from tests.support.checkpoints import save_model
from tests.support.models import model_of_kind


def a_text(length: int, first: int, name: str = "text") -> ScoredText:
    ids = np.random.RandomState(length + first).randint(0, 101, length)
    return ScoredText(name, [int(number) for number in ids], first, 10)


TEXTS = [a_text(8, 1), a_text(25, 1), a_text(26, 1), a_text(70, 5), a_text(2, 1), a_text(60, 57), a_text(60, 30)]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> ModelReplica:
    source = find_model(save_model(tmp_path_factory.mktemp("run"), model_of_kind("llama")))
    replica = ModelReplica(inference_config(source, ReplicaLayout(dtype="float64"), 1), ProcessGrid.alone())
    replica.load(source)
    return replica


@given(st.lists(st.tuples(st.integers(2, 80), st.integers(1, 79)), min_size=1, max_size=5), st.integers(1, 20))
def test_every_token_is_predicted_once_with_context(sizes: List[List[int]], stride: int) -> None:
    texts = [a_text(length, min(first, length - 1)) for length, first in sizes]
    predicted: List[List[int]] = [[] for _ in texts]
    for window in windows_of(texts, 20, stride):
        assert 0 <= window.start < window.first < window.stop <= window.start + 21
        predicted[window.text] += range(window.first, window.stop)
    assert predicted == [list(range(text.first, len(text.ids))) for text in texts]


@given(st.integers(2, 60), st.integers(1, 20))
def test_a_smaller_stride_leaves_each_token_more_context(length: int, stride: int) -> None:
    for window in windows_of([a_text(length, 1)], 20, stride)[1:]:
        assert window.first - window.start == 21 - stride


def test_losses_are_those_of_the_definition(replica: ModelReplica) -> None:
    seq_len = replica.config.model.seq_len
    for text, loss in zip(TEXTS, text_losses(replica, TEXTS, batch=3)):
        expected = 0.0
        for window in windows_of([text], seq_len, seq_len):
            ids = torch.tensor([text.ids[window.start : window.stop]])
            with torch.no_grad():
                logs = torch.log_softmax(replica._model.logits(ids[:, :-1])[0, :, :101], dim=-1)
            for position in range(window.first, window.stop):
                expected -= float(logs[position - window.start - 1, text.ids[position]])
        assert loss.nats == pytest.approx(expected, rel=1e-12)
        assert (loss.tokens, loss.bytes) == (len(text.ids) - text.first, 10)


@pytest.mark.parametrize("batch", [1, 2, 50])
def test_losses_do_not_depend_on_the_batch(batch: int, replica: ModelReplica) -> None:
    expected = text_losses(replica, TEXTS, stride=7)
    done: List[int] = []
    losses = text_losses(replica, TEXTS, stride=7, batch=batch, on_done=done.append)
    assert [loss.nats for loss in losses] == pytest.approx([loss.nats for loss in expected], rel=1e-12)
    assert done == sorted(done) and done


@pytest.mark.skipif(not hasattr(torch, "frombuffer"), reason="this PyTorch has no pool of tensors")
def test_texts_of_many_lengths_leave_no_memory_in_the_pool(
    replica: ModelReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_pool, "_MIN_BYTES", 1)
    monkeypatch.setattr(tensor_pool, "_POOL", TensorPool())
    monkeypatch.setattr(tensor_pool, "_is_enabled", True)
    text_losses(replica, [a_text(25, 1)])
    kept = tensor_pool.pooled_sizes()
    text_losses(replica, [a_text(length, 1) for length in range(2, 25)], batch=1)
    assert tensor_pool.pooled_sizes() == kept
    generator = Generator(replica, lambda context, ids: "", Sampling(), GenerationLimits(1))
    generator.run({number: list(range(length)) for number, length in enumerate(range(2, 24))})
    assert tensor_pool.pooled_sizes() == kept


def test_a_stride_beyond_the_sequence_length_is_refused(replica: ModelReplica) -> None:
    with pytest.raises(ValueError, match="stride 25: valid: 1 to 24"):
        text_losses(replica, TEXTS, stride=25)


def test_a_damaged_checkpoint_is_refused_by_name_of_the_tensor(tmp_path: Path) -> None:
    path = save_model(tmp_path, model_of_kind("gpt2"), ranks=1)
    (data,) = path.glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-9] ^= 1
    data.write_bytes(bytes(content))
    source = find_model(path)
    replica = ModelReplica(inference_config(source, ReplicaLayout(), 1), ProcessGrid.alone())
    with pytest.raises(UsageError, match="damaged: .*its CRC-32 is another"):
        replica.load(source)
