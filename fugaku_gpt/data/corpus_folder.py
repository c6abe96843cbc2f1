"""The folder of a corpus while it is made: it appears under its name completely or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Iterator, List, Sequence

from fugaku_gpt.data.corpus import CORPUS, MANIFEST, TOKENIZER
from fugaku_gpt.data.indexed import bin_file, idx_file
from fugaku_gpt.errors import DataError

CORPUS_FILES = frozenset((bin_file(Path(CORPUS)).name, idx_file(Path(CORPUS)).name, TOKENIZER, MANIFEST))


def sha256_of(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def temporary_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``, removed at the end of the block; leftovers of a kill are removed next time."""
    host = socket.gethostname()
    folder = out.with_name(f".{out.name}.{host}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for leftover in _leftover_folders(out, host):
            shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise DataError(f"{out}: cannot be made: {error.strerror}: {error.filename}") from None
    try:
        with _termination_as_interrupt():
            yield folder
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}; nothing was left behind") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _leftover_folders(out: Path, host: str) -> List[Path]:
    """Temporary folders of processes of this machine that have ended."""
    leftovers = []
    for path in out.parent.iterdir():
        prefix, suffix = f".{out.name}.{host}.", ".tmp"
        if path.name.startswith(prefix) and path.name.endswith(suffix):
            pid = path.name[len(prefix) : -len(suffix)]
            if pid.isdecimal() and not _is_alive(int(pid)):
                leftovers.append(path)
    return leftovers


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that partial files are removed before the process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def publish(folder: Path, out: Path, replaces: bool = True) -> None:
    """Rename the finished folder to ``out``.

    Args:
        replaces: remove the old contents of ``out``, which the caller has checked; or else it must be empty.

    Raises:
        DataError: ``out`` cannot be renamed, or has contents that are not to be removed.
    """
    replaced = folder.with_name(folder.name + ".old")
    try:
        if replaces and out.exists():
            os.rename(out, replaced)
        os.rename(folder, out)
    except OSError as error:
        raise DataError(f"{out}: cannot be put in its place: {error.strerror}") from None
    finally:  # after any error between the two renames, also an interrupt
        if replaced.exists() and out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        elif replaced.exists():
            os.rename(replaced, out)
    if hasattr(os, "O_DIRECTORY"):
        directory = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)  # the rename itself survives a crash
        except OSError as error:  # some network file systems cannot
            print(f"fugaku-gpt: {out.parent}: not flushed: {error.strerror}", file=sys.stderr)
        finally:
            os.close(directory)
