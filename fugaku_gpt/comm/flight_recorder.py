"""The writer of the flight recorder (format: ``records/flight.py``): a few microseconds per MPI call."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.records.flight import (
    BEAT,
    CHANNEL,
    CHANNELS,
    COUNT,
    DIRECTIONS,
    ENTERED,
    GROUP,
    GROUPS,
    HEADER,
    LEFT,
    LEFT_OFFSET,
    MAGIC,
    NAME_SIZE,
    NAMES,
    PINNED,
    POSTED,
    PROGRESS,
    PROGRESS_OFFSET,
    RECORD,
    RETURNED,
    RING_OFFSET,
    SLOTS,
    START_UP,
    STATE,
    STATE_OFFSET,
    VERSION,
    WAITED,
    WAITED_OFFSET,
    WAITING,
    WATCH,
    WATCH_OFFSET,
    channels_at,
    file_size,
    flight_file,
    groups_at,
    names_at,
    pinned_at,
    progressions,
)

_HERE = os.path.dirname(os.path.abspath(__file__))


class FlightRecorder:
    """This rank's progress and last calls in a memory-mapped file, which the kernel keeps when the process is killed.

    One thread writes: the one that calls MPI. The watchdog's thread reads :attr:`beats`, and writes its own few bytes.

    Attributes:
        beats: moves with every call and every micro-batch.
        step: iteration being worked on, from 1; -1 before the first.
        phase: index into ``PHASES``.
        path: the file.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self.path = flight_file(directory, rank)
        self.beats = 0
        self.rank, self.ranks = rank, ranks
        self._pinned_places = PINNED
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._take_room(0, file_size())
        self._map = mmap.mmap(self._descriptor, file_size())
        self._started = time.time()
        self._write_header()
        self._names: Dict[str, int] = {"": 0}
        self._names_used = 1  # the first one stays empty
        self._sites: Dict[Tuple[CodeType, int], int] = {}
        self._inside: Dict[CodeType, bool] = {}
        self._ordinal = 0
        self.step, self._micro_batch, self.phase = -1, -1, START_UP
        self._collectives: List[int] = []
        self._channels: Dict[Tuple[int, int, int], List[int]] = {}  # place and count of messages
        self._open: Dict[int, int] = {}  # outstanding calls, and where their records are
        self._free = list(range(PINNED))
        self.progress(START_UP)

    def group(self, name: str, members: Sequence[int], rank: int) -> int:
        """Record a communicator; returns the number that :meth:`enter` wants.

        Args:
            members: world ranks, by rank in it.
            rank: of this process, in it.
        """
        place = len(self._collectives)
        self._collectives.append(0)
        if place < GROUPS:
            ranks = self._text(progressions(members) + ";")
            GROUP.pack_into(self._map, groups_at() + place * GROUP.size, 0, len(members), rank, self._name(name), ranks)
        return place

    def progress(self, phase: int, step: Optional[int] = None, micro_batch: Optional[int] = None) -> None:
        """Record what the rank is about to do; what is None stays as it was."""
        self.phase = phase
        if step is not None:
            self.step = step
        if micro_batch is not None:
            self._micro_batch = micro_batch
        self.beats += 1
        PROGRESS.pack_into(
            self._map, PROGRESS_OFFSET, self.beats, time.time(), self.step, self._micro_batch, self.phase
        )

    def enter(
        self,
        group: int,
        operation: str,
        dtype: str,
        shape: Tuple[int, ...],
        waits: bool,
        peer: int = -1,
    ) -> int:
        """Record that this rank is about to begin a call; returns its number.

        Args:
            waits: whether it does not go on before the call has ended.
            peer: world rank of the other end of a message, or of a broadcast's root.
        """
        ordinal = self._ordinal = self._ordinal + 1
        slot = ordinal % SLOTS
        if ordinal - SLOTS in self._open:
            self._pin(ordinal - SLOTS)
        offset = self._open[ordinal] = RING_OFFSET + slot * RECORD.size
        direction = DIRECTIONS.get(operation)
        if direction is None:
            sequence = self._collectives[group] = self._collectives[group] + 1
            if group < GROUPS:
                COUNT.pack_into(self._map, groups_at() + group * GROUP.size, sequence)
        else:
            sequence = self._message(group, peer, direction)
        sizes = shape if len(shape) == 4 else (*shape[:4], -1, -1, -1, -1)
        now, site = time.time(), self._site()
        RECORD.pack_into(
            self._map,
            offset,
            ordinal,
            sequence,
            self.step,
            self._micro_batch,
            peer,
            group,
            self._name(operation),
            self._name(dtype),
            site,
            self.phase,
            sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            now,
            now if waits else 0.0,
            0.0,
            WAITING if waits else ENTERED,
            site,
        )
        self.beats += 1
        BEAT.pack_into(self._map, PROGRESS_OFFSET, self.beats, now)
        return ordinal

    def posted(self, ordinal: int) -> None:
        """Record that the call was begun and has returned, and its end is not waited for yet."""
        offset = self._open.get(ordinal)
        if offset is not None:
            STATE.pack_into(self._map, offset + STATE_OFFSET, POSTED)

    def wait(self, ordinal: int) -> None:
        """Record that the rank now does nothing but wait for the call's end."""
        offset = self._open.get(ordinal)
        if offset is not None:
            WAITED.pack_into(self._map, offset + WAITED_OFFSET, time.time(), 0.0, WAITING, self._site())

    def leave(self, ordinal: int) -> None:
        """Record that the call has ended."""
        offset = self._open.pop(ordinal, None)
        if offset is None:
            return
        now = time.time()
        LEFT.pack_into(self._map, offset + LEFT_OFFSET, now, RETURNED)
        self.beats += 1
        BEAT.pack_into(self._map, PROGRESS_OFFSET, self.beats, now)
        if offset >= pinned_at():
            self._free.append((offset - pinned_at()) // RECORD.size)

    def watched(self, timeout: float, dumped: bool) -> None:
        """For the watchdog's thread: that the process lives, and whether its stacks are written."""
        WATCH.pack_into(self._map, WATCH_OFFSET, time.time(), timeout, dumped)

    def sync(self) -> None:
        """Have the file written to where other nodes read it; may take long, and lets other threads run."""
        os.fsync(self._descriptor)

    def _pin(self, ordinal: int) -> None:
        """Move the record of a call that is still outstanding out of the ring's way."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        old, new = self._open[ordinal], pinned_at() + place * RECORD.size
        self._map[new : new + RECORD.size] = self._map[old : old + RECORD.size]
        self._open[ordinal] = new

    def _grow(self) -> None:
        self._free = list(range(self._pinned_places, 2 * self._pinned_places))
        self._pinned_places *= 2
        size = file_size(self._pinned_places)
        self._take_room(len(self._map), size)
        self._map.resize(size)
        self._write_header()

    def _take_room(self, first: int, stop: int) -> None:
        """Have the disk keep the bytes from ``first`` on: where it is full, that is an error here, and not a signal
        (SIGBUS) when something is written to the map."""
        zeros = memoryview(bytes(stop - first))
        while first < stop:
            first += os.pwrite(self._descriptor, zeros[first - stop :], first)

    def _write_header(self) -> None:
        host = socket.gethostname().encode("utf-8")[:63]
        HEADER.pack_into(
            self._map,
            0,
            MAGIC,
            VERSION,
            SLOTS,
            self._pinned_places,
            self.rank,
            self.ranks,
            os.getpid(),
            self._started,
            host,
        )

    def _message(self, group: int, peer: int, direction: int) -> int:
        channel = self._channels.get((group, peer, direction))
        if channel is None:
            channel = self._channels[group, peer, direction] = [len(self._channels), 0]
        channel[1] += 1
        if channel[0] < CHANNELS:
            offset = channels_at() + channel[0] * CHANNEL.size
            CHANNEL.pack_into(self._map, offset, channel[1], peer, group, direction)
        return channel[1]

    def _site(self) -> int:
        """The line outside this package that has led here."""
        frame: Optional[FrameType] = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            inside = self._inside.get(code)
            if inside is None:
                inside = self._inside[code] = os.path.dirname(os.path.abspath(code.co_filename)) == _HERE
            if not inside:
                key = (code, frame.f_lineno)
                index = self._sites.get(key)
                if index is None:
                    parts = Path(code.co_filename).parts[-2:]
                    index = self._sites[key] = self._name(f"{'/'.join(parts)}:{frame.f_lineno}")
                return index
            frame = frame.f_back
        return 0

    def _name(self, name: str) -> int:
        index = self._names.get(name)
        if index is None:
            index = self._names[name] = self._text(name[:NAME_SIZE])
        return index

    def _text(self, text: str) -> int:
        """Place of a text in the table of names; 0 where it does not fit, which readers show as unknown."""
        data = text.encode("utf-8")
        places = -(-len(data) // NAME_SIZE)
        if self._names_used + places > NAMES:
            return 0
        index, self._names_used = self._names_used, self._names_used + places
        start = names_at() + index * NAME_SIZE
        self._map[start : start + len(data)] = data
        return index
