"""Ends a run that hangs, with a report: a thread per rank that looks at files only and never calls MPI.

A rank whose own heartbeat (calls, micro-batches) has stood still for ``node.hang_timeout`` looks at the heartbeats of
the others, one rank for all of them. As long as anybody's has moved, the run is slow, not hung. Else it writes down the
verdict (``hang/diagnosis.py``) and the exit record; every rank sees that, writes the Python stacks of its threads, and
leaves; a rank that is stopped or dead is ended by its launcher then. A rank whose thread cannot run, since C code holds
the interpreter, has its stacks written to its standard error by ``faulthandler``, which needs no interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from fugaku_gpt.comm import Communicator, FlightRecorder
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import EXIT_RUN_FAILED, UsageError
from fugaku_gpt.hang.against_plan import config_or_none
from fugaku_gpt.hang.diagnosis import diagnose_hang, process_states, read_flights
from fugaku_gpt.records.files import create_json_atomically
from fugaku_gpt.records.flight import CHECKPOINT, FINISHED, START_UP, Head, flight_file, read_head
from fugaku_gpt.records.run import HUNG, Result, RunDirectory, failure_lines

_LOOKS = 20  # per timeout
_LONGEST_TICK_SECONDS = 5.0
_PATIENCE = {START_UP: 5, CHECKPOINT: 5}  # timeouts that a rank may stand still in these phases: files may be slow
_GRACE_SECONDS = 3.0  # for all ranks to write their stacks, and two ticks more


class Watchdog:
    """Watches over one rank from :meth:`start` to :meth:`stop`."""

    def __init__(self, recorder: FlightRecorder, directory: RunDirectory, timeout: float, started: float) -> None:
        """``timeout``: seconds; longer than the longest time in which a healthy rank begins no call and no
        micro-batch. ``started``: the run's beginning, for the exit record."""
        self._recorder = recorder
        self._directory = directory
        self._timeout = timeout
        self._started = started
        self._began = time.time()
        self._tick = min(timeout / _LOOKS, _LONGEST_TICK_SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beats, self._still = -1, 0.0  # this rank's heartbeat, and for how many seconds it has been that
        self._before, self._synced, self._armed = (
            time.monotonic(),
            0.0,
            -timeout,
        )  # times of the last look, sync, arming
        self._examines = False
        self._seen: Dict[int, Tuple[int, float]] = {}  # heartbeat of a rank, and since when it has been that
        self._examiner: Tuple[float, float] = (0.0, 0.0)  # its last sign of life, and since when it has been that

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """The rank is done, or ends by itself."""
        self._stop.set()
        self._thread.join()
        self._resign()

    def look(self) -> None:
        """One look at this rank, and at the others where it stands still; the thread takes one per tick. Does not
        return where the run hangs."""
        now = time.monotonic()
        passed, self._before = now - self._before, now
        if passed > max(self._timeout / 4, 4 * self._tick):
            passed = self._tick  # this process was suspended: time in which nobody could move
        self._recorder.watched(self._timeout, False)
        if now - self._armed > self._timeout / 2:
            faulthandler.dump_traceback_later(2 * self._timeout, file=2)  # standard error
            self._armed = now
        moved = self._recorder.beats != self._beats
        self._beats, self._still = self._recorder.beats, 0.0 if moved else self._still + passed
        if now - self._synced > self._timeout / 4:
            with contextlib.suppress(OSError):  # a file system that is away: others see an older heartbeat
                self._recorder.sync()
            self._synced = time.monotonic()
        if self._still < self._timeout / 2:
            self._resign()
        elif self._marked():
            self._leave()
        elif self._is_examiner() and self._all_stand_still(self._still):
            self._conclude()

    def _watch(self) -> None:
        self._before = time.monotonic()
        while not self._stop.wait(self._tick):
            self.look()
        faulthandler.cancel_dump_traceback_later()

    @property
    def _marker(self) -> Path:
        return self._directory.stacks_dir / "hung.json"

    @property
    def _claim(self) -> Path:
        return self._directory.stacks_dir / "examiner"

    def _marked(self) -> bool:
        """Whether a rank has found that this run hangs, not one before it in the same directory."""
        try:
            return bool(json.loads(self._marker.read_text(encoding="utf-8"))["time"] > self._began)
        except (OSError, ValueError):  # none, or being written
            return False

    def _is_examiner(self) -> bool:
        """Whether this rank looks for all: the first that stands still, until it moves again or is not heard of."""
        with contextlib.suppress(OSError):  # a file system that is away: another time
            if self._examines:
                os.utime(self._claim)
                return True
            self._directory.stacks_dir.mkdir(exist_ok=True)
            try:
                os.close(os.open(self._claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                self._examines = True
            except FileExistsError:
                sign, now = self._claim.stat().st_mtime, time.monotonic()
                if sign != self._examiner[0]:
                    self._examiner = (sign, now)
                elif now - self._examiner[1] > max(self._timeout / 4, 4 * self._tick):
                    self._claim.unlink()
        return self._examines

    def _resign(self) -> None:
        if self._examines:
            self._examines = False
            self._seen.clear()
            with contextlib.suppress(OSError):
                self._claim.unlink()

    def _all_stand_still(self, still: float) -> bool:
        if still < self._timeout * _PATIENCE.get(self._recorder.phase, 1):
            return False
        here, now = socket.gethostname(), time.monotonic()
        quiet = True
        for rank in range(self._recorder.ranks):
            if rank == self._recorder.rank:
                continue
            head = self._head(rank)
            if head is None:
                continue  # never started, or its files are away: it cannot be what moves
            if self._seen.get(rank, (-1, 0.0))[0] != head.heartbeat:
                self._seen[rank] = (head.heartbeat, now)
            stands = [now - self._seen[rank][1], head.watched - head.progressed]
            if head.host == here:
                stands.append(time.time() - head.progressed)
            limit = self._timeout * _PATIENCE.get(head.phase, 1)
            quiet = quiet and max(stands) >= limit  # all are read, so that all are known since the first look
        return quiet

    def _head(self, rank: int) -> Optional[Head]:
        try:
            return read_head(flight_file(self._directory.flight_dir, rank))
        except UsageError:
            return None

    def _conclude(self) -> None:
        """Nobody moves: say who is the cause, record it, and have all ranks end."""
        try:
            self._record()
        except Exception:  # a full disk, for one: the ranks must end all the same
            traceback.print_exc()
        self._dump()
        end = time.monotonic() + _GRACE_SECONDS + 2 * self._tick
        while time.monotonic() < end and not self._all_dumped():
            time.sleep(self._tick)
        os._exit(EXIT_RUN_FAILED)

    def _record(self) -> None:
        """Write down that the run hangs, and who is the cause."""
        culprits: Tuple[int, ...] = ()
        heads: List[Head] = []
        try:
            flights = read_flights(self._directory.flight_dir)
            heads = [flight.head for flight in flights]
            processes = process_states(heads, socket.gethostname())
            told = diagnose_hang(flights, processes, config_or_none(self._directory.config_file))
            verdict, culprits = told.verdict, told.culprits
        except Exception as error:  # that it hangs is known, whatever is wrong with the files that tell why
            traceback.print_exc()
            verdict = f"no rank has moved for {self._timeout:g} s, and why cannot be told: {error}"
        marker = {"time": time.time(), "rank": self._recorder.rank, "verdict": verdict}
        if not create_json_atomically(self._marker, marker) and not self._marked():
            self._marker.unlink()  # of a run before this one
            create_json_atomically(self._marker, marker)
        result = Result(
            HUNG,
            verdict,
            self._started,
            time.time(),
            self._directory.last_iteration(),
            rank=culprits[0] if len(culprits) == 1 else None,
            node=next((head.host for head in heads if culprits == (head.rank,)), ""),
            last_checkpoint=self._directory.last_checkpoint(),
        )
        self._directory.write_result(result, replace=False)
        print("\n".join(failure_lines(result)), file=sys.stderr, flush=True)

    def _all_dumped(self) -> bool:
        """Whether every rank whose watchdog can still run has written its stacks."""
        for rank in range(self._recorder.ranks):
            head = self._head(rank)
            if head is None or head.dumped or head.phase == FINISHED:
                continue
            if time.time() - head.watched < max(4 * self._tick, 1.0) or head.host != socket.gethostname():
                return False
        return True

    def _leave(self) -> None:
        """Another rank has found the hang: add this one's stacks, and end after it."""
        self._dump()
        time.sleep(2 * _GRACE_SECONDS + 2 * self._tick)
        os._exit(EXIT_RUN_FAILED)

    def _dump(self) -> None:
        path = self._directory.stacks_dir / f"rank-{self._recorder.rank:06d}.txt"
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
        self._recorder.watched(self._timeout, True)
        with contextlib.suppress(OSError):
            self._recorder.sync()


def start_watchdog(
    config: RunConfig, world: Communicator, directory: RunDirectory, started: float
) -> Optional[Watchdog]:
    """The watchdog of this rank; None where it is switched off, or there is no flight recorder to watch."""
    if world.recorder is None or config.node.hang_timeout is None:
        return None
    watchdog = Watchdog(world.recorder, directory, config.node.hang_timeout, started)
    watchdog.start()
    return watchdog
