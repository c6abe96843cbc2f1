"""Values on the lines of a script that a scheduler reads."""

from __future__ import annotations

import re

from fugaku_gpt.errors import ConfigError

_UNSAFE_IN_DIRECTIVE = re.compile(r"[\x00-\x1f\x7f\"\\$`]")


def directive_value(value: object) -> str:
    """Quote a value for a directive line; nothing is expanded there, and it must stay one line.

    Raises:
        ConfigError: the text has a character that the scheduler or a shell could interpret.
    """
    text = str(value)
    if _UNSAFE_IN_DIRECTIVE.search(text) or not text.isascii():
        raise ConfigError(
            f"{text!r} cannot stand in a scheduler's line; leave out quotes, \\, $, ` and what is not ASCII"
        )
    return f'"{text}"'
