"""Tests on each kind of tokenizer: documents are encoded as a whole, and end only at their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from fugaku_gpt.data.tokenizer import Encoder, split_text
from fugaku_gpt.errors import DataError
from tests.support.tokenizers import (
    BYTE_LEVEL,
    BYTE_LEVEL_PREFIX,
    KINDS,
    LLAMA,
    METASPACE,
    UNIGRAM,
    WORD_LEVEL,
    WORD_PIECE,
    edit,
    ids_of_library,
    make_tokenizer,
)

END_IN_THE_MIDDLE = "He said <s>old</s> new. end"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: make_tokenizer(kind, folder / f"{number}.json") for number, kind in enumerate(KINDS)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab \n\t1'.\u3000éxt\u0301東", max_size=60), size=st.integers(1, 10))
def test_cuts_change_no_token_of_a_document(tokenizers: Dict[str, Path], kind: str, text: str, size: int) -> None:
    encoder = Encoder(tokenizers[kind])
    if encoder._piece_size is not None:
        encoder._piece_size = size
    assert encoder.encode(text.encode()).tolist() == [*ids_of_library(tokenizers[kind], text), encoder.end]


def test_only_those_documents_are_cut_whose_cuts_are_harmless(tokenizers: Dict[str, Path]) -> None:
    cut = {kind for kind in KINDS if Encoder(tokenizers[kind])._piece_size is not None}
    assert cut == {BYTE_LEVEL, WORD_PIECE, WORD_LEVEL}
    text = "a text\nof words\nx"
    for kind in (BYTE_LEVEL_PREFIX, LLAMA, METASPACE, UNIGRAM):
        pieces: List[int] = []
        for piece in split_text(text, 3):
            pieces += ids_of_library(tokenizers[kind], piece)
        assert pieces != ids_of_library(tokenizers[kind], text), "a cut does harm with this kind"


@pytest.mark.parametrize(
    ("token", "is_cut"),
    [
        ({"special": False, "content": "tool", "lstrip": False, "rstrip": False}, True),
        ({"special": False, "content": "tool", "lstrip": True, "rstrip": False}, False),
        ({"special": False, "content": "\n\n", "lstrip": False, "rstrip": False}, False),
        ({"special": True, "content": "tool", "lstrip": True, "rstrip": True}, True),
    ],
)
def test_tokens_that_take_blanks_forbid_cuts(tmp_path: Path, token: Dict[str, Any], is_cut: bool) -> None:
    path = make_tokenizer(BYTE_LEVEL, tmp_path / "t.json")
    added = json.loads(path.read_text())["added_tokens"]
    edit(path, added_tokens=[*added, {**added[0], **token, "id": 330}])
    assert (Encoder(path)._piece_size is not None) == is_cut


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_the_end_does_not_end_a_document(tokenizers: Dict[str, Path], kind: str) -> None:
    encoder = Encoder(tokenizers[kind])
    for text in (END_IN_THE_MIDDLE, "a </s> b", "</s>", " </s>"):
        ids = encoder.encode(text.encode()).tolist()
        assert encoder.end_name == "</s>" and ids.index(encoder.end) == len(ids) - 1 and len(ids) > 1


@pytest.mark.parametrize("kind", [BYTE_LEVEL, LLAMA, UNIGRAM, WORD_LEVEL])
def test_an_ordinary_token_is_taken_only_if_it_is_named(tmp_path: Path, kind: str) -> None:
    path = make_tokenizer(kind, tmp_path / "t.json")
    added = json.loads(path.read_text())["added_tokens"]
    edit(path, added_tokens=[{**token, "special": token["content"] == "<unk>"} for token in added])
    with pytest.raises(
        DataError, match=r"candidates: '<unk>', '</s>' \(an ordinary token\); name one with --end-token"
    ):
        Encoder(path)
    encoder = Encoder(path, "</s>")
    ids = encoder.encode(END_IN_THE_MIDDLE.encode()).tolist()
    assert ids.index(encoder.end) == len(ids) - 1


@pytest.mark.parametrize("kind", [METASPACE, LLAMA])
def test_merges_that_make_the_end_are_not_used(tmp_path: Path, kind: str) -> None:
    """A vocabulary may have learned the token from texts of web pages."""
    path = make_tokenizer(kind, tmp_path / "t.json", ())
    content = json.loads(path.read_text())
    model = content["model"]
    number = max(model["vocab"].values())
    as_list = isinstance(model["merges"][0], list)  # of newer versions of the library
    merges = [("<", "/"), ("</", "s"), ("</s", ">")]
    for left, right in merges:
        number += 1
        model["vocab"][left + right] = number
    model["merges"] = [list(pair) if as_list else " ".join(pair) for pair in merges] + model["merges"]
    edit(path, model=model)
    assert number in ids_of_library(path, END_IN_THE_MIDDLE)
    encoder = Encoder(path, "</s>")
    ids = encoder.encode(END_IN_THE_MIDDLE.encode()).tolist()
    assert (encoder.end, ids.index(number)) == (number, len(ids) - 1)


def test_an_end_that_stands_for_the_unknown_is_refused(tmp_path: Path) -> None:
    path = make_tokenizer(WORD_LEVEL, tmp_path / "t.json")
    with pytest.raises(DataError, match=r"encodes a part of a document as '<unk>', .* begins with 'a strange word'"):
        Encoder(path, "<unk>").encode(b"a strange word")


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (["<|endoftext|>", "<|im_end|>"], "<|endoftext|>"),
        (["[PAD]", "[EOS]"], "[EOS]"),
        (["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], "<｜end▁of▁sentence｜>"),
        (["<EOD|LLM-jp>", "<pad|LLM-jp>"], "<EOD|LLM-jp>"),
        (["<s>", "</s>"], "</s>"),
        (["<|plamo:eos|>"], "<|plamo:eos|>"),
        (["<|end_of_text|>", "<|eot_id|>"], "<|end_of_text|>"),
    ],
)
def test_the_only_special_token_with_such_a_name_ends_documents(
    tmp_path: Path, special: List[str], expected: str
) -> None:
    path = make_tokenizer(BYTE_LEVEL, tmp_path / "t.json", special)
    assert Encoder(path).end_name == expected


def test_among_several_the_end_is_never_guessed(tmp_path: Path) -> None:
    path = make_tokenizer(BYTE_LEVEL, tmp_path / "tokenizer.json", ["<|endoftext|>", "</s>", "<pad>"])
    message = r"several special tokens may end a document; candidates: '<\|endoftext\|>', '</s>'; name one with"
    with pytest.raises(DataError, match=message):
        Encoder(path)
    assert Encoder(path, "</s>").end_name == "</s>"
    with pytest.raises(DataError, match=r"--end-token '<eos>' is not a token of its vocabulary; candidates: '<\|end"):
        Encoder(path, "<eos>")
    declaration = tmp_path / "tokenizer_config.json"
    declaration.write_text(json.dumps({"eos_token": {"content": "<pad>", "lstrip": False}}))
    assert Encoder(path).end_name == "<pad>"
    declaration.write_text(json.dumps({"eos_token": "<eos>"}))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token '<eos>' is not a token of tokenizer\.json"):
        Encoder(path)
    declaration.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read"):
        Encoder(path)
    declaration.unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert Encoder(path).end_name == "</s>"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": None}))
    (tmp_path / "manifest.json").write_text(json.dumps({"end_of_document": {"id": 1, "token": "<|endoftext|>"}}))
    assert Encoder(path).end_name == "<|endoftext|>"
