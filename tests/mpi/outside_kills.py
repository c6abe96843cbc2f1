"""Kills healthy runs from outside, at random moments and by different means: the doctor must accuse no rank.

    python -m tests.mpi.outside_kills --kills 200 --seed 1 [--keep FOLDER]

Only where one rank alone was killed, or its supervisor, is that rank the cause.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

import psutil

from fugaku_gpt.doctor.hang import hang_report
from fugaku_gpt.doctor.run import diagnose
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.flight import CHECKPOINT, FINISHED, VALIDATION, flight_file, read_flight, read_head
from fugaku_gpt.records.run import RunDirectory
from tests.mpi.hangs import ROOT
from tests.support.corpus import write_byte_corpus

SETTINGS = (
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.seq_len=16",
    "model.vocab_size=256",
    "training.global_batch=8",
    "training.micro_batch=1",
    "training.eval_interval=4",
    "training.eval_batches=1",
    "training.lr_schedule=constant",
    "checkpoint.interval=3",
    "node.threads_per_rank=1",
    "node.memory_guard=false",  # other programs on this machine are no part of this
)
LAYOUTS: Dict[int, Tuple[Tuple[str, ...], ...]] = {
    1: ((),),
    2: (("layout.dp=2",), ("layout.dp=2", "layout.zero=1"), ("layout.tp=2",), ("layout.pp=2",)),
    4: (("layout.dp=2", "layout.tp=2"), ("layout.tp=2", "layout.pp=2")),
}
STAGES = ("start", "step", "communication", "checkpoint", "evaluation", "end")
ALL, RANKS, MPIRUN, PROXY, SUPERVISOR, RANK, STOP, LAUNCHER = MEANS = (
    "everything",
    "ranks",
    "mpirun",
    "proxy",
    "supervisor",
    "rank",
    "stop",  # SIGTERM to the launcher, at which ranks stop with a checkpoint
    "launcher",
)
_ENDLESS, _SHORT = 10**6, 8  # iterations
_START_SECONDS = 5.0  # of a launch, on a machine with little to do: kills at the start come within them
_PATIENCE = 240.0  # seconds of a case
_END_SECONDS = 40.0  # for a run to end by itself after it was struck
_NAMES = {MPIRUN: ("mpiexec", "mpirun"), PROXY: ("hydra_pmi_proxy",), SUPERVISOR: ("rank-supervisor", "rank-superviso")}


@dataclass(frozen=True)
class Kill:
    """A run, and how and when it is killed.

    Attributes:
        ranks: number of ranks.
        settings: of the run's layout.
        stage: of the run, one of ``STAGES``.
        means: one of ``MEANS``.
        delay: a number from 0 to 1: how late in the stage.
        chosen: the rank that is struck, where it is one.
        is_asynchronous: whether checkpoints are written beside training.
    """

    ranks: int
    settings: Tuple[str, ...]
    stage: str
    means: str
    delay: float
    chosen: int
    is_asynchronous: bool

    @property
    def name(self) -> str:
        """Name of the case in reports."""
        return f"{self.ranks}-{self.stage}-{self.means}"


@dataclass(frozen=True)
class Verdict:
    """The answer of the doctor.

    Attributes:
        wrong: empty if no rank is accused that was not struck.
        seconds: from the kill to the end of all processes.
        result: status and reason of ``result.json``.
        text: the doctor's verdict.
    """

    kill: Kill
    wrong: str
    seconds: float
    result: str
    text: str


def all_kills(count: int, seed: int) -> List[Kill]:
    """Returns kills: every stage by every means in turn, mostly of two ranks, the rest drawn."""
    dice = random.Random(seed)
    pairs = list(itertools.product(STAGES, MEANS))
    dice.shuffle(pairs)
    kills = []
    for stage, means in itertools.islice(itertools.cycle(pairs), count):
        ranks = dice.choice((1, 2, 2, 2, 2, 4))
        chosen, settings = dice.randrange(ranks), dice.choice(LAYOUTS[ranks])
        kills.append(Kill(ranks, settings, stage, means, dice.random(), chosen, dice.random() < 0.5))
    return kills


def strike(kill: Kill, corpus: Path, out: Path) -> Verdict:
    """Starts a run, kills it, and asks the doctor."""
    iterations = _SHORT if kill.stage == "end" else _ENDLESS
    command = [sys.executable, "-m", "fugaku_gpt", "train", "--data", str(corpus), "--out", str(out)]
    command += ["--ranks", str(kill.ranks)]
    asynchronous = f"checkpoint.asynchronous={str(kill.is_asynchronous).lower()}"
    for setting in (*SETTINGS, *kill.settings, f"training.iterations={iterations}", asynchronous):
        command += ["--set", setting]
    with open(out.with_suffix(".txt"), "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    launcher = psutil.Process(process.pid)
    struck: List[psutil.Process] = []
    began = time.monotonic()
    tree: List[psutil.Process] = []
    try:
        if kill.stage == "start":
            time.sleep(kill.delay * _START_SECONDS)
        else:
            _wait_for(lambda: _has_begun(out, kill.ranks), process)
            tree = _tree(launcher)
            _wait_for(_moment(kill, out), process)
            time.sleep(kill.delay * (0.3 if kill.stage == "step" else 0.01))
        struck = _targets(kill, launcher, tree or _tree(launcher))
        began = time.monotonic()
        for target in struck:
            with contextlib.suppress(psutil.Error):
                target.send_signal(signal.SIGTERM if kill.means == STOP else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        while _left(out) and time.monotonic() - began < _END_SECONDS:
            time.sleep(0.1)
        seconds = time.monotonic() - began
    finally:
        for other in [*_left(out), *([launcher] if process.poll() is None else [])]:
            with contextlib.suppress(psutil.Error):
                other.kill()
        process.wait()
    return _ask(kill, out, seconds, bool(struck))


def _ask(kill: Kill, out: Path, seconds: float, was_struck: bool) -> Verdict:
    """Ask both forms of the doctor about the run."""
    try:
        result = RunDirectory(out).result()
        findings = diagnose(out).findings
        report = hang_report(out)
        culprits, text = report.hang.culprits if report.hang is not None else (), report.verdict
    except UsageError as error:  # it was killed before it had a directory, or recorders
        wrong = "" if kill.stage == "start" else "the doctor has no answer"
        return Verdict(kill, wrong, seconds, "", str(error))
    allowed = [(), (kill.chosen,)] if kill.means in (RANK, SUPERVISOR) else [()]
    wrong = "" if culprits in allowed else f"ranks {culprits} are accused"
    if not culprits and any("is the cause" in line or "are the cause" in line for line in findings):
        wrong = f"accused: {findings[0]}"
    is_named = kill.means == RANK and kill.ranks > 1 and kill.stage not in ("start", "end") and was_struck
    if is_named and culprits != (kill.chosen,):
        wrong = f"rank {kill.chosen} alone was killed, and is not named"
    return Verdict(kill, wrong, seconds, f"{result.status}: {result.reason}" if result is not None else "none", text)


def _has_begun(out: Path, ranks: int) -> bool:
    try:
        return all(read_head(flight_file(out / "flight", rank)).step >= 2 for rank in range(ranks))
    except UsageError:  # not created yet
        return False


def _moment(kill: Kill, out: Path) -> Callable[[], bool]:
    """The condition that the stage of a kill has come, for a run that has begun."""
    path = flight_file(out / "flight", kill.chosen)
    if kill.stage == "communication":
        return lambda: read_flight(path).waiting is not None
    phase = {"checkpoint": CHECKPOINT, "evaluation": VALIDATION, "end": FINISHED}.get(kill.stage)
    return lambda: phase is None or read_head(path).phase == phase or (out / "result.json").exists()


def _wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Wait for a moment of the run, or for its end."""
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < deadline and not condition():
        time.sleep(0.0005)


def _tree(launcher: psutil.Process) -> List[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [launcher, *launcher.children(recursive=True)]
    return []


def _targets(kill: Kill, launcher: psutil.Process, tree: List[psutil.Process]) -> List[psutil.Process]:
    """The processes to strike; without any of the kind that is wanted, such as a proxy under Open MPI, all."""
    supervisors = [process for process in tree if _name(process).startswith("rank-super")]
    numbers = {process.pid: process for process in supervisors}
    ranks = [process for process in tree if _parent(process) in numbers]
    if kill.means in (STOP, LAUNCHER):
        return [launcher]
    if kill.means == RANKS and ranks:
        return ranks
    by_rank = {RANK: ranks, SUPERVISOR: supervisors}.get(kill.means, [])
    chosen = [process for process in by_rank if _rank(process) == kill.chosen]
    if chosen:
        return chosen
    return [process for process in tree if _name(process) in _NAMES.get(kill.means, ())] or tree


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _parent(process: psutil.Process) -> Optional[int]:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _rank(process: psutil.Process) -> int:
    try:
        environment = process.environ()
    except psutil.Error:
        return -1
    return int(environment.get("PMI_RANK", environment.get("OMPI_COMM_WORLD_RANK", "-1")))


def _left(out: Path) -> List[psutil.Process]:
    """The living processes with the run directory among their arguments."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and str(out) in process.cmdline():
                processes.append(process)
    return processes


def run_kills(kills: List[Kill], folder: Path, at_once: int = 1) -> List[Verdict]:
    """Runs kills, some at once, and prints each."""
    corpus = write_byte_corpus(folder / "bytes")

    def strike_kill(number: int) -> Verdict:
        verdict = strike(kills[number], corpus, folder / f"{number:03d}-{kills[number].name}")
        remark = f"WRONG: {verdict.wrong}; " if verdict.wrong else ""
        print(
            f"{number:3d} {verdict.kill.name} ({verdict.seconds:.1f} s): {remark}{verdict.result} | {verdict.text}",
            flush=True,
        )
        return verdict

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(strike_kill, range(len(kills))))


def main() -> int:
    """Runs the kills and reports; exit code 1 unless no rank is accused."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", default="", help="Run only kills whose name contains this.")
    parser.add_argument("--keep", type=Path, help="Folder for the run directories; default: a temporary one.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.keep if options.keep is not None else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        kills = [kill for kill in all_kills(options.kills, options.seed) if options.only in kill.name]
        verdicts = run_kills(kills, folder, options.at_once)
    counts = Counter(verdict.kill.means for verdict in verdicts if verdict.wrong)
    by_means = f" ({', '.join(f'{count} by {means}' for means, count in counts.items())})" if counts else ""
    print(f"{len(verdicts)} kills of healthy runs: {sum(counts.values())} wrong answers{by_means}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
