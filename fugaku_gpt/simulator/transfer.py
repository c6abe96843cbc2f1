"""``llio_transfer`` and ``dir_transfer``: they check their arguments as the real commands do.

They copy nothing, since every process of this machine sees every file.
"""

from __future__ import annotations

import os
import sys
from typing import List, Sequence

MAX_FILES = 16384  # largest number of common files of one job


def llio_transfer(arguments: Sequence[str]) -> int:
    """Check ``llio_transfer [--purge] FILE...``; return its exit code."""
    files = [argument for argument in arguments if not argument.startswith("-")]
    unknown = [
        argument
        for argument in arguments
        if argument.startswith("-") and argument not in ("--purge", "-p", "--sync", "--help")
    ]
    if "--help" in arguments:
        print("Usage: llio_transfer [--purge] file...")
        return 0
    if unknown or not files:
        return _error("llio_transfer", f"invalid option {unknown[0]}" if unknown else "no file is named")
    if len(files) > MAX_FILES:
        return _error("llio_transfer", f"{len(files)} files: at most {MAX_FILES} can be common files")
    return max(_check("llio_transfer", path, os.path.isfile(path), "not a file") for path in files)


def dir_transfer(arguments: Sequence[str]) -> int:
    """Check ``dir_transfer [-l LOG] [-p] DIRECTORY...``; return its exit code."""
    remaining = list(arguments)
    directories: List[str] = []
    log_path = ""
    while remaining:
        argument = remaining.pop(0)
        if argument == "-l":
            if not remaining:
                return _error("dir_transfer", "-l needs an argument")
            log_path = remaining.pop(0)
        elif argument.startswith("-") and argument != "-p":
            return _error("dir_transfer", f"invalid option {argument}")
        elif argument != "-p":
            directories.append(argument)
    if not directories:
        return _error("dir_transfer", "no directory is named")
    code = max(_check("dir_transfer", path, os.path.isdir(path), "not a directory") for path in directories)
    if log_path:
        with open(log_path, "a", encoding="utf-8") as stream:
            stream.writelines(f"{path}\n" for path in directories)
    return code


def _check(command: str, path: str, is_valid: bool, problem: str) -> int:
    return 0 if is_valid and os.access(path, os.R_OK) else _error(command, f"{path}: {problem}, or not readable")


def _error(command: str, text: str) -> int:
    print(f"{command}: {text}", file=sys.stderr)
    return 1
