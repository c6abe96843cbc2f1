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
from fugaku_gpt.simulator.environment import FOLDER_VARIABLE, MAX_RANKS_VARIABLE, STAND_IN_VARIABLE
from fugaku_gpt.simulator.placement import claim_nodes, node_numbers, ranks_on_nodes, read_coordinates

# options are listed without their dashes: each may be written with one or two
_RANK_FILES = {
    "std-proc": ("out", "err"),
    "of-proc": ("out", "err"),
    "stdout-proc": ("out",),
    "ofout-proc": ("out",),
    "stderr-proc": ("err",),
    "oferr-proc": ("err",),
}
_IGNORED_FILES = {  # options for a single file, which Fugaku ignores with a warning
    "std": "-of/-std(stdout/stderr outputs to {})",
    "of": "-of/-std(stdout/stderr outputs to {})",
    "stdout": "-ofout/-stdout(stdout outputs to {})",
    "ofout": "-ofout/-stdout(stdout outputs to {})",
    "stderr": "-oferr/-stderr(stderr outputs to {})",
    "oferr": "-oferr/-stderr(stderr outputs to {})",
}
_RANK_OPTIONS = ("n", "np", "c")
_WITH_ARGUMENT = ("ofprefix", "hostfile", "machinefile", "path", "am", "tune", "max-proc-per-node")
_WITHOUT_ARGUMENT = ("nompi", "debuglib", "tag-output", "oversubscribe", "q", "quiet", "v", "verbose")
_METACHARACTERS = re.compile(r"%(?:(?P<pad>0\d+)?(?:/(?P<round>\d+))?(?P<letter>[jJbsnmr]))")
DEFAULT_OUT = "./output.%j/%/1000r/%m/stdout"
DEFAULT_ERR = "./output.%j/%/1000r/%m/stderr"
_FORWARDED = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGUSR1, signals.SIGUSR2)


@dataclass
class Segment:
    """One program of the command; colons separate several programs."""

    ranks: Optional[int] = None
    environment: Dict[str, str] = field(default_factory=dict)
    argv: List[str] = field(default_factory=list)


@dataclass
class Command:
    """The parsed command line; ``out``, ``err``, ``stdin`` and ``coordinates`` are paths."""

    segments: List[Segment] = field(default_factory=list)
    out: str = DEFAULT_OUT
    err: str = DEFAULT_ERR
    stdin: str = ""
    coordinates: str = ""
    directory: str = ""
    warnings: List[str] = field(default_factory=list)


def parse_command(arguments: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Parse the command line.

    Raises:
        UsageError: an option is unknown, or there is no program.
    """
    command = Command()
    remaining = list(arguments)
    while True:
        segment = Segment()
        _read_segment(remaining, segment, command, environment)
        while remaining and remaining[0] != ":":
            segment.argv.append(remaining.pop(0))
        if not segment.argv:
            raise UsageError("mpiexec: no program to start")
        command.segments.append(segment)
        if not remaining:
            return command
        remaining.pop(0)


def _read_segment(remaining: List[str], segment: Segment, command: Command, environment: Mapping[str, str]) -> None:
    """Parse the options that precede one program."""

    def next_argument(option: str) -> str:
        if not remaining:
            raise UsageError(f"mpiexec: {option} needs an argument")
        return remaining.pop(0)

    while remaining and remaining[0].startswith("-") and len(remaining[0]) > 1:
        option = remaining.pop(0)
        name = option.lstrip("-")
        if name in _RANK_OPTIONS:
            text = next_argument(option)
            if not text.isdecimal() or int(text) < 1:
                raise UsageError(f"mpiexec: {option} {text}: not a number of processes")
            segment.ranks = int(text)
        elif name in _RANK_FILES:
            path = next_argument(option) + ".%m.%r"
            for stream in _RANK_FILES[name]:
                setattr(command, stream, path)
        elif name in _IGNORED_FILES:
            described_file = _IGNORED_FILES[name].format(next_argument(option))
            command.warnings.append(f"[WARN] PLE 0605 plexec ignore option {described_file}.")
        elif name == "x":
            variable, equals, value = next_argument(option).partition("=")
            segment.environment[variable] = value if equals else environment.get(variable, "")
        elif name in ("mca", "gmca"):  # settings of Fujitsu's MPI, which have no meaning here
            next_argument(option)
            next_argument(option)
        elif name == "stdin":
            command.stdin = os.path.abspath(next_argument(option))
        elif name == "vcoordfile":
            command.coordinates = os.path.abspath(next_argument(option))
        elif name in ("wdir", "wd"):
            command.directory = os.path.abspath(next_argument(option))
        elif name in _WITH_ARGUMENT:
            next_argument(option)
        elif name not in _WITHOUT_ARGUMENT:
            raise UsageError(f"mpiexec: {option}: not an option that this stand-in knows")


def expand_path(path: str, environment: Mapping[str, str], call_number: int, rank: int) -> str:
    """A path with its metacharacters expanded: ``%j %J %b %s %n`` of the job, ``%m`` the number of the mpiexec call,
    ``%r`` the rank, ``%04r`` padded, ``%/1000r`` rounded down."""
    values = {
        "j": environment.get("PJM_JOBID", ""),
        "J": environment.get("PJM_SUBJOBID", ""),
        "b": environment.get("PJM_BULKNUM", ""),
        "s": environment.get("PJM_STEPNUM", ""),
        "n": environment.get("PJM_JOBNAME", ""),
        "m": str(call_number),
        "r": str(rank),
    }

    def substitute(match: "re.Match[str]") -> str:
        value = values[match["letter"]]
        if match["round"] and value.isdecimal() and int(match["round"]):
            value = str(int(value) // int(match["round"]) * int(match["round"]))
        return value.zfill(int(match["pad"])) if match["pad"] else value

    return _METACHARACTERS.sub(substitute, path)


def node_local_ranks(ranks: int, environment: Mapping[str, str]) -> List[int]:
    """The number of each rank on its node (``PLE_RANK_ON_NODE``)."""
    per_node = max(1, int(environment.get("PJM_PROC_BY_NODE", "1")))
    nodes = max(1, int(environment.get("PJM_NODE", "1")))
    if "PJM_RANK_MAP_BYNODE" in environment:
        return [rank // nodes for rank in range(ranks)]
    return [rank % per_node for rank in range(ranks)]


def nodes_of_ranks(ranks: int, environment: Mapping[str, str]) -> List[int]:
    """The number of each rank's node in the job, from 0."""
    per_node = max(1, int(environment.get("PJM_PROC_BY_NODE", "1")))
    nodes = max(1, int(environment.get("PJM_NODE", "1")))
    if "PJM_RANK_MAP_BYNODE" in environment:
        return [rank % nodes for rank in range(ranks)]
    return [rank // per_node for rank in range(ranks)]


def _make_call_folder(job_folder: Path) -> Tuple[int, Path]:
    """Number of mpiexec calls of this job, including this one, and a new folder for the files of this call."""
    call_number = 1
    while True:
        call_folder = job_folder / f"mpiexec.{call_number}"
        try:
            call_folder.mkdir(parents=True)
            return call_number, call_folder
        except FileExistsError:
            call_number += 1


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start the ranks and wait for them; return the exit code of ``mpirun``."""
    if FOLDER_VARIABLE not in environment:
        raise UsageError("mpiexec: only inside a job of the simulator")
    command = parse_command(arguments, environment)
    for warning in command.warnings:
        print(warning, file=sys.stderr)
    default = int(environment.get("PJM_MPI_PROC", "1"))
    ranks = [segment.ranks or (default if len(command.segments) == 1 else 1) for segment in command.segments]
    total = sum(ranks)
    limit = int(environment[MAX_RANKS_VARIABLE])
    if total > limit:
        raise UsageError(f"mpiexec: {total} processes: this simulator starts at most {limit}")
    capacity = int(environment.get("PJM_PROC_BY_NODE", "1")) * int(environment.get("PJM_NODE", "1"))
    if total > capacity:
        raise UsageError(f"mpiexec: {total} processes: the job has room for {capacity} (--mpi proc, max-proc-per-node)")
    coordinates = read_coordinates(command.coordinates, total, environment) if command.coordinates else None
    job_folder = Path(environment[FOLDER_VARIABLE])
    call_number, folder = _make_call_folder(job_folder)
    claim = claim_nodes(job_folder, folder, None if coordinates is None else frozenset(coordinates))
    files = {
        str(rank): {
            "out": os.path.abspath(expand_path(_with_rank(command.out), environment, call_number, rank)),
            "err": os.path.abspath(expand_path(_with_rank(command.err), environment, call_number, rank)),
        }
        for rank in range(total)
    }
    plan = {
        "files": files,
        "stdin": command.stdin,
        "directory": command.directory,
        "folder": str(folder),
        "variables": sorted(set(environment) - {STAND_IN_VARIABLE}),
        "environment": [segment.environment for segment in command.segments],
        "rank_on_node": node_local_ranks(total, environment) if coordinates is None else ranks_on_nodes(coordinates),
        "nodes": nodes_of_ranks(total, environment) if coordinates is None else node_numbers(coordinates, environment),
    }
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(plan), encoding="utf-8")
    with claim:
        code = _launch(command, ranks, plan_file, environment)
    _remove_empty(files, environment)
    return code


def _with_rank(path: str) -> str:
    """A default path with the call and the rank appended, as paths of options already have them."""
    return path + ".%m.%r" if path in (DEFAULT_OUT, DEFAULT_ERR) else path


def _launch(command: Command, ranks: List[int], plan_file: Path, environment: Mapping[str, str]) -> int:
    """Run ``mpirun`` with a small wrapper around each rank; return its exit code."""
    from fugaku_gpt.launch.launcher import find_launcher

    simulator_bin = str(Path(environment[FOLDER_VARIABLE]).parents[1] / "bin")
    outer_path = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join(entry for entry in outer_path.split(os.pathsep) if entry != simulator_bin)
    try:
        launcher = find_launcher()
    finally:
        os.environ["PATH"] = outer_path
    wrapper = [sys.executable, "-I", "-S", str(Path(simulator_bin).parent / "lib" / "rank.py"), str(plan_file)]
    argv: List[str] = []
    for index, segment in enumerate(command.segments):
        prefix = launcher.command_prefix(ranks[index]) if index == 0 else [":", "-n", str(ranks[index])]
        argv += [*prefix, *wrapper, str(index), *segment.argv]
    process = subprocess.Popen(argv, env={**environment, **launcher.environment}, stdin=subprocess.DEVNULL)

    def forward(signal_number: int, frame: Optional[FrameType]) -> None:
        """Send the signal to the ranks themselves: this machine's mpirun would end them at once instead."""
        signalled = 0
        for pid_file in plan_file.parent.glob("rank.*"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid_file.read_text(encoding="ascii")), signal_number)
                signalled += 1
        if not signalled:
            process.send_signal(signal_number)

    for signal_number in _FORWARDED:
        signals.signal(signal_number, forward)
    code = process.wait()
    return 128 - code if code < 0 else code


def _remove_empty(files: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]) -> None:
    """Remove empty output files: Fugaku creates none for a silent rank, unless ``PLE_MPI_STD_EMPTYFILE=on``."""
    if environment.get("PLE_MPI_STD_EMPTYFILE") == "on":
        return
    for paths in files.values():
        for path in {paths["out"], paths["err"]}:
            with contextlib.suppress(OSError):
                if os.path.getsize(path) == 0:
                    os.unlink(path)


def main(arguments: Sequence[str]) -> int:
    """Run ``mpiexec``; errors go to standard error in Fugaku's form, with exit code 1."""
    if arguments[:1] in (["--version"], ["-V"], ["-version"]):
        print(f"mpiexec ({BANNER})")
        return 0
    try:
        return run(arguments, dict(os.environ))
    except FugakuGptError as error:
        text = str(error) if str(error).startswith("PLE ") else f"PLE plexec {error}"
        print(f"[ERR.] {text}", file=sys.stderr)
        return 1
