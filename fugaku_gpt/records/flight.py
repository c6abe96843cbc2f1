"""The flight recorder's file: one rank's progress and last MPI calls, in memory that outlives the process.

Layout, little-endian:

* a head of 256 bytes: identity of the process; its progress (heartbeat, step, micro-batch, phase), which the rank
  itself writes; and at ``WATCH_OFFSET`` the fields of its watchdog, which keeps writing when the rank does not;
* a ring of ``slots`` records of the last calls, of 112 bytes each;
* ``GROUPS`` communicators: name, own rank, world ranks of its members, collectives begun so far;
* ``CHANNELS`` counts of messages by communicator, peer and direction;
* ``NAMES`` names of 96 bytes, to which the rest refers by index; longer texts continue in the next name;
* ``pinned`` more records, for calls that are outstanding when the ring comes round to them; the file grows with them.

A record is written before its call begins, so the file shows a rank that hangs or dies inside. A collective's sequence
number counts the collectives of its communicator, and a message's those between the same two ranks in the same
direction, each from 1: MPI matches both in this order, so equal numbers on two ranks are the same call.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import open_file, read_bytes
from fugaku_gpt.layout.operations import RECEIVE, SEND
from fugaku_gpt.limits import FLIGHT, RANKS
from fugaku_gpt.typed_json import check_times

MAGIC = b"FGFLIGHT"
VERSION = 2
HEADER = struct.Struct("<8sIIIIIId64s24x")  # magic, version, slots, pinned, rank, ranks, process id, started, host
PROGRESS = struct.Struct("<QdqiI32x")  # heartbeat, time of it, step, micro-batch, phase
WATCH = struct.Struct("<ddI44x")  # time of the watchdog's last look, its timeout, whether the stacks are dumped
PROGRESS_OFFSET = HEADER.size
WATCH_OFFSET = PROGRESS_OFFSET + PROGRESS.size
HEAD_SIZE = WATCH_OFFSET + WATCH.size

# ordinal of this rank's calls, sequence number, step, micro-batch, peer (world rank; a broadcast's root), communicator,
# operation, data type, call site, phase, shape of at most 4 sizes, entered, waited for since, left, state, waiting site
RECORD = struct.Struct("<QQqiiHHHHI4x4qddd HH4x")
GROUP = struct.Struct("<QIIHH4x")  # collectives begun, size, own rank, name, members
CHANNEL = struct.Struct("<QiHH")  # messages begun, peer (world rank), communicator, direction
NAME_SIZE = 96
NAMES = 512
SLOTS = 512
GROUPS = 64
CHANNELS = 64
PINNED = 64

RING_OFFSET = HEAD_SIZE
ENTERED, POSTED, WAITING, RETURNED = range(
    4
)  # states of a call: inside the call that starts it, on its way, waited for
DIRECTIONS = {SEND: 0, RECEIVE: 1}  # of the messages between two ranks; other operations are collectives

START_UP, FORWARD, BACKWARD, SUMS, OPTIMISER, LOG, VALIDATION, CHECKPOINT, FINISHED = range(9)
PHASES = ("start-up", "forward", "backward", "sums", "optimiser", "log", "validation", "checkpoint", "finished")

_RUN = re.compile(r"([0-9]{1,9})\+([0-9]{1,9})\*([0-9]{1,9})")
CALL_FIELDS = np.dtype(
    [
        ("ordinal", "<u8"),
        ("sequence", "<u8"),
        ("step", "<i8"),
        ("micro_batch", "<i4"),
        ("peer", "<i4"),
        ("group", "<u2"),
        ("operation", "<u2"),
        ("dtype", "<u2"),
        ("site", "<u2"),
        ("phase", "<u4"),
        ("pad", "V4"),
        ("shape", "<i8", (4,)),
        ("entered", "<f8"),
        ("waited", "<f8"),
        ("left", "<f8"),
        ("state", "<u2"),
        ("wait_site", "<u2"),
        ("more_pad", "V4"),
    ]
)
assert CALL_FIELDS.itemsize == RECORD.size


@dataclass(frozen=True)
class CommunicatorRecord:
    """One communicator, as recorded by one of its ranks.

    Attributes:
        name: name of the communicator in the code.
        members: world ranks, by rank in the communicator; empty if they did not fit into the file.
        rank: rank of this process in the communicator.
        collectives: number of collectives that this process has begun.
        number: index among communicators of the same name and members, in the order of their creation, from 0.
    """

    name: str
    members: Tuple[int, ...]
    rank: int
    collectives: int
    number: int


@dataclass(frozen=True)
class RecordedCall:
    """One recorded MPI call.

    Attributes:
        ordinal: number among all of this rank's calls, from 1.
        sequence: number among the calls that match it (see above), from 1.
        group: index of the communicator in the file.
        communicator: name of the communicator.
        peer: world rank of the other end, or of a broadcast's root; -1 for other calls.
        site, wait_site: file and line that made the call, and that wait for it (may be the same; "" if none waits).
        step, micro_batch, phase: the rank's progress when it made the call.
        entered, waited, left: seconds since the epoch; 0 if it has not happened.
    """

    ordinal: int
    sequence: int
    group: int
    communicator: str
    operation: str
    dtype: str
    shape: Tuple[int, ...]
    peer: int
    site: str
    wait_site: str
    step: int
    micro_batch: int
    phase: int
    state: int
    entered: float
    waited: float
    left: float

    @property
    def is_message(self) -> bool:
        """True for a send or a receive, False for a collective."""
        return self.operation in DIRECTIONS


@dataclass(frozen=True)
class Head:
    """Identity and progress of a rank's process.

    Attributes:
        process, host: process id, and the host that it runs on.
        started: time at which the process opened this file, seconds since the epoch.
        heartbeat: counter that increases with every call and every micro-batch.
        progressed: time of the last heartbeat.
        step: current iteration, as the log counts them, from 1; -1 before the first.
        micro_batch: current micro-batch, from 0; -1 outside of one.
        phase: index into ``PHASES``.
        watched: time at which the rank's watchdog last checked; 0 without a watchdog.
        timeout: seconds without progress after which the watchdog reads the files of other ranks.
        dumped: whether the process's Python stacks have been written.
    """

    rank: int
    ranks: int
    process: int
    host: str
    started: float
    heartbeat: int
    progressed: float
    step: int
    micro_batch: int
    phase: int
    watched: float
    timeout: float
    dumped: bool


class Flight:
    """The recorded progress and last calls of one rank."""

    def __init__(
        self,
        head: Head,
        records: "np.ndarray[Any, Any]",
        names: Sequence[str],
        groups: List[CommunicatorRecord],
        channels: Dict[Tuple[int, int, int], int],
    ) -> None:
        self.head = head
        self.groups = groups
        self._records = records
        self._names = names
        self._channels = channels
        self._calls: Optional[List[RecordedCall]] = None

    @property
    def rank(self) -> int:
        """World rank."""
        return self.head.rank

    @property
    def calls(self) -> List[RecordedCall]:
        """All recorded calls in order: the last ``SLOTS``, and earlier ones that were outstanding."""
        if self._calls is None:
            self._calls = [self._call(record) for record in self._records]
        return self._calls

    @property
    def outstanding(self) -> List[RecordedCall]:
        """Calls that have begun and, as far as recorded, not ended."""
        return [self._call(record) for record in self._records[self._records["state"] != RETURNED]]

    @property
    def waiting(self) -> Optional[RecordedCall]:
        """The call that the rank waits for, if it waits."""
        waiting = self._records[self._records["state"] == WAITING]
        return self._call(waiting[-1]) if len(waiting) else None

    def call_at(self, group: int, sequence: int) -> Optional[RecordedCall]:
        """A collective by its communicator and number; None if it is no longer recorded, or not begun."""
        matching = self._records[(self._records["group"] == group) & (self._records["sequence"] == sequence)]
        calls = [call for call in map(self._call, matching) if not call.is_message]
        return calls[0] if calls else None

    def message_at(self, group: int, peer: int, operation: str, sequence: int) -> Optional[RecordedCall]:
        """A message by its communicator, peer, operation and number; None if not begun, or no longer recorded."""
        matching = self._records[(self._records["group"] == group) & (self._records["sequence"] == sequence)]
        calls = [call for call in map(self._call, matching) if (call.operation, call.peer) == (operation, peer)]
        return calls[0] if calls else None

    @property
    def last(self) -> Optional[RecordedCall]:
        """The call that was begun last."""
        return self._call(self._records[-1]) if len(self._records) else None

    def messages(self, group: int, peer: int, operation: str) -> int:
        """Number of sends to, or receives from, a world rank that were begun."""
        return self._channels.get((group, peer, DIRECTIONS[operation]), 0)

    def _name(self, index: int) -> str:
        return self._names[index] or "?" if index < len(self._names) else "?"

    def _call(self, record: "np.void") -> RecordedCall:
        group = int(record["group"])
        return RecordedCall(
            ordinal=int(record["ordinal"]),
            sequence=int(record["sequence"]),
            group=group,
            communicator=self.groups[group].name if group < len(self.groups) else "?",
            operation=self._name(record["operation"]),
            dtype=self._name(record["dtype"]),
            shape=tuple(int(size) for size in record["shape"] if size >= 0),
            peer=int(record["peer"]),
            site=self._name(record["site"]),
            wait_site=self._name(record["wait_site"]) if record["waited"] else "",
            step=int(record["step"]),
            micro_batch=int(record["micro_batch"]),
            phase=int(record["phase"]),
            state=int(record["state"]),
            entered=float(record["entered"]),
            waited=float(record["waited"]),
            left=float(record["left"]),
        )


def flight_file(directory: Path, rank: int) -> Path:
    """Path of a rank's file; a thousand ranks share a folder, because metadata servers are slow on larger ones."""
    return directory / f"{rank // 1000:03d}" / f"rank-{rank:06d}.flight"


def groups_at(slots: int = SLOTS) -> int:
    """Offset of the communicators."""
    return RING_OFFSET + slots * RECORD.size


def channels_at(slots: int = SLOTS) -> int:
    """Offset of the counts of messages."""
    return groups_at(slots) + GROUPS * GROUP.size


def names_at(slots: int = SLOTS) -> int:
    """Offset of the names."""
    return channels_at(slots) + CHANNELS * CHANNEL.size


def pinned_at(slots: int = SLOTS) -> int:
    """Offset of the records of calls that stay outstanding."""
    return names_at(slots) + NAMES * NAME_SIZE


def file_size(pinned: int = PINNED, slots: int = SLOTS) -> int:
    """Size of a file in bytes."""
    return pinned_at(slots) + pinned * RECORD.size


def progressions(ranks: Sequence[int]) -> str:
    """Encode ranks as few runs of ``first+step*count``, such as ``0+2*4`` for 0, 2, 4, 6, which is how grids look."""
    runs: List[List[int]] = []
    for rank in ranks:
        if runs and (runs[-1][2] == 1 or rank == runs[-1][0] + runs[-1][1] * runs[-1][2]):
            if runs[-1][2] == 1:
                runs[-1][1] = rank - runs[-1][0]
            runs[-1][2] += 1
        else:
            runs.append([rank, 1, 1])
    return ",".join(f"{first}+{step}*{count}" for first, step, count in runs)


def read_head(path: Path) -> Head:
    """Read a rank's progress, without its calls.

    Raises:
        UsageError: the file is not a flight recorder's of this version.
    """
    try:
        with open_file(path) as stream:
            return _head(stream.read(HEAD_SIZE), path)[0]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def read_flight(path: Path) -> Flight:
    """Read one rank's file, even while it is being written or after a kill.

    Raises:
        UsageError: the file is not a flight recorder's of this version.
    """
    try:
        data = read_bytes(path, FLIGHT)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    head, slots, pinned = _head(data, path)
    if len(data) < file_size(pinned, slots):
        raise UsageError(f"{path}: a flight recorder file that was cut short")
    ring = np.frombuffer(data, CALL_FIELDS, slots, RING_OFFSET)
    pinned_records = np.frombuffer(data, CALL_FIELDS, pinned, pinned_at(slots))
    records = np.concatenate([ring, pinned_records])
    records = records[records["ordinal"] > 0]
    table = names_at(slots)
    names = [_text(data[table + index * NAME_SIZE : table + (index + 1) * NAME_SIZE]) for index in range(NAMES)]
    return Flight(
        head,
        records[np.argsort(records["ordinal"], kind="stable")],
        names,
        _groups(data, slots),
        _channels(data, slots),
    )


def _head(data: bytes, path: Path) -> Tuple[Head, int, int]:
    if len(data) < HEAD_SIZE or not data.startswith(MAGIC):
        raise UsageError(f"{path}: not a flight recorder file")
    _, version, slots, pinned, rank, ranks, process, started, host = HEADER.unpack_from(data)
    if version != VERSION:
        raise UsageError(f"{path}: a flight recorder file of version {version}; this build reads {VERSION}")
    heartbeat, progressed, step, micro_batch, phase = PROGRESS.unpack_from(data, PROGRESS_OFFSET)
    watched, timeout, dumped = WATCH.unpack_from(data, WATCH_OFFSET)
    try:
        check_times(start=started, progress=progressed, watch=watched)
    except ValueError as wrong:
        raise UsageError(f"{path}: a damaged flight recorder file: {wrong}") from None
    head = Head(
        rank,
        ranks,
        process,
        _text(host),
        started,
        heartbeat,
        progressed,
        step,
        micro_batch,
        min(phase, FINISHED),
        watched,
        timeout,
        bool(dumped),
    )
    return head, slots, pinned


def _groups(data: bytes, slots: int) -> List[CommunicatorRecord]:
    groups: List[CommunicatorRecord] = []
    seen: Dict[Tuple[str, Tuple[int, ...]], int] = {}
    for index in range(GROUPS):
        collectives, size, rank, name, members = GROUP.unpack_from(data, groups_at(slots) + index * GROUP.size)
        if size == 0:
            break
        text = _text(data[names_at(slots) + name * NAME_SIZE :][:NAME_SIZE])
        world_ranks = _members(data[names_at(slots) + members * NAME_SIZE : pinned_at(slots)]) if members else ()
        number = seen[text, world_ranks] = seen.get((text, world_ranks), -1) + 1
        groups.append(CommunicatorRecord(text, world_ranks, rank, collectives, number))
    return groups


def _members(data: bytes) -> Tuple[int, ...]:
    """The ranks of :func:`progressions`; none if they are not whole, since the file may be cut or still be written."""
    text = data.partition(b";")[0].decode("ascii", "replace") if b";" in data else ""
    ranks: List[int] = []
    for run in filter(None, text.split(",")):
        matched = _RUN.fullmatch(run)
        first, step, count = map(int, matched.groups()) if matched is not None else (0, 0, 0)
        if not step or not 0 < count <= RANKS.value - len(ranks):
            return ()
        ranks += range(first, first + step * count, step)
    return tuple(ranks)


def _channels(data: bytes, slots: int) -> Dict[Tuple[int, int, int], int]:
    channels = {}
    for index in range(CHANNELS):
        count, peer, group, direction = CHANNEL.unpack_from(data, channels_at(slots) + index * CHANNEL.size)
        if count:
            channels[group, peer, direction] = count
    return channels


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")
