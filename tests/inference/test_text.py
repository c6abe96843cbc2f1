"""Tests of texts as token ids and back, growing texts, and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.text import TextTokenizer, render_chat, stable_text
from tests.support import tokenizers

pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")

USER = [{"role": "user", "content": "Hello"}]


def a_tokenizer(
    folder: Path, kind: str = tokenizers.BYTE_LEVEL, special: Sequence[str] = ("</s>",), **declared: object
) -> Path:
    path = tokenizers.make_tokenizer(kind, folder / "tokenizer.json", special)
    if declared:
        (folder / "tokenizer_config.json").write_text(json.dumps(declared), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", [tokenizers.BYTE_LEVEL, tokenizers.UNIGRAM, tokenizers.LLAMA])
def test_a_text_is_encoded_as_a_document_and_decoded_again(kind: str, tmp_path: Path) -> None:
    path = a_tokenizer(tmp_path, kind)
    tokenizer = TextTokenizer(path)
    ids = tokenizer.encode_start("some words")
    assert ids[0] == tokenizer.end and ids[1:] == tokenizers.ids_of_library(path, "some words")
    assert tokenizer.decode(ids) == "some words"
    assert tokenizer.decode_after(ids[:-3], ids[-3:]) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:-3])) :]


def test_a_continuation_keeps_the_space_before_it(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(a_tokenizer(tmp_path, tokenizers.METASPACE))
    ids = tokenizer.encode("some words")
    (split,) = [number for number in range(len(ids)) if tokenizer.decode(ids[:number]) == "some"]
    assert tokenizer.decode(ids[split:]) == "words"
    assert tokenizer.decode_after(ids[:split], ids[split:]) == " words"


def test_characters_of_single_bytes_continue_a_text_wherever_it_is_cut(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(a_tokenizer(tmp_path, tokenizers.BYTE_FALLBACK))
    ids = tokenizer.encode("日本語漢字 words あ")
    assert len(ids) > 20
    for split in range(len(ids) + 1):
        before = tokenizer.decode(ids[:split])
        if "\ufffd" not in before:  # a prompt ends at a character
            assert before + tokenizer.decode_after(ids[:split], ids[split:]) == "日本語漢字 words あ"


def test_a_wrong_byte_takes_no_other_character_with_it(tmp_path: Path) -> None:
    path = a_tokenizer(tmp_path, tokenizers.BYTE_FALLBACK)
    tokenizer = TextTokenizer(path)
    vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    ids = [vocabulary[f"<0x{byte:02X}>"] for byte in "あ".encode() + b"\xff" + "い".encode()]
    assert tokenizer.decode_after([], [*ids, vocabulary["a"]]) == "あ\ufffdいa"
    texts = [tokenizer.decode_after([], ids[:length]) for length in range(len(ids) + 1)]
    assert texts[3:] == ["あ", "あ\ufffd", "あ\ufffd\ufffd", "あ\ufffd\ufffd", "あ\ufffdい"]


def test_a_text_begins_as_the_tokenizer_begins_it(tmp_path: Path) -> None:
    import tokenizers as library

    path = a_tokenizer(tmp_path, special=["</s>", "<s>"])
    changed = library.Tokenizer.from_file(str(path))
    begin = changed.token_to_id("<s>")
    changed.post_processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    changed.save(str(path))
    assert TextTokenizer(path, "</s>").encode_start("some")[0] == begin


def test_special_tokens_are_recognised_in_a_chat_template_and_in_no_other_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    path = a_tokenizer(
        tmp_path, special=["</s>", "<|im_start|>", "<|im_end|>"], chat_template=template, eos_token="</s>"
    )
    tokenizer = TextTokenizer(path)
    marks = {name: tokenizers.ids_of_library(path, name) for name in ("<|im_start|>", "<|im_end|>")}
    ids = tokenizer.encode_chat(USER)
    assert len(tokenizer.stops) == 2 and tokenizer.end in tokenizer.stops
    (end_of_turn,) = tokenizer.stops - {tokenizer.end}
    assert ids.count(end_of_turn) == 1 and ids[0] == ids[-1] not in tokenizer.stops
    assert "user: Hello" in tokenizer.decode(ids)
    assert end_of_turn not in tokenizer.encode("<|im_end|>") == marks["<|im_end|>"]


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer_config.json: has no chat_template"):
        TextTokenizer(a_tokenizer(tmp_path)).encode_chat(USER)


def test_a_chat_template_is_rendered_as_transformers_renders_it() -> None:
    template = (
        "{%- for m in messages %}\n    {%- if loop.first and m.role != 'system' %}\n<sys>"
        "{{ bos_token }}\n    {%- endif %}\n"
        "{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"
    )
    utilities = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    expected = utilities._compile_jinja_template(template).render(
        messages=USER, add_generation_prompt=True, bos_token="<s>"
    )
    assert render_chat(template, USER, {"bos_token": "<s>"}) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for m in messages %}", "end of template"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'x' * 10 ** 12 }}", "memory"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_chat_template_that_fails_or_reaches_out_is_refused(template: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^the model's chat template .*{message}"):
        render_chat(template, USER, {})


@given(st.lists(st.text("abEND\ufffd\n", max_size=4), max_size=8), st.lists(st.text("abEND", min_size=1), max_size=2))
def test_a_growing_text_never_shrinks(pieces: List[str], stops: List[str]) -> None:
    shown, text = "", ""
    for piece in pieces:
        text += piece
        stable = stable_text(text, stops)
        assert stable.text.startswith(shown)
        shown = stable.text
        assert not any(stop in shown for stop in stops)
        if stable.is_stopped:
            assert any(stop in text for stop in stops)
            break
        assert not any(stop in text for stop in stops)


def test_an_incomplete_character_and_the_beginning_of_a_stop_string_wait() -> None:
    assert stable_text("na\ufffd", ()) == ("na", False)
    assert stable_text("one\nEN", ["END"]) == ("one\n", False)
    assert stable_text("one\nEND two", ["END", "tw"]) == ("one\n", True)
