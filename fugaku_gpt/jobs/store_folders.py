"""Finds the run directories of a store, and the fingerprints of the files that their records are made of.

Each folder is read, but for the run directories that the index knows: of these, the times of the folder and of its
files are enough, since a folder's own time changes with every name in it.
"""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from fugaku_gpt.records.index import Entry, fingerprint_of, newest_change_ns
from fugaku_gpt.records.job import EXIT_DIR, JOB_FILE
from fugaku_gpt.records.sweep import ATTEMPTS

MAX_DEPTH = 4  # levels of folders below a store that are searched: a folder of stores, a sweep, attempts, a run
FILES = ("config.yaml", "sweep.json", "environment.json", "metrics.jsonl", "result.json", JOB_FILE, EXIT_DIR)
_BITS = {name: 1 << number for number, name in enumerate(FILES)}
_HAS_BELOW = 1 << len(FILES)  # the bit of a run in which there are others


class RunFolder(NamedTuple):
    """A run directory.

    Attributes:
        path: below the store.
        files: bits of the present ones of ``FILES``, and of runs below it.
        fingerprint: of the folder and these files.
        newest_ns: time of the last change of any of these; 0 if the fingerprint is that of the index.
    """

    path: str
    files: int
    fingerprint: str
    newest_ns: int


def find_run_folders(store: Path, indexed: Mapping[str, Entry]) -> List[RunFolder]:
    """Find all run directories of a store, in the order of their paths; links are not followed."""
    return sorted(_walk(os.fspath(store), "", MAX_DEPTH, indexed), key=lambda folder: folder.path)


def _walk(store: str, path: str, depth: int, indexed: Mapping[str, Entry]) -> Iterator[RunFolder]:
    folder = f"{store}/{path}" if path else store
    stats: Dict[str, os.stat_result] = {}
    below: List[str] = []
    try:
        own = os.lstat(folder)  # before its names are read: what changes after that shows the next time
        with os.scandir(folder) as children:
            for entry in children:
                name = entry.name
                if name in _BITS:
                    with contextlib.suppress(FileNotFoundError):  # moved in the meantime
                        stats[name] = entry.stat(follow_symlinks=False)
                elif not name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    below.append(name)
    except OSError:  # moved in the meantime, or not readable
        return
    if "config.yaml" in stats:
        # inside a run: earlier attempts of its job, and the sub-jobs of a bulk job
        below = [name for name in below if name == ATTEMPTS or name.startswith("repeat-")]
        yield _run_folder(path, own, stats, bool(below))
    if depth == 0:
        return
    for name in below:
        path_below = f"{path}/{name}" if path else name
        entry_of_run = indexed.get(path_below)
        if entry_of_run is not None and _is_unchanged(f"{store}/{path_below}", entry_of_run):
            yield RunFolder(path_below, entry_of_run.files, entry_of_run.fingerprint, 0)
        else:
            yield from _walk(store, path_below, depth - 1, indexed)


def _run_folder(path: str, own: os.stat_result, stats: Dict[str, os.stat_result], has_below: bool) -> RunFolder:
    # a store that is itself a run: the index is in its folder, and changes the folder's time
    in_order = ([own] if path else []) + [stats[name] for name in FILES if name in stats]
    files = sum(_BITS[name] for name in stats) + (_HAS_BELOW if has_below else 0)
    return RunFolder(path or ".", files, fingerprint_of(in_order), newest_change_ns(in_order))


def _is_unchanged(folder: str, entry: Entry) -> bool:
    """Whether a run directory is as the index has it; False for one with others below it, which may have changed."""
    names = _names_of(entry.files)
    if names is None:
        return False
    try:
        return fingerprint_of([os.lstat(folder + name) for name in names]) == entry.fingerprint
    except OSError:  # moved in the meantime, or not readable
        return False


@lru_cache(maxsize=1024)
def _names_of(files: int) -> Optional[Tuple[str, ...]]:
    """Endings that make a run's path that of its folder and of each of its files; None if the bits are no files."""
    if not 0 <= files < _HAS_BELOW:
        return None
    return ("", *(f"/{name}" for name in FILES if _BITS[name] & files))
