"""The tokenizer's files of an exported folder, which ``AutoTokenizer`` of Hugging Face's ``transformers`` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, NamedTuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import TOKENIZER_TEXT

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
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


def _without_adding(processor: Any) -> Any:
    """A post-processor without those that add tokens."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        processors = [_without_adding(member) for member in processor.get("processors") or ()]
        return {**processor, "processors": [member for member in processors if member is not None]}
    return None if processor.get("type") in _ADDING else processor
