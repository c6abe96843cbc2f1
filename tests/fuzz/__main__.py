"""Fuzzes the readers: ``python -m tests.fuzz --seconds 600`` each for minutes, ``--calls N`` each for N calls.

Each reader is called in this process, whose memory may grow by 512 MiB, and each call has 2 s of processor time. Exit
code 1 where another error than ours came out, or a limit was exceeded; the files that did it are kept in ``--keep``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, Iterator, Optional, Tuple

from fugaku_gpt.errors import FugakuGptError
from tests.fuzz.calls import SECONDS, bounded_memory, call_reader, watch_time
from tests.fuzz.mutations import mutate
from tests.fuzz.readers import Reader, prepare
from tests.fuzz.registry import all_readers

_LONGEST = 2**20  # bytes of a mutation


def main() -> int:
    """Fuzz, print a table and the findings, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="Time for each reader.")
    parser.add_argument("--calls", type=int, default=400, help="Work of each reader, in calls of a cheap one.")
    parser.add_argument("--patience", type=float, default=1.0, help="Factor of the limit of time, on a busy machine.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="Fuzz only readers whose name contains this.")
    parser.add_argument("--part", choices=("a", "b"), help="Fuzz the first or the second half of the readers.")
    parser.add_argument("--keep", type=Path, help="Folder for the files of findings.")
    parser.add_argument(
        "--guided", action="store_true", help="Let atheris choose changes by coverage, where it is installed."
    )
    arguments = parser.parse_args()
    watch_time()
    readers = [reader for reader in all_readers() if arguments.only in reader.name]
    if arguments.part is not None:
        readers = readers[::2] if arguments.part == "a" else readers[1::2]
    is_guided = arguments.guided and importlib.util.find_spec("atheris") is not None
    if arguments.guided and not is_guided:
        print("=== atheris is not installed: changes are random, not guided by coverage ===", flush=True)
    findings = 0
    for reader in readers:
        with tempfile.TemporaryDirectory() as folder:
            if is_guided:
                calls, kinds = fuzz_guided(
                    reader, Path(folder), arguments.seed, arguments.seconds or 60.0, arguments.patience
                )
            else:
                calls, kinds = fuzz(
                    reader, Path(folder), arguments.seed, arguments.seconds, arguments.calls, arguments.patience
                )
        findings += len(kinds)
        print(f"{reader.name}: {calls} calls, {len(kinds)} findings", flush=True)
        for name, (content, text) in kinds.items():
            print(f"--- {reader.name}: {name}\n{text}", flush=True)
            if arguments.keep is not None:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                digest = hashlib.sha256(content).hexdigest()[:12]
                (arguments.keep / f"{digest}.{Path(reader.file).name}").write_bytes(content)
    return 1 if findings else 0


def fuzz(
    reader: Reader, folder: Path, seed: int, seconds: Optional[float], calls: int, patience: float = 1.0
) -> Tuple[int, Dict[str, Tuple[bytes, str]]]:
    """Call a reader with mutations and with odd files; returns the number of calls, and the findings by their kind."""
    rng = random.Random(f"{seed} {reader.name}")
    limit = SECONDS * reader.commands * patience
    path = folder / reader.file
    prepare(reader, folder)
    kinds: Dict[str, Tuple[bytes, str]] = {}
    done = 0
    path.write_bytes(reader.seeds[0])
    with contextlib.suppress(FugakuGptError):
        reader.read(path)  # imports and caches count for no call
    with bounded_memory():
        for content in _contents(reader, rng, seconds, max(20, calls // reader.cost)):
            path.write_bytes(content)
            call_reader(reader, path, content, limit, kinds)
            done += 1
        for kind in _odd_files(path, reader.is_payload) if reader.is_file else ():
            call_reader(reader, path, kind.encode(), limit, kinds)
            done += 1
    return done, kinds


def fuzz_guided(
    reader: Reader, folder: Path, seed: int, seconds: float, patience: float = 1.0
) -> Tuple[int, Dict[str, Tuple[bytes, str]]]:
    """Fuzz a reader guided by coverage, by a process of its own; returns the same as :func:`fuzz`, without odd files.

    A process that ends before its time is a finding: a reader that ends it, or uses more memory than it may.
    """
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, content in enumerate(reader.seeds):
        (corpus / f"seed-{number}").write_bytes(content[:_LONGEST])
    command = [sys.executable, "-m", "tests.fuzz.guided", reader.name, "--corpus", str(corpus)]
    command += ["--seconds", str(int(seconds)), "--seed", str(seed), "--patience", str(patience)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    output = done.stdout.decode("utf-8", "replace")
    record = corpus.with_suffix(".json")
    values = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {"calls": 0, "kinds": {}}
    kinds = {name: (bytes.fromhex(content), text) for name, (content, text) in values["kinds"].items()}
    if done.returncode != 0:
        kinds["the process ended"] = (b"", f"exit code {done.returncode}\n{output[-2000:]}")
    return values["calls"], kinds


def _contents(reader: Reader, rng: random.Random, seconds: Optional[float], calls: int) -> Iterator[bytes]:
    yield from reader.seeds
    end = time.monotonic() + seconds if seconds is not None else None
    number = 0
    while time.monotonic() < end if end is not None else number < calls:
        number += 1
        content = mutate(rng, reader.seeds, reader.form)[:_LONGEST]
        yield reader.seal(content) if reader.seal is not None else content


def _odd_files(path: Path, is_payload: bool) -> Iterator[str]:
    """Put each kind of odd file at a path, and yield the kind."""
    kinds = {
        "no file": lambda: None,
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
        "a device without end": lambda: path.symlink_to("/dev/zero"),
        "an empty device": lambda: path.symlink_to("/dev/null"),
        "a link to nothing": lambda: path.symlink_to("gone"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a file without permissions": lambda: (path.write_bytes(b"{}"), path.chmod(0)),
        "an empty file": lambda: path.write_bytes(b""),
        "a hole of a GiB": lambda: _make_hole(path),
        "a long line": lambda: path.write_bytes(b"x" * 2**24),
        "many short lines": lambda: path.write_bytes(b"a: 1\n" * 2**15),
        "many brackets": lambda: path.write_bytes(b"[" * 2**20),
    }
    for kind, make in kinds.items():
        if kind == "a hole of a GiB" and is_payload:
            continue
        _remove(path)
        make()
        yield kind
    _remove(path)


def _make_hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30)


def _remove(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if stat.S_ISDIR(path.lstat().st_mode):
        for child in path.iterdir():
            _remove(child)
        path.rmdir()
    else:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
