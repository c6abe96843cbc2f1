"""Finds docstrings, help texts and comments that are fragments, and phrases that no engineer would write."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

# Openings that make a fragment of what follows.
OPENINGS = ("Of ", "So many", "That there", "By ", "Its ", "What ", "Whose ", "Who ")

# Phrase to the pattern of its forms.
PHRASES: Dict[str, str] = {
    "hand in": r"\bhand(s|ed|ing)?\s+in\b(?!\s+hand)",
    "go on": r"\b(go|goes|going|went)\s+on\b",
    "is told": r"\b(is|are|was|were|be|been|being)\s+told\b",
    "so many": r"\bso\s+many\b",
    "who stays": r"\bwho\s+stays\b",
}


# Kinds of text that are held to sentences; a comment or a field's meaning is held to its opening alone.
SENTENCES = ("docstring", "help")
OPENED = (*SENTENCES, "comment", "field")


@dataclass(frozen=True)
class Text:
    """A text for readers: its line, its kind (docstring, help, field, comment, message) and its content."""

    line: int
    kind: str
    content: str

    @property
    def first_line(self) -> str:
        """The first line that is not empty."""
        return self.content.strip().partition("\n")[0]


# The position of the meaning among the arguments of the functions that make fields of a run.
MEANING_POSITION = {"option": 1, "duration": 1, "power_knob": 0}


def texts_of(source: str) -> List[Text]:
    """Docstrings, help texts, meanings of fields, comments and other strings of Python source, by line."""
    nodes = list(ast.walk(ast.parse(source)))
    special = {id(node): kind for kind, node in _special_strings(nodes)}
    inside_f_strings = {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in node.values}
    strings = []
    for node in nodes:
        content = _literal(node)
        if content and id(node) not in inside_f_strings:
            strings.append(Text(node.lineno, special.get(id(node), "message"), content))  # type: ignore[attr-defined]
    return sorted([*strings, *_comments(source)], key=lambda text: text.line)


def _special_strings(nodes: Sequence[ast.AST]) -> Iterator[Tuple[str, ast.AST]]:
    """Yields kind and node of docstrings, of ``help=`` in calls, and of the meaning in ``option(default, meaning)``."""
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                yield "docstring", node.body[0].value  # type: ignore[attr-defined]
        elif isinstance(node, ast.Call):
            yield from (("help", word.value) for word in node.keywords if word.arg in ("help", "short_help"))
            position = MEANING_POSITION.get(node.func.id) if isinstance(node.func, ast.Name) else None
            if position is not None and len(node.args) > position:
                yield "field", node.args[position]


def _literal(node: ast.AST) -> Optional[str]:
    """Text of a string or f-string, its expressions replaced by ``{}``; None for another node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(value) or "{}" for value in node.values)
    return None


def _comments(source: str) -> Iterator[Text]:
    """Comments, lines of one block joined."""
    block: List[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and (token.start[0] != block[-1].start[0] + 1 or token.start[1] != block[-1].start[1]):
            yield _comment(block)
            block = []
        block.append(token)
    if block:
        yield _comment(block)


def _comment(block: List[tokenize.TokenInfo]) -> Text:
    return Text(block[0].start[0], "comment", "\n".join(token.string.lstrip("#: ") for token in block))


def fragment_signs(text: Text) -> List[str]:
    """Mechanical signs that a docstring or help text is no sentence, or that another text opens as a fragment."""
    stripped = text.content.strip()
    if text.kind not in OPENED:
        return []
    signs = [f"begins with {opening.strip()!r}" for opening in OPENINGS if stripped.startswith(opening)]
    if text.kind not in SENTENCES:
        return signs
    if re.match(r"[a-z]+\b(?![_.(/=])", stripped):
        signs.append("begins in lower case")
    paragraph = re.sub(r"\s*\[[^\]]*\]$", "", stripped.partition("\n\n")[0].rstrip())  # without click's [default: 1]
    if not re.search(r"[.:!?][)'\"`]*$", paragraph):
        signs.append("first paragraph does not end a sentence")
    return signs


# Titles that users' reports have had since version 0.1.0: they stay.
EXEMPT = ("What else went on",)


def banned_phrases(content: str) -> List[str]:
    """Banned phrases in a text, one entry an occurrence."""
    for title in EXEMPT:
        content = content.replace(title, "")
    return [phrase for phrase, pattern in PHRASES.items() for _ in re.finditer(pattern, content, re.IGNORECASE)]
