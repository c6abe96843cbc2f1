"""Ends a run that hangs, with a report. Each rank has a watchdog thread, which only reads files and never calls MPI.

When a rank's own heartbeat (calls, micro-batches) has not moved for ``node.hang_timeout``, one such rank, the examiner,
reads the heartbeats of all ranks. As long as any of them moves, the run is slow, not hung. Otherwise the examiner
records the verdict (``hang/diagnosis.py``) and the exit record; every rank sees that, writes the Python stacks of its
threads, and exits. A rank that is stopped or dead is then ended by its launcher. If a rank's thread cannot run because
C code holds the interpreter, ``faulthandler``, which does not need it, writes its stacks to standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from fugaku_gpt.hang.against_plan import config_or_problem
from fugaku_gpt.hang.diagnosis import diagnose_hang, process_states, read_flights
from fugaku_gpt.hang.standstill import PATIENCE_BY_PHASE
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.records.files import create_json_atomically
from fugaku_gpt.records.flight import FINISHED, Head, flight_file, read_head
from fugaku_gpt.records.run import HUNG, Result, RunDirectory, failure_lines

_CHECKS_PER_TIMEOUT = 20
_LONGEST_TICK_SECONDS = 5.0
_GRACE_SECONDS = 3.0  # that all ranks have, plus two ticks, to write their stacks


class Watchdog:
    """Watches over one rank from :meth:`start` to :meth:`stop`."""

    def __init__(self, recorder: FlightRecorder, directory: RunDirectory, timeout: float, started: float) -> None:
        """Create a watchdog.

        Args:
            timeout: seconds; longer than a healthy rank ever takes between two calls or micro-batches.
            started: start of the run, for the exit record.
        """
        self._recorder = recorder
        self._directory = directory
        self._timeout = timeout
        self._started = started
        self._began = time.time()
        self._tick = min(timeout / _CHECKS_PER_TIMEOUT, _LONGEST_TICK_SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._last_heartbeat, self._idle_seconds = -1, 0.0  # this rank's heartbeat, and how long it has not moved
        self._last_check, self._last_sync, self._last_arming = (
            time.monotonic(),
            0.0,
            -timeout,
        )
        self._is_examining = False
        self._heartbeats: Dict[int, Tuple[int, float]] = {}  # heartbeat of each rank, and since when it has not moved
        self._examiner_sign: Tuple[float, float] = (
            0.0,
            0.0,
        )  # the examiner's last sign of life, and when it was first seen

    def start(self) -> None:
        """Start the watchdog thread."""
        self._recorder.watched(self._timeout, False)  # so that a run that is killed soon is seen to have been watched
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the rank is done, or ends by itself."""
        self._stop.set()
        self._thread.join()
        self._resign()

    def check(self) -> None:
        """Check this rank, and the other ranks if this one is idle; the thread does so once per tick. Does not return
        if the run hangs."""
        current_time = time.monotonic()
        passed, self._last_check = current_time - self._last_check, current_time
        if passed > max(self._timeout / 4, 4 * self._tick):
            passed = self._tick  # this process was suspended, when it could not move
        self._recorder.watched(self._timeout, False)
        if current_time - self._last_arming > self._timeout / 2:
            faulthandler.dump_traceback_later(2 * self._timeout, file=2)  # standard error
            self._last_arming = current_time
        moved = self._recorder.beats != self._last_heartbeat
        self._last_heartbeat, self._idle_seconds = self._recorder.beats, 0.0 if moved else self._idle_seconds + passed
        if current_time - self._last_sync > self._timeout / 4:
            with contextlib.suppress(OSError):  # if the file system is unavailable, other ranks see an older heartbeat
                self._recorder.sync()
            self._last_sync = time.monotonic()
        if self._idle_seconds < self._timeout / 2:
            self._resign()
        elif self._is_marked_hung():
            self._leave()
        elif self._is_examiner() and self._are_all_idle(self._idle_seconds):
            self._end_hung_run()

    def _watch(self) -> None:
        self._last_check = time.monotonic()
        while not self._stop.wait(self._tick):
            self.check()
        faulthandler.cancel_dump_traceback_later()

    @property
    def _marker(self) -> Path:
        return self._directory.stacks_dir / "hung.json"

    @property
    def _claim(self) -> Path:
        return self._directory.stacks_dir / "examiner"

    def _is_marked_hung(self) -> bool:
        """True if a rank has recorded that this run hangs (not an earlier run in the same directory)."""
        try:
            marker = parse_json(self._marker.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing, or being written
            return False
        moment = marker.get("time") if isinstance(marker, dict) else None
        return isinstance(moment, (int, float)) and moment > self._began

    def _is_examiner(self) -> bool:
        """True if this rank is the examiner: the first idle rank, until it moves again or gives no sign of life."""
        with contextlib.suppress(OSError):  # if the file system is unavailable, try again later
            if self._is_examining:
                os.utime(self._claim)
                return True
            self._directory.stacks_dir.mkdir(exist_ok=True)
            try:
                os.close(os.open(self._claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                self._is_examining = True
            except FileExistsError:
                last_sign, current_time = self._claim.stat().st_mtime, time.monotonic()
                if last_sign != self._examiner_sign[0]:
                    self._examiner_sign = (last_sign, current_time)
                elif current_time - self._examiner_sign[1] > max(self._timeout / 4, 4 * self._tick):
                    self._claim.unlink()
        return self._is_examining

    def _resign(self) -> None:
        if self._is_examining:
            self._is_examining = False
            self._heartbeats.clear()
            with contextlib.suppress(OSError):
                self._claim.unlink()

    def _are_all_idle(self, own_idle_seconds: float) -> bool:
        if own_idle_seconds < self._timeout * PATIENCE_BY_PHASE.get(self._recorder.phase, 1):
            return False
        host, current_time = socket.gethostname(), time.monotonic()
        all_idle = True
        for rank in range(self._recorder.ranks):
            if rank == self._recorder.rank:
                continue
            head = self._head(rank)
            if head is None:
                continue  # it never started, or its files are missing: it cannot be the rank that moves
            if self._heartbeats.get(rank, (-1, 0.0))[0] != head.heartbeat:
                self._heartbeats[rank] = (head.heartbeat, current_time)
            idle_seconds = [current_time - self._heartbeats[rank][1], head.watched - head.progressed]
            if head.host == host:
                idle_seconds.append(time.time() - head.progressed)
            limit = self._timeout * PATIENCE_BY_PHASE.get(head.phase, 1)
            all_idle = all_idle and max(idle_seconds) >= limit  # every rank is read in every check
        return all_idle

    def _head(self, rank: int) -> Optional[Head]:
        try:
            return read_head(flight_file(self._directory.flight_dir, rank))
        except UsageError:
            return None

    def _end_hung_run(self) -> None:
        """No rank moves: record the hang and its cause, and end all ranks."""
        try:
            self._record_hang()
        except Exception:  # the ranks must end even if, say, the disk is full
            traceback.print_exc()
        self._dump_stacks()
        end = time.monotonic() + _GRACE_SECONDS + 2 * self._tick
        while time.monotonic() < end and not self._have_all_dumped():
            time.sleep(self._tick)
        os._exit(EXIT_RUN_FAILED)

    def _record_hang(self) -> None:
        """Record that the run hangs, and which ranks are the cause."""
        culprits: Tuple[int, ...] = ()
        heads: List[Head] = []
        try:
            flights = read_flights(self._directory.flight_dir)
            heads = [flight.head for flight in flights]
            processes = process_states(heads, socket.gethostname())
            diagnosis = diagnose_hang(flights, processes, config_or_problem(self._directory.config_file))
            verdict, culprits = diagnosis.verdict, diagnosis.culprits
        except Exception as error:  # the run hangs, even if the files that explain it are unreadable
            traceback.print_exc()
            verdict = f"no rank has moved for {self._timeout:g} s, and the cause is unknown: {error}"
        marker = {"time": time.time(), "rank": self._recorder.rank, "verdict": verdict}
        if not create_json_atomically(self._marker, marker) and not self._is_marked_hung():
            self._marker.unlink()  # it is from an earlier run
            create_json_atomically(self._marker, marker)
        result = Result(
            HUNG,
            verdict,
            self._started,
            steady_time(),
            self._directory.last_iteration(),
            rank=culprits[0] if len(culprits) == 1 else None,
            node=next((head.host for head in heads if culprits == (head.rank,)), ""),
            last_checkpoint=self._directory.last_checkpoint(),
        )
        self._directory.write_result(result, replace=False)
        print("\n".join(failure_lines(result)), file=sys.stderr, flush=True)

    def _have_all_dumped(self) -> bool:
        """True if every rank whose watchdog can still run has written its stacks."""
        for rank in range(self._recorder.ranks):
            head = self._head(rank)
            if head is None or head.dumped or head.phase == FINISHED:
                continue
            if time.time() - head.watched < max(4 * self._tick, 1.0) or head.host != socket.gethostname():
                return False
        return True

    def _leave(self) -> None:
        """Another rank has detected the hang: write this rank's stacks, and exit after it."""
        self._dump_stacks()
        time.sleep(2 * _GRACE_SECONDS + 2 * self._tick)
        os._exit(EXIT_RUN_FAILED)

    def _dump_stacks(self) -> None:
        path = self._directory.stacks_dir / f"rank-{self._recorder.rank:06d}.txt"
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
        self._recorder.watched(self._timeout, True)
        with contextlib.suppress(OSError):
            self._recorder.sync()


def start_watchdog(
    config: RunConfig, world: Communicator, directory: RunDirectory, started: float
) -> Optional[Watchdog]:
    """Start the watchdog of this rank; None if it is switched off, or there is no flight recorder to watch."""
    if world.recorder is None or config.node.hang_timeout is None:
        return None
    watchdog = Watchdog(world.recorder, directory, config.node.hang_timeout, started)
    watchdog.start()
    return watchdog
