"""Tests that documents that share a sequence are computed as if each were alone."""

from __future__ import annotations

from typing import Dict, Iterator, List, Sequence, Tuple

import numpy as np
import pytest
import torch

from fugaku_gpt.comm import Communicator
from fugaku_gpt.model import build_model
from fugaku_gpt.model.documents import Documents
from fugaku_gpt.model.gpt import GPT
from fugaku_gpt.parallel.cross_entropy import NO_TARGET
from fugaku_gpt.parallel.sequence import Shard
from tests.mpi.cases import MEANINGS
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config

NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0")
MODELS: Dict[str, Sequence[str]] = {"gpt2": (), "llama": MEANINGS["llama"]}
SAMPLES = 2


def model_of(kind: str, dtype: str, reference: bool = False, *more: str) -> GPT:
    config = tiny_config(*NO_DROPOUT, *MODELS[kind], f"training.dtype={dtype}", *more)
    return build_model(config, Communicator.alone(), reference)


def pieces(begins: np.ndarray) -> Iterator[Tuple[int, int]]:
    """Yields where the documents of a sample begin and end."""
    bounds = [0, *(np.flatnonzero(begins[1:]) + 1).tolist(), len(begins)]
    return zip(bounds[:-1], bounds[1:])


def packed_gradients(model: GPT, resets_positions: bool = True) -> Tuple[float, Dict[str, torch.Tensor]]:
    """Returns loss and gradients of samples whose documents are documents."""
    batch = ByteSamples(model.config.seq_len).packed_batch(0, SAMPLES)
    tokens, dtype = torch.from_numpy(batch.tokens), next(model.parameters()).dtype
    documents = Documents.of(model.config, batch.begins[:, :-1], resets_positions, dtype)
    targets = tokens[:, 1:].masked_fill(torch.from_numpy(batch.begins[:, 1:]), NO_TARGET)
    loss = model(tokens[:, :-1], targets, 0, documents=documents)
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def separate_gradients(model: GPT) -> Tuple[float, Dict[str, torch.Tensor]]:
    """Returns loss and gradients of the same documents, of which each is a sequence of its own."""
    batch, total, lengths = ByteSamples(model.config.seq_len).packed_batch(0, SAMPLES), 0.0, []
    for tokens, begins in zip(torch.from_numpy(batch.tokens), batch.begins):
        for start, end in pieces(begins):
            lengths.append(end - start)
            if end - start > 1:  # else no token has a target
                loss = model(tokens[start : end - 1].unsqueeze(0), tokens[start + 1 : end].unsqueeze(0))
                loss.backward()
                total += float(loss.detach())
    assert len(lengths) > 2 * SAMPLES and min(lengths) == 1 < max(lengths)
    return total, gradients_of(model)


def gradients_of(model: GPT) -> Dict[str, torch.Tensor]:
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def distance(ours: Dict[str, torch.Tensor], judge: Dict[str, torch.Tensor]) -> float:
    """Returns the largest difference relative to the largest entry of its tensor."""
    assert set(ours) == set(judge)
    return max(float((ours[name] - x).abs().max() / x.abs().max()) for name, x in judge.items())


@pytest.mark.parametrize("reference", [True, False], ids=["naive", "tiled"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_packed_documents_have_the_gradients_of_separate_ones(kind: str, reference: bool) -> None:
    model = model_of(kind, "float64", reference)
    (loss, ours), (expected, judge) = packed_gradients(model), separate_gradients(model)
    assert loss == pytest.approx(expected, rel=1e-13)
    assert distance(ours, judge) <= 1e-12


@pytest.mark.parametrize("kind", list(MODELS))
def test_kernels_have_the_gradients_of_the_definition(kind: str) -> None:
    (_, ours), (_, judge) = (packed_gradients(model_of(kind, "float32", reference)) for reference in (False, True))
    assert distance(ours, judge) <= 1e-5


def test_recomputed_layers_see_the_same_documents() -> None:
    stored = build_model(tiny_config(*NO_DROPOUT, "training.dtype=float64"), Communicator.alone())
    again = build_model(
        tiny_config(*NO_DROPOUT, "training.dtype=float64", "training.recompute=full"), Communicator.alone()
    )
    assert distance(packed_gradients(again)[1], packed_gradients(stored)[1]) == 0


def test_rotary_positions_need_no_reset_and_learned_ones_do() -> None:
    distances: List[float] = []
    for kind in ("llama", "gpt2"):
        model = model_of(kind, "float64")
        distances.append(distance(packed_gradients(model, False)[1], separate_gradients(model)[1]))
    assert distances[0] <= 1e-12 and distances[1] > 1e-2


def test_a_document_does_not_change_with_an_earlier_document() -> None:
    model = model_of("gpt2", "float64").eval()
    tokens = torch.from_numpy(ByteSamples(24).batch(0, 1)[:, :-1])
    changed = tokens.clone()
    changed[:, :10] = 7
    begins = np.zeros((1, 24), dtype=bool)
    begins[0, 10] = True
    documents = Documents.of(model.config, begins, False, torch.float64)
    with torch.no_grad():
        ours, judge = (model.hidden_states(x, documents=documents)[:, 10:] for x in (tokens, changed))
        assert torch.equal(ours, judge)
        ours, judge = (model.hidden_states(x)[:, 10:] for x in (tokens, changed))
        assert not torch.equal(ours, judge)  # without the mask they attend across


def test_a_rank_of_sequence_parallelism_has_the_positions_of_that_rank() -> None:
    config = tiny_config(*MEANINGS["llama"])
    begins = ByteSamples(24).packed_batch(0, 3).begins[:, :-1]
    full = Documents.of(config.model, begins, True, torch.float64)
    shards = [Documents.of(config.model, begins, True, torch.float64, Shard(index, 2)) for index in range(2)]
    assert full.positions is not None and full.rotation is not None
    assert torch.equal(torch.cat([part.positions for part in shards if part.positions is not None], 1), full.positions)
    for part in shards:  # attention has all tokens, in the order of ranks
        assert part.rotation is not None
        cosines = Shard(0, 2).to_sample_order(part.rotation[0].view(6, 12, -1))
        assert torch.equal(cosines, full.rotation[0].view(3, 24, -1))
    for row, positions in zip(begins, full.positions.tolist()):
        assert positions == [number for start, end in pieces(row) for number in range(end - start)]
