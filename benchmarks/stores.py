"""Times the verbs that read a store of runs beside `find -name result.json`, which only looks for the files.

    python benchmarks/stores.py [--runs 2000] [--turns 5] [--store DIR] [--only NAME[,NAME]] [--samples FILE]

The store has sweeps of 100 runs, 20 settings repeated 5 times, each run with the files that `train` leaves of 20
iterations. Every call is a process of its own, start-up included; the calls take turns. Columns:

* cpu s: processor time, user and system, of the process: median (smallest-largest) over the turns;
* s: the same of elapsed time;
* of find: median over the turns of the processor time divided by that of `find` in the same turn;
* MiB: largest resident memory.

`runs ls` is timed without an index, which it then leaves, and with it. `--columns run` prints one column instead of 16:
the difference is the price of the table. Files are in the cache of the system: a disk or file server adds its own time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in [str(ROOT)] if path not in sys.path]
from benchmarks.turns import middle  # noqa: E402  # the path is set above

ITERATIONS, REPEATS, SETTINGS = 20, 5, 20
SETTLED_SECONDS = 2.2  # after this time, the index trusts the time stamps of a file
COLUMNS = ("call", "cpu s", "s", "of find", "MiB")


class Call(NamedTuple):
    """A command that is timed; ``forgets`` if the index is removed before it."""

    name: str
    command: List[str]
    forgets: bool = False


class Sample(NamedTuple):
    """One call: seconds of processor time and of elapsed time, and bytes of memory."""

    cpu: float
    seconds: float
    peak_bytes: int


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Makes a store, times the calls, and prints the table."""
    from fugaku_gpt.cli.output import render_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--store", type=Path, help="Keep the store here; one that is there is used as it is.")
    parser.add_argument("--only", help="Names of calls, such as find,ls.")
    parser.add_argument("--samples", type=Path)
    options = parser.parse_args(argv)
    if options.runs < 1 or options.turns < 1:
        parser.error("--runs and --turns are at least 1")
    scratch = tempfile.mkdtemp(prefix="stores-")
    try:
        store = options.store.absolute() if options.store is not None else Path(scratch) / "runs"
        if not store.exists():
            make_store(store, options.runs)
            time.sleep(SETTLED_SECONDS)
        calls = calls_on(store)
        names = options.only.split(",") if options.only is not None else [call.name for call in calls]
        if not set(names) <= {call.name for call in calls}:
            parser.error(f"--only: valid: {','.join(call.name for call in calls)}")
        turns = take_turns(store, [call for call in calls if call.name in names], options.turns)
    finally:
        shutil.rmtree(scratch)
    print(render_rows(COLUMNS, [row_of(name, turns) for name in turns[0]], "table"), end="")
    if options.samples is not None:
        options.samples.write_text(json.dumps([{n: s._asdict() for n, s in turn.items()} for turn in turns], indent=1))
    return 0


def calls_on(store: Path) -> List[Call]:
    """The calls that are timed on a store."""
    program = [sys.executable, "-m", "fugaku_gpt"]
    first = min(store.glob("*/*/result.json")).parent
    return [
        Call("find", ["find", str(store), "-name", "result.json"]),
        Call("start", [*program, "runs", "--help"]),
        Call("ls-anew", [*program, "runs", "ls", str(store)], forgets=True),
        Call("ls", [*program, "runs", "ls", str(store)]),
        Call("ls-run", [*program, "runs", "ls", str(store), "--columns", "run"]),
        Call("ls-where", [*program, "runs", "ls", str(store), "--where", "last_loss < 5", "--sort", "-last_loss"]),
        Call("show", [*program, "runs", "show", str(first)]),
        Call("table", [*program, "report", "table", str(first.parent)]),
    ]


def take_turns(store: Path, calls: Sequence[Call], turns: int) -> List[Dict[str, Sample]]:
    """Times every call in every turn, after one of them that fills the system's caches."""
    from fugaku_gpt.records.index import FILE

    samples = []
    for turn in range(turns + 1):
        measured = {}
        for call in calls:
            if call.forgets and (store / FILE).exists():
                (store / FILE).unlink()
            measured[call.name] = timed(call.command)
        print(f"turn {turn}/{turns}: " + ", ".join(f"{n} {s.cpu:.2f}" for n, s in measured.items()), file=sys.stderr)
        samples.append(measured)
    return samples[1:]


def timed(command: Sequence[str]) -> Sample:
    """Runs a command to its end.

    Raises:
        SystemExit: it fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)  # as `-m` finds it
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: failed; its message is above")
    return Sample(usage.ru_utime + usage.ru_stime, time.monotonic() - started, usage.ru_maxrss * 1024)


def row_of(name: str, turns: Sequence[Dict[str, Sample]]) -> Dict[str, Any]:
    """The row of the table of one call."""
    samples = [turn[name] for turn in turns]
    ratios = [turn[name].cpu / max(turn["find"].cpu, 1e-3) for turn in turns if "find" in turn]
    return {
        "call": name,
        "cpu s": middle([sample.cpu for sample in samples], 2),
        "s": middle([sample.seconds for sample in samples], 2),
        "of find": f"{statistics.median(ratios):.1f}" if ratios else None,
        "MiB": f"{max(sample.peak_bytes for sample in samples) / 2**20:.0f}",
    }


def make_store(store: Path, runs: int) -> None:
    """Writes a store: the files of each run are those that `train` leaves, without its checkpoints."""
    from fugaku_gpt.config import dump_run_config, load_run_config
    from fugaku_gpt.records.summary import summarise
    from fugaku_gpt.records.sweep import SweepEntry, digest_of_config

    for start in range(0, runs, SETTINGS * REPEATS):
        sweep = f"sweep-{start // (SETTINGS * REPEATS):04d}"
        for row in range(min(SETTINGS, -(-(runs - start) // REPEATS))):
            rate = 1e-3 * (row % 5 + 1) + 1e-9 * start
            overrides = [f"training.lr={rate:.9g}", f"layout.dp={2 ** (row // 5)}", "training.global_batch=64"]
            config = load_run_config(preset="tiny", overrides=[*overrides, f"training.iterations={ITERATIONS}"])
            text, digest = dump_run_config(config), digest_of_config(config)
            for repeat in range(1, min(REPEATS, runs - start - row * REPEATS) + 1):
                lines = metric_lines(row, repeat)
                iterations = [line for line in lines if line["kind"] == "iteration"]
                summary = summarise(config, iterations, [line for line in lines if line["kind"] == "validation"])
                entry = SweepEntry(sweep, f"row{row}-r{repeat}", f"row{row}", row, repeat, digest)
                write_run(store / sweep / entry.run, text, entry, lines, summary)


def write_run(folder: Path, config: str, entry: Any, lines: List[Dict[str, Any]], summary: Dict[str, Any]) -> None:
    """Writes the files of one run, without waiting for the disk."""
    from fugaku_gpt.records.run import OK, Result

    result = Result(OK, "", 1.7e9, 1.7e9 + 25, ITERATIONS, summary, last_checkpoint=f"step-{ITERATIONS:08d}")
    flight = folder / "flight" / "000"
    flight.mkdir(parents=True)
    files = {
        "config.yaml": config,
        "sweep.json": json.dumps(asdict(entry), indent=2) + "\n",
        ".claim.1": json.dumps({"version": 1, "holder": "0" * 32, "host": "node-0", "pid": 1}, indent=2) + "\n",
        "environment.json": json.dumps(environment_of(summary["ranks"]), indent=2) + "\n",
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "result.json": json.dumps(asdict(result), indent=2) + "\n",
        "log.txt": "".join(f"iteration {line['iteration']} loss {line['loss']:.4f}\n" for line in lines),
        "flight/000/rank-000000.flight": "",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def metric_lines(row: int, repeat: int) -> List[Dict[str, Any]]:
    """The lines of ``metrics.jsonl``, with figures that differ between runs."""
    lines: List[Dict[str, Any]] = []
    for number in range(1, ITERATIONS + 1):
        seconds = 1.2 + (7919 * (number + 31 * repeat + 977 * row) % 1000) / 7000
        lines.append({
            "kind": "iteration", "iteration": number, "consumed_samples": 8 * number, "consumed_tokens": 2048 * number,
            "seconds": seconds, "lr": 1e-4, "global_batch": 8, "loss": 10.4 - number / 9 - row / 70 + repeat / 999,
            "grad_norm": 1.5 + seconds / 7, "samples_per_second": 8 / seconds, "tokens_per_second": 2048 / seconds,
            "tflops_notes": 0.05 / seconds, "tflops_exact": 0.06 / seconds, "rss_max_bytes": 481771520 + 4096 * repeat,
            "node_used_bytes": 3548139520 + 4096 * row, "hidden_communication": 0.1 / seconds,
            "compute_max": seconds - 0.1, "compute_min": seconds - 0.2, "compute_max_rank": 0, "compute_min_rank": 1,
            "compute_max_node": "node-0", "compute_min_node": "node-0",
        })  # fmt: skip
    first, last = ({"kind": "validation", "iteration": n, "loss": 10.4 - n / 9, "tokens": 8} for n in (0, ITERATIONS))
    return [first, *lines, last]


def environment_of(ranks: int) -> Dict[str, Any]:
    """The environment as rank 0 records it."""
    affinity = list(range(12))
    return {
        "version": 1,
        "build": {"torch": "2.13.0+cpu", "mkldnn": True, "blas": "mkl", "threads": 12},
        "mpi": {"library": "MPICH 4.2.0", "thread_level": "serialized", "tag_limit": 2**29},
        "git_commit": "0123abc",
        "toggles": [{"name": "tcmalloc", "requested": True, "applied": True, "seen": "libtcmalloc.so.4"}],
        "processor": "A64FX", "system": "Linux 5.14", "memory_limit_bytes": 32 * 2**30,
        "ranks": [{"rank": n, "host": f"node-{n // 4}", "threads": 12, "affinity": affinity} for n in range(ranks)],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
