"""Parses YAML text to a tree of scalars as they were written, with their lines, without interpreting them.

It serves run files, sweep files and ``--set key=value``. Untrusted text is only composed to nodes, never constructed to
Python objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import yaml

from fugaku_gpt.errors import ConfigError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.limits import YAML_KEY, YAML_LEVELS, YAML_TEXT, YAML_VALUES, cut

_QUOTES = ("'", '"', "|", ">")  # a plain scalar has style None or "", by the loader
# Texts that are one plain scalar to YAML, such as most values of the command line; YAML's own parser takes 20 times as
# long, which is seconds for a sweep of a hundred runs.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_INDENTED = re.compile(r"^[ \t?:-]*", re.MULTILINE)
_WORD = r"-?[A-Za-z0-9/](?:[A-Za-z0-9_.+/,:-]*[A-Za-z0-9_.+/,-])?"
_SECTION_LINE = re.compile(rf"([a-z_]{{1,64}}):|  ([a-z_0-9]{{1,64}}):(?: ({_WORD}|''|\[\]))?|  - ({_WORD})")
_LONGEST_LINE = 1024  # characters of a line that is remembered
Groups = Tuple[str, str, str, str]
_NO_GROUPS: Groups = ("", "", "", "")
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same grammar; the C loader is 10 times faster


class _Loader(_Base):  # type: ignore[misc]  # chosen when it is imported
    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """The tag of a node: nobody looks at it, and to find it takes longer than all else."""
        return "!"


@dataclass(frozen=True)
class Scalar:
    """One scalar as written: its text, whether it was in quotes, and its location (file and line)."""

    text: str
    is_quoted: bool
    location: str

    def __str__(self) -> str:
        return self.text


Tree = Union[Scalar, List["Tree"], Dict[str, "Tree"]]


def read_yaml_file(path: Path) -> Dict[str, Tree]:
    """Read the mapping in a YAML file.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8, not YAML, or not a mapping.
    """
    return parse_yaml(read_yaml_text(path), str(path))


def read_yaml_text(path: Path) -> str:
    """Read the text of a YAML file.

    Raises:
        ConfigError: the file is missing, unreadable, or not UTF-8.
    """
    try:
        return read_text(path, YAML_TEXT)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse_yaml(text: str, origin: str) -> Dict[str, Tree]:
    """Parse YAML text to a mapping; an empty text is an empty mapping. ``origin`` names the text in messages."""
    sections = parse_sections(text, origin)
    if sections is not None:
        return sections
    tree = _compose(text, origin)
    if isinstance(tree, Scalar) and tree.text == "" and not tree.is_quoted:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: expected `key: value` lines at the top")
    return tree


def parse_sections(text: str, origin: str) -> Optional[Dict[str, Tree]]:
    """Parse the file of a run as the trainer writes it: sections of one level, plain values, lists of these.

    A store has thousands of such files, on which YAML's own parser spends most of the time of a listing. None for a
    text with any other line, also if it is valid YAML.
    """
    if not text.endswith("\n"):
        return None
    sections: Dict[str, Tree] = {}
    values: Dict[str, Tree] = {}
    items: Optional[List[Tree]] = None  # of the value before this line, if that was none: a list may follow
    for number, line in enumerate(text[:-1].split("\n"), start=1):
        section, key, value, item = _groups_of(line) if len(line) <= _LONGEST_LINE else _NO_GROUPS
        if not (section or key or item):
            return None
        if item:
            if items is None:
                return None
            items.append(Scalar(item, False, f"{origin}:{number}"))
            continue
        if items == [] or (section or key) in (sections if section else values):
            return None  # a key without a value; one that is written twice
        items = None
        if section:
            values = sections[section] = {}
        elif not sections:
            return None
        elif value == "[]":
            values[key] = []
        elif value:
            values[key] = Scalar(value.strip("'"), value == "''", f"{origin}:{number}")
        else:
            items = values[key] = []
    return None if items == [] or not all(sections.values()) else sections


@lru_cache(maxsize=4096)
def _groups_of(line: str) -> Groups:
    """Section, key, value and item of a line, each empty if it has none; a store's files have most lines in common."""
    match = _SECTION_LINE.fullmatch(line)
    return (match[1] or "", match[2] or "", match[3] or "", match[4] or "") if match is not None else _NO_GROUPS


def parse_override(text: str) -> Tuple[str, Tree]:
    """Parse ``key=value`` of the command line to the dotted key and its value."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {cut(text)}: expected key=value, such as training.lr=1e-4")
    if _PLAIN.fullmatch(value):
        return key, Scalar(value, False, f"--set {cut(text)}")
    return key, _compose(value, f"--set {cut(text)}")


def flatten(tree: Mapping[str, Tree], prefix: str = "") -> Iterator[Tuple[str, Tree]]:
    """Return (dotted key, value) of a tree; ``{layout: {dp: 2}}`` and ``layout.dp: 2`` are equal. Lists are values.

    Raises:
        ConfigError: a key is written twice, once in each way.
    """
    leaves: Dict[str, Tree] = {}
    _add_leaves(tree, prefix, leaves)
    return iter(leaves.items())


def _add_leaves(tree: Mapping[str, Tree], prefix: str, leaves: Dict[str, Tree]) -> None:
    for key, value in tree.items():
        dotted_key = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            _add_leaves(value, dotted_key, leaves)
        elif dotted_key in leaves:
            raise ConfigError(f"{location_of(value, dotted_key)}: {cut(dotted_key)}: written twice")
        else:
            leaves[dotted_key] = value


def location_of(value: Tree, fallback: str) -> str:
    """The file and line of a value's first scalar; ``fallback`` for a value without scalars."""
    if isinstance(value, Scalar):
        return value.location
    children = list(value.values()) if isinstance(value, dict) else value
    return location_of(children[0], fallback) if children else fallback


def plain_values(value: Tree) -> object:
    """The tree with its scalars replaced by their text, for messages."""
    if isinstance(value, Scalar):
        return value.text
    if isinstance(value, dict):
        return {key: plain_values(child) for key, child in value.items()}
    return [plain_values(child) for child in value]


def quoted(value: Tree) -> str:
    """A value as a message quotes it, on a line and cut."""
    return cut(repr(plain_values(value)))


def _compose(text: str, origin: str) -> Tree:
    try:
        if _may_exceed_limits(text):
            check_structure(text, origin)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not valid YAML"
        raise ConfigError(f"{origin}{line}: not valid YAML: {problem}") from None
    except UnicodeEncodeError as error:  # bytes of the command line that Python could not decode
        raise ConfigError(f"{ascii(origin)[1:-1]}: not UTF-8 text (character {error.start + 1})") from None
    if node is None:
        return Scalar("", False, origin)
    return _Converter(origin).convert(node, depth=0)


def _may_exceed_limits(text: str) -> bool:
    """Whether a text may have more values or levels than allowed: each level needs a bracket, or stands further to the
    right than the one around it, but for a list that is the value of a key. Parsing takes a hundred times as long."""
    indented = max((len(prefix) for prefix in _INDENTED.findall(text)), default=0)
    levels = 2 * (indented + 1) + text.count("[") + text.count("{")
    return levels > YAML_LEVELS.value or len(text) > YAML_VALUES.value


def check_structure(text: str, origin: str) -> None:
    """Refuse a YAML text with deep nesting, since composing recurses for each level and would overflow the C stack, or
    with too many values, each of which takes many times its text in memory.

    Raises:
        ConfigError: it exceeds ``YAML_LEVELS`` or ``YAML_VALUES``.
        yaml.YAMLError: it is not YAML.
    """
    depth = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        values += isinstance(event, yaml.NodeEvent)
        if depth > YAML_LEVELS.value or values > YAML_VALUES.value:
            mark = event.start_mark
            line = f":{mark.line + 1}" if mark is not None and not origin.startswith("--set") else ""
            limit = YAML_LEVELS if depth > YAML_LEVELS.value else YAML_VALUES
            raise ConfigError(f"{origin}{line}: more than {limit}")


class _Converter:
    """Converts YAML nodes to a tree; it counts them, since a few nested aliases can stand for billions of nodes."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.remaining = YAML_VALUES.value

    def convert(self, node: yaml.Node, depth: int) -> Tree:
        self.remaining -= 1
        location = self.origin if self.origin.startswith("--set") else f"{self.origin}:{node.start_mark.line + 1}"
        if self.remaining < 0 or depth > YAML_LEVELS.value:
            limit = YAML_VALUES if self.remaining < 0 else YAML_LEVELS
            raise ConfigError(f"{location}: more than {limit} (aliases written out)")
        if isinstance(node, yaml.ScalarNode):
            return Scalar(node.value, node.style in _QUOTES, location)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(child, depth + 1) for child in node.value]
        result: Dict[str, Tree] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{location}: a key must be a plain word")
            key = key_node.value
            if len(key) > YAML_KEY.value:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{self.origin}:{line}: a key of {len(key)} characters; at most {YAML_KEY}")
            if key in result:
                raise ConfigError(f"{self.origin}:{key_node.start_mark.line + 1}: {key}: written twice")
            result[key] = self.convert(value_node, depth + 1)
        return result
