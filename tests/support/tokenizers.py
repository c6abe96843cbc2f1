"""Makes small tokenizers of the kinds that published models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

TEXTS = ["It's a text of some words, e.g. naïve or 東京.\n" * 3, "def f(x):\n    return x\n\n", "</s> <s>[EOS]"]
CHARACTERS = sorted(set("".join(TEXTS)) | set("▁ab\t1'"))

BYTE_LEVEL = "byte-level BPE"
BYTE_LEVEL_PREFIX = "byte-level BPE with a space before the text"
LLAMA = "BPE behind Prepend and Replace, as in Llama-2"
BYTE_FALLBACK = "that of Llama-2, with tokens of single bytes for characters that it has not"
METASPACE = "BPE behind Metaspace"
WORD_PIECE = "WordPiece"
UNIGRAM = "Unigram"
WORD_LEVEL = "WordLevel"
KINDS = (BYTE_LEVEL, BYTE_LEVEL_PREFIX, LLAMA, BYTE_FALLBACK, METASPACE, WORD_PIECE, UNIGRAM, WORD_LEVEL)


def make_tokenizer(kind: str, path: Path, special: Sequence[str] = ("</s>",)) -> Path:
    """Train a tokenizer on a few texts, with special tokens, and save it."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    alphabet: Dict[str, Any] = {"initial_alphabet": CHARACTERS}
    settings: Dict[str, Any] = {"special_tokens": ["<unk>", *special], "show_progress": False}
    unknown: Dict[str, Any] = {"unk_token": "<unk>"}
    if kind in (BYTE_LEVEL, BYTE_LEVEL_PREFIX):
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == BYTE_LEVEL_PREFIX)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = {"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
        trainer: Any = trainers.BpeTrainer(vocab_size=330, **settings, **alphabet)
    elif kind in (LLAMA, BYTE_FALLBACK, METASPACE):
        tokenizer = tokenizers.Tokenizer(models.BPE(**unknown, fuse_unk=True, byte_fallback=kind == BYTE_FALLBACK))
        if kind == BYTE_FALLBACK:
            settings["special_tokens"] = [*settings["special_tokens"], *(f"<0x{byte:02X}>" for byte in range(256))]
        if kind != METASPACE:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            tokenizer.decoder = decoders.Sequence(steps)
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Metaspace()
        size = 150 + (256 if kind == BYTE_FALLBACK else 0)
        trainer = trainers.BpeTrainer(vocab_size=size, **settings, **alphabet)
    elif kind == WORD_PIECE:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(**unknown))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=150, **settings, **alphabet)
    elif kind == UNIGRAM:
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", **settings, **alphabet)
    else:
        tokenizer = tokenizers.Tokenizer(models.WordLevel(**unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(vocab_size=150, **settings)
    tokenizer.train_from_iterator(TEXTS, trainer=trainer)
    tokenizer.save(str(path))
    if kind == BYTE_FALLBACK:  # published ones list these tokens in the vocabulary alone
        tokens = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
        edit(path, added_tokens=[token for token in tokens if not token["content"].startswith("<0x")])
    return path


def edit(path: Path, **changes: Any) -> Path:
    """Replace values at the top of a ``tokenizer.json``."""
    settings = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def ids_of_library(path: Path, text: str) -> List[int]:
    """The ids of a text by the library, without special tokens."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    ids: List[int] = library.encode(text, add_special_tokens=False).ids
    return ids
