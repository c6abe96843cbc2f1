"""The writer of the flight recorder (format: ``records/flight.py``): a few microseconds per MPI call.

Between two calls the model's products have filled every cache, so that what a call costs is the memory that it touches,
code included. So it writes words to the map itself (`struct` costs three times as much then), looks up by numbers, and
keeps ready what is the same for every call of a kind.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.records.files import naming_file
from fugaku_gpt.records.flight import (
    CHANNEL,
    CHANNELS,
    DIRECTIONS,
    ENTERED,
    GROUP,
    GROUPS,
    HEADER,
    MAGIC,
    NAME_SIZE,
    NAMES,
    PINNED,
    POSTED,
    PROGRESS_OFFSET,
    RECORD,
    RETURNED,
    RING_OFFSET,
    SLOTS,
    START_UP,
    VERSION,
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

_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__))
# places of 8 bytes: in the file, and in a record
_BEAT, _RING, _SIZE = PROGRESS_OFFSET // 8, RING_OFFSET // 8, RECORD.size // 8
_PROGRESS = 4  # int64s: heartbeat, time, step, micro-batch and phase
_ENTERED, _WAITED, _LEFT, _STATE = _SIZE - 4, _SIZE - 3, _SIZE - 2, _SIZE - 1
# a kind of call: where its calls are counted; its peer, communicator, operation and data type as the record has them,
# with zeros for what differs; its shape
_Kind = Tuple[int, int, int, int, int, int, int]
_KINDS = 4096  # most kinds that are cached: lengths of texts are unlimited


class FlightRecorder:
    """This rank's progress and last calls in a memory-mapped file, which the kernel keeps when the process is killed.

    One thread writes: the one that calls MPI. The watchdog's thread reads :attr:`beats`, and writes its own few bytes.

    Attributes:
        beats: moves with every call and every micro-batch.
        step: iteration being worked on, from 1; -1 before the first.
        phase: index into ``PHASES``.
        path: the file.
        communicators: names of the recorded communicators, by number.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self.path = flight_file(directory, rank)
        self.beats = 0
        self.rank, self.ranks = rank, ranks
        self._pinned_slots = PINNED
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._allocate(0, file_size())
        self._map = mmap.mmap(self._descriptor, file_size())
        self._view()
        self._started = time.time()
        self._write_header()
        self._names: Dict[str, int] = {"": 0}
        self._names_used = 1  # the first one stays empty
        self._sites: Dict[Tuple[int, int], int] = {}
        self._codes: List[CodeType] = []
        self._kinds: Dict[Tuple[int, str, str, Tuple[int, ...], int], _Kind] = {}
        self._ordinal = 0
        self.step, self._micro_batch, self.phase = -1, -1, START_UP
        self._groups = 0
        self.communicators: List[str] = []
        self._channels: Dict[Tuple[int, int, int], int] = {}  # where messages are counted
        self._uncounted: Dict[int, int] = {}  # by a number below 0: counts for which the file has no room
        self._pinned: Dict[int, int] = {}  # outstanding calls that the ring has passed, and where their records are
        self._free = list(range(PINNED))
        self.mark_phase(START_UP)

    def group(self, name: str, members: Sequence[int], rank: int) -> int:
        """Record a communicator; returns its number for :meth:`enter`.

        Args:
            members: world ranks, by rank in it.
            rank: of this process, in it.
        """
        index, self._groups = self._groups, self._groups + 1
        self.communicators.append(name)
        if index < GROUPS:
            ranks = self._text(progressions(members) + ";")
            GROUP.pack_into(self._map, groups_at() + index * GROUP.size, 0, len(members), rank, self._name(name), ranks)
        return index

    def mark_phase(self, phase: int, step: Optional[int] = None, micro_batch: Optional[int] = None) -> None:
        """Record what the rank is about to do; what is None stays as it was."""
        self.phase = phase
        if step is not None:
            self.step = step
        if micro_batch is not None:
            self._micro_batch = micro_batch
        self.beats += 1
        int64s = self._int64s
        int64s[_BEAT + 3] = phase << 32 | self._micro_batch & 0xFFFFFFFF
        int64s[_BEAT + 2] = self.step  # last: killed in between, a new step must not seem to be in a late phase
        self._seconds[_BEAT + 1] = time.time()
        int64s[_BEAT] = self.beats

    def enter(
        self,
        group: int,
        operation: str,
        dtype: str,
        shape: Tuple[int, ...],
        blocking: bool,
        peer: int = -1,
    ) -> int:
        """Record that this rank is about to start a call; returns the call's number.

        Args:
            blocking: whether the rank waits for the end of the call before it continues.
            peer: world rank of the other end of a message, or of a broadcast's root.
        """
        ordinal = self._ordinal = self._ordinal + 1
        at = _RING + ordinal % SLOTS * _SIZE
        if self._int64s[at + _STATE] & 0xFFFF != RETURNED and self._int64s[at]:
            self._pin(at)
        int64s, seconds = self._int64s, self._seconds
        kind = self._kinds.get((group, operation, dtype, shape, peer))
        if kind is None:
            kind = self._kind(group, operation, dtype, shape, peer)
        counter, peer_bits, ids, first, second, third, fourth = kind
        counts = int64s if counter >= 0 else self._uncounted
        sequence = counts[counter] = counts[counter] + 1
        site, timestamp = self._site(), time.time()
        int64s[at] = 0  # no record, for who reads it now or after a kill
        int64s[at + 1] = sequence
        int64s[at + 2] = self.step
        int64s[at + 3] = peer_bits | self._micro_batch & 0xFFFFFFFF
        int64s[at + 4] = ids | site << 48
        int64s[at + 5] = self.phase
        int64s[at + 6] = first
        int64s[at + 7] = second
        int64s[at + 8] = third
        int64s[at + 9] = fourth
        seconds[at + _ENTERED] = timestamp
        seconds[at + _WAITED] = timestamp if blocking else 0.0
        seconds[at + _LEFT] = 0.0
        int64s[at + _STATE] = (WAITING if blocking else ENTERED) | site << 16
        int64s[at] = ordinal
        self.beats += 1
        seconds[_BEAT + 1] = timestamp
        int64s[_BEAT] = self.beats
        return ordinal

    def posted(self, ordinal: int) -> None:
        """Record that the call was begun and has returned, and its end is not waited for yet."""
        at = self.record_at(ordinal)
        if at >= 0:
            self._int64s[at + _STATE] = self._int64s[at + _STATE] & ~0xFFFF | POSTED

    def wait(self, ordinal: int) -> None:
        """Record that the rank now does nothing but wait for the call's end."""
        at = self.record_at(ordinal)
        if at >= 0:
            self._seconds[at + _WAITED] = time.time()
            self._int64s[at + _STATE] = WAITING | self._site() << 16

    def leave(self, ordinal: int) -> None:
        """Record that the call has ended."""
        int64s = self._int64s
        at = self.record_at(ordinal)
        if at < 0:
            return
        timestamp = time.time()
        self._seconds[at + _LEFT] = timestamp
        int64s[at + _STATE] = int64s[at + _STATE] & ~0xFFFF | RETURNED
        self.beats += 1
        self._seconds[_BEAT + 1] = timestamp
        int64s[_BEAT] = self.beats
        if ordinal in self._pinned:
            self._free.append((8 * self._pinned.pop(ordinal) - pinned_at()) // RECORD.size)

    @property
    def names(self) -> List[str]:
        """The texts to which records refer by index; those without an index of their own are empty."""
        texts = [""] * self._names_used
        for text, index in self._names.items():
            if index:
                texts[index] = text
        return texts

    def copy_progress(self, target: "memoryview[int]", at: int) -> None:
        """Copy the progress, as the head of the file has it, to a position in other memory, in int64s."""
        target[at : at + _PROGRESS] = self._int64s[_BEAT : _BEAT + _PROGRESS]

    def copy_record(self, position: int, target: "memoryview[int]", at: int) -> None:
        """Copy the record at a position (:meth:`record_at`) to one in other memory, in int64s."""
        target[at : at + _SIZE] = self._int64s[position : position + _SIZE]

    def outstanding_records(self) -> List["memoryview[int]"]:
        """The records of the calls that have begun and not ended, as int64s."""
        int64s = self._int64s
        in_ring = [_RING + slot * _SIZE for slot in range(SLOTS)]
        is_open = [at for at in in_ring if int64s[at] and int64s[at + _STATE] & 0xFFFF != RETURNED]
        return [int64s[at : at + _SIZE] for at in (*self._pinned.values(), *is_open)]

    def watched(self, timeout: float, dumped: bool) -> None:
        """Record, from the watchdog's thread, that the process is alive and whether its stacks are written."""
        WATCH.pack_into(self._map, WATCH_OFFSET, time.time(), timeout, dumped)

    def sync(self) -> None:
        """Have the file written to where other nodes read it; may take long, and lets other threads run."""
        os.fsync(self._descriptor)

    def record_at(self, ordinal: int) -> int:
        """Position of an outstanding call's record; below 0 if its end was recorded long ago."""
        if self._ordinal - ordinal < SLOTS:
            return _RING + ordinal % SLOTS * _SIZE
        return self._pinned.get(ordinal, -1)

    def _pin(self, at: int) -> None:
        """Move the record of a call that is still outstanding out of the ring's way."""
        if not self._free:
            self._grow()
        target = pinned_at() // 8 + self._free.pop() * _SIZE
        self._int64s[target : target + _SIZE] = self._int64s[at : at + _SIZE]
        self._pinned[self._int64s[at]] = target

    def _grow(self) -> None:
        self._free = list(range(self._pinned_slots, 2 * self._pinned_slots))
        self._pinned_slots *= 2
        size = file_size(self._pinned_slots)
        self._allocate(len(self._map), size)
        self._int64s.release()
        self._seconds.release()
        try:
            self._map.resize(size)
        finally:
            self._view()
        self._write_header()

    def _view(self) -> None:
        self._int64s = memoryview(self._map).cast("q")  # little-endian, as the file is, on every machine of ours
        self._seconds: "memoryview[float]" = memoryview(self._map).cast("d")

    def _allocate(self, first: int, stop: int) -> None:
        """Have the disk keep the bytes from ``first`` on: where it is full, that is an error here, and not a signal
        (SIGBUS) when something is written to the map."""
        zeros = memoryview(bytes(stop - first))
        with naming_file(self.path):
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
            self._pinned_slots,
            self.rank,
            self.ranks,
            os.getpid(),
            self._started,
            host,
        )

    def _kind(self, group: int, operation: str, dtype: str, shape: Tuple[int, ...], peer: int) -> _Kind:
        direction = DIRECTIONS.get(operation)
        if direction is not None:
            counter = self._channel(group, peer, direction)
        elif group < GROUPS:
            counter = (groups_at() + group * GROUP.size) // 8
        else:
            counter = -1 - group
            self._uncounted.setdefault(counter, 0)
        ids = group & 0xFFFF | self._name(operation) << 16 | self._name(dtype) << 32
        first, second, third, fourth = (*shape[:4], -1, -1, -1, -1)[:4]
        kind = counter, peer << 32, ids, first, second, third, fourth
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._kinds[group, operation, dtype, shape, peer] = kind
        return kind

    def _channel(self, group: int, peer: int, direction: int) -> int:
        """Where messages to or from a peer are counted."""
        counter = self._channels.get((group, peer, direction))
        if counter is None:
            number = len(self._channels)
            offset = channels_at() + number * CHANNEL.size
            if number < CHANNELS:
                CHANNEL.pack_into(self._map, offset, 0, peer, group, direction)
                counter = offset // 8
            else:
                counter = -(2**32) - number  # apart from those of communicators
                self._uncounted[counter] = 0
            self._channels[group, peer, direction] = counter
        return counter

    def _site(self) -> int:
        """The index of the line outside this package that called into it."""
        frame: Optional[FrameType] = sys._getframe(2)
        while frame is not None:
            # numbers as keys, and no line number: both need memory that is in no cache by now
            key = (id(frame.f_code), frame.f_lasti)
            index = self._sites.get(key)
            if index is None:
                index = self._sites[key] = self._site_of(frame)
            if index >= 0:
                return index
            frame = frame.f_back
        return 0

    def _site_of(self, frame: FrameType) -> int:
        """Index of a line's name; -1 for a line of this package."""
        code = frame.f_code
        self._codes.append(code)  # or its number is soon another's
        if os.path.dirname(os.path.abspath(code.co_filename)) == _PACKAGE_DIR:
            return -1
        return self._name(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno}")

    def _name(self, name: str) -> int:
        index = self._names.get(name)
        if index is None:
            index = self._names[name] = self._text(name[:NAME_SIZE])
        return index

    def _text(self, text: str) -> int:
        """Index of a text in the table of names; 0 if it does not fit, which readers show as unknown."""
        data = text.encode("utf-8")
        slots = -(-len(data) // NAME_SIZE)
        if self._names_used + slots > NAMES:
            return 0
        index, self._names_used = self._names_used, self._names_used + slots
        start = names_at() + index * NAME_SIZE
        self._map[start : start + len(data)] = data
        return index
