"""Tests that generated texts are those of forward passes over all tokens, whatever else is generated at the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List, Sequence

import numpy as np
import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.errors import RunFailed
from fugaku_gpt.inference.continuation import CONTEXT, END, LENGTH, STOP, GenerationLimits
from fugaku_gpt.inference.generation import Generator, _prompts_at_once
from fugaku_gpt.inference.model_source import ReplicaLayout, find_model, inference_config
from fugaku_gpt.inference.replica import ModelReplica
from fugaku_gpt.inference.sampling import Sampling
from fugaku_gpt.inference.text import TextTokenizer
from fugaku_gpt.model.kv_cache import KeyValueCache, NewTokens
from tests.support import tokenizers
from tests.support.checkpoints import save_model
from tests.support.models import MODELS, model_of_kind

PROMPTS: Dict[int, List[int]] = {0: [1, 2, 3], 1: [4], 2: list(range(5, 17)), 3: [3, 3], 4: [9, 8, 7, 6]}


@pytest.fixture(scope="module", params=MODELS)
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelReplica:
    folder = tmp_path_factory.mktemp("run")
    save_model(folder, model_of_kind(request.param))
    return make_replica(folder, "float64")


def make_replica(folder: Path, dtype: str) -> ModelReplica:
    source = find_model(folder)
    replica = ModelReplica(inference_config(source, ReplicaLayout(dtype=dtype), 1), ProcessGrid.alone())
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


def test_prompts_of_about_equal_length_are_read_at_once_whatever_pads_them(
    replica: ModelReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {number: [(7 * number + i) % 90 for i in range(length)] for number, length in enumerate([18, 20, 19, 9])}
    read: List[List[int]] = []
    extend = KeyValueCache.extend

    def recorded(cache: KeyValueCache, first: int, stop: int, tokens: int, counts: Sequence[int] = ()) -> NewTokens:
        read.append([tokens, *counts])
        return extend(cache, first, stop, tokens, counts)

    monkeypatch.setattr(KeyValueCache, "extend", recorded)
    sampling = Sampling(temperature=1.0, seed=3)
    generator = Generator(replica, letters, sampling, GenerationLimits(4, slots=4))
    texts = generator.run(prompts)
    assert read[:2] == [[20, 18, 20, 19], [9, 9]] and generator.speed.prefill_tokens == 66
    for number, text in texts.items():
        assert [*text.prompt_ids, *text.ids] == by_definition(replica, number, prompts[number], sampling, 4)


@pytest.mark.parametrize(
    ("lengths", "count"),
    [([5], 1), ([5, 5], 2), ([128] * 9, 8), ([2000, 2000], 1), ([20, 10], 1), ([10, 10, 20], 2), ([20, 18], 2)],
)
def test_prompts_are_read_together_up_to_a_number_of_tokens_and_little_padding(lengths: List[int], count: int) -> None:
    assert _prompts_at_once(lengths) == count


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


def test_prefill_and_decode_are_counted_separately(replica: ModelReplica) -> None:
    generator = Generator(replica, letters, Sampling(), GenerationLimits(5, slots=2))
    generator.run(PROMPTS)
    speed = generator.speed
    assert speed.prefill_tokens == sum(map(len, PROMPTS.values())) and speed.decode_tokens == 4 * len(PROMPTS)
    assert speed.prefill_seconds > 0 and speed.decode_seconds > 0


@pytest.mark.parametrize("kind", ["gpt2", "qwen3-like"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.06), ("float16", 0.01)])
def test_logits_of_the_cache_are_those_of_all_tokens_in_every_type(
    dtype: str, bound: float, kind: str, tmp_path: Path
) -> None:
    source = find_model(save_model(tmp_path, model_of_kind(kind)))
    exact = make_replica(tmp_path, "float64")
    replica = make_replica(tmp_path, dtype)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [8, 6, 7, 5, 3, 0, 9, 1]])
    cache, logits = replica.make_cache(2, 24), []
    choose = lambda values: logits.append(torch.from_numpy(values)) or [0] * len(values)  # noqa: E731
    with torch.no_grad():
        # the second sequence begins earlier, so that a batch has two lengths
        replica.next_tokens(ids[:1, :2], cache, cache.extend(0, 1, 2), choose)
        replica.next_tokens(ids[1:, :5], cache, cache.extend(1, 2, 5), choose)
        both = torch.stack([ids[0, 2:3], ids[1, 5:6]])
        replica.next_tokens(both, cache, cache.extend(0, 2, 1), choose)
        for row, length in ((0, 3), (1, 6)):
            expected = exact._model.logits(ids[row : row + 1, :length])[0, -1, :101]
            distance = (logits[2][row] - expected).abs().max() / expected.abs().max()
            assert float(distance) < bound
    assert source.notes == []


@pytest.mark.skipif(not ops.has_native_kernels(), reason="no kernels are compiled here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3-like"])
def test_logits_of_a_text_do_not_depend_on_the_texts_beside_it(dtype: str, kind: str, tmp_path: Path) -> None:
    save_model(tmp_path, model_of_kind(kind))
    replica = make_replica(tmp_path, dtype)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [8, 6, 7, 5, 3, 0, 9, 1]])
    logits: List[torch.Tensor] = []
    choose = lambda values: logits.append(torch.from_numpy(values)) or [0] * len(values)  # noqa: E731
    with torch.no_grad():
        for slots in (1, 2):
            cache = replica.make_cache(slots, 24)
            for slot, length in zip(range(slots), (3, 6)):
                replica.next_tokens(ids[slot : slot + 1, :length], cache, cache.extend(slot, slot + 1, length), choose)
            newest = torch.stack([ids[0, 3:4], ids[1, 6:7]])[:slots]
            replica.next_tokens(newest, cache, cache.extend(0, slots, 1), choose)
    assert torch.equal(logits[1][0], logits[-1][0]) and not torch.equal(logits[-1][0], logits[-1][1])


@pytest.mark.parametrize("kind", ["gpt2", "qwen3-like"])
def test_several_new_tokens_of_a_text_are_read_at_once_as_singly(kind: str, tmp_path: Path) -> None:
    save_model(tmp_path, model_of_kind(kind))
    replica = make_replica(tmp_path, "float32")
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    logits: List[torch.Tensor] = []
    choose = lambda values: logits.append(torch.from_numpy(values)) or [0] * len(values)  # noqa: E731
    with torch.no_grad():
        for lengths in ((4, 3, 1), (4, 1, 1, 1, 1)):
            cache, start = replica.make_cache(1, 24), 0
            for count in lengths:
                tokens = ids[:, start : start + count]
                replica.next_tokens(tokens, cache, cache.extend(0, 1, count), choose)
                start += count
    assert float((logits[2] - logits[-1]).abs().max()) < 1e-5 * float(logits[-1].abs().max())


def text_of_bytes(path: Path, ids: Sequence[int]) -> str:
    """The text of ids of a tokenizer with tokens of single bytes, each of them by its name alone."""
    values = json.loads(path.read_text(encoding="utf-8"))
    special = {token["id"] for token in values["added_tokens"]}
    names = {number: name for name, number in values["model"]["vocab"].items()}
    content = b""
    for number in ids:
        if number not in special:
            name = names[number]
            is_byte = len(name) == 6 and name.startswith("<0x")
            content += bytes([int(name[3:5], 16)]) if is_byte else name.replace("▁", " ").encode("utf-8")
    return content.decode("utf-8", "replace")


@pytest.mark.parametrize(
    "kind", [tokenizers.BYTE_LEVEL, tokenizers.LLAMA, tokenizers.BYTE_FALLBACK, tokenizers.METASPACE]
)
def test_a_text_that_grows_by_real_tokens_is_that_of_all_its_tokens(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")
    path = tokenizers.make_tokenizer(kind, tmp_path / "tokenizer.json")
    tokenizer = TextTokenizer(path)
    shown: Dict[int, str] = dict.fromkeys(range(3), "")

    def show(number: int, text: str) -> None:
        shown[number] += text

    source = find_model(save_model(tmp_path, model_of_kind("llama", f"model.vocab_size={tokenizer.vocab_size}")))
    replica = ModelReplica(inference_config(source, ReplicaLayout(), 1), ProcessGrid.alone())
    replica.load(source)
    prompts = {number: [tokenizer.end, *tokenizer.encode(text)] for number, text in enumerate(("a b", "words", "東京"))}
    generator = Generator(replica, tokenizer.decode_after, Sampling(temperature=3.0), GenerationLimits(20))
    texts = generator.run(prompts, show)
    for number, text in texts.items():
        if kind == tokenizers.BYTE_FALLBACK:
            expected = text_of_bytes(path, text.ids)
        else:
            before = tokenizer.decode(prompts[number])
            expected = tokenizer.decode([*prompts[number], *text.ids])[len(before) :]
        assert text.text == shown[number] == expected


def test_a_decoder_that_changes_what_was_shown_cuts_no_text(replica: ModelReplica) -> None:
    def without_last_letter(context: Sequence[int], ids: Sequence[int]) -> str:
        return letters(context, ids)[:-1] + "." * len(ids)

    texts = Generator(replica, without_last_letter, Sampling(), GenerationLimits(5)).run(PROMPTS)
    assert all(text.text == without_last_letter([], text.ids) for text in texts.values())


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    save_model(tmp_path, model_of_kind("gpt2"))
    replica = make_replica(tmp_path, "float32")
    next(replica._model.parameters()).data.fill_(float("nan"))
    with pytest.raises(RunFailed, match="a logit is not finite in float32"):
        Generator(replica, letters, Sampling(), GenerationLimits(3)).run(PROMPTS)
