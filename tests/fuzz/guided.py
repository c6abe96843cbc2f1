"""Fuzzes a reader guided by coverage, with atheris (libFuzzer), in a process of its own, which libFuzzer never leaves.

    python -m tests.fuzz.guided READER --seconds 600 --seed 1 --corpus FOLDER

The changes are those of ``mutations.py`` and libFuzzer's own, in turns. What reaches new branches of the package is
added to the corpus, from which later changes are made. Progress and findings are in ``FOLDER.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from tests.fuzz.calls import SECONDS, bounded_memory, call_reader, watch_time
from tests.fuzz.mutations import mutate
from tests.fuzz.readers import Reader, prepare
from tests.fuzz.registry import all_readers

LONGEST = 2**20  # bytes of a content
_RECORD_EVERY = 5.0  # seconds


class Campaign:
    """The calls of one reader so far, and what came out of them; the record is written now and then."""

    def __init__(self, reader: Reader, path: Path, record: Path, patience: float) -> None:
        self._reader, self._path, self._record = reader, path, record
        self._limit = SECONDS * reader.commands * patience
        self.calls = 0
        self.kinds: Dict[str, Tuple[bytes, str]] = {}
        self._recorded = 0.0

    def call(self, content: bytes) -> None:
        """Call the reader with a content; what comes out is judged and never raised."""
        sealed = self._reader.seal(content) if self._reader.seal is not None else content
        self._path.write_bytes(sealed)
        before = len(self.kinds)
        call_reader(self._reader, self._path, sealed, self._limit, self.kinds)
        self.calls += 1
        if len(self.kinds) > before or time.monotonic() - self._recorded > _RECORD_EVERY:
            self.write_record()

    def write_record(self) -> None:
        """Write calls and findings."""
        self._recorded = time.monotonic()
        kinds = {name: [content.hex(), text] for name, (content, text) in self.kinds.items()}
        self._record.write_text(json.dumps({"calls": self.calls, "kinds": kinds}), encoding="utf-8")


def main() -> None:
    """Fuzz until the time is over, which ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=1.0)
    parser.add_argument("--corpus", type=Path, required=True)
    arguments = parser.parse_args()
    (reader,) = (reader for reader in all_readers() if reader.name == arguments.reader)
    folder = Path(tempfile.mkdtemp(dir=arguments.corpus.parent))
    prepare(reader, folder)
    campaign = Campaign(reader, folder / reader.file, arguments.corpus.with_suffix(".json"), arguments.patience)
    watch_time()
    _fuzz(campaign, reader, arguments)


def _fuzz(campaign: Campaign, reader: Reader, arguments: argparse.Namespace) -> None:
    import atheris

    with atheris.instrument_imports(include=["fugaku_gpt"]):
        for seed in reader.seeds:  # a reader imports what it needs at its first calls
            campaign.call(seed)

    def change(content: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(content, longest))
        return mutate(rng, [content, *reader.seeds[:1]] if rng.random() < 0.1 else [content], reader.form)[:longest]

    options: List[Any] = [
        sys.argv[0],
        str(arguments.corpus),
        f"-seed={arguments.seed}",
        f"-max_len={LONGEST}",
        "-timeout=0",  # call_reader's limits count
        "-rss_limit_mb=0",
        "-verbosity=0",
        "-len_control=0",
    ]
    end = time.monotonic() + float(arguments.seconds)

    def call_until_the_end(content: bytes) -> None:
        campaign.call(content)
        if time.monotonic() >= end:
            campaign.write_record()
            os._exit(0)

    with bounded_memory():
        atheris.Setup(options, call_until_the_end, custom_mutator=change)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
