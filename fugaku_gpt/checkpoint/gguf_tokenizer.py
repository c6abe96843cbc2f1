"""Makes the ``tokenizer.json`` of Hugging Face's ``tokenizers`` from the vocabulary in the metadata of a GGUF file.

Two kinds can be carried: byte-level BPE (``gpt2``) with a pre-tokenizer of the table below, which llama.cpp names and
does not describe (``llama-vocab.cpp``), and SentencePiece's BPE (``llama``), whose merges follow from its scores. With
any other, text would become other tokens than those on which the model was trained.
"""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.checkpoint.hugging_face_tokenizer import TOKENIZER, TOKENIZER_CONFIG
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.limits import GGUF_PIECE, cut

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# ASCII's space and visible characters as byte-level vocabularies write them; bytes that training did not see may lack
_ASCII = {"\u0120", *map(chr, range(33, 127))}
_SPACE = "\u2581"  # SentencePiece's mark of a space
_DECLARED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # our short names → llama.cpp's


class NotCarried(Exception):
    """A tokenizer cannot be made from a file's metadata; the message says why."""


class _Split(NamedTuple):
    """How a byte-level tokenizer splits a text before merges.

    Attributes:
        steps: pre-tokenizers of ``tokenizers``.
        normalizer: as of ``tokenizers``.
        ignores_merges: whether a piece that is a token is taken as such, whatever the merges would make of it.
        adds_start: whether a text begins with the start token where the metadata do not say.
    """

    steps: Tuple[Mapping[str, Any], ...]
    normalizer: Optional[Mapping[str, Any]] = None
    ignores_merges: bool = False
    adds_start: bool = False


def _byte_level(use_regex: bool) -> Dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _by_regex(digits: str) -> Tuple[Mapping[str, Any], ...]:
    """The split of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return (split, _byte_level(use_regex=False))


_GPT2 = _Split((_byte_level(use_regex=True),))
_SMOLLM = _Split(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)))
_QWEN2 = _Split(_by_regex(r"\p{N}"), {"type": "NFC"})
_LLAMA3 = _Split(_by_regex(r"\p{N}{1,3}"), ignores_merges=True, adds_start=True)
_SPLITS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


class _Vocabulary(NamedTuple):
    """The tokens of a file, without unused ones at the end, which pad the embedding.

    Attributes:
        names: texts by id.
        kinds: llama.cpp's kinds by id.
        ids: ids by text.
    """

    names: List[str]
    kinds: List[int]
    ids: Dict[str, int]


def carried_tokenizer(values: Mapping[str, Any], model: ModelConfig) -> Dict[str, bytes]:
    """Make the files of a tokenizer, by name: ``tokenizer.json``, and ``tokenizer_config.json`` with its special tokens
    and its chat template.

    Args:
        values: the metadata of a GGUF file.

    Raises:
        NotCarried: it cannot be made.
    """
    kind = values.get(f"{_PREFIX}model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        has_none = kind is None or (isinstance(kind, str) and kind in ("none", "no_vocab"))
        raise NotCarried(
            "the file has none"
            if has_none
            else f"{_PREFIX}model is {cut(repr(kind))}; those that can be are gpt2 and llama"
        )
    vocabulary = _vocabulary(values, model.vocab_size)
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    special = {
        name: _special_token(values, vocabulary, name, defaults.get(name))
        for name in ("bos", "eos", "unknown", "padding")
    }
    settings = _byte_level_bpe(values, vocabulary) if kind == "gpt2" else _sentencepiece(values, vocabulary, special)
    default_start = kind == "llama" or _SPLITS[str(values.get(f"{_PREFIX}pre"))].adds_start
    settings["post_processor"] = _adding(
        vocabulary,
        special["bos"] if _flag(values, "add_bos_token", default_start) else None,
        special["eos"] if _flag(values, "add_eos_token", False) else None,
    )
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(vocabulary), **settings}
    declared = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{short}_token": special[name] for short, name in _DECLARED.items() if special[name] is not None},
        **_templates(values),
        "model_max_length": model.seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return {
        TOKENIZER: (json.dumps(whole, ensure_ascii=False) + "\n").encode("utf-8"),
        TOKENIZER_CONFIG: (json.dumps(declared, ensure_ascii=False, indent=2) + "\n").encode("utf-8"),
    }


def _vocabulary(values: Mapping[str, Any], most: int) -> _Vocabulary:
    names = values.get(f"{_PREFIX}tokens")
    if not isinstance(names, list) or not names:
        raise NotCarried(f"{_PREFIX}tokens is no list of texts")
    if len(names) > most:
        raise NotCarried(f"{_PREFIX}tokens has {len(names):,} tokens, and the model {most:,}")
    kinds = values.get(f"{_PREFIX}token_type")
    if kinds is None:
        kinds = np.full(len(names), _NORMAL)
    if not isinstance(kinds, np.ndarray) or kinds.dtype.kind not in "iu" or len(kinds) != len(names):
        raise NotCarried(f"{_PREFIX}token_type is no list of as many numbers as there are tokens")
    count = len(names)
    while count > 1 and kinds[count - 1] == _UNUSED:
        count -= 1
    names = names[:count]
    ids = {name: number for number, name in enumerate(names)}
    if len(ids) != count or "" in ids:
        raise NotCarried(f"{_PREFIX}tokens has a token twice, or an empty one")
    return _Vocabulary(names, [int(kind) for kind in kinds[:count]], ids)


def _special_token(
    values: Mapping[str, Any], vocabulary: _Vocabulary, name: str, default: Optional[int]
) -> Optional[str]:
    number = values.get(f"{_PREFIX}{name}_token_id", default)
    if type(number) is not int or not 0 <= number < len(vocabulary.names):
        return None
    return vocabulary.names[number]


def _flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    value = values.get(f"{_PREFIX}{name}", default)
    if not isinstance(value, bool):
        raise NotCarried(f"{_PREFIX}{name} is {cut(repr(value))}, not true or false")
    return value


def _byte_level_bpe(values: Mapping[str, Any], vocabulary: _Vocabulary) -> Dict[str, Any]:
    name = values.get(f"{_PREFIX}pre")
    if not isinstance(name, str) or name not in _SPLITS:
        raise NotCarried(f"{_PREFIX}pre is {cut(repr(name))}; those that can be are {', '.join(_SPLITS)}")
    missing = sorted(_ASCII - set(vocabulary.ids))
    if missing:
        raise NotCarried(f"{_PREFIX}tokens has no token {missing[0]!r}, as of a byte")
    merges = values.get(f"{_PREFIX}merges")
    if not isinstance(merges, list):
        raise NotCarried(f"{_PREFIX}merges is no list of texts")
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not all(token in vocabulary.ids for token in (left, right, left + right)):
            raise NotCarried(f"{_PREFIX}merges has {cut(repr(merge))}, which is not of two tokens that make a third")
    split = _SPLITS[name]
    steps = list(split.steps)
    return {
        "normalizer": split.normalizer,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(use_regex=True),
        "model": {**_bpe(vocabulary, merges), "ignore_merges": split.ignores_merges},
    }


def _sentencepiece(
    values: Mapping[str, Any], vocabulary: _Vocabulary, special: Mapping[str, Optional[str]]
) -> Dict[str, Any]:
    if f"{_PREFIX}precompiled_charsmap" in values or _flag(values, "remove_extra_whitespaces", False):
        raise NotCarried("it changes texts before it splits them (precompiled_charsmap, remove_extra_whitespaces)")
    missing = [number for number in range(256) if f"<0x{number:02X}>" not in vocabulary.ids]
    if missing:
        raise NotCarried(f"{_PREFIX}tokens has no token <0x{missing[0]:02X}> of that byte")
    has_prefix = _flag(values, "add_space_prefix", True)
    steps: List[Dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    back: List[Dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if has_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(vocabulary, _merges_of_scores(values, vocabulary))
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {**model, "unk_token": special["unknown"], "fuse_unk": True, "byte_fallback": True},
    }


def _merges_of_scores(values: Mapping[str, Any], vocabulary: _Vocabulary) -> List[str]:
    """The merges of SentencePiece's BPE: two neighbours become a token by its score, the best first."""
    scores = values.get(f"{_PREFIX}scores")
    if not isinstance(scores, np.ndarray) or len(scores) < len(vocabulary.names) or not np.all(np.isfinite(scores)):
        raise NotCarried(f"{_PREFIX}scores is no list of as many numbers as there are tokens")
    pieces = {
        name: float(scores[number])
        for number, name in enumerate(vocabulary.names)
        if vocabulary.kinds[number] == _NORMAL
    }
    merges: List[Tuple[float, int, str]] = []
    for name, score in pieces.items():
        if len(name) > GGUF_PIECE.value:
            raise NotCarried(f"{_PREFIX}tokens has a token of more than {GGUF_PIECE}")
        cuts = [(name[:at], name[at:]) for at in range(1, len(name))]
        merges += [
            (-score, -len(left), f"{left} {right}") for left, right in cuts if left in pieces and right in pieces
        ]
    made = {merge.replace(" ", "", 1) for _, _, merge in merges}
    if len({pieces[name] for name in made if name in pieces}) != len(made) or any(" " in name for name in pieces):
        raise NotCarried(f"{_PREFIX}scores has a score twice, so that the order of merges is not known")
    return [merge for _, _, merge in sorted(merges)]


def _bpe(vocabulary: _Vocabulary, merges: Sequence[str]) -> Dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": list(merges),
    }


def _added(vocabulary: _Vocabulary) -> List[Dict[str, Any]]:
    """The tokens that a text has as they are, which no merge makes."""
    added = []
    for number, (name, kind) in enumerate(zip(vocabulary.names, vocabulary.kinds)):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            added.append({"id": number, "content": name, **plain, "special": kind != _USER_DEFINED})
    return added


def _adding(vocabulary: _Vocabulary, start: Optional[str], end: Optional[str]) -> Optional[Dict[str, Any]]:
    """A post-processor that puts tokens around a text; None if there are none."""
    if start is None and end is None:
        return None
    before = [{"SpecialToken": {"id": start, "type_id": 0}}] if start is not None else []
    after = [{"SpecialToken": {"id": end, "type_id": 0}}] if end is not None else []
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    added = {name for name in (start, end) if name is not None}
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, *after, *before, second, *after],
        "special_tokens": {
            name: {"id": name, "ids": [vocabulary.ids[name]], "tokens": [name]} for name in sorted(added)
        },
    }


def _templates(values: Mapping[str, Any]) -> Dict[str, Any]:
    """The chat template, or several with their names; they are carried as they are, and never run here."""
    default = values.get(_TEMPLATE)
    named = {
        key[len(_TEMPLATE) + 1 :]: value
        for key, value in values.items()
        if key.startswith(f"{_TEMPLATE}.") and isinstance(value, str)
    }
    if isinstance(default, str):
        if not named:
            return {"chat_template": default}
        named = {"default": default, **named}
    return {"chat_template": [{"name": name, "template": text} for name, text in named.items()]} if named else {}
