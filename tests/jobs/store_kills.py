"""A program that kills writers of a run store again and again, and reads meanwhile; prints what it has seen as JSON.

Arguments: folder, number of kills, seed. Each writer says on a pipe what it has done, after it has done it: that is
acknowledged, and must be there at the end. Writers that follow go on with a run that a killed one has left.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from fugaku_gpt.jobs.store import list_runs, reindex
from fugaku_gpt.records import index
from fugaku_gpt.records.job import append_event, read_events
from fugaku_gpt.records.run import OK, MetricsWriter, Result, RunDirectory

WRITERS, READERS = 3, 2
MOST_STEPS = 20  # said by a writer before it is killed, so that a busy machine kills no less than an idle one
LONGEST_WAIT = 0.004  # seconds after its last step, into the next one
LONGEST_LIFE = 10.0  # seconds, whatever it has said
index.TICK_NS = 50_000_000  # this machine's clock ticks finer than the coarsest file system's
CONFIG = "model: {layers: 1, name: mini}\n"
SHARED = "shared"  # a run whose history all writers append to
RANKS = [{"rank": rank, "host": "node", "threads": 12} for rank in range(1000)]  # takes a while to write
NEWEST = 8  # runs of which a reader reads all
PADDING = "x" * 700  # lines of the length of real ones, so that they lie across pages


def write(store: Path, number: int, left: Optional[str], pipe: int) -> None:
    """One writer: runs from their creation to their result, each step said when it is done."""

    def done(kind: str, run: str, value: object) -> None:
        os.write(pipe, (json.dumps([kind, run, value]) + "\n").encode())

    for count in range(1_000_000):
        name = left if left is not None else f"sweep-{number % 3}/run-{number}-{count}"
        directory = RunDirectory(store / name)
        if left is None:
            directory.create(CONFIG)
            done("created", name, None)
            directory.write_environment({"build": {"torch": str(number)}, "ranks": RANKS})
            done("environment", name, str(number))
        left = None
        metrics = MetricsWriter(directory.metrics_file)
        for step in range(3):
            mark = f"{number}-{count}-{step}"
            metrics.write("iteration", {"iteration": step, "mark": mark, "padding": PADDING})
            done("metrics", name, mark)
            for folder in (directory.path, store / SHARED):
                append_event(folder, "status", 1.0, mark=mark, padding=PADDING)
                done("event", str(folder.relative_to(store)), mark)
        metrics.close()
        directory.write_result(Result(OK, "", 1.0, 2.0, 3, {"first_loss": float(number)}), replace=bool(count % 2))
        done("result", name, float(number))
        if (number + count) % 3 == 0:
            list_runs(store)


def read(store: Path, pipe: int) -> None:
    """One reader: everything, all the time; says how often, and dies of what it should not have seen."""
    rounds = 0
    while True:
        ended = {}
        newest = sorted(store.glob("*/run-*"), key=lambda path: path.stat().st_ctime, reverse=True)
        for path in newest[:NEWEST]:
            RunDirectory(path).metrics("iteration")
            environment = RunDirectory(path).environment()
            assert environment is None or len(environment["ranks"]) == len(RANKS)
            read_events(path)
        for path in newest:
            result = RunDirectory(path).result()
            if result is not None:
                ended[str(path.relative_to(store))] = result
        listing = {record.run: record for record in list_runs(store).runs}
        for run, result in ended.items():
            assert listing[run].status == OK and listing[run].figures == result.summary, (run, listing.get(run))
        damaged = [record.problem for record in listing.values() if record.problem]
        assert not damaged, damaged
        rounds += 1
        os.write(pipe, f"{rounds}\n".encode())
        time.sleep(0.02)  # two cores are shared with the writers


def start(work: Any, *arguments: object) -> Tuple[int, int]:
    """(process, what it says) of a fork; it ends in here."""
    said, pipe = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(said)
        try:
            work(*arguments, pipe)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(1)
    os.close(pipe)
    os.set_blocking(said, False)
    return process, said


def hear(pipe: int) -> bytes:
    """What has been said so far."""
    parts = []
    while select.select([pipe], [], [], 0)[0]:
        part = os.read(pipe, 1 << 20)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


class Writer:
    """One that is going to be killed: ``wait`` seconds after it has said ``steps`` things, ``end`` at the latest."""

    def __init__(self, process: int, pipe: int, steps: int, wait: float, end: float) -> None:
        self.process, self.pipe, self.end = process, pipe, end
        self.heard = b""
        self._steps, self._wait = steps, wait

    def listen(self) -> None:
        """Hear what it has done, and set its end."""
        self.heard += hear(self.pipe)
        if self.heard.count(b"\n") >= self._steps:
            self.end, self._steps = min(self.end, time.monotonic() + self._wait), sys.maxsize


def missing(store: Path, said: List[Tuple[str, str, Any]]) -> List[str]:
    """What was acknowledged and is not there."""
    lost = []
    marks: Dict[Tuple[str, str], List[Any]] = {}
    for kind, run, value in said:
        directory = RunDirectory(store / run)
        if kind in ("metrics", "event") and (kind, run) not in marks:
            lines = directory.metrics("iteration") if kind == "metrics" else []
            events = read_events(store / run) if kind == "event" else []
            marks[kind, run] = [line["mark"] for line in lines] + [event.values.get("mark") for event in events]
        result = directory.result() if kind == "result" else None
        there = {
            "created": directory.config_file.exists(),
            "environment": (directory.environment() or {}).get("build") == {"torch": value},
            "metrics": value in marks.get(("metrics", run), []),
            "event": value in marks.get(("event", run), []),
            "result": result is not None and (result.status, result.iterations) == (OK, 3),
        }
        if not there[kind]:
            lost.append(f"{kind} of {run}: {value}")
    return lost


def main() -> None:
    """Kill, read, and tell."""
    store, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    RunDirectory(store / SHARED).create(CONFIG)
    readers = [start(read, store) for _ in range(READERS)]
    writers: List[Writer] = []
    said: List[Tuple[str, str, Any]] = []
    killed, number, rounds, continued = 0, 0, 0, 0
    left: Optional[str] = None
    while killed < kills:
        while len(writers) < WRITERS:
            process, pipe = start(write, store, number, left)
            wait = chance.uniform(0, LONGEST_WAIT)
            writers.append(Writer(process, pipe, chance.randint(0, MOST_STEPS), wait, time.monotonic() + LONGEST_LIFE))
            continued += left is not None
            number, left = number + 1, None
        for writer in list(writers):
            writer.listen()
            if time.monotonic() < writer.end:
                continue
            os.kill(writer.process, signal.SIGKILL)
            _, code = os.waitpid(writer.process, 0)
            assert os.WIFSIGNALED(code), "a writer has ended by itself"
            writer.listen()
            os.close(writer.pipe)
            writers.remove(writer)
            killed += 1
            done = [json.loads(line) for line in writer.heard.split(b"\n")[:-1]]
            said += [tuple(one) for one in done]
            if done and done[-1][0] in ("created", "metrics", "event") and done[-1][1] != SHARED:
                left = done[-1][1]  # the next writer goes on with it
        rounds += sum(hear(pipe).count(b"\n") for _, pipe in readers)
        assert all(os.waitpid(process, os.WNOHANG)[0] == 0 for process, _ in readers), "a reader has died"
        time.sleep(0.001)
    for process in [writer.process for writer in writers] + [process for process, _ in readers]:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    quick, whole = list_runs(store), list_runs(store, use_index=False).runs
    again, _ = reindex(store)
    print(
        json.dumps(
            {
                "kills": killed,
                "acknowledged": len(said),
                "missing": missing(store, said),
                "runs": len(whole),
                "continued": continued,
                "rounds of reading": rounds,
                "from the index": len(quick.runs) - quick.read,
                "damaged": [record.problem for record in whole if record.problem],
                "other by the index": [one.run for one, other in zip(quick.runs, whole) if one != other],
                "index agrees": quick.runs == whole == again.runs and (store / index.FILE).exists(),
            }
        )
    )


if __name__ == "__main__":
    main()
