"""Changes of files at random: of bytes, of texts by numbers and words, of JSON values, of words of binary files."""

from __future__ import annotations

import json
import random
import re
import struct
from typing import Any, Callable, List, Sequence

TEXT, JSON, LINES, BINARY = "text", "JSON", "lines of JSON", "binary"

NUMBERS = (
    "0", "-1", "-0", "1e999", "-1e999", "nan", "NaN", "inf", "Infinity", "1e-320", "9" * 100_000, "9" * 400,
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "2147483648", "1e308", "0.1", "1_0",
    "0x10", "\u00b2", "\u0663", "1:99:99", "99999999:00:00", "1e5", "--1", "+",
)  # fmt: skip
TOKENS = (
    "", "null", "~", "true", "[]", "{}", '"x"', "'", '"', "[", "]", "{", "}", ":", "- ", "#", "&a ", "*a", "*b",
    "!!int ", "!!python/object:os.system ", "!!binary ", "<<: ", "? ", "|", ">", "%", "@", "`", "\0", "\ufeff",
    "\u2028", "\r\n", "\t", "\x1b[2J", "\u202e", "/dev/zero", "..", "/", "a" * 300, "${x}", "{{ x }}",
    "{% for i in range(9999999) %}",
    "2024-99-99", "=1+1", "|" * 50, "\n", "\n\n", "x" * 70_000, ",", "=", "(", ")", "and ", "**", "not ",
)  # fmt: skip
VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), "",
    "x", "1", "\0", "\ud800", "../x", "/dev/zero", "x" * 70_000, "\u00b2", [], {}, [[]], [None], {"": None},
    [1, "a", {}], {"a": {"b": []}}, [[[[[[[[1]]]]]]]], "ok", "9" * 5000, [0] * 1000,
)  # fmt: skip
INTEGERS = (
    0,
    1,
    2**7,
    2**8 - 1,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")


def mutate(rng: random.Random, seeds: Sequence[bytes], form: str) -> bytes:
    """A changed copy of one of the seeds."""
    content = rng.choice(seeds)
    changes = _CHANGES[form]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        content = rng.choice(changes)(rng, content, seeds)
    return content


Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def _flip(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 4))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _remove(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    first = rng.randrange(len(content) + 1)
    return content[:first] + content[first + rng.choice((1, 4, 30, 300)) :]


def _repeat(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    first = rng.randrange(len(content) + 1)
    stop = first + rng.choice((1, 8, 64, 512))
    return content[:stop] + content[first:stop] * rng.choice((1, 1, 2, 100)) + content[stop:]


def _splice(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    other = rng.choice(seeds)
    return content[: rng.randrange(len(content) + 1)] + other[rng.randrange(len(other) + 1) :]


def _word(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(TOKENS).encode("utf-8", "surrogatepass") + content[at:]


def _number(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    numbers = list(_NUMBER.finditer(content))
    if not numbers:
        return _word(rng, content, seeds)
    chosen = rng.choice(numbers)
    text = rng.choice(NUMBERS if rng.random() < 0.8 else TOKENS)
    return content[: chosen.start()] + text.encode("utf-8", "surrogatepass") + content[chosen.end() :]


def _line(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    action = rng.randrange(5)
    if action == 0:
        del lines[at]
    elif action == 1:
        lines.insert(at, rng.choice(lines))
    elif action == 2:
        lines[at] = b" " * rng.choice((1, 2, 4)) + lines[at]
    elif action == 3:
        lines[at] = lines[at].partition(b":")[0] + b": " + rng.choice(TOKENS).encode("utf-8", "surrogatepass")
    else:
        rng.shuffle(lines)
    return b"\n".join(lines)


def _nest(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    opening, closing = rng.choice(((b"[", b"]"), (b"{a: ", b"}"), (b'{"a":', b"}"), (b"- ", b""), (b"(", b")")))
    depth = rng.choice((10, 60, 3000, 100_000))
    at = rng.randrange(len(content) + 1)
    return content[:at] + opening * depth + b"1" + closing * depth + content[at:]


def _json_value(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _number(rng, content, seeds)
    return _dumped(_changed(rng, value))


def _json_line(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = _json_value(rng, lines[at], seeds)
    return b"\n".join(lines)


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value, indent=1).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):  # a number of 5,000 digits
        return b"{}"


def _changed(rng: random.Random, value: Any) -> Any:
    """A JSON value with one change: here, or deeper."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(("", "x", "\0", "kind", "version", "name")): rng.choice(VALUES)}
        return {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at + 1 :]
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


def _binary_word(rng: random.Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    size, letter = rng.choice(((8, "Q"), (4, "I"), (2, "H"), (1, "B")))
    if len(content) < size:
        return content
    most = min(len(content) - size, rng.choice((64, 512, len(content))))
    at = rng.randrange(most + 1)
    at -= at % rng.choice((1, size))
    value = rng.choice(INTEGERS) if rng.random() < 0.8 else rng.randrange(2**32)
    return content[:at] + struct.pack(f"<{letter}", value % 256**size) + content[at + size :]


_BYTES: List[Change] = [_flip, _cut, _remove, _repeat, _splice]
_CHANGES = {
    TEXT: [*_BYTES, _word, _word, _number, _number, _line, _line, _nest],
    JSON: [*_BYTES, _word, _number, _nest, *[_json_value] * 8],
    LINES: [*_BYTES, _word, _number, _line, _nest, *[_json_line] * 8],
    BINARY: [*_BYTES, *[_binary_word] * 8],
}
