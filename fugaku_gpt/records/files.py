"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file through a temporary neighbour and a rename, so that no reader ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink() if temporary.exists() else None
        raise


def write_json_atomically(path: Path, value: Any) -> None:
    """JSON with sorted-by-writer keys, indented, through :func:`write_text_atomically`."""
    write_text_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
