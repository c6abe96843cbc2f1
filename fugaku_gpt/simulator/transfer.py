"""``llio_transfer`` and ``dir_transfer``: on this machine every process sees every file already, so nothing is copied;
what the real commands would refuse is refused."""

from __future__ import annotations

import os
import sys
from typing import List, Sequence

MOST_FILES = 16384  # that one job may have as common files


def llio_transfer(words: Sequence[str]) -> int:
    """``llio_transfer [--purge] FILE...``."""
    files = [word for word in words if not word.startswith("-")]
    unknown = [word for word in words if word.startswith("-") and word not in ("--purge", "-p", "--sync", "--help")]
    if "--help" in words:
        print("Usage: llio_transfer [--purge] file...")
        return 0
    if unknown or not files:
        return _error("llio_transfer", f"invalid option {unknown[0]}" if unknown else "no file is named")
    if len(files) > MOST_FILES:
        return _error("llio_transfer", f"{len(files)} files: at most {MOST_FILES} can be common files")
    return max(_check("llio_transfer", path, os.path.isfile(path), "not a file") for path in files)


def dir_transfer(words: Sequence[str]) -> int:
    """``dir_transfer [-l LOG] [-p] DIRECTORY...``."""
    left = list(words)
    directories: List[str] = []
    log = ""
    while left:
        word = left.pop(0)
        if word == "-l":
            if not left:
                return _error("dir_transfer", "-l needs an argument")
            log = left.pop(0)
        elif word.startswith("-") and word != "-p":
            return _error("dir_transfer", f"invalid option {word}")
        elif word != "-p":
            directories.append(word)
    if not directories:
        return _error("dir_transfer", "no directory is named")
    code = max(_check("dir_transfer", path, os.path.isdir(path), "not a directory") for path in directories)
    if log:
        with open(log, "a", encoding="utf-8") as stream:
            stream.writelines(f"{path}\n" for path in directories)
    return code


def _check(command: str, path: str, good: bool, words: str) -> int:
    return 0 if good and os.access(path, os.R_OK) else _error(command, f"{path}: {words}, or not readable")


def _error(command: str, text: str) -> int:
    print(f"{command}: {text}", file=sys.stderr)
    return 1
