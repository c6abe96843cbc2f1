"""The stand-in for Fujitsu's ``mpiexec``: its options and its files, with this machine's own ``mpirun`` behind it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal as signals
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import FugakuGptError, UsageError
from fugaku_gpt.simulator.client import BANNER
from fugaku_gpt.simulator.environment import FOLDER, PART, RANKS

# option (without its dashes) → what it is; each may be written with one or two dashes
_FILES = {
    "std-proc": ("out", "err"),
    "of-proc": ("out", "err"),
    "stdout-proc": ("out",),
    "ofout-proc": ("out",),
    "stderr-proc": ("err",),
    "oferr-proc": ("err",),
}
_IGNORED_FILES = {  # single files: ignored on Fugaku, with a warning
    "std": "-of/-std(stdout/stderr outputs to {})",
    "of": "-of/-std(stdout/stderr outputs to {})",
    "stdout": "-ofout/-stdout(stdout outputs to {})",
    "ofout": "-ofout/-stdout(stdout outputs to {})",
    "stderr": "-oferr/-stderr(stderr outputs to {})",
    "oferr": "-oferr/-stderr(stderr outputs to {})",
}
_COUNTS = ("n", "np", "c")
_WITH_ARGUMENT = ("vcoordfile", "ofprefix", "hostfile", "machinefile", "path", "am", "tune", "max-proc-per-node")
_WITHOUT_ARGUMENT = ("nompi", "debuglib", "tag-output", "oversubscribe", "q", "quiet", "v", "verbose")
_META = re.compile(r"%(?:(?P<pad>0\d+)?(?:/(?P<round>\d+))?(?P<letter>[jJbsnmr]))")
DEFAULT_OUT = "./output.%j/%/1000r/%m/stdout"
DEFAULT_ERR = "./output.%j/%/1000r/%m/stderr"
_FORWARDED = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGUSR1, signals.SIGUSR2)


@dataclass
class Segment:
    """One program of the command (several where colons part them)."""

    ranks: Optional[int] = None
    environment: Dict[str, str] = field(default_factory=dict)
    words: List[str] = field(default_factory=list)


@dataclass
class Command:
    """What was typed."""

    segments: List[Segment] = field(default_factory=list)
    out: str = DEFAULT_OUT
    err: str = DEFAULT_ERR
    stdin: str = ""
    directory: str = ""
    warnings: List[str] = field(default_factory=list)


def read_command(words: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Take the command line apart.

    Raises:
        UsageError: an option is not known, or there is no program.
    """
    command = Command()
    left = list(words)
    while True:
        segment = Segment()
        _read_segment(left, segment, command, environment)
        while left and left[0] != ":":
            segment.words.append(left.pop(0))
        if not segment.words:
            raise UsageError("mpiexec: no program to start")
        command.segments.append(segment)
        if not left:
            return command
        left.pop(0)


def _read_segment(left: List[str], segment: Segment, command: Command, environment: Mapping[str, str]) -> None:
    """The options before one program."""

    def argument(option: str) -> str:
        if not left:
            raise UsageError(f"mpiexec: {option} needs an argument")
        return left.pop(0)

    while left and left[0].startswith("-") and len(left[0]) > 1:
        option = left.pop(0)
        name = option.lstrip("-")
        if name in _COUNTS:
            text = argument(option)
            if not text.isdigit() or int(text) < 1:
                raise UsageError(f"mpiexec: {option} {text}: not a number of processes")
            segment.ranks = int(text)
        elif name in _FILES:
            path = argument(option) + ".%m.%r"
            for stream in _FILES[name]:
                setattr(command, stream, path)
        elif name in _IGNORED_FILES:
            where = _IGNORED_FILES[name].format(argument(option))
            command.warnings.append(f"[WARN] PLE 0605 plexec ignore option {where}.")
        elif name == "x":
            variable, equals, value = argument(option).partition("=")
            segment.environment[variable] = value if equals else environment.get(variable, "")
        elif name in ("mca", "gmca"):  # of Fujitsu's MPI: nothing here knows them
            argument(option)
            argument(option)
        elif name == "stdin":
            command.stdin = os.path.abspath(argument(option))
        elif name in ("wdir", "wd"):
            command.directory = os.path.abspath(argument(option))
        elif name in _WITH_ARGUMENT:
            argument(option)
        elif name not in _WITHOUT_ARGUMENT:
            raise UsageError(f"mpiexec: {option}: not an option that this stand-in knows")


def expand(path: str, environment: Mapping[str, str], count: int, rank: int) -> str:
    """A path with its metacharacters put in: ``%j %J %b %s %n`` of the job, ``%m`` this call's number, ``%r`` the rank,
    ``%04r`` padded, ``%/1000r`` rounded down."""
    values = {
        "j": environment.get("PJM_JOBID", ""),
        "J": environment.get("PJM_SUBJOBID", ""),
        "b": environment.get("PJM_BULKNUM", ""),
        "s": environment.get("PJM_STEPNUM", ""),
        "n": environment.get("PJM_JOBNAME", ""),
        "m": str(count),
        "r": str(rank),
    }

    def put(found: "re.Match[str]") -> str:
        value = values[found["letter"]]
        if found["round"] and value.isdigit() and int(found["round"]):
            value = str(int(value) // int(found["round"]) * int(found["round"]))
        return value.zfill(int(found["pad"])) if found["pad"] else value

    return _META.sub(put, path)


def places(ranks: int, environment: Mapping[str, str]) -> List[int]:
    """Each rank's number on its node (``PLE_RANK_ON_NODE``)."""
    per_node = max(1, int(environment.get("PJM_PROC_BY_NODE", "1")))
    nodes = max(1, int(environment.get("PJM_NODE", "1")))
    if "PJM_RANK_MAP_BYNODE" in environment:
        return [rank // nodes for rank in range(ranks)]
    return [rank % per_node for rank in range(ranks)]


def _number(folder: Path) -> Tuple[int, Path]:
    """How many calls of mpiexec this job has made with this one, and the folder for its notes."""
    count = 1
    while True:
        place = folder / f"mpiexec.{count}"
        try:
            place.mkdir(parents=True)
            return count, place
        except FileExistsError:
            count += 1


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start the ranks, wait for them; returns the exit code of ``mpirun``."""
    if FOLDER not in environment:
        raise UsageError("mpiexec: only inside a job of the simulator")
    command = read_command(words, environment)
    for warning in command.warnings:
        print(warning, file=sys.stderr)
    default = int(environment.get("PJM_MPI_PROC", "1"))
    ranks = [segment.ranks or (default if len(command.segments) == 1 else 1) for segment in command.segments]
    total = sum(ranks)
    limit = int(environment[RANKS])
    if total > limit:
        raise UsageError(f"mpiexec: {total} processes: this simulator starts at most {limit}")
    allowed = int(environment.get("PJM_PROC_BY_NODE", "1")) * int(environment.get("PJM_NODE", "1"))
    if total > allowed:
        raise UsageError(f"mpiexec: {total} processes: the job has room for {allowed} (--mpi proc, max-proc-per-node)")
    count, folder = _number(Path(environment[FOLDER]))
    files = {
        str(rank): {
            "out": os.path.abspath(expand(_ranked(command.out), environment, count, rank)),
            "err": os.path.abspath(expand(_ranked(command.err), environment, count, rank)),
        }
        for rank in range(total)
    }
    plan = {
        "files": files,
        "stdin": command.stdin,
        "directory": command.directory,
        "folder": str(folder),
        "part": PART,
        "environment": [segment.environment for segment in command.segments],
        "rank_on_node": places(total, environment),
    }
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(plan), encoding="utf-8")
    code = _launch(command, ranks, plan_file, environment)
    _remove_empty(files, environment)
    return code


def _ranked(path: str) -> str:
    """The default paths get call and rank after a dot, as those that are given already have."""
    return path + ".%m.%r" if path in (DEFAULT_OUT, DEFAULT_ERR) else path


def _launch(command: Command, ranks: List[int], plan_file: Path, environment: Mapping[str, str]) -> int:
    """``mpirun`` with one small wrapper around each rank."""
    from fugaku_gpt.launch.launcher import find_launcher

    own = str(Path(environment[FOLDER]).parents[1] / "bin")
    outer = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join(part for part in outer.split(os.pathsep) if part != own)
    try:
        launcher = find_launcher()
    finally:
        os.environ["PATH"] = outer
    wrapper = [sys.executable, "-I", "-S", str(Path(own).parent / "lib" / "rank.py"), str(plan_file)]
    argv: List[str] = []
    for index, segment in enumerate(command.segments):
        start = launcher.start(ranks[index]) if index == 0 else [":", "-n", str(ranks[index])]
        argv += [*start, *wrapper, str(index), *segment.words]
    process = subprocess.Popen(argv, env={**environment, **launcher.environment}, stdin=subprocess.DEVNULL)

    def forward(number: int, frame: Optional[FrameType]) -> None:
        """To the ranks themselves: this machine's mpirun would end them at once instead."""
        reached = 0
        for note in plan_file.parent.glob("rank.*"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(note.read_text(encoding="ascii")), number)
                reached += 1
        if not reached:
            process.send_signal(number)

    for number in _FORWARDED:
        signals.signal(number, forward)
    code = process.wait()
    return 128 - code if code < 0 else code


def _remove_empty(files: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]) -> None:
    """Fugaku makes no file for a rank that says nothing, unless ``PLE_MPI_STD_EMPTYFILE=on``."""
    if environment.get("PLE_MPI_STD_EMPTYFILE") == "on":
        return
    for paths in files.values():
        for path in {paths["out"], paths["err"]}:
            with contextlib.suppress(OSError):
                if os.path.getsize(path) == 0:
                    os.unlink(path)


def main(words: Sequence[str]) -> int:
    """``mpiexec``; a mistake is told as on Fugaku's standard error, with exit code 1."""
    if words[:1] in (["--version"], ["-V"], ["-version"]):
        print(f"mpiexec ({BANNER})")
        return 0
    try:
        return run(words, dict(os.environ))
    except FugakuGptError as error:
        print(f"[ERR.] PLE plexec {error}", file=sys.stderr)
        return 1
