"""Determines which token of a tokenizer ends a document, and keeps documents from containing it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from fugaku_gpt.checkpoint.hugging_face_tokenizer import declared_token
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import RECORD

# Files beside a tokenizer.json that declare its end token: name of the file, and keys to the token.
_DECLARATIONS = (
    ("tokenizer_config.json", ("eos_token",)),
    ("special_tokens_map.json", ("eos_token",)),
    ("manifest.json", ("end_of_document", "token")),  # of a folder made by `data prepare`
)
# Names of the token, in lower case and without brackets and other marks, and a part of a name that says the same.
_END_NAMES = {"endoftext", "endofdocument", "endofsentence", "endofsequence", "eos", "eod", "/s"}
_END_COMPONENTS = {"eos", "eod", "/s"}
_MAX_LISTED = 12


def end_of_document(
    path: Path, settings: Mapping[str, Any], vocabulary: Mapping[str, int], end_token: Optional[str]
) -> str:
    """The text of the token that ends documents: the named one, else the declared one, else the only likely one.

    Likely is a special token whose name means an end; an ordinary token is never taken, as documents may contain it.

    Args:
        path: the ``tokenizer.json``; files beside it may declare the token.
        settings: its content.
        vocabulary: ids of all tokens.
        end_token: the token that the user names, or None.

    Raises:
        DataError: there is no such token, or it is not certain which it is.
    """
    special = [token["content"] for token in settings.get("added_tokens") or () if token.get("special")]
    likely = [name for name in special if _means_end(name)]
    ordinary = sorted(name for name in vocabulary if name not in special and _is_marked(name) and _means_end(name))
    candidates = likely or special
    listed = [repr(name) for name in candidates[:_MAX_LISTED]]
    listed += [f"{name!r} (an ordinary token)" for name in ordinary[:_MAX_LISTED]]
    choices = f"candidates: {', '.join(listed)}" if listed else "it has no special token"
    if end_token is not None:
        if end_token not in vocabulary:
            raise DataError(f"{path}: --end-token {end_token!r} is not a token of its vocabulary; {choices}")
        return end_token
    for name, keys in _DECLARATIONS:
        declared = _declared_token(path.with_name(name), keys)
        if declared is not None:
            if declared not in vocabulary:
                raise DataError(
                    f"{path.with_name(name)}: {'.'.join(keys)} {declared!r} is not a token of {path.name}; {choices}; "
                    "name one with --end-token"
                )
            return declared
    if len(likely) == 1:
        return likely[0]
    problem = "several special tokens may end a document" if likely else "no special token has the name of an end"
    raise DataError(f"{path}: {problem}; {choices}; name one with --end-token")


def without_text_of_end(settings: Mapping[str, Any], end_name: str) -> Dict[str, Any]:
    """The content of a ``tokenizer.json`` whose end token has a name that no document contains; its id stays.

    So the text of the token is encoded from other tokens, as SentencePiece does with control symbols: the library
    keeps special tokens from being recognised in a text, but not the model of the tokenizer from making one.
    Dropout of merges, which makes tokens random, is removed as well.
    """
    hidden_name = f"\U0010ffff{end_name}\U0010ffff"  # U+10FFFF is no character, and never will be
    model = dict(settings["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {hidden_name if name == end_name else name: number for name, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: pieces with their scores
        model["vocab"] = [[hidden_name if name == end_name else name, score] for name, score in vocabulary]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if end_name not in _tokens_of_merge(merge)]
    if model.get("unk_token") == end_name:
        model["unk_token"] = hidden_name
    if model.get("dropout") is not None:
        model["dropout"] = None
    added = [
        {**token, "content": hidden_name} if token["content"] == end_name else token
        for token in settings.get("added_tokens") or ()
    ]
    return {**settings, "model": model, "added_tokens": added}


def _tokens_of_merge(merge: Any) -> List[str]:
    """The two tokens of a merge, and the one that it makes; older files write them as one text with a space."""
    left, _, right = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
    return [left, right, left + right]


def _means_end(name: str) -> bool:
    components = re.findall(r"/?[a-z]+", name.lower())
    return "".join(components) in _END_NAMES or not _END_COMPONENTS.isdisjoint(components)


def _is_marked(name: str) -> bool:
    """Whether a name stands between brackets, which no other brackets are between; without them it is a word."""
    return re.fullmatch(r"<[^<>\s]+>|\[[^\[\]\s]+\]", name) is not None


def _declared_token(path: Path, keys: "tuple[str, ...]") -> Optional[str]:
    """The token that a file declares; None if there is no such file, or it declares none.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        value = parse_json(read_text(path, RECORD))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; mend it, or name the token with --end-token") from None
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return declared_token(value)
