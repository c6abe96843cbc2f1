"""Encodes documents to token ids in several processes, in order, with bounded memory.

Each worker is ``python -m fugaku_gpt.data.workers TOKENIZER END_TOKEN``. It reads batches of documents from its
standard input and writes their token ids to its standard output; a thread of the parent waits for each. Each process
has pipes of its own instead of ``ProcessPoolExecutor``: the end of a pipe shows that a worker died while it wrote, or
that the parent died, whereas the executor would wait for its shared queues for ever.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Deque, Iterable, Iterator, List, Optional, Sequence, Type

import numpy as np

import fugaku_gpt
from fugaku_gpt.data.tokenizer import Encoder
from fugaku_gpt.errors import DataError

BATCH_BYTES = 1 << 18  # bytes of text: large enough to hide the cost of the pipe, small enough for balance
_COUNT = struct.Struct("<Q")
_PENDING_PER_WORKER = 4  # batches per worker that may wait for an earlier one


def encode_documents(
    documents: Iterable[bytes], tokenizer: Path, workers: int, end_token: Optional[str] = None
) -> "Iterator[np.ndarray[Any, np.dtype[Any]]]":
    """Yield the token ids of each document, in order, from ``workers`` processes (1: this process).

    Raises:
        DataError: the tokenizer cannot be loaded, a document cannot be encoded, or a worker died.
    """
    encoder = Encoder(tokenizer, end_token)
    if workers == 1:
        for document in documents:
            yield encoder.encode(document)
        return
    with _WorkerPool(tokenizer, workers, encoder.end_name) as pool:
        for encoded_batch in pool.encode(_batches(documents)):
            for ids in encoded_batch:
                yield np.frombuffer(ids, encoder.dtype)


def _batches(documents: Iterable[bytes]) -> Iterator[List[bytes]]:
    batch: List[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _WorkerPool:
    """Worker processes that start when there is work for them, and end with the block, also after an error."""

    def __init__(self, tokenizer: Path, workers: int, end_token: str) -> None:
        self._tokenizer = tokenizer
        self._end_token = end_token
        self._workers = workers
        self._processes: List["subprocess.Popen[bytes]"] = []
        self._idle: "SimpleQueue[subprocess.Popen[bytes]]" = SimpleQueue()
        self._threads = ThreadPoolExecutor(workers)

    def encode(self, batches: Iterable[List[bytes]]) -> Iterator[List[bytes]]:
        """Yield the token ids of each batch's documents, as bytes, in the order of the batches."""
        pending: "Deque[Future[List[bytes]]]" = deque()
        for batch in batches:
            if len(self._processes) < self._workers:
                self._start()
            pending.append(self._threads.submit(self._encode, batch))
            if len(pending) == _PENDING_PER_WORKER * self._workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _start(self) -> None:
        root = str(Path(fugaku_gpt.__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "fugaku_gpt.data.workers", str(self._tokenizer), self._end_token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # the parent handles Ctrl-C by closing the pipes
        )
        self._processes.append(process)
        self._idle.put(process)

    def _encode(self, batch: List[bytes]) -> List[bytes]:
        process = self._idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            _write_batch(process.stdin, batch)
            (has_failed,) = _COUNT.unpack(_read_exactly(process.stdout, _COUNT.size))
            encoded_batch = _read_batch(process.stdout)
        except (OSError, EOFError):
            raise _worker_error(process) from None
        finally:
            self._idle.put(process)
        if has_failed:
            message = encoded_batch[0].decode("utf-8", "replace")
            raise DataError(f"a worker process could not encode a document: {message}")
        return encoded_batch

    def __enter__(self) -> "_WorkerPool":
        return self

    def __exit__(
        self, error_type: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if error_type is not None:
            for process in self._processes:
                process.kill()  # so that the threads see the end of their pipes
        self._threads.shutdown()
        for process in self._processes:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):  # the pipe of a dead worker may have unwritten data
                    stream.close()
        for process in self._processes:
            process.wait()


def _worker_error(process: "subprocess.Popen[bytes]") -> DataError:
    try:
        code = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return DataError(f"worker process {process.pid} closed its output; try --workers 1")
    cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return DataError(
        f"worker process {process.pid} died ({cause}); nothing was written; if memory was short, try fewer --workers"
    )


def _write_batch(stream: IO[bytes], batch: Sequence[bytes]) -> None:
    """Write the number of texts, their sizes and then the texts."""
    sizes = np.array([len(text) for text in batch], dtype="<u8")
    stream.write(_COUNT.pack(len(batch)) + sizes.tobytes())
    for text in batch:
        stream.write(text)
    stream.flush()


def _read_batch(stream: IO[bytes]) -> List[bytes]:
    """Read what :func:`_write_batch` wrote.

    Raises:
        EOFError: the stream ends before the batch does.
    """
    (count,) = _COUNT.unpack(_read_exactly(stream, _COUNT.size))
    sizes = np.frombuffer(_read_exactly(stream, 8 * count), dtype="<u8")
    return [_read_exactly(stream, int(size)) for size in sizes]


def _read_exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _serve_batches(tokenizer: Path, end_token: str, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Encode batches until the input ends; write the token ids as bytes, or the text of an error."""
    encoder = Encoder(tokenizer, end_token)
    while True:
        try:
            batch = _read_batch(incoming)
        except EOFError:  # the parent is gone, perhaps while it wrote
            return
        has_failed = False
        try:
            encoded_batch = [encoder.encode(document).tobytes() for document in batch]
        except Exception as error:  # the library raises nothing more specific; the parent reports it
            has_failed, encoded_batch = True, [f"{type(error).__name__}: {error}".encode("utf-8", "replace")]
        outgoing.write(_COUNT.pack(has_failed))
        _write_batch(outgoing, encoded_batch)


if __name__ == "__main__":
    try:
        _serve_batches(Path(sys.argv[1]), sys.argv[2], sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:  # the parent is gone; so is whoever would read a message
        os._exit(1)
