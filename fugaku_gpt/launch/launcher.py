"""Finds and recognises ``mpirun`` of MPICH or Open MPI on this machine, and starts ranks with its own options."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.profile import Profile
from fugaku_gpt.config.schema import NodeConfig
from fugaku_gpt.config.values import format_duration
from fugaku_gpt.errors import EXIT_CODES, EXIT_OK, EXIT_RESUME, EXIT_RUN_FAILED, UsageError
from fugaku_gpt.launch.processes import Control, Outcome, run_command
from fugaku_gpt.launch.rank_endings import PRINT_STATUSES, RankEndings
from fugaku_gpt.launch.rank_variables import SAVED_VARIABLE_PREFIX, prepended, rank_environment
from fugaku_gpt.launch.rank_watch import RankWatch
from fugaku_gpt.machine.checkout import checkout
from fugaku_gpt.machine.clock import clock_variables
from fugaku_gpt.machine.job_limit import LONGEST_MARGIN
from fugaku_gpt.machine.local import find_tcmalloc, usable_cores
from fugaku_gpt.machine.shared_memory import SHARED_MEMORY, leftover_segments, remove_segments, segments
from fugaku_gpt.machine.signals import signal_name
from fugaku_gpt.machine.system import this_system
from fugaku_gpt.records.run import FAILED, INTERRUPTED, OK, Result, RunDirectory

MPICH = "MPICH"
OPEN_MPI = "Open MPI"
PROGRAM_NAMES = ("mpirun", "mpiexec")
_VERSION_SECONDS = 30
# Inside an allocation, Open MPI would ask the batch system for the hosts and start ranks by its means. These leave
# this machine and fork: the first three for its runtime up to 4, the others for that of 5 (PRRTE).
_OPEN_MPI_HERE = {
    "OMPI_MCA_plm": "isolated",
    "OMPI_MCA_ras": "^slurm,tm,lsf,gridengine,alps",
    "OMPI_MCA_pmix": "^flux",  # which ends mpirun 4.1 by SIGSEGV where FLUX_JOB_ID is set, and there is no Flux
    "PRTE_MCA_plm": "^slurm,lsf,pals,tm",
    "PRTE_MCA_ras": "^slurm,pbs,lsf,gridengine,flux,pals",
}
_ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Launcher:
    """One ``mpirun``.

    Attributes:
        path: the program.
        family: ``MPICH`` or ``Open MPI``.
        version: the version that it prints.
        environment: variables that the launcher itself needs (not the ranks).
    """

    path: Path
    family: str
    version: str
    environment: Dict[str, str] = field(default_factory=dict)

    def command_prefix(self, ranks: int) -> List[str]:
        """The arguments before the ranks' command; they allow more ranks than cores, and bind no rank to a core."""
        if self.family == MPICH:  # shares cores and leaves binding alone unless asked
            # inside an allocation it would ask the batch system for the hosts, and start ranks by its means
            return [str(self.path), "-launcher", "fork", "-hosts", "localhost", "-n", str(ranks)]
        # Open MPI would refuse more ranks than cores, and binds each of one or two ranks to one core, whatever their
        # threads. `--map-by slot:OVERSUBSCRIBE` is understood by 4 and 5.
        return [str(self.path), "-n", str(ranks), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]


@dataclass(frozen=True)
class LaunchCommand:
    """A command line, and the variables that are set for the launcher on top of the present ones."""

    argv: List[str]
    environment: Dict[str, str]


def find_launcher(is_root: Optional[bool] = None, profile: Optional[Profile] = None) -> Launcher:
    """Find the first usable ``mpirun`` or ``mpiexec``: beside the ranks' Python (from a wheel in the environment), then
    in the profile's folders, then on PATH.

    Args:
        is_root: whether the user is root, whom Open MPI refuses unless that is allowed; default: the present user.
        profile: profile of the ranks' build; default: this Python.

    Raises:
        UsageError: there is none, or none that is MPICH or Open MPI.
    """
    python = Path(profile.python if profile is not None else sys.executable)
    folders = [python.parent, *map(Path, profile.path if profile is not None else ())]
    beside = [folder / name for folder in folders for name in PROGRAM_NAMES]
    on_path = [Path(program) for program in map(shutil.which, PROGRAM_NAMES) if program]
    rejected = []
    for path in [candidate for candidate in beside if os.access(candidate, os.X_OK)] + on_path:
        version_text = _version_text(path)
        family_and_version = parse_version(version_text)
        if family_and_version is not None:
            family, version = family_and_version
            is_root = os.geteuid() == 0 if is_root is None else is_root
            open_mpi = {**_OPEN_MPI_HERE, **(_ROOT_ALLOWED if is_root else {})}
            return Launcher(path, family, version, open_mpi if family == OPEN_MPI else {})
        rejected.append(f"{path} is neither MPICH nor Open MPI (it says: {version_text.strip()[:80] or 'nothing'})")
    raise UsageError(
        "\n".join(rejected or [f"no mpirun beside {python} and none on PATH"])
        + "\nto start ranks, install an MPI: `make install`, or `pip install mpich`, or the system's MPICH or Open MPI"
    )


def require_rank_packages() -> None:
    """Refuse to start ranks with this Python where it lacks what they import, as each of them would report it.

    Raises:
        ModuleNotFoundError: the first package that it lacks.
    """
    for package in ("torch", "mpi4py"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


def parse_version(text: str) -> Optional[Tuple[str, str]]:
    """(family, version) from the output of ``mpirun --version``; None if it is neither MPICH nor Open MPI."""
    open_mpi = re.search(r"\(Open MPI\)\s+(\S+)", text)
    if open_mpi:
        return OPEN_MPI, open_mpi[1]
    hydra = re.search(r"HYDRA build details:.*?Version:\s*(\S+)", text, re.DOTALL)
    return (MPICH, hydra[1]) if hydra else None


def train_command(
    launcher: Launcher,
    config: RunConfig,
    config_file: Path,
    out_dir: Path,
    cores: int,
    tcmalloc: Optional[Path],
    extra_arguments: Sequence[str] = (),
    profile: Optional[Profile] = None,
) -> LaunchCommand:
    """The command that trains ``config`` on this machine; a pure function.

    The ranks' variables are set by ``env`` in front of the ranks' Python, so that they reach the ranks under any
    launcher, and nothing else: a preloaded allocator must not be loaded into the launcher.

    Args:
        cores: cores that the ranks share, for the default of ``node.threads_per_rank``.
        tcmalloc: the library to preload where ``node.tcmalloc`` asks for it; None leaves it out, and the run records
            that it was not applied.
        extra_arguments: further arguments of ``train``.
        profile: profile of the ranks' build; default: this Python.

    Raises:
        UsageError: the run needs more than this one machine.
    """
    require_one_node(config)
    rank_argv = rank_command(
        config, config_file, out_dir, threads_per_rank(config, cores), tcmalloc, extra_arguments, profile
    )
    program, *options = launcher.command_prefix(config.layout.ranks)
    if launcher.family == MPICH:  # Open MPI names a rank that has failed without being asked
        options.insert(0, PRINT_STATUSES)
    return LaunchCommand([program, *options, *rank_argv], dict(launcher.environment))


def rank_command(
    config: RunConfig,
    config_file: Path,
    out_dir: Path,
    threads: int,
    tcmalloc: Optional[Path],
    extra_arguments: Sequence[str] = (),
    profile: Optional[Profile] = None,
) -> List[str]:
    """The command of each rank: its variables, its Python and its arguments; a pure function.

    The arguments are those of :func:`train_command`; ``threads`` is the number of threads of a rank.
    """
    libraries = preloaded_libraries(config.node, tcmalloc, profile)
    python = profile.python if profile is not None else sys.executable
    build = profile_variables(profile) if profile is not None else None
    return [
        *rank_environment(config.node, threads, libraries, build),
        python,
        "-m",
        "fugaku_gpt",
        "train",
        str(config_file),
        "--out",
        str(out_dir),
        *extra_arguments,
    ]


def profile_variables(profile: Profile) -> Dict[str, str]:
    """The variables that a build's ranks get on top of the present ones, without those for preloaded libraries."""
    variables = dict(text.split("=", 1) for text in profile.environment)
    for name, folders in (("PATH", profile.path), ("LD_LIBRARY_PATH", profile.library_path)):
        if folders or (SAVED_VARIABLE_PREFIX + name in os.environ and name not in variables):
            variables[name] = prepended(folders, name, variables)
    top = checkout()
    # The code of this checkout runs under another Python. An installed copy has the packages of this Python beside it:
    # then the environment's own copy is used, and the run records which.
    if top is not None:
        variables["PYTHONPATH"] = prepended([str(top)], "PYTHONPATH", variables)
    return variables


def tcmalloc_library(profile: Optional[Profile]) -> Optional[Path]:
    """The library that ``node.tcmalloc`` preloads: that of the profile if it is a path, or else this machine's."""
    library = profile.tcmalloc if profile is not None else ""
    return Path(library) if "/" in library else find_tcmalloc()


def preloaded_libraries(node: NodeConfig, tcmalloc: Optional[Path], profile: Optional[Profile] = None) -> List[str]:
    """The libraries that a rank preloads: ``tcmalloc`` where ``node.tcmalloc`` asks for it, the build's and the
    run's."""
    libraries = [str(tcmalloc)] if node.tcmalloc and tcmalloc is not None else []
    return [*libraries, *(profile.preload if profile is not None else ()), *node.preload]


def require_one_node(config: RunConfig) -> None:
    """Refuse a run of several nodes, as ranks are started on this machine.

    Raises:
        UsageError: it needs more than this one machine.
    """
    if config.job.nodes != 1:
        raise UsageError(f"job.nodes: {config.job.nodes}: ranks are started on this machine only; valid: 1")


def threads_per_rank(config: RunConfig, cores: int) -> int:
    """``node.threads_per_rank``, or an equal share of this machine's cores, at least 1."""
    return config.node.threads_per_rank or max(1, cores // config.layout.ranks)


def launch(
    config: RunConfig,
    directory: RunDirectory,
    extra_arguments: Sequence[str] = (),
    *,
    timeout: Optional[float] = None,
    on_line: Optional[Callable[[str], None]] = None,
    mark: Optional[str] = None,
    profile: Optional[Profile] = None,
    start: Sequence[str] = (),
) -> Outcome:
    """Start the ranks of a run, wait for their end, and leave no process behind (see :func:`run_command`).

    A signal to this process is passed on as SIGUSR1, which ``mpirun`` of both families forwards to every rank (Open
    MPI's kills them at SIGTERM): they stop after their iteration, with a checkpoint, for which they have
    ``job.stop_margin`` or five minutes. Before they have joined MPI, they are ended at once. So are they, and the
    launcher, when a rank has ended without joining.

    Args:
        directory: the run's directory; its ``config_file`` must hold the configuration, and its ``log_file`` gets the
            output.
        extra_arguments, profile: as in :func:`train_command`.
        timeout, on_line, mark: as in :func:`run_command`.
        start: the arguments that start ranks inside a job, in place of this machine's ``mpirun``; ``{ranks}`` in them
            stands for the number of ranks, ``{threads}`` for the threads of each.

    Raises:
        UsageError: there is no usable ``mpirun``, or the run needs more than this machine.
    """
    tcmalloc = tcmalloc_library(profile)
    config_file, out_dir = directory.config_file, directory.path
    if start:
        if tcmalloc is None and profile is not None:
            tcmalloc = Path(profile.tcmalloc)  # from a module; the loader finds it by its name
        per_node = max(1, len(usable_cores()) // config.ranks_per_node)
        threads = config.node.threads_per_rank or per_node
        start_argv = [
            word.replace("{ranks}", str(config.layout.ranks)).replace("{threads}", str(threads)) for word in start
        ]
        rank_argv = rank_command(config, config_file, out_dir, threads, tcmalloc, extra_arguments, profile)
        command = LaunchCommand([*start_argv, *rank_argv], {})
    else:
        launcher = find_launcher(profile=profile)
        cores = len(usable_cores())
        command = train_command(launcher, config, config_file, out_dir, cores, tcmalloc, extra_arguments, profile)
    mark = mark if mark is not None else uuid.uuid4().hex
    stamp, shared_memory = directory.environment_stamp(), this_system().path(SHARED_MEMORY)
    older = segments(shared_memory)  # of other runs, perhaps in containers whose processes are not seen

    def has_joined() -> bool:
        return directory.environment_stamp() != stamp

    control = _control(config, has_joined, on_line)
    watch, endings = RankWatch(mark, config.layout.ranks, has_joined), RankEndings(on_line)
    if not start:  # a job's own command starts ranks on other nodes, too
        control = replace(control, is_lost=watch.has_lost_ranks)
    outcome = run_command(
        command.argv,
        {**command.environment, **clock_variables()},
        log=directory.log_file,
        timeout=timeout,
        on_line=endings.read,
        mark=mark,
        control=control,
    )
    outcome = replace(outcome, lost_reason=_lost_reason(outcome, watch, endings, has_joined(), directory))
    if not outcome.ok:  # ranks that have ended well have removed their own
        leftovers = leftover_segments(shared_memory)
        remove_segments(set(leftovers.dead) - older)
    return outcome


def _control(config: RunConfig, has_joined: Callable[[], bool], on_line: Optional[Callable[[str], None]]) -> Control:
    """How the ranks of a run are asked to stop, with a line about it for ``on_line``."""
    margin = config.job.stop_margin if config.job.stop_margin is not None else LONGEST_MARGIN

    def on_stop(number: int) -> None:
        if on_line is not None:
            on_line(
                f"{signal_name(number)}: the run stops after this iteration, with a checkpoint, and is ended after "
                f"{format_duration(margin)}; another Ctrl-C in some seconds ends it at once"
            )

    return Control(signal.SIGUSR1, margin, has_joined, on_stop)


def _lost_reason(
    outcome: Outcome, watch: RankWatch, endings: RankEndings, has_joined: bool, directory: RunDirectory
) -> str:
    """Name the ranks that could not report their end themselves; empty where all have reported it."""
    if watch.stopped:
        return f"{watch.stopped} on {socket.gethostname()} is stopped (SIGSTOP), and the run would wait for it"
    if outcome.is_lost and has_joined:
        return f"no rank lives on {socket.gethostname()}, but their launcher does"
    if outcome.is_lost:
        return endings.reason(watch.gone)
    was_ended = outcome.stopped_by is not None or outcome.timed_out or outcome.oom_kills > 0
    try:
        recorded = directory.result()
    except UsageError:  # a damaged record must not have the caller take the run for one that has not begun
        return ""
    if endings.has_lost_proxy and not was_ended and recorded is None:
        # the helper may be lost to the launcher because it ends after a rank that was killed before it joined
        killed = "" if has_joined else endings.reason_of_first(outcome.exit_code)
        helper = f"hydra_pmi_proxy on {socket.gethostname()}, which had started the ranks"
        return killed or f"{helper}, is gone: mpirun has lost it"
    if has_joined and not was_ended and (recorded is None or recorded.status == OK):
        return endings.reason_of_supervisor(outcome.exit_code)
    # a rank that the launcher has ended for another's end records just that
    if has_joined or was_ended or (recorded is not None and recorded.status != INTERRUPTED):
        return ""
    return endings.reason_of_first(outcome.exit_code)


def exit_code_of(outcome: Outcome, result: Optional[Result] = None) -> int:
    """The exit code of a command that did nothing but this one run: that of the ranks, or 128 + signal.

    When all ranks end with ``EXIT_RESUME``, the launcher may have killed some of them while they left, and report that.
    So the run's own result decides whether it can be resumed, and whether it had ended before something failed.
    """
    if result is not None and result.is_resumable:
        return EXIT_RESUME
    if result is not None and result.status == OK:  # whatever came after
        return EXIT_OK
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.timed_out or outcome.lost_reason:
        return EXIT_RUN_FAILED
    if result is not None and result.signal is not None:  # the launcher may report another rank, which it has killed
        return 128 + result.signal
    if outcome.signal is not None:
        return 128 + outcome.signal
    if result is not None and result.status == FAILED and outcome.exit_code == EXIT_OK:
        return EXIT_RUN_FAILED
    # a launcher that fails itself has codes of its own, such as 255, or the number of a signal
    return outcome.exit_code if outcome.exit_code in EXIT_CODES or 128 < outcome.exit_code < 255 else EXIT_RUN_FAILED


def _version_text(path: Path) -> str:
    try:
        process = subprocess.run(
            [str(path), "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return process.stdout.decode("utf-8", "replace")
