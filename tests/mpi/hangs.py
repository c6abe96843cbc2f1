"""Runs seeded faults in several layouts: each must end in time without an orphan, and the doctor name rank and call.

    python -m tests.mpi.hangs --cases 64 --seed 1 --healthy 50 [--keep FOLDER]

Each case is a training run under ``mpirun`` with a fault on one rank (see ``tests/mpi/faults.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from fugaku_gpt.doctor.hang import HangReport, hang_report, report_lines
from fugaku_gpt.hang.history import DISAGREE, EXTRA_CALL, LEFT_OUT, ORDER
from fugaku_gpt.hang.recorders import IN_WAIT
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.records.run import FAILED, HUNG, OK, RunDirectory
from tests.mpi.faults import CALL_KINDS, KINDS, SLOW, STATE_KINDS, Fault
from tests.support.corpus import write_byte_corpus

ROOT = Path(__file__).resolve().parent.parent.parent
HANG_TIMEOUT = 5.0  # seconds
PATIENCE = 240.0  # seconds of a case, from start to end, on a busy machine
STEP = 4  # the step of the fault; those before it are the example
SETTINGS = (
    "model.layers=4",
    "model.hidden=16",
    "model.heads=2",
    "model.seq_len=16",
    "model.vocab_size=256",
    "training.iterations=6",
    "training.global_batch=8",
    "training.micro_batch=1",
    "training.log_interval=2",
    "training.eval_interval=null",
    "training.bucket_mib=0.01",
    "node.threads_per_rank=1",
    "node.memory_guard=false",  # other programs on this machine are no part of this
)
CHECKED = ("--check-collectives",)
TOLERATED = ("shape", "extra")  # faults that MPI may let pass in silence, and only checks detect

DIAGNOSES = {  # kinds of the doctor's finding for a kind of fault
    "skip": (LEFT_OUT,),
    "swallow": (LEFT_OUT,),
    "extra": (EXTRA_CALL,),
    "shape": (DISAGREE,),
    "order": (ORDER,),
}


@dataclass(frozen=True)
class Layout:
    """A layout, with the least number of calls on each communicator that rank 0 makes in a step."""

    name: str
    ranks: int
    settings: Tuple[str, ...]
    groups: Dict[str, int]


LAYOUTS = (
    Layout("dp2", 2, ("layout.dp=2",), {"dp": 3, "world": 1}),
    Layout("dp2-zero", 2, ("layout.dp=2", "layout.zero=1"), {"dp": 3, "world": 1}),
    Layout("tp2", 2, ("layout.tp=2",), {"tp": 40, "world": 1}),
    Layout("tp2-sp", 2, ("layout.tp=2", "layout.sequence_parallel=true"), {"tp": 40, "world": 1}),
    Layout("pp2", 2, ("layout.pp=2",), {"pp": 8, "world": 1}),
    Layout("pp2-gpipe", 2, ("layout.pp=2", "layout.schedule=gpipe"), {"pp": 8, "world": 1}),
    Layout("dp3", 3, ("layout.dp=3", "training.global_batch=6"), {"dp": 3, "world": 1}),
    Layout("dp2-tp2", 4, ("layout.dp=2", "layout.tp=2", "layout.zero=1"), {"tp": 20, "dp": 3, "world": 1}),
    Layout("dp2-pp2", 4, ("layout.dp=2", "layout.pp=2", "layout.zero=1"), {"pp": 4, "dp": 2, "world": 1}),
    Layout("tp2-pp2", 4, ("layout.tp=2", "layout.pp=2"), {"tp": 20, "pp": 8, "world": 1}),
)


@dataclass(frozen=True)
class Case:
    """A run with a fault."""

    layout: Layout
    fault: Fault

    @property
    def name(self) -> str:
        """The name of the case in reports, and that of its folder."""
        fault = self.fault
        return f"{self.layout.name}-{fault.kind}-rank{fault.rank}-{fault.group}-{fault.nth}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended; ``wrong`` is empty where the diagnosis is right.

    Attributes:
        seconds: duration of the run that was judged.
        checked: MPI let the fault pass in silence, so that the run was repeated with ``--check-collectives``.
    """

    case: Case
    wrong: str
    seconds: float
    verdict: str
    checked: bool = False


def all_cases(count: int, seed: int) -> List[Case]:
    """Returns ``count`` cases: every kind in turn, on layouts in turn, the rest drawn."""
    dice = random.Random(seed)
    pairs = [(kind, layout) for layout in LAYOUTS for kind in KINDS]
    dice.shuffle(pairs)
    return [_case(dice, kind, layout) for kind, layout in (pairs * (count // len(pairs) + 1))[:count]]


def _case(dice: random.Random, kind: str, layout: Layout) -> Case:
    groups = [group for group in layout.groups if group != "pp" or kind not in ("order",)]
    if kind == "order":  # the other group must be joined by all of this one's ranks
        groups = [group for group in groups if group != "world"] or ["world"]
    group = dice.choice(groups)
    rank = dice.randrange(layout.ranks)
    method = "start_send" if group == "pp" and kind in CALL_KINDS else ""
    calls = layout.groups[group] // (2 if method else 1)
    return Case(layout, Fault(kind, rank, group, STEP, dice.randrange(calls), method))


def strike(case: Case, corpus: Path, out: Path, checks: Tuple[str, ...] = ()) -> Outcome:
    """Runs a case and compares the doctor's diagnosis with the fault."""
    began = time.monotonic()
    code, output = train(case.layout, case.fault, corpus, out, ("--hang-timeout", str(HANG_TIMEOUT), *checks))
    seconds = time.monotonic() - began
    expected = json.loads((out / "fault.json").read_text()) if (out / "fault.json").exists() else None
    if expected is None:
        return Outcome(case, f"the fault was never struck (exit code {code}): {output[-600:]}", seconds, "")
    pids = orphans(out)
    if code == 0 and case.fault.kind in TOLERATED and not checks and not pids:
        return strike(case, corpus, out.with_name(f"{out.name}-checked"), CHECKED)
    report = hang_report(out)
    wrong = judge(case.fault, expected, report, RunDirectory(out), code)
    if pids:
        wrong = f"{len(pids)} processes left behind; {wrong}"
    (out / "report.txt").write_text("\n".join(report_lines(report)) + "\n", encoding="utf-8")
    (out / "output.txt").write_text(output, encoding="utf-8")
    return Outcome(case, wrong, seconds, report.verdict, bool(checks))


def train(layout: Layout, fault: Fault, corpus: Path, out: Path, options: Tuple[str, ...]) -> Tuple[int, str]:
    """Returns exit code and output of a run; kills it, with exit code -9, if it does not end by itself."""
    launcher = find_launcher()
    command = [
        *launcher.command_prefix(layout.ranks),
        sys.executable,
        "-m",
        "tests.mpi.faults",
        json.dumps(asdict(fault)),
    ]
    command += ["train", "--data", str(corpus), "--out", str(out), *options]
    for setting in (*SETTINGS, *layout.settings):
        command += ["--set", setting]
    environment = {**os.environ, **launcher.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return -signal.SIGKILL, output.decode("utf-8", "replace")
    return process.returncode, output.decode("utf-8", "replace")


def orphans(out: Path) -> List[int]:
    """Returns the processes that still run for this run directory."""
    pids: List[int] = []
    for _ in range(20):
        pids = list(_processes(str(out)))
        if not pids:
            break
        time.sleep(0.1)
    return pids


def _processes(word: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                yield int(path.parent.name)
        except OSError:  # ended meanwhile
            continue


def judge(fault: Fault, expected: Dict[str, Any], report: HangReport, directory: RunDirectory, code: int) -> str:
    """Returns what is wrong with the diagnosis; "" if it names the rank and the call."""
    if code == -signal.SIGKILL:
        return "the run did not end by itself"
    if code == 0:
        return "the run ended as if nothing had been"
    result = directory.result()
    if result is None or result.status not in (HUNG, FAILED):
        return f"recorded as {result}"
    hang = report.hang
    if hang is None or hang.culprits != (fault.rank,):
        return f"rank {fault.rank} did it"
    call = hang.call
    if call is None:
        return "no call is named"
    if fault.kind in STATE_KINDS:
        waits = [position for position in hang.positions if position.state == IN_WAIT and fault.rank in position.absent]
        culprit_position = next(position for position in hang.positions if fault.rank in position.ranks)
        if not waits or culprit_position.step != fault.step or culprit_position.micro_batch != expected["micro_batch"]:
            return f"the place of rank {fault.rank} is not as in {expected}, or nobody waits for it"
        return ""
    if hang.kind not in DIAGNOSES[fault.kind]:
        return f"a rank that {fault.kind}s is diagnosed as {hang.kind!r}"
    # of two calls in another order, either is a true answer: they are made by the same line here
    groups = (fault.group, expected["other"]) if fault.kind == "order" else (fault.group,)
    if call.communicator not in groups or (call.step, call.site) != (fault.step, expected["site"]):
        return f"the call is {call}, and should be {expected}"
    return ""


def healthy(count: int, seed: int, corpus: Path, folder: Path) -> Tuple[int, int]:
    """Returns (runs, false alarms) of slow runs, which pause up to two thirds of the timeout at random calls."""
    dice = random.Random(seed)
    alarms = 0
    for number in range(count):
        layout = dice.choice(LAYOUTS)
        fault = Fault(SLOW, 0, "", 0, sum(layout.groups.values()), seconds=HANG_TIMEOUT * 2 / 3)
        out = folder / f"healthy-{number:02d}"
        code, output = train(layout, fault, corpus, out, ("--hang-timeout", str(HANG_TIMEOUT)))
        result = RunDirectory(out).result()
        if code != 0 or result is None or result.status != OK:
            alarms += 1
            print(f"healthy {number} {layout.name}: {result}\n{output[-2000:]}", flush=True)
    return count, alarms


def main() -> int:
    """Runs the cases and reports; exit code 1 unless every diagnosis is right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=len(KINDS) * len(LAYOUTS))
    parser.add_argument("--healthy", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Run only cases whose name contains this.")
    parser.add_argument("--part", default="1/1", help="Run a part of the cases, such as 2/3, beside other processes.")
    parser.add_argument("--keep", type=Path, help="Folder for the run directories; default: a temporary one.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.keep if options.keep is not None else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        corpus = write_byte_corpus(folder / "bytes")
        wrong = _strike_all(options, corpus, folder)
        runs, alarms = healthy(options.healthy, options.seed, corpus, folder)
        if runs:
            print(f"{runs} slow but healthy runs: {alarms} false alarms")
    return 1 if wrong or alarms else 0


def _strike_all(options: argparse.Namespace, corpus: Path, folder: Path) -> int:
    part, _, part_count = options.part.partition("/")
    cases = [case for case in all_cases(options.cases, options.seed) if options.only in case.name]
    cases = cases[int(part) - 1 :: int(part_count)]
    wrong, longest = 0, 0.0
    for number, case in enumerate(cases, start=1):
        outcome = strike(case, corpus, folder / f"{number:03d}-{case.name}")
        longest = max(longest, outcome.seconds)
        wrong += bool(outcome.wrong)
        remark = "MPI let it pass in silence; with --check-collectives: " if outcome.checked else ""
        remark += f"WRONG: {outcome.wrong}\n    " if outcome.wrong else ""
        print(f"{number:3d} {case.name} ({outcome.seconds:.0f} s): {remark}{outcome.verdict}", flush=True)
    if cases:
        print(f"{len(cases)} faults: {len(cases) - wrong} right answers; the longest took {longest:.0f} s")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
