"""Reads prompts: from the command line, or from a file of one text or JSON value in each line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional, Sequence, Union

from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.text import Message, TextTokenizer
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import PROMPTS_TEXT, cut

Prompt = Union[str, List[Message]]  # a text, or a conversation
_ROLES = ("system", "user", "assistant", "tool")


def read_prompts(path: Path, name: Optional[Path] = None) -> List[Prompt]:
    """Read a file of prompts: JSON lines where its name ends in ``.jsonl`` (a text, or an object with ``prompt`` or
    ``messages``), else one prompt in each line that is not blank.

    Args:
        name: the file of which ``path`` is a copy, whose name tells the form; None: it is none.

    Raises:
        UsageError: it cannot be read, a line is not valid, or there is no prompt.
    """
    try:
        lines = read_text(path, PROMPTS_TEXT).split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{path}: holds no prompt")
    if (name or path).suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt_of_json(f"{path}:{number}", line) for number, line in numbered]


def encode_prompts(prompts: Sequence[Prompt], tokenizer: TextTokenizer, is_chat: bool, most: int) -> List[List[int]]:
    """Return the token ids of each prompt; with ``is_chat``, a text is what a user says.

    Args:
        most: tokens that the model can read.

    Raises:
        UsageError: a prompt leaves no room for a text, or the model has no form for conversations.
    """
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        if is_chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        ids = tokenizer.encode_start(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        if not ids or len(ids) > most:
            raise UsageError(f"prompt {number}: has {len(ids)} tokens; valid: 1 to {most}, model.seq_len")
        encoded.append(ids)
    return encoded


def _prompt_of_json(place: str, line: str) -> Prompt:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON: {error}") from None
    if isinstance(value, dict) and "messages" in value:
        messages = value["messages"]
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return messages
        raise UsageError(f"{place}: messages: expected a list of objects with role ({', '.join(_ROLES)}) and content")
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UsageError(f"{place}: {cut(line)}: expected a text, or an object with prompt or messages")
    return text


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in _ROLES and isinstance(value.get("content"), str)
