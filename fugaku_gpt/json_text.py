"""Parses JSON that another program may have written, or that a fault has damaged."""

from __future__ import annotations

import json
from typing import Any, Tuple, Union

_DECODER = json.JSONDecoder()


def parse_json(text: Union[str, bytes]) -> Any:
    """Return the value of a JSON text, as :func:`json.loads` does.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deeply, for which ``json`` has a RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_json_at(text: str, position: int) -> Tuple[Any, int]:
    """Return the JSON value that begins at a position of a text, and the position of its end.

    Raises:
        ValueError: as of :func:`parse_json`.
    """
    try:
        return _DECODER.raw_decode(text, position)
    except RecursionError:
        raise ValueError("nested too deeply") from None
