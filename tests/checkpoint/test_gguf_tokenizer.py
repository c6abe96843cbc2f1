"""Tests of tokenizers from the metadata of GGUF files, against the library and against llama.cpp's algorithms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import numpy as np
import pytest

from fugaku_gpt.checkpoint.gguf_import import import_gguf
from fugaku_gpt.checkpoint.gguf_tokenizer import NotCarried, carried_tokenizer
from fugaku_gpt.checkpoint.hugging_face import export_model
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.config import ModelConfig, load_run_config
from fugaku_gpt.limits import GGUF_PIECE
from tests.checkpoint.test_gguf import LLAMA, a_folder
from tests.support.gguf_files import write_gguf
from tests.support.tokenizers import BYTE_LEVEL, TEXTS, ids_of_library, make_tokenizer

tokenizers = pytest.importorskip("tokenizers")

MODEL = load_run_config(overrides=["model.vocab_size=400", "model.seq_len=32"]).model
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SAMPLES = [
    "It's a text of some words, e.g. na\u00efve or \u6771\u4eac.", "x1234567 12,345.6\u00bd",
    "  two  spaces\t and tabs \n\n\n  end ", "WE'LL DON'T we'll", "def f(x):\r\n    return x\r\n",
    "e\u0301 \U0001f600!?\n", "", " ", "\u3000wide\u00a0blank",
]  # fmt: skip
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TIKTOKEN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's splits by the name of the pre-tokenizer, one after the other (llama-vocab.cpp)
SPLITS = {
    "gpt-2": [WORDS],
    "smollm": [r"\p{N}", WORDS],
    "qwen2": [TIKTOKEN % r"\p{N}"],
    "llama-bpe": [TIKTOKEN % r"\p{N}{1,3}"],
}


def byte_level_metadata(folder: Path, pre: str) -> Dict[str, Any]:
    """The metadata of a small byte-level tokenizer."""
    settings = json.loads(
        make_tokenizer(BYTE_LEVEL, folder / "source.json", ["<|im_start|>", "<|im_end|>"]).read_text()
    )
    ids = settings["model"]["vocab"]
    names = sorted(ids, key=lambda name: int(ids[name]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in settings["model"]["merges"]]
    kinds = [3 if name.startswith("<|") else 2 if name == "<unk>" else 1 for name in names]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": np.array(kinds), "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": names.index("<|im_start|>"), "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.eos_token_id": names.index("<|im_end|>"),
    }  # fmt: skip


def saved(folder: Path, values: Mapping[str, Any], model: ModelConfig = MODEL) -> Path:
    for name, content in carried_tokenizer(values, model).items():
        (folder / name).write_bytes(content)
    return folder / "tokenizer.json"


def naive_bpe(piece: str, values: Mapping[str, Any]) -> List[int]:
    """The tokens of a piece by the merges of the metadata, each at its leftmost place first."""
    names = list(values["tokenizer.ggml.tokens"])
    ranks = {merge: rank for rank, merge in enumerate(values["tokenizer.ggml.merges"])}
    symbols = [bytes_to_characters()[number] for number in piece.encode("utf-8")]
    if values["tokenizer.ggml.pre"] == "llama-bpe" and "".join(symbols) in names:
        return [names.index("".join(symbols))]
    while len(symbols) > 1:
        pairs = [ranks.get(f"{left} {right}", len(ranks)) for left, right in zip(symbols, symbols[1:])]
        best = min(pairs)
        if best == len(ranks):
            break
        at = pairs.index(best)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return [names.index(part) for part in symbols]


def bytes_to_characters() -> Dict[int, str]:
    """GPT-2's characters of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [number for number in range(256) if number not in printable]
    return {**{number: chr(number) for number in printable}, **{n: chr(256 + i) for i, n in enumerate(unprintable)}}


def pieces_of(text: str, patterns: List[str]) -> List[str]:
    regex = pytest.importorskip("regex", reason="the package regex is not installed: make dev")
    pieces = [text]
    for pattern in patterns:
        split: List[str] = []
        for piece in pieces:
            last = 0
            for match in regex.finditer(pattern, piece):
                split += [piece[last : match.start()], match.group()]
                last = match.end()
            split.append(piece[last:])
        pieces = [piece for piece in split if piece]
    return pieces


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokens_are_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    values = byte_level_metadata(tmp_path, pre)
    path = saved(tmp_path, values)
    for text in [*SAMPLES, *TEXTS]:
        normal = text.replace("e\u0301", "\u00e9") if pre == "qwen2" else text  # as the model's own tokenizer does
        expected = [number for piece in pieces_of(normal, SPLITS[pre]) for number in naive_bpe(piece, values)]
        assert ids_of_library(path, text) == expected, text
        assert tokenizers.Tokenizer.from_file(str(path)).decode(expected) == normal
    if pre == "gpt-2":
        assert ids_of_library(path, SAMPLES[1]) == ids_of_library(tmp_path / "source.json", SAMPLES[1])


def test_special_tokens_and_the_chat_template_are_declared(tmp_path: Path) -> None:
    values = {**byte_level_metadata(tmp_path, "smollm"), "tokenizer.ggml.padding_token_id": 10**6}
    path = saved(tmp_path, values)
    declared = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert declared == {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE, "model_max_length": 32, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    library = tokenizers.Tokenizer.from_file(str(path))
    start, end = values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"]
    assert library.encode("<|im_start|>a<|im_end|>").ids[::2] == [start, end]
    several = {**values, "tokenizer.chat_template.tool_use": "x"}
    saved(tmp_path, several)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == [
        {"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "flags"), [("llama-bpe", (None, None)), ("gpt-2", (True, True)), ("qwen2", (False, None))]
)
def test_a_start_and_an_end_are_added_where_llama_cpp_adds_them(pre: str, flags: Any, tmp_path: Path) -> None:
    values = byte_level_metadata(tmp_path, pre)
    for name, flag in zip(("add_bos_token", "add_eos_token"), flags):
        if flag is not None:
            values[f"tokenizer.ggml.{name}"] = flag
    ids = tokenizers.Tokenizer.from_file(str(saved(tmp_path, values))).encode("abc").ids
    start, end = values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"]
    assert (start in ids, end in ids) == (pre != "qwen2", pre == "gpt-2")


def sentencepiece_metadata() -> Dict[str, Any]:
    """A small SentencePiece vocabulary: tokens of two and more characters have scores by their rank."""
    made = ["\u2581t", "he", "\u2581the", "er", "in", "\u2581a", "re", "ere", "\u2581w", "or", "ds", "\u2581wor",
            "ords", "\u2581words", "\u2581\u2581", "aa", "aaa", "aaaa"]  # fmt: skip
    characters = sorted(set("\u2581abcdefghijklmnopqrstuvwxyz.,'"))
    names = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *dict.fromkeys(made), *characters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(names) - 259)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(names) - 259)]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [*names, "[PAD1]", "[PAD2]"],
        "tokenizer.ggml.token_type": np.array([*kinds, 5, 5]),
        "tokenizer.ggml.scores": np.array([*scores, 0.0, 0.0], np.float32),
    }  # fmt: skip


def naive_sentencepiece(text: str, values: Mapping[str, Any]) -> List[int]:
    """llama.cpp's ``llm_tokenizer_spm``: neighbours that make a token are merged by its score, the leftmost first."""
    names, scores = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]
    symbols = list(text)
    while True:
        candidates: List[Any] = []
        for at, pair in enumerate(zip(symbols, symbols[1:])):
            if "".join(pair) in names:
                candidates.append((-scores[names.index("".join(pair))], at))
        if not candidates:
            break
        at = min(candidates)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    ids: List[int] = []
    for part in symbols:
        ids += [names.index(part)] if part in names else [names.index(f"<0x{n:02X}>") for n in part.encode("utf-8")]
    return ids


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_tokens_are_those_of_llama_cpp(has_prefix: bool, tmp_path: Path) -> None:
    values = sentencepiece_metadata()
    if not has_prefix:
        values["tokenizer.ggml.add_space_prefix"] = False
    path = saved(tmp_path, values)
    library = tokenizers.Tokenizer.from_file(str(path))
    for text in ["the words", "there, in a  world of aaaaaaa words.", "\u6771\u4eac 7!", " the", "\n"]:
        marked = ("\u2581" if has_prefix else "") + text.replace(" ", "\u2581")
        expected = naive_sentencepiece(marked, values)
        assert ids_of_library(path, text) == expected, text
        assert library.decode(expected) == text and library.encode(text).ids == [1, *expected]
    assert library.get_vocab_size() == len(values["tokenizer.ggml.tokens"]) - 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "the file has none"),
        ({"model": "none"}, "the file has none"),
        ({"model": np.array([1, 2])}, r"tokenizer\.ggml\.model is array"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model is 't5'; those that can be are gpt2 and llama"),
        ({"pre": "default"}, r"tokenizer\.ggml\.pre is 'default'; those that can be are gpt-2, "),
        ({"pre": None}, r"tokenizer\.ggml\.pre is None"),
        ({"tokens": None}, "tokens is no list of texts"),
        ({"tokens": ["a"] * 401}, "tokens has 401 tokens, and the model 400"),
        ({"tokens": ["a", "a"], "token_type": np.array([1, 1])}, "tokens has a token twice, or an empty one"),
        ({"tokens": ["a", "b"], "token_type": np.array([1, 1])}, "tokens has no token '!', as of a byte"),
        ({"token_type": np.array([1])}, "token_type is no list of as many numbers"),
        ({"token_type": np.full(330, np.nan)}, "token_type is no list of as many numbers"),
        ({"merges": None}, "merges is no list"),
        ({"merges": ["a"]}, "merges has 'a', which is not of two tokens"),
        ({"merges": ["a qqq"]}, "merges has 'a qqq'"),
        ({"add_bos_token": 1}, "add_bos_token is 1, not true or false"),
    ],
)
def test_unsupported_tokenizers_are_named(changes: Dict[str, Any], message: str, tmp_path: Path) -> None:
    values = byte_level_metadata(tmp_path, "gpt-2")
    values.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.raises(NotCarried, match=message):
        carried_tokenizer({key: value for key, value in values.items() if value is not None}, MODEL)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("scores", lambda scores: scores * 0, "scores has a score twice"),
        ("scores", lambda scores: scores * np.nan, "scores is no list of as many numbers"),
        ("scores", lambda scores: scores[:9], "scores is no list of as many numbers"),
        (
            "tokens",
            lambda tokens: ["x" * (GGUF_PIECE.value + 1) if t == "aa" else t for t in tokens],
            "a token of more than",
        ),
        ("tokens", lambda tokens: ["?" if t == "<0x41>" else t for t in tokens], "no token <0x41> of that byte"),
        ("remove_extra_whitespaces", lambda _: True, "it changes texts before it splits them"),
    ],
)
def test_unsupported_sentencepiece_models_are_named(key: str, change: Any, message: str) -> None:
    values = sentencepiece_metadata()
    values[f"tokenizer.ggml.{key}"] = change(values.get(f"tokenizer.ggml.{key}"))
    with pytest.raises(NotCarried, match=message):
        carried_tokenizer(values, MODEL)


def listed(values: Mapping[str, Any]) -> Dict[str, Optional[Any]]:
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}


def test_an_imported_tokenizer_reaches_an_export(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed: make dev")
    a_folder(tmp_path, [*LLAMA, "model.vocab_size=400"])
    metadata = byte_level_metadata(tmp_path, "smollm")
    checkpoint, _, notes = import_gguf(
        write_gguf(tmp_path / "m.gguf", tmp_path / "hf", listed(metadata)), tmp_path / "run"
    )
    assert not notes and verify_checkpoint(checkpoint) == []
    export_model(checkpoint, tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (checkpoint / name).read_bytes()
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    names = metadata["tokenizer.ggml.tokens"]
    assert [names[settings[f"{name}_token_id"]] for name in ("bos", "eos")] == ["<|im_start|>", "<|im_end|>"]
