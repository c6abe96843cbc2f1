"""Documents to token ids in several processes, in order, with bounded memory.

Each worker is ``python -m fugaku_gpt.data.workers TOKENIZER`` and speaks length-prefixed frames over its standard
input and output, one batch at a time, so neither side can wait for the other for ever: a worker whose parent is gone
reads the end of its input and ends, a worker that dies is seen as the end of its output.

Frame of a batch: number of documents (u64), bytes of each (u64), then the bytes. Frame of an answer: status (u64; 0 ok,
1 error), then as a batch: token ids of each document in the tokenizer's dtype, or one message.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import struct
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Type

import numpy as np

import fugaku_gpt
from fugaku_gpt.data.tokenizer import Encoder
from fugaku_gpt.errors import DataError

BATCH = 1 << 18  # bytes of text: long enough to hide the pipe, short enough to balance
_AHEAD = 4  # batches per worker that may wait for an earlier one
_U64 = struct.Struct("<Q")


def encode_all(documents: Iterable[bytes], tokenizer: Path, workers: int) -> "Iterator[np.ndarray[Any, np.dtype[Any]]]":
    """Token ids of each document, in order, by ``workers`` processes (1: this one).

    Raises:
        DataError: the tokenizer cannot be loaded, or a worker died.
    """
    encoder = Encoder(tokenizer)
    if workers == 1:
        for document in documents:
            yield encoder.encode(document)
        return
    with _Pool(tokenizer, workers) as pool:
        for parts in pool.run(_batches(documents)):
            for part in parts:
                yield np.frombuffer(part, encoder.dtype)


def _batches(documents: Iterable[bytes]) -> Iterator[List[bytes]]:
    batch: List[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Pool:
    """Workers that are started as there is work for them, and ended however the block is left."""

    def __init__(self, tokenizer: Path, workers: int) -> None:
        self._tokenizer = tokenizer
        self._workers = workers
        self._processes: List["subprocess.Popen[bytes]"] = []
        self._idle: Deque["subprocess.Popen[bytes]"] = deque()
        self._selector = selectors.DefaultSelector()

    def run(self, batches: Iterator[List[bytes]]) -> Iterator[List[bytes]]:
        """The answers to the batches, in their order."""
        answers: Dict[int, List[bytes]] = {}
        doing: Dict[int, int] = {}  # process id -> number of its batch
        sent = emitted = 0
        more = True
        while more or emitted < sent:
            while more and (self._idle or len(self._processes) < self._workers):
                if sent - emitted >= _AHEAD * self._workers:
                    break
                batch = next(batches, None)
                if batch is None:
                    more = False
                    break
                process = self._idle.popleft() if self._idle else self._start()
                self._send(process, batch)
                doing[process.pid] = sent
                sent += 1
            if doing:
                for key, _ in self._selector.select():
                    process = key.data
                    answers[doing.pop(process.pid)] = self._receive(process)
                    self._idle.append(process)
            while emitted in answers:
                yield answers.pop(emitted)
                emitted += 1

    def _start(self) -> "subprocess.Popen[bytes]":
        root = str(Path(fugaku_gpt.__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "fugaku_gpt.data.workers", str(self._tokenizer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is the parent's to handle; it closes the pipes
        )
        self._processes.append(process)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, process)
        return process

    def _send(self, process: "subprocess.Popen[bytes]", batch: Sequence[bytes]) -> None:
        assert process.stdin is not None
        try:
            _write_parts(process.stdin, batch)
        except OSError:
            raise self._died(process) from None

    def _receive(self, process: "subprocess.Popen[bytes]") -> List[bytes]:
        assert process.stdout is not None
        try:
            status = _U64.unpack(_read(process.stdout, _U64.size))[0]
            parts = _read_parts(process.stdout)
        except EOFError:
            raise self._died(process) from None
        if status:
            raise DataError(f"a worker process could not encode a document: {parts[0].decode('utf-8', 'replace')}")
        return parts

    def _died(self, process: "subprocess.Popen[bytes]") -> DataError:
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return DataError(f"worker process {process.pid} closed its output; try --workers 1")
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return DataError(
            f"worker process {process.pid} died ({how}); nothing was written; if memory was short, try fewer --workers"
        )

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._selector.close()
        for process in self._processes:
            if kind is not None:
                process.kill()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):  # a dead worker's pipe still holds what was not read
                    stream.close()
        for process in self._processes:
            process.wait()


def _write_parts(stream: IO[bytes], parts: Sequence[bytes]) -> None:
    sizes = np.array([len(part) for part in parts], dtype="<u8")
    stream.write(_U64.pack(len(parts)) + sizes.tobytes())
    for part in parts:
        stream.write(part)
    stream.flush()


def _read_parts(stream: IO[bytes]) -> List[bytes]:
    count = _U64.unpack(_read(stream, _U64.size))[0]
    sizes = np.frombuffer(_read(stream, 8 * count), dtype="<u8")
    return [_read(stream, int(size)) for size in sizes]


def _read(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _work(tokenizer: Path, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Answer batches until there are no more."""
    encoder = Encoder(tokenizer)
    while True:
        try:
            batch = _read_parts(incoming)
        except EOFError:
            return
        try:
            status, parts = 0, [encoder.encode(document).tobytes() for document in batch]
        except Exception as error:  # the library raises nothing more specific; the parent says it
            status, parts = 1, [f"{type(error).__name__}: {error}".encode("utf-8", "replace")]
        outgoing.write(_U64.pack(status))
        _write_parts(outgoing, parts)


if __name__ == "__main__":
    try:
        _work(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:  # the parent is gone; so is whoever would read a message
        os._exit(1)
