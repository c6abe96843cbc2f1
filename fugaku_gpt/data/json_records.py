"""Reads documents out of JSON: lines, arrays and objects that follow one another, and the text of each record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterable, Iterator, List, Mapping, Set, Tuple

from fugaku_gpt.data.forms import BadText
from fugaku_gpt.json_text import parse_json, parse_json_at

_SPACE = re.compile(r"[ \t\r\n]*")
# Beginnings of JSON that prose does not have: an object with a quoted key, or an array of such objects.
_JSON_BEGINNING = re.compile(rb'\s*(\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')
_MAX_KEYS_SHOWN = 8
OnBad = Callable[[BadText], None]  # is given each bad record; raises it, or counts it


def resembles_json(data: bytes) -> bool:
    """Whether bytes begin with a JSON object that has keys, or with an array of such objects."""
    return _JSON_BEGINNING.match(data) is not None


def is_object(line: bytes) -> bool:
    """Whether bytes are exactly one JSON object."""
    try:
        return isinstance(parse_json(line.decode("utf-8-sig")), dict)
    except ValueError:
        return False


def is_json(data: bytes) -> bool:
    """Whether bytes are JSON objects and arrays, all of them, and at least one that is not empty."""
    has_content = False
    try:
        for _, value in _values(data, Path()):  # one by one: all of them may take ten times the memory of the text
            has_content = has_content or bool(value)
    except BadText:
        return False
    return has_content


class TextKeys:
    """Keys of the texts of a record, which become one document; ``a.b`` is the key ``b`` of the object under ``a``."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys
        self._met: Set[str] = set()

    def texts_of(self, record: Mapping[str, Any]) -> List[str]:
        """The texts that a record has under the keys, in their order."""
        texts = []
        for key in self.keys:
            value = _value_at(record, key)
            if isinstance(value, str):
                texts.append(value)
                self._met.add(key)
        return texts

    @property
    def never_met(self) -> List[str]:
        """The keys under which no record had a text, if others had."""
        return [key for key in self.keys if key not in self._met] if self._met else []


def text_of_record(value: Any, keys: TextKeys, location: str) -> bytes:
    """The texts of a record under keys, as UTF-8 with a blank line between.

    Keys without a text are passed over, as long as one of them has one.

    Raises:
        BadText: the record is no object, or has no text under any key.
    """
    if not isinstance(value, dict):
        raise BadText(f"{location}: expected a JSON object such as {{{json.dumps(keys.keys[0])}: ...}}")
    texts = keys.texts_of(value)
    if not texts:
        others = sorted(_text_keys(value))
        names = ", ".join(others[:_MAX_KEYS_SHOWN]) + (", ..." if len(others) > _MAX_KEYS_SHOWN else "")
        hint = f"texts of this record: {names}; name one with --text-key" if others else "it has no text"
        raise BadText(f"{location}: no text under the key {' or '.join(map(repr, keys.keys))}; {hint}")
    text = "\n\n".join(text for text in texts if text)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # surrogates: a pair such as "\ud83d\ude00" is one character, a lone one is none
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")


def json_lines(lines: Iterable[bytes], path: Path, keys: TextKeys, largest_line: int, on_bad: OnBad) -> Iterator[bytes]:
    """Yield the text of each line; blank lines are skipped, and bad ones are given to ``on_bad``."""
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        location = f"{path}:{number}"
        if len(line) >= largest_line:
            raise BadText(f"{location}: a line of more than {largest_line >> 20} MiB; one document takes one line")
        try:
            try:
                value = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                raise BadText(f"{location}: not JSON: {error}; each line must be one JSON object") from None
            text = text_of_record(value, keys, location)
        except BadText as error:
            on_bad(error)
            continue
        yield text


def json_values(data: bytes, path: Path, keys: TextKeys, on_bad: OnBad) -> Iterator[bytes]:
    """Yield the text of each object of a file of JSON values: objects, and arrays of objects.

    Raises:
        BadText: the file is not JSON from some line on.
    """
    for line, value in _values(data, path):
        try:
            text = text_of_record(value, keys, f"{path}:{line}")
        except BadText as error:
            on_bad(error)
            continue
        yield text


def _values(data: bytes, path: Path) -> Iterator[Tuple[int, Any]]:
    """Yield the line and value of each object, and of each element of an array, one by one to save memory."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadText(f"{path}: not JSON: {error}") from None
    position, line, counted_to = 0, 1, 0
    in_array, needs_comma = False, False
    while True:
        position = _after_space(text, position)
        line, counted_to = line + text.count("\n", counted_to, position), position
        character = text[position : position + 1]
        if in_array and character == "]":
            in_array, needs_comma, position = False, False, position + 1
            continue
        if in_array and needs_comma:
            if character != ",":
                raise BadText(f"{path}:{line}: not JSON: expected , or ] after an element; is the file cut short?")
            position, needs_comma = position + 1, False
            continue
        if not character and not in_array:
            return
        if not in_array and character == "[":
            in_array, position = True, position + 1
            continue
        try:
            value, position = parse_json_at(text, position)
        except ValueError as error:
            reason = getattr(error, "msg", error)
            raise BadText(f"{path}:{line}: not JSON: {reason}; is the file cut short?") from None
        if not in_array and not isinstance(value, dict):
            raise BadText(f"{path}:{line}: not JSON objects, but {type(value).__name__} at the top")
        needs_comma = in_array
        yield line, value


def _after_space(text: str, position: int) -> int:
    matched = _SPACE.match(text, position)
    return matched.end() if matched is not None else position


def _value_at(record: Any, key: str) -> Any:
    """The value under a key, or under a path of keys with dots between; None if there is none."""
    if not isinstance(record, dict):
        return None
    if key in record:
        return record[key]
    head, dot, rest = key.partition(".")
    while dot:
        if head in record:
            value = _value_at(record[head], rest)
            if value is not None:
                return value
        component, dot, rest = rest.partition(".")
        head = f"{head}.{component}"
    return None


def _text_keys(record: Any, prefix: str = "") -> List[str]:
    """The dotted keys of all texts of a record."""
    keys = []
    for key, value in record.items():
        if isinstance(value, str):
            keys.append(prefix + key)
        elif isinstance(value, dict):
            keys += _text_keys(value, f"{prefix}{key}.")
    return keys


def lines_of(stream: BinaryIO, largest_line: int) -> Iterator[bytes]:
    """Yield the lines of a stream, none longer than ``largest_line`` bytes."""
    return iter(lambda: stream.readline(largest_line), b"")
