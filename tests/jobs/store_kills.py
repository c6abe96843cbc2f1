"""A program that repeatedly kills writers of a run store while readers read it, and prints the counts as JSON.

Arguments: folder, number of kills, seed. Each writer acknowledges each step on a pipe after the step is done: an
acknowledged step must be in the store at the end. Later writers continue a run that a killed writer left unfinished.
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
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import OK, Result, RunDirectory

WRITERS, READERS = 3, 2
MOST_STEPS = 20  # acknowledged by a writer before it is killed, so that a busy machine kills no less than an idle one
LONGEST_WAIT = 0.004  # seconds after its last step, into the next one
LONGEST_LIFE = 10.0  # seconds, whatever it has acknowledged
index.TICK_NS = 50_000_000  # this machine's clock ticks finer than the coarsest file system's
CONFIG = "model: {layers: 1, name: mini}\n"
SHARED = "shared"  # a run whose history all writers append to
RANKS = [{"rank": rank, "host": "node", "threads": 12} for rank in range(1000)]  # takes a while to write
NEWEST = 8  # runs of which a reader reads all
PADDING = "x" * 700  # lines of the length of real ones, so that they lie across pages


def write(store: Path, number: int, unfinished_run: Optional[str], pipe: int) -> None:
    """A writer: writes runs from their creation to their result, and acknowledges each step."""

    def done(kind: str, run: str, value: object) -> None:
        os.write(pipe, (json.dumps([kind, run, value]) + "\n").encode())

    for count in range(1_000_000):
        name = unfinished_run if unfinished_run is not None else f"sweep-{number % 3}/run-{number}-{count}"
        directory = RunDirectory(store / name)
        if unfinished_run is None:
            directory.create(CONFIG)
            done("created", name, None)
            directory.write_environment({"build": {"torch": str(number)}, "ranks": RANKS})
            done("environment", name, str(number))
        unfinished_run = None
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
    """A reader: reads everything repeatedly, reports the number of rounds, and fails on an inconsistent store."""
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
    """Fork a process that does ``work``; return its id and the read end of its pipe."""
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read_end)
        try:
            work(*arguments, write_end)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(1)
    os.close(write_end)
    os.set_blocking(read_end, False)
    return process, read_end


def read_available(pipe: int) -> bytes:
    """Return the bytes that can be read without waiting."""
    chunks = []
    while select.select([pipe], [], [], 0)[0]:
        chunk = os.read(pipe, 1 << 20)
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks)


class Writer:
    """A writer that will be killed ``wait`` seconds after it acknowledged ``steps`` steps, at ``end`` at the latest."""

    def __init__(self, process: int, pipe: int, steps: int, wait: float, end: float) -> None:
        self.process, self.pipe, self.end = process, pipe, end
        self.received = b""
        self._steps, self._wait = steps, wait

    def listen(self) -> None:
        """Read its acknowledgements, and set its end once there are enough."""
        self.received += read_available(self.pipe)
        if self.received.count(b"\n") >= self._steps:
            self.end, self._steps = min(self.end, time.monotonic() + self._wait), sys.maxsize


def missing(store: Path, acknowledged: List[Tuple[str, str, Any]]) -> List[str]:
    """Return the acknowledged steps that are not in the store."""
    lost = []
    marks: Dict[Tuple[str, str], List[Any]] = {}
    for kind, run, value in acknowledged:
        directory = RunDirectory(store / run)
        if kind in ("metrics", "event") and (kind, run) not in marks:
            lines = directory.metrics("iteration") if kind == "metrics" else []
            events = read_events(store / run) if kind == "event" else []
            marks[kind, run] = [line["mark"] for line in lines] + [event.values.get("mark") for event in events]
        result = directory.result() if kind == "result" else None
        present = {
            "created": directory.config_file.exists(),
            "environment": (directory.environment() or {}).get("build") == {"torch": value},
            "metrics": value in marks.get(("metrics", run), []),
            "event": value in marks.get(("event", run), []),
            "result": result is not None and (result.status, result.iterations) == (OK, 3),
        }
        if not present[kind]:
            lost.append(f"{kind} of {run}: {value}")
    return lost


def main() -> None:
    """Kill writers while readers read, and print the counts."""
    store, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    RunDirectory(store / SHARED).create(CONFIG)
    readers = [start(read, store) for _ in range(READERS)]
    writers: List[Writer] = []
    acknowledged: List[Tuple[str, str, Any]] = []
    killed, number, rounds, continued = 0, 0, 0, 0
    unfinished_run: Optional[str] = None
    while killed < kills:
        while len(writers) < WRITERS:
            process, pipe = start(write, store, number, unfinished_run)
            wait = chance.uniform(0, LONGEST_WAIT)
            writers.append(Writer(process, pipe, chance.randint(0, MOST_STEPS), wait, time.monotonic() + LONGEST_LIFE))
            continued += unfinished_run is not None
            number, unfinished_run = number + 1, None
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
            done = [json.loads(line) for line in writer.received.split(b"\n")[:-1]]
            acknowledged += [tuple(step) for step in done]
            if done and done[-1][0] in ("created", "metrics", "event") and done[-1][1] != SHARED:
                unfinished_run = done[-1][1]  # the next writer continues it
        rounds += sum(read_available(pipe).count(b"\n") for _, pipe in readers)
        assert all(os.waitpid(process, os.WNOHANG)[0] == 0 for process, _ in readers), "a reader has died"
        time.sleep(0.001)
    for process in [writer.process for writer in writers] + [process for process, _ in readers]:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    indexed, all_runs = list_runs(store), list_runs(store, use_index=False).runs
    reindexed, _ = reindex(store)
    print(
        json.dumps(
            {
                "kills": killed,
                "acknowledged": len(acknowledged),
                "missing": missing(store, acknowledged),
                "runs": len(all_runs),
                "continued": continued,
                "rounds of reading": rounds,
                "from the index": len(indexed.runs) - indexed.read,
                "damaged": [record.problem for record in all_runs if record.problem],
                "other by the index": [record.run for record, other in zip(indexed.runs, all_runs) if record != other],
                "index agrees": indexed.runs == all_runs == reindexed.runs and (store / index.FILE).exists(),
            }
        )
    )


if __name__ == "__main__":
    main()
