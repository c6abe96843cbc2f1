"""Follows the metrics of a run as they grow, without reading anything twice.

::

    follower, series = RunFollower(folder), RunSeries()
    while ...:
        for line in follower.poll():
            series.add(line)

A call of :meth:`RunFollower.poll` opens the file, reads at most ``most`` bytes from where the last call ended, and
returns the lines that have ended in them, in order: those of :func:`fugaku_gpt.records.metrics.read_sound_lines`,
however the bytes arrive. Memory is that of one call's lines and of one unfinished line. A half-written line waits for
its end, a damaged one is counted, and so is the piece before a line of kind ``cut``. Lines of kind ``resumed`` are
returned like others; :class:`fugaku_gpt.report.run_series.RunSeries` leaves out what they supersede.

A file that was replaced or has become shorter is read anew, after a line of kind ``resumed`` without a checkpoint,
which supersedes all lines before it: so whoever handles ``resumed`` handles this too. Nothing is raised for a file that
is missing or cannot be read; ``is_missing`` and ``problem`` say so, and a later call tries again.
"""

from __future__ import annotations

import codecs
import io
import os
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List

from fugaku_gpt.input_files import open_file
from fugaku_gpt.limits import METRICS_LINE
from fugaku_gpt.records.metrics import CUT, RESUMED, sound_line
from fugaku_gpt.records.run import RunDirectory

_MOST_BYTES = 2**20  # of one call
_TAIL_BYTES = 256  # before the position, by which a file is recognised

Line = Dict[str, Any]


class RunFollower:
    """Reads what is appended to the ``metrics.jsonl`` of a run directory.

    Attributes:
        path: the file.
        damaged: number of damaged lines since the beginning of the file; the newest line does not count before another
            follows it.
        has_more: whether the last call has ended before the end of the file, since it had read ``most`` bytes.
        is_missing: whether there was no file at the last call.
        problem: why the file could not be read at the last call; empty if it could, or was missing.
    """

    def __init__(self, folder: Path, most: int = _MOST_BYTES) -> None:
        """Follow the run in a folder, which need not exist yet, with at most this many bytes for each call."""
        self.path = RunDirectory(folder).metrics_file
        self.damaged, self.has_more, self.is_missing, self.problem = 0, False, True, ""
        self._most = most
        self._splitter = _LineSplitter()
        self._position, self._tail = 0, b""
        self._has_lines, self._is_last_damaged = False, False

    def poll(self) -> List[Line]:
        """Return the lines that have been finished since the last call, in order; none is of kind ``cut``."""
        self.has_more, self.is_missing, self.problem = False, False, ""
        try:
            with open_file(self.path) as stream:
                return self._read(stream)
        except (FileNotFoundError, NotADirectoryError):
            self.is_missing = True
        except OSError as error:
            self.problem = error.strerror or str(error)
        return []

    def _read(self, stream: BinaryIO) -> List[Line]:
        if not stream.seekable():
            self.problem = "it is a pipe, not a file"
            return []
        lines: List[Line] = []
        end = stream.seek(0, os.SEEK_END)
        if not self._is_continued(stream, end):
            lines += self._begin_anew()
        stream.seek(self._position)
        content = stream.read(min(self._most, end - self._position))
        self._position += len(content)
        self._tail = (self._tail + content)[-_TAIL_BYTES:]
        self.has_more = self._position < end
        for text in self._splitter.feed(content):
            self.damaged += self._is_last_damaged
            line = sound_line(text)
            self._is_last_damaged = line is None
            if line is not None and line.get("kind") != CUT:
                self._has_lines = True
                lines.append(line)
        return lines

    def _is_continued(self, stream: BinaryIO, end: int) -> bool:
        """Whether what was read is still before the position."""
        if end < self._position:
            return False
        stream.seek(self._position - len(self._tail))
        return stream.read(len(self._tail)) == self._tail

    def _begin_anew(self) -> List[Line]:
        lines: List[Line] = [{"kind": RESUMED, "iteration": 0, "checkpoint": None}] if self._has_lines else []
        self._splitter = _LineSplitter()
        self._position, self._tail = 0, b""
        self.damaged, self._has_lines, self._is_last_damaged = 0, False, False
        return lines


class _LineSplitter:
    """Splits bytes that arrive in pieces into the lines of :func:`fugaku_gpt.input_files.lines_of_file`."""

    def __init__(self) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._unfinished: List[str] = []  # the pieces of a line, together no longer than its limit
        self._length = 0

    def feed(self, content: bytes) -> Iterator[str]:
        """Yield the lines that end in these bytes, without their ends; of a long one its first characters."""
        for number, piece in enumerate(self._decoder.decode(content).split("\n")):
            if number > 0:
                yield "".join(self._unfinished)
                self._unfinished, self._length = [], 0
            piece = piece[: METRICS_LINE.value - self._length]
            if piece:
                self._unfinished.append(piece)
                self._length += len(piece)
