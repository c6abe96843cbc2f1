"""The tokenizer's files of an exported folder, which ``AutoTokenizer`` of Hugging Face's ``transformers`` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_bytes, read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import TEMPLATE_TEXT, TOKENIZER_TEXT

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_CHAT_TEMPLATE = "chat_template.jinja"  # of newer versions of transformers
# Post-processors that add tokens around a text, such as <s>, which no document of a corpus has.
_ADDING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


class CorpusTokenizer(NamedTuple):
    """The tokenizer of a corpus.

    Attributes:
        path: its ``tokenizer.json``.
        vocab_size: number of its tokens.
        end, end_name: id and text of the token that ends documents.
    """

    path: Path
    vocab_size: int
    end: int
    end_name: str


def tokenizer_files(tokenizer: CorpusTokenizer, seq_len: int) -> Dict[str, bytes]:
    """The files of a tokenizer by name, so that a prompt is encoded as the documents of the corpus were.

    Args:
        seq_len: most tokens that the model takes.

    Raises:
        UsageError: the tokenizer's file cannot be read.
    """
    try:
        settings = parse_json(read_text(tokenizer.path, TOKENIZER_TEXT))
    except (OSError, ValueError) as error:
        raise UsageError(f"{tokenizer.path}: the tokenizer cannot be read: {error}") from None
    settings.update(truncation=None, padding=None, post_processor=_without_adding(settings.get("post_processor")))
    declared = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.end_name,
        "bos_token": tokenizer.end_name,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return {
        TOKENIZER: (json.dumps(settings, ensure_ascii=False) + "\n").encode("utf-8"),
        TOKENIZER_CONFIG: (json.dumps(declared, ensure_ascii=False, indent=2) + "\n").encode("utf-8"),
    }


class OwnTokenizer(NamedTuple):
    """The tokenizer in the folder of an imported checkpoint.

    Attributes:
        files: its files by name.
        start, end: ids of the tokens that begin and end a text; None if it declares none.
    """

    files: Dict[str, bytes]
    start: Optional[int]
    end: Optional[int]


def declared_token(value: Any) -> Optional[str]:
    """The text of a token as Hugging Face's files declare it: by its text, or with its properties; None if they do
    not."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def imported_tokenizer_files(folder: Path) -> Dict[str, bytes]:
    """Read the tokenizer of a Hugging Face folder as the files of an imported checkpoint; none if it has no
    ``tokenizer.json``.

    Special tokens, which ``special_tokens_map.json`` may declare instead, become texts, and a chat template in a file
    of its own becomes a part of ``tokenizer_config.json``.

    Raises:
        UsageError: a file cannot be read, or is not what it is called.
    """
    path = folder / TOKENIZER
    if not path.exists():
        return {}
    try:
        files = {TOKENIZER: read_bytes(path, TOKENIZER_TEXT)}
        parse_json(files[TOKENIZER])
        path = folder / TOKENIZER_CONFIG
        declared: Any = parse_json(read_bytes(path, TOKENIZER_TEXT)) if path.exists() else {}
        path = folder / _SPECIAL_TOKENS
        special: Any = parse_json(read_bytes(path, TOKENIZER_TEXT)) if path.exists() else {}
        for name in ("bos_token", "eos_token"):
            token = declared_token(declared.get(name)) or declared_token(special.get(name))
            if token is not None:
                declared[name] = token
        path = folder / _CHAT_TEMPLATE
        if path.exists():
            declared["chat_template"] = read_text(path, TEMPLATE_TEXT)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path}: not a file of a tokenizer: {error}") from None
    text = json.dumps(declared, ensure_ascii=False, indent=2) + "\n"
    return {**files, TOKENIZER_CONFIG: text.encode("utf-8", "replace")}


def own_tokenizer(checkpoint: Path) -> Optional[OwnTokenizer]:
    """Read the tokenizer that came with the weights of an imported checkpoint; None if there is none.

    Raises:
        UsageError: it cannot be read.
    """
    path = checkpoint / TOKENIZER
    if not path.exists():
        return None
    try:
        files = {TOKENIZER: read_bytes(path, TOKENIZER_TEXT)}
        settings = parse_json(files[TOKENIZER])
        path = checkpoint / TOKENIZER_CONFIG
        declared: Any = {}
        if path.exists():
            files[TOKENIZER_CONFIG] = read_bytes(path, TOKENIZER_TEXT)
            declared = parse_json(files[TOKENIZER_CONFIG])
        ids = {token["content"]: int(token["id"]) for token in settings.get("added_tokens") or ()}
        start, end = (ids.get(declared.get(name)) for name in ("bos_token", "eos_token"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise UsageError(f"{path}: not as an import writes it; remove it, or name a corpus with --data DIR") from None
    return OwnTokenizer(files, start, end)


def _without_adding(processor: Any) -> Any:
    """A post-processor without those that add tokens."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        processors = [_without_adding(member) for member in processor.get("processors") or ()]
        return {**processor, "processors": [member for member in processors if member is not None]}
    return None if processor.get("type") in _ADDING else processor
