"""Checks whether this machine is able to train; each check reports what was seen and how to mend it."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.launch.processes import run_command
from fugaku_gpt.machine import fugaku, local
from fugaku_gpt.machine.rank import without_launch_variables
from fugaku_gpt.machine.shared_memory import SHARED_MEMORY
from fugaku_gpt.machine.system import this_system

OK = "ok"
WARN = "warn"
FAIL = "fail"
PROBE_SECONDS = 120.0
_IMPORT_SECONDS = 600.0  # on a busy parallel file system, importing PyTorch takes minutes

# Run in another process, so that this one needs neither torch nor MPI, and survives if loading them crashes.
_TORCH_PROBE = "import json; from fugaku_gpt.compat import build_facts; print(json.dumps(build_facts()))"
_MPI_PROBE = "import json; from fugaku_gpt.comm import mpi_facts; print(json.dumps(mpi_facts()))"
_SUM_PROBE = (
    "import sys; from mpi4py import MPI; world = MPI.COMM_WORLD; total = world.allreduce(world.Get_rank() + 1); "
    "print('sum', total, 'size', world.Get_size()) if world.Get_rank() == 0 else None; "
    "sys.exit(0 if total == 3 and world.Get_size() == 2 else 1)"
)


@dataclass(frozen=True)
class Check:
    """One check: name, status (``ok``, ``warn`` or ``fail``), what was seen, and how to mend it (empty where ok)."""

    name: str
    status: str
    seen: str
    mend: str = ""


def check_machine() -> List[Check]:
    """Runs all checks, in an order in which later checks depend on earlier ones."""
    return [
        check_python(),
        check_package("numpy", FAIL, "pip install numpy"),
        check_torch(),
        check_mpi(),
        check_launcher(),
        check_ranks(),
        *check_node(),
    ]


def check_node() -> List[Check]:
    """The checks of what the system gives to processes on this node; they start no process."""
    return [
        check_cores(),
        check_memory(local.memory_limit()),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_shared_memory(this_system().path(SHARED_MEMORY)),
        check_tcmalloc(local.find_tcmalloc()),
        check_package("tokenizers", OK, "only `data prepare` needs it: pip install tokenizers"),
        check_clock(local.clock_mhz()),
        check_retention(local.job_resources()),
    ]


def check_python() -> Check:
    """Checks that the interpreter is at least Python 3.8."""
    seen = f"{platform.python_version()} at {sys.executable}"
    return Check("Python", OK if sys.version_info >= (3, 8) else FAIL, seen, "")


def check_package(name: str, missing: str, mend: str) -> Check:
    """Checks that a package is installed; ``missing`` is the status where it is not."""
    try:
        return Check(name, OK, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, missing, "not installed", mend)


def check_torch() -> Check:
    """Checks PyTorch, which is loaded in a process of its own."""
    facts, problem = _probe(_TORCH_PROBE)
    if facts is None:
        return Check("PyTorch", FAIL, problem, "make install, or pip install torch")
    seen = (
        f"{facts['torch']}, BLAS {facts['blas']}, kernels for {facts['instruction_set']}, "
        f"{facts['torch_threads']} threads"
    )
    return Check("PyTorch", OK, seen)


def check_mpi() -> Check:
    """Checks mpi4py and the MPI library that it loads, in a process of its own."""
    facts, problem = _probe(_MPI_PROBE)
    if facts is None:
        return Check("MPI library", FAIL, problem, "make install, or pip install mpi4py mpich")
    seen = f"{facts['library']}, threads: {facts['thread_level']}, mpi4py {facts['mpi4py']}"
    return Check("MPI library", OK, seen)


def check_launcher() -> Check:
    """Checks that an ``mpirun`` exists."""
    try:
        launcher = find_launcher()
    except UsageError as error:
        if _is_in_pjm_job():
            return Check("mpirun", OK, f"none of ours: {_PJM_STARTS_RANKS}")
        first, *more = str(error).splitlines()
        return Check("mpirun", FAIL, first, more[-1] if more else "")
    return Check("mpirun", OK, f"{launcher.family} {launcher.version} at {launcher.path}")


def check_ranks(seconds: float = PROBE_SECONDS) -> Check:
    """Starts two ranks that add two numbers; detects a launcher and a library that do not belong together."""
    name = "two ranks"
    try:
        launcher = find_launcher()
    except UsageError:
        if _is_in_pjm_job():
            return Check(name, OK, "not tried: `fugaku-gpt doctor node --job pjm` measures with the ranks of a job")
        return Check(name, FAIL, "no mpirun to start them", "see mpirun")
    lines: List[str] = []
    argv = [*launcher.command_prefix(2), sys.executable, "-c", _SUM_PROBE]
    outcome = run_command(argv, launcher.environment, timeout=seconds, on_line=lines.append)
    if outcome.ok:
        return Check(name, OK, f"all-reduce of 1 and 2 is 3, in {outcome.seconds:.1f} s with start-up")
    mend = "mpirun and mpi4py's MPI library must be of one family: make install, or set PATH to its mpirun"
    if outcome.timed_out:
        return Check(name, FAIL, f"all-reduce did not end within {seconds:g} s", mend)
    single_rank_lines = [line for line in lines if line.startswith("sum 1 size 1")]
    detail = (
        "each rank is alone: size 1" if single_rank_lines else " / ".join(line for line in lines if line.strip())[:200]
    )
    return Check(name, FAIL, f"exit code {outcome.exit_code}: {detail}", mend)


def check_cores() -> Check:
    """Checks how many of the machine's cores this process may use, and the quota of its control group."""
    usable, total = len(local.usable_cores()), len(local.online_cores())
    processor = local.processor_name()
    seen = f"{usable} of {total} usable, {processor} ({' '.join(local.vector_flags())})"
    if processor == local.A64FX:  # its two to four assistant cores are the system's: no job has them
        total = min(total, fugaku.CORES)
    share = cpu_share(this_system().read("sys/fs/cgroup/cpu.max") or "")
    if share is not None and share < usable:
        return Check("cores", WARN, f"{seen}, but a quota of {share:g} cores", "raise the container's CPU limit")
    if usable < total:
        return Check("cores", WARN, seen, "an affinity mask holds the rest back: see taskset, or the job's allocation")
    return Check("cores", OK, seen)


def cpu_share(text: str) -> Optional[float]:
    """Number of cores that a control group's ``cpu.max`` allows; None for no limit."""
    quota_and_period = text.split()
    if len(quota_and_period) != 2 or not (quota_and_period[0].isdecimal() and quota_and_period[1].isdecimal()):
        return None
    return int(quota_and_period[0]) / int(quota_and_period[1])


def check_memory(limit: int) -> Check:
    """Checks the memory that all processes of this node may use together, ``limit`` in bytes."""
    used = local.node_used_bytes()
    seen = f"{limit / 2**30:.1f} GiB, {used / 2**30:.1f} GiB in use"
    if limit - used < 2**30:
        return Check("memory", WARN, seen, "less than 1 GiB is left: end other processes, or take a small model")
    return Check("memory", OK, seen)


def check_open_files(limit: int) -> Check:
    """Checks the number of files and connections that one process may have open."""
    unlimited = limit == resource.RLIM_INFINITY
    if not unlimited and limit < 1024:
        return Check("open files", WARN, str(limit), "many ranks on one node need more: ulimit -n 4096")
    return Check("open files", OK, "unlimited" if unlimited else str(limit))


def check_shared_memory(directory: Path) -> Check:
    """Checks the directory in which MPI stores the memory that the ranks of one node share."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return Check(
            "shared memory",
            WARN,
            f"no {directory}",
            f"MPI between ranks of one node may be slow or fail: mount {directory}",
        )
    free = status.f_bavail * status.f_frsize
    seen = f"{free / 2**20:.0f} MiB free in {directory}"
    if free < 256 * 2**20:
        return Check("shared memory", WARN, seen, "give the container more, such as docker run --shm-size=1g")
    return Check("shared memory", OK, seen)


def check_tcmalloc(library: Optional[Path]) -> Check:
    """Checks the allocator for ``node.tcmalloc``."""
    if library is None and local.processor_name() == local.A64FX:
        seen = "not among the system's libraries: a profile of env/ names that of its build"
        return Check("tcmalloc", OK, seen)
    if library is None:
        mend = "runs with node.tcmalloc will be recorded as `not applied`; on Debian: apt install libtcmalloc-minimal4"
        return Check("tcmalloc", WARN, "not installed", mend)
    return Check("tcmalloc", OK, str(library))


def check_clock(mhz: Optional[int]) -> Check:
    """Checks the control of the clock; its absence is normal outside a job on Fugaku."""
    if mhz is None:
        return Check("clock", OK, "not fixed here: node.freq_mhz will be recorded as `not applied`")
    return Check("clock", OK, f"fixed to {mhz} MHz")


def check_retention(resources: Dict[str, str]) -> Check:
    """Checks the control of A64FX's idle-core sleep; its absence is normal outside a job on Fugaku."""
    state = resources.get("retention_state")
    if state is None:
        seen = "no control here: node.retention_state will be recorded as `not applied`"
        return Check("retention_state", OK, seen)
    return Check("retention_state", OK, f"{state}, as granted to this job")


_PJM_STARTS_RANKS = "the mpiexec of this PJM job starts its ranks"


def _is_in_pjm_job() -> bool:
    return bool(os.environ.get("PJM_JOBID"))


def _probe(program: str) -> Tuple[Optional[Dict[str, Any]], str]:
    """Runs a Python program that prints JSON; returns (its facts, ""), or (None, the reason of the failure).

    It is no rank, though this process may be one: MPI would refuse a second process with the rank of the first.
    """
    try:
        completed = subprocess.run(
            [sys.executable, "-c", program],
            env=without_launch_variables(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    error_lines = completed.stderr.decode("utf-8", "replace").strip().splitlines()
    if completed.returncode != 0:
        return None, error_lines[-1][:200] if error_lines else f"exit code {completed.returncode}"
    try:
        facts = parse_json(completed.stdout.decode("utf-8", "replace").strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None, "printed no facts"
    return (facts, "") if isinstance(facts, dict) else (None, "printed no facts")
