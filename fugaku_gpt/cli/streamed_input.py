"""Input files of ranks that may be streams: the standard input, or a pipe, which one process alone can read.

With ``--ranks`` the process that starts the ranks reads each stream once and hands on a copy of it, which has no name
in any folder and ends with that process.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Callable, List, NamedTuple, Sequence, Tuple, TypeVar

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.limits import Limit
from fugaku_gpt.machine.rank import launched_rank

T = TypeVar("T")
Copies = Tuple[Tuple[Path, Path], ...]  # a stream, and the file that has what was read from it
_STANDARD_INPUT = "/dev/stdin"
_OF_EACH_PROCESS = ("/dev/fd/", "/proc/self/fd/", "/proc/thread-self/fd/")


class InputFile(NamedTuple):
    """A file that a command is to read: the option that names it, its path, and the most that is read of it."""

    option: str
    path: Path
    limit: Limit


def is_stream(path: Path) -> bool:
    """Whether a path is the standard input (``-``) or a pipe, or means another file in each process."""
    name = str(path)
    if name in ("-", _STANDARD_INPUT) or name.startswith(_OF_EACH_PROCESS):
        return True
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):  # reading it reports why
        return False


def copy_streams(files: Sequence[InputFile], stack: ExitStack) -> List[str]:
    """Read the streams among some files, and return the options by which a rank of this machine gets what they had. The
    copies exist until ``stack`` is closed.

    Raises:
        UsageError: a stream cannot be read, or has more than the limit of its file.
    """
    options: List[str] = []
    for _, path, limit in files:
        if not is_stream(path):
            continue
        try:
            content = read_bytes(_readable(path), limit)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from None
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        stack.callback(copy.close)
        copy.write(content)
        copy.flush()
        options += ["--copy-of", str(path), f"/proc/{os.getpid()}/fd/{copy.fileno()}"]
    return options


def read_input(option: str, path: Path, copies: Copies, read: Callable[[Path], T]) -> T:
    """Return what ``read`` makes of a file, or of the copy of a stream; its errors name the path that the user gave.

    Raises:
        UsageError: ``read`` has raised it, or this is one of several ranks and has no copy.
    """
    if not is_stream(path):
        return read(path)
    launched, source = launched_rank(), dict(copies).get(path)
    if source is None and launched is not None and launched.ranks != 1:
        raise UsageError(
            f"{option} {path}: is a stream, which not every rank of a launcher can read: write it into a file that all "
            "nodes see"
        )
    source = source if source is not None else _readable(path)
    try:
        return read(source)
    except UsageError as error:
        raise type(error)(str(error).replace(str(source), str(path))) from None


def _readable(path: Path) -> Path:
    return Path(_STANDARD_INPUT) if str(path) == "-" else path
