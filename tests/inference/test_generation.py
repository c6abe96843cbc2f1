"""Tests that generated texts are those of forward passes over all tokens, whatever else is generated at the time."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Sequence

import numpy as np
import pytest
import torch

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.inference.continuation import CONTEXT, END, LENGTH, STOP, GenerationLimits
from fugaku_gpt.inference.generation import Generator
from fugaku_gpt.inference.model_source import ReplicaLayout, find_model, inference_config
from fugaku_gpt.inference.replica import ModelReplica
from fugaku_gpt.inference.sampling import Sampling
from tests.support.checkpoints import save_model
from tests.support.models import MODELS, model_of_kind

PROMPTS: Dict[int, List[int]] = {0: [1, 2, 3], 1: [4], 2: list(range(5, 17)), 3: [3, 3], 4: [9, 8, 7, 6]}


@pytest.fixture(scope="module", params=MODELS)
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelReplica:
    return make_replica(tmp_path_factory.mktemp("run"), request.param)


def make_replica(folder: Path, kind: str) -> ModelReplica:
    source = find_model(save_model(folder, model_of_kind(kind)))
    replica = ModelReplica(inference_config(source, ReplicaLayout(dtype="float64"), 1), ProcessGrid.alone())
    replica.load(source)
    return replica


def letters(context: Sequence[int], ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + number % 26) for number in ids)


def by_definition(replica: ModelReplica, prompt: int, ids: List[int], sampling: Sampling, count: int) -> List[int]:
    """Generates by forward passes over all tokens, without a cache."""
    ids = list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits = replica._model.logits(torch.tensor([ids]))[0, -1, : replica.config.model.vocab_size]
        ids.append(sampling.next_token(logits.numpy().astype(np.float64), ids, prompt))
    return ids


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_texts_are_those_of_passes_over_all_tokens(slots: int, replica: ModelReplica) -> None:
    sampling = Sampling(temperature=1.0, top_k=20, repetition_penalty=1.2, seed=3)
    texts = Generator(replica, letters, sampling, GenerationLimits(9, slots=slots)).run(PROMPTS)
    for number, text in texts.items():
        expected = by_definition(replica, number, PROMPTS[number], sampling, 9)
        assert [*text.prompt_ids, *text.ids] == expected and text.reason == LENGTH
        assert text.text == letters([], text.ids)
    assert list(texts) == list(PROMPTS)


def test_texts_end_where_they_are_to_end(replica: ModelReplica) -> None:
    free = Generator(replica, letters, Sampling(), GenerationLimits(12)).run(PROMPTS)
    ends = {number: text.ids[number + 1] for number, text in free.items()}
    for number, end in ends.items():
        limits = GenerationLimits(12, stop_ids=frozenset({end}))
        text = Generator(replica, letters, Sampling(), limits).run(PROMPTS)[number]
        expected = free[number].ids[: free[number].ids.index(end)]
        assert (text.ids, text.reason) == (expected, END)


def test_a_stop_string_ends_a_text_before_it_and_is_never_shown(replica: ModelReplica) -> None:
    free = Generator(replica, letters, Sampling(), GenerationLimits(12)).run(PROMPTS)
    stop = free[2].text[4:7]
    shown: Dict[int, str] = dict.fromkeys(PROMPTS, "")

    def show(number: int, text: str) -> None:
        shown[number] += text

    texts = Generator(replica, letters, Sampling(), GenerationLimits(12, stop_strings=[stop])).run(PROMPTS, show)
    assert texts[2].reason == STOP
    for number, text in texts.items():
        assert text.text == free[number].text.partition(stop)[0] == shown[number]


def test_a_text_ends_where_the_context_of_the_model_is_full(replica: ModelReplica) -> None:
    seq_len = replica.config.model.seq_len
    prompt = [number % 7 for number in range(seq_len - 2)]
    (text,) = Generator(replica, letters, Sampling(), GenerationLimits(12)).run({0: prompt}).values()
    assert (len(text.ids), text.reason) == (3, CONTEXT)
    (text,) = Generator(replica, letters, Sampling(), GenerationLimits(12)).run({0: [1] * seq_len}).values()
    assert (len(text.ids), text.reason) == (1, CONTEXT)


def test_tokens_and_seconds_of_prompts_and_of_texts_are_counted_apart(replica: ModelReplica) -> None:
    generator = Generator(replica, letters, Sampling(), GenerationLimits(5, slots=2))
    generator.run(PROMPTS)
    speed = generator.speed
    assert speed.prefill_tokens == sum(map(len, PROMPTS.values())) and speed.decode_tokens == 4 * len(PROMPTS)
    assert speed.prefill_seconds > 0 and speed.decode_seconds > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_type_generates(dtype: str, tmp_path: Path) -> None:
    source = find_model(save_model(tmp_path, model_of_kind("llama")))
    replica = ModelReplica(inference_config(source, ReplicaLayout(dtype=dtype), 1), ProcessGrid.alone())
    replica.load(source)
    texts = Generator(replica, letters, Sampling(), GenerationLimits(4, slots=2)).run(PROMPTS)
    assert all(len(text.ids) == 4 for text in texts.values())
