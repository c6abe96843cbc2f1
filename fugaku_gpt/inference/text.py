"""Text to token ids and back, by the ``tokenizer.json`` of a model, and the model's own form of a conversation."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from fugaku_gpt.checkpoint.hugging_face_tokenizer import TOKENIZER_CONFIG, declared_token
from fugaku_gpt.data.tokenizer import Encoder, import_tokenizers
from fugaku_gpt.errors import DataError, UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import CHAT_TEXT, TEMPLATE_MEMORY, TEMPLATE_SECONDS, TEMPLATE_TEXT, TOKENIZER_TEXT, cut
from fugaku_gpt.machine.bounded import BoundExceeded, call_in_child

_INCOMPLETE = "\ufffd"  # what bytes decode to that are not yet a character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # of a tokenizer that has tokens of single bytes for rare characters
Message = Mapping[str, str]  # role and content


class TextTokenizer:
    """A tokenizer as a model's user needs it.

    Attributes:
        vocab_size: one more than the largest id.
        end: id of the token that ends a document, which is also what comes before one.
        stops: ids at which a text ends: ``end``, and the end of a turn where the chat template has one.
    """

    def __init__(self, path: Path, end_token: Optional[str] = None, *, begins_after_end: bool = False) -> None:
        """Load a ``tokenizer.json``; files beside it may declare its end token and its chat template.

        Args:
            end_token: the token that ends documents; None: as the files say.
            begins_after_end: the model has read documents one behind the other, each behind the end of another, and
                never what the tokenizer itself puts before a text.

        Raises:
            DataError: it cannot be read, or does not say which token ends a document.
        """
        encoder = Encoder(path, end_token)
        self.vocab_size, self.end = encoder.vocab_size, encoder.end
        self._path = path
        self._encoder = encoder
        # unlike the encoder, it recognises the names of special tokens, which a chat template writes
        self._tokenizer = import_tokenizers().Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # what the tokenizer itself puts before a text, such as <s>; else a text begins where a document has ended
        before = self._tokenizer.encode("", add_special_tokens=True).ids
        self._start = [int(before[0])] if len(before) == 1 and not begins_after_end else [self.end]
        self._bytes = self._byte_tokens()
        self._anchor = self._find_anchor()
        self._declared = _declarations(path.with_name(TOKENIZER_CONFIG))
        self.stops = frozenset({self.end, *self._ends_of_turns()})

    def encode(self, text: str) -> List[int]:
        """Return the ids of a text as documents of a corpus are encoded, without the end.

        Raises:
            UsageError: the text has what is no character, such as a byte that is not UTF-8.
        """
        try:
            content = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"{cut(text)!r}: character {error.start + 1} is none: expected UTF-8") from None
        return [int(number) for number in self._encoder.encode(content)[:-1]]

    def encode_start(self, text: str) -> List[int]:
        """Return the ids of a text that begins a document."""
        return [*self._start, *self.encode(text)]

    def encode_chat(self, messages: Sequence[Message]) -> List[int]:
        """Return the ids of a conversation in the form of the model's chat template, ready for its answer.

        Raises:
            UsageError: the tokenizer has no chat template, or it fails.
        """
        for message in messages:
            self.encode(message["content"])  # refuses what is no text
        text = render_chat(self._chat_template(), messages, self._special_names())
        return [int(number) for number in self._tokenizer.encode(text, add_special_tokens=False).ids]

    def require_chat_template(self) -> None:
        """Raise a ``UsageError`` if the tokenizer has no chat template."""
        self._chat_template()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; bytes that are no text are U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def decode_after(self, context: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text by which ``ids``, which begin at a character, continue ``context``. Further ids change
        no more than an incomplete character at its end.

        Decoders leave out a space where a text begins; here it is kept behind a context that has any text. Of tokens of
        single bytes, the library's decoder makes no character at all if one byte in a row of them is wrong; here the
        others keep theirs.
        """
        texts: List[str] = []
        has_text_before = any(self.decode([number]) for number in reversed(context))  # of most, the last one has
        for is_of_bytes, run in groupby(ids, lambda number: number in self._bytes):
            if is_of_bytes:
                texts.append(bytes(self._bytes[number] for number in run).decode("utf-8", "replace"))
            elif texts or has_text_before:
                texts.append(self.decode([*self._anchor, *run])[len(self.decode(self._anchor)) :])
            else:
                texts.append(self.decode(list(run)))
        return "".join(texts)

    def _byte_tokens(self) -> Dict[int, int]:
        """The tokens that the decoder makes single bytes of, and these bytes; empty if it has none."""
        letter = self._tokenizer.token_to_id("<0x41>")
        if letter is None or self.decode([letter]) != "A":
            return {}
        names = ((number, _BYTE_TOKEN.fullmatch(name)) for name, number in self._tokenizer.get_vocab().items())
        return {number: int(matched[1], 16) for number, matched in names if matched is not None}

    def _find_anchor(self) -> List[int]:
        """A token whose text is complete, and no space, behind which tokens are decoded as in the middle of a text."""
        for number in range(self.vocab_size):
            text = self.decode([number]) if number not in self._bytes else ""
            if text.strip() and _INCOMPLETE not in text:
                return [number]
        return []

    def _chat_template(self) -> str:
        template = self._declared.get("chat_template")
        if isinstance(template, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if not isinstance(template, str):
            where = self._path.with_name(TOKENIZER_CONFIG)
            raise UsageError(f"{where}: has no chat_template: this model is not for chat; leave --chat out")
        if len(template) > TEMPLATE_TEXT.value:
            raise UsageError(f"{self._path.with_name(TOKENIZER_CONFIG)}: chat_template: longer than {TEMPLATE_TEXT}")
        return template

    def _special_names(self) -> Dict[str, str]:
        names = {name: declared_token(self._declared.get(name)) for name in ("bos_token", "eos_token")}
        return {name: text for name, text in names.items() if text is not None}

    def _ends_of_turns(self) -> List[int]:
        """The special tokens by which chat models end an answer, where this tokenizer has them."""
        names = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", declared_token(self._declared.get("eos_token")))
        ids = [self._tokenizer.token_to_id(name) for name in names if name]
        return [number for number in ids if number is not None]


class StableText(NamedTuple):
    """Text of tokens so far.

    Attributes:
        text: without what later tokens may change.
        is_stopped: a stop string has come; ``text`` ends before it.
    """

    text: str
    is_stopped: bool


def stable_text(text: str, stops: Sequence[str]) -> StableText:
    """Return the part of a growing text that is final: without an incomplete character, or the beginning of a stop
    string, at its end."""
    ends = [text.find(stop) for stop in stops if stop in text]
    if ends:
        return StableText(text[: min(ends)], True)
    text = text.rstrip(_INCOMPLETE)
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return StableText(text[:-length], False)
    return StableText(text, False)


def render_chat(template: str, messages: Sequence[Message], names: Mapping[str, str]) -> str:
    """Return a conversation in the form of a chat template, up to where the answer begins.

    The template comes with the model, from anyone: Jinja's sandbox renders it in a child process, within bounds.

    Args:
        names: texts of special tokens, such as ``bos_token``.

    Raises:
        UsageError: the template is not valid, refuses the conversation, or exceeds a bound.
    """
    seconds, memory, length = TEMPLATE_SECONDS.value, TEMPLATE_MEMORY.value, CHAT_TEXT.value
    try:
        return call_in_child(lambda: _render(template, messages, names), seconds=seconds, memory=memory, length=length)
    except BoundExceeded as exceeded:
        raise UsageError(f"the model's chat template {exceeded}") from None


def _render(template: str, messages: Sequence[Message], names: Mapping[str, str]) -> str:
    import jinja2  # the ranks of a training never import it
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    values = {"messages": [dict(message) for message in messages], "add_generation_prompt": True, **names}
    return environment.from_string(template).render(values)


def _declarations(path: Path) -> Dict[str, Any]:
    """The content of a ``tokenizer_config.json``; empty if there is none."""
    try:
        values = parse_json(read_text(path, TOKENIZER_TEXT))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    return values if isinstance(values, dict) else {}
