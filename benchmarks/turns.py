"""Lets contestants take turns in one run, each in separate processes that sleep while others work.

A slow moment of a shared machine falls on all of them alike, peak memory is measured for each, and a ratio is taken
within a turn. Ranks are notified through a socket, not MPI: a rank that waits for an MPI message may occupy a core.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from fugaku_gpt.launch.processes import MARK, end_marked_processes
from fugaku_gpt.machine.garbage_collection import gc_paused

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 600.0
TURN_SECONDS = 600.0

Work = Callable[[], Any]
Turn = Dict[str, "Unit"]


class Lacking(Exception):
    """A contestant cannot run on this build; the message is the reason."""


class Unit(NamedTuple):
    """One unit of work: seconds of the slowest rank, the value that rank 0 returned, and each rank's peak memory."""

    seconds: float
    value: Any
    peak_bytes: List[int]


class Worker:
    """Ranks that do one unit of their work at each request.

    Attributes:
        lacks: the reason why this build cannot do it, or "".
        torch: the version of its PyTorch.
        first_step_seconds: from its start to the end of its first unit of work; 0 before that.
    """

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], ranks: int = 1) -> None:
        """Starts the ranks: ``argv`` starts processes that call :func:`serve` with the path of a socket, which is
        appended.

        Raises:
            SystemExit: they do not start.
        """
        self.name = name
        self.first_step_seconds = 0.0
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.mkdtemp(prefix="turns-")
        self._files: List[Any] = []
        path = os.path.join(self._folder, "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(ranks)
        listener.settimeout(0.5)
        everything = {**os.environ, "PYTHONPATH": str(ROOT), **environment, MARK: self._mark}
        started = time.monotonic()
        self._process = subprocess.Popen(
            [*argv, path],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env=everything,
            start_new_session=True,
        )
        try:
            limit = time.monotonic() + START_SECONDS
            while len(self._files) < ranks:
                try:
                    connection, _ = listener.accept()
                except socket.timeout:
                    if self._process.poll() is not None or time.monotonic() > limit:
                        raise self._failed() from None
                    continue
                connection.settimeout(TURN_SECONDS)
                self._files.append(connection.makefile("rwb"))
                connection.close()
            ready = self._answers()[0]
        except BaseException:
            self.close(grace=0.0)
            raise
        finally:
            listener.close()
        self.lacks, self.torch = str(ready["lacks"]), str(ready["torch"])
        self._setup_seconds = time.monotonic() - started

    def work(self) -> Unit:
        """Makes all ranks do one unit of work at once.

        Raises:
            SystemExit: a rank has ended, or the unit takes too long.
        """
        try:
            for file in self._files:
                file.write(b"\n")
                file.flush()
        except OSError:
            raise self._failed() from None
        answers = sorted(self._answers(), key=lambda answer: int(answer["rank"]))
        seconds = max(answer["seconds"] for answer in answers)
        self.first_step_seconds = self.first_step_seconds or self._setup_seconds + seconds
        return Unit(
            seconds,
            answers[0]["value"],
            [int(answer["peak_bytes"]) for answer in answers],
        )

    def close(self, grace: float = 30.0) -> None:
        """Waits for the processes to end, ends those that do not, and removes the socket."""
        for file in self._files:
            file.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace)
        end_marked_processes(self._mark, 0.0, self._process)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> List[Dict[str, Any]]:
        try:
            lines = [file.readline() for file in self._files]
        except OSError:
            raise self._failed() from None
        if not all(lines):
            raise self._failed()
        return [json.loads(line) for line in lines]

    def _failed(self) -> SystemExit:
        code = self._process.poll()
        how = "does not answer" if code is None else f"ended with exit code {code}"
        return SystemExit(f"{self.name} {how}; its output is above")


def serve(path: str, setup: Callable[[], Work], rank: int = 0) -> None:
    """Serves a rank: sets it up, and does one unit of work for each line from the socket, until it is closed.

    A unit's time is that of the call, or ``seconds`` of what it returns where that is a mapping with such a key.
    """
    with contextlib.suppress(BrokenPipeError):
        _serve(path, setup, rank)


def _serve(path: str, setup: Callable[[], Work], rank: int) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    file = connection.makefile("rwb")

    def answer(**fields: Any) -> None:
        file.write(json.dumps(fields).encode() + b"\n")
        file.flush()

    def version() -> str:
        return str(getattr(sys.modules.get("torch"), "__version__", "no torch"))

    try:
        with gc_paused():
            work = setup()
    except Lacking as error:
        answer(lacks=str(error), torch=version())
        return
    answer(lacks="", torch=version())
    for _ in file:
        started = time.perf_counter()
        value = work()
        seconds = time.perf_counter() - started
        if isinstance(value, dict):
            seconds = value.get("seconds", seconds)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer(rank=rank, seconds=seconds, value=value, peak_bytes=peak)


def take_turns(workers: Sequence[Worker], turns: int) -> List[Turn]:
    """Lets all workers take turns, after one warm-up turn, which touches fresh memory. Every second turn is in reverse
    order."""
    counted = []
    for turn in range(turns + 1):
        order = workers if turn % 2 else list(reversed(workers))
        measured = {worker.name: worker.work() for worker in order}
        times = ", ".join(f"{worker.name} {measured[worker.name].seconds:.3f} s" for worker in workers)
        print(f"turn {turn}/{turns}: {times}", file=sys.stderr, flush=True)
        if turn:
            counted.append(measured)
    return counted


class Several:
    """Workers that are all closed at the end, whatever happens; those that their build cannot run are left out.

    Attributes:
        lacking: name → the reason why the build cannot run it.
    """

    def __init__(self) -> None:
        self.workers: List[Worker] = []
        self.lacking: Dict[str, str] = {}

    def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str], ranks: int = 1) -> None:
        """Starts a worker; see :class:`Worker`."""
        worker = Worker(name, argv, environment, ranks)
        if worker.lacks:
            self.lacking[name] = worker.lacks
            worker.close()
        else:
            self.workers.append(worker)

    def __enter__(self) -> "Several":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()


def thread_environment(threads: int) -> Dict[str, str]:
    """Environment variables that libraries read when they are loaded."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def first_steps(workers: Sequence[Worker]) -> str:
    """A line with the seconds from each worker's start to the end of its first step, with imports and compilation."""
    times = (f"{worker.name} {worker.first_step_seconds:.1f} s" for worker in workers)
    return f"from the start to the end of the first step: {', '.join(times)}"


def seconds_of(turns: Sequence[Turn], name: str) -> List[float]:
    """A contestant's seconds in every turn."""
    return [turn[name].seconds for turn in turns]


def ratios_of(turns: Sequence[Turn], slower: str, faster: str) -> List[float]:
    """One contestant's seconds divided by another's, within each turn."""
    return [turn[slower].seconds / turn[faster].seconds for turn in turns]


def middle(values: Sequence[float], digits: int = 3) -> str:
    """The median, and the smallest and the largest: ``1.234 (1.200-1.300)``."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def write_samples(path: Optional[Path], head: Mapping[str, Any], turns: Sequence[Turn]) -> None:
    """Writes every turn's units as JSON, for statistics other than those printed."""
    if path is not None:
        units = [{name: unit._asdict() for name, unit in turn.items()} for turn in turns]
        path.write_text(json.dumps({**head, "turns": units}, indent=1), encoding="utf-8")
