"""How ranks start on this machine: ``mpirun`` of MPICH or Open MPI, found, recognised and called in its own words."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import EXIT_RESUME, UsageError
from fugaku_gpt.jobs.processes import GRACE_SECONDS, Outcome, run_command
from fugaku_gpt.machine.local import find_tcmalloc, usable_cores
from fugaku_gpt.records.run import Result

MPICH = "MPICH"
OPEN_MPI = "Open MPI"
NAMES = ("mpirun", "mpiexec")
_VERSION_SECONDS = 30
# (rank, size) as launchers tell them: Open MPI and its kin, PMI (MPICH, Slurm), PMIx under Slurm (it names no size)
_RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)


@dataclass(frozen=True)
class Launcher:
    """One ``mpirun``.

    Attributes:
        path: the program.
        family: ``MPICH`` or ``Open MPI``.
        version: as it says itself.
        environment: variables that the launcher itself needs (not the ranks).
    """

    path: Path
    family: str
    version: str
    environment: Dict[str, str] = field(default_factory=dict)

    def start(self, ranks: int) -> List[str]:
        """The words before the ranks' command: more ranks than cores are allowed, and no rank is bound to a core."""
        if self.family == MPICH:  # shares cores and leaves binding alone unless asked
            return [str(self.path), "-n", str(ranks)]
        # Open MPI would refuse more ranks than cores, and binds each of one or two ranks to one core, whatever their
        # threads. `--map-by slot:OVERSUBSCRIBE` is understood by 4 and 5.
        return [str(self.path), "-n", str(ranks), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]


@dataclass(frozen=True)
class Command:
    """What is to be started: the words, and the variables that are set for the launcher over the present ones."""

    argv: List[str]
    environment: Dict[str, str]


def rank_from_environment(environment: Optional[Mapping[str, str]] = None) -> Optional[Tuple[int, int]]:
    """(rank, number of ranks) if a launcher has started this process, else None."""
    variables = os.environ if environment is None else environment
    for rank, size in _RANK_VARIABLES:
        if variables.get(rank, "").isdigit() and variables.get(size, "").isdigit():
            return int(variables[rank]), int(variables[size])
    return None


def find_launcher(root: Optional[bool] = None) -> Launcher:
    """The first usable ``mpirun`` or ``mpiexec``: beside this Python (a wheel in the environment), then on PATH.

    Args:
        root: whether the user is root, whom Open MPI refuses unless told; default: as it is.

    Raises:
        UsageError: there is none, or none that is MPICH or Open MPI.
    """
    beside = [Path(sys.executable).parent / name for name in NAMES]
    on_path = [Path(found) for found in map(shutil.which, NAMES) if found]
    rejected = []
    for path in [candidate for candidate in beside if os.access(candidate, os.X_OK)] + on_path:
        said = _version_text(path)
        recognised = recognise(said)
        if recognised is not None:
            family, version = recognised
            allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            is_root = os.geteuid() == 0 if root is None else root
            return Launcher(path, family, version, allow if family == OPEN_MPI and is_root else {})
        rejected.append(f"{path} is neither MPICH nor Open MPI (it says: {said.strip()[:80] or 'nothing'})")
    raise UsageError(
        "\n".join(rejected or [f"no mpirun beside {sys.executable} and none on PATH"])
        + "\nto start ranks, install an MPI: `make install`, or `pip install mpich`, or the system's MPICH or Open MPI"
    )


def recognise(said: str) -> Optional[Tuple[str, str]]:
    """(family, version) from the output of ``mpirun --version``; None if it is of no known family."""
    open_mpi = re.search(r"\(Open MPI\)\s+(\S+)", said)
    if open_mpi:
        return OPEN_MPI, open_mpi[1]
    hydra = re.search(r"HYDRA build details:.*?Version:\s*(\S+)", said, re.DOTALL)
    return (MPICH, hydra[1]) if hydra else None


def train_command(
    launcher: Launcher,
    config: RunConfig,
    config_file: Path,
    out_dir: Path,
    cores: int,
    tcmalloc: Optional[Path],
    more: Sequence[str] = (),
) -> Command:
    """The command that trains ``config`` on this machine; a pure function.

    The ranks' variables are set by ``env`` in front of the ranks' Python, so that they reach the ranks under any
    launcher, and nothing else: a preloaded allocator must not be loaded into the launcher.

    Args:
        cores: cores that the ranks share, for the default of ``node.threads_per_rank``.
        tcmalloc: the library to preload where ``node.tcmalloc`` asks for it; None leaves it out, and the run records
            that it was not applied.
        more: words for ``train`` besides.

    Raises:
        UsageError: the run wants more than this one machine.
    """
    if config.job.nodes != 1:
        raise UsageError(f"job.nodes: {config.job.nodes}: ranks are started on this machine only; valid: 1")
    ranks = config.layout.ranks
    threads = str(threads_per_rank(config, cores))
    words = [f"OMP_NUM_THREADS={threads}", f"MKL_NUM_THREADS={threads}"]
    libraries = [str(tcmalloc)] if config.node.tcmalloc and tcmalloc is not None else []
    libraries += config.node.preload
    if libraries:
        words.append("LD_PRELOAD=" + ":".join([*libraries, *filter(None, [os.environ.get("LD_PRELOAD")])]))
    python = [sys.executable, "-m", "fugaku_gpt", "train", str(config_file), "--out", str(out_dir), *more]
    return Command([*launcher.start(ranks), "env", *words, *python], dict(launcher.environment))


def threads_per_rank(config: RunConfig, cores: int) -> int:
    """``node.threads_per_rank``, or an equal share of this machine's cores, at least 1."""
    return config.node.threads_per_rank or max(1, cores // config.layout.ranks)


def launch(
    config: RunConfig,
    config_file: Path,
    out_dir: Path,
    more: Sequence[str] = (),
    *,
    log: Optional[Path] = None,
    timeout: Optional[float] = None,
    on_line: Optional[Callable[[str], None]] = None,
    grace: float = GRACE_SECONDS,
    mark: Optional[str] = None,
) -> Outcome:
    """Start the ranks of a run, wait for their end, and leave no process behind (see :func:`run_command`).

    A signal to this process is passed on as SIGUSR1, which the ``mpirun`` of both families hands to every rank (that of
    Open MPI kills them at SIGTERM): they stop after their iteration, with a checkpoint.

    Args:
        more: as of :func:`train_command`.

    Raises:
        UsageError: there is no usable ``mpirun``, or the run wants more than this machine.
    """
    command = train_command(find_launcher(), config, config_file, out_dir, len(usable_cores()), find_tcmalloc(), more)
    return run_command(
        command.argv,
        command.environment,
        log=log,
        timeout=timeout,
        on_line=on_line,
        grace=grace,
        mark=mark,
        ask_with=signal.SIGUSR1,
    )


def exit_code_of(outcome: Outcome, result: Optional[Result] = None) -> int:
    """The exit code for a command line that has done nothing but this one run: the ranks' own, or 128 + signal.

    Of ranks that all end with ``EXIT_RESUME`` the launcher may have killed some while they left, and tell that: the
    run's own result says whether it can be resumed.
    """
    if result is not None and result.resumable:
        return EXIT_RESUME
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.timed_out:
        return 1
    return 128 + outcome.signal if outcome.signal is not None else outcome.exit_code


def _version_text(path: Path) -> str:
    try:
        done = subprocess.run(
            [str(path), "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.decode("utf-8", "replace")
