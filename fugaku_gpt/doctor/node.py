"""Measures the nodes of a job, or this machine: checks, products, then ranks that measure everything together.

The ranks are processes of their own, started as a run's are, and leave what they measured in a file. A section that
ends them, such as a kernel with an instruction that the processor lacks, is a finding of the report and not its end; so
are a missing ``mpirun``, a time limit, and a signal to this process.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import fugaku_gpt
from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.doctor import machine
from fugaku_gpt.doctor.machine import FAIL, Check
from fugaku_gpt.doctor.node_findings import DEVIATES, Finding, findings_of
from fugaku_gpt.doctor.node_text import report_text
from fugaku_gpt.errors import UsageError
from fugaku_gpt.kernels.product_check import measure_products
from fugaku_gpt.launch.launcher import find_launcher, preloaded_libraries
from fugaku_gpt.launch.processes import Outcome, run_command
from fugaku_gpt.launch.rank_variables import rank_environment
from fugaku_gpt.machine import local
from fugaku_gpt.machine.checkout import git_commit
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.machine.fugaku import power_knobs
from fugaku_gpt.machine.job_limit import read_job_limit
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.records.node_report import read_measurements, remove_report, write_report

_MODULE = "fugaku_gpt.training.node_check"
_LAST_LINES = 5  # of the ranks' output, in a report of their failure
_SECONDS = 3600.0  # limit without a job

Progress = Callable[[str], None]


@dataclass(frozen=True)
class NodeReport:
    """A report.

    Attributes:
        values: as in ``node-report.json``.
        findings: its comparisons with what is expected.
        failed_checks: names of the checks of the machine that failed.
        failure: why the ranks have not measured everything, or empty.
        stopped_by: the signal to this process for which the ranks were ended, or None.
    """

    values: Dict[str, Any]
    findings: List[Finding]
    failed_checks: List[str]
    failure: str
    stopped_by: Optional[int] = None

    @property
    def text(self) -> str:
        """The report as plain text."""
        return report_text(self.values)

    @property
    def deviates(self) -> bool:
        """Whether something is not as it is expected."""
        return any(finding.status == DEVIATES for finding in self.findings)


def measure_nodes(
    config: RunConfig,
    folder: Optional[Path],
    iterations: int,
    start: Sequence[str] = (),
    on_progress: Progress = lambda line: None,
    is_short: bool = False,
) -> NodeReport:
    """Check and measure, and write the report.

    Args:
        config: the run whose step is timed. Its layout and ``node`` say which ranks are started.
        folder: folder for the report; None: it is not written.
        iterations: timed iterations.
        start: the arguments that start the ranks inside a job; default: this machine's ``mpirun``.
        on_progress: called with a line before each thing that takes more than a moment.
        is_short: measure for moments only, so that figures mean little.

    Raises:
        UsageError: the folder cannot be written, so that nothing was checked.
    """
    started = steady_time()
    with tempfile.TemporaryDirectory(prefix="fugaku-gpt-node-") as temporary:
        working = folder if folder is not None else Path(temporary)
        run_file = _prepare_folder(working, config)
        checks = run_checks(in_job=bool(start), on_progress=on_progress)
        on_progress("measuring: products")
        products = _measure_products()
        command = _Command(run_file, working, iterations, is_short)
        failure, stopped_by = _run_ranks(config, command, start, on_progress)
        measurements = read_measurements(working) or {}
    eco_state = power_knobs(config.node, config.job.nodes)["eco_state"]
    findings = findings_of(measurements, products, failure, eco_state, is_short)
    values = {
        "made": started,
        "fugaku_gpt": fugaku_gpt.__version__,
        "git_commit": git_commit(),
        "short": is_short,
        "checks": [asdict(check) for check in checks],
        "products": products,
        "measurements": measurements,
        "failure": failure,
        "findings": [asdict(finding) for finding in findings],
    }
    failed = [check.name for check in checks if check.status == FAIL]
    report = NodeReport(values, findings, failed, failure, stopped_by)
    if folder is not None:
        write_report(folder, values, report.text)
    return report


def _prepare_folder(folder: Path, config: RunConfig) -> Path:
    """Make the folder without the report of an earlier call, and write the ranks' run file, which is returned."""
    run_file = folder / "node-run.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_report(folder)
        write_text_atomically(run_file, dump_run_config(config))
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}; choose another --out") from None
    return run_file


def run_checks(in_job: bool, on_progress: Progress) -> List[Check]:
    """The checks of the machine; in a job, whose script starts the ranks, without those of an ``mpirun`` on PATH."""
    checks = [machine.check_python(), machine.check_package("numpy", FAIL, "pip install numpy")]
    slow = [machine.check_torch, machine.check_mpi]
    slow += [] if in_job else [machine.check_launcher, machine.check_ranks]
    for check in slow:
        on_progress(f"checking: {check.__name__.replace('check_', '')}")
        checks.append(check())
    return [*checks, *machine.check_node()]


def _measure_products() -> Dict[str, Any]:
    """The verdicts on products of matrices of this node's environment, measured in a process of their own where there
    are none yet."""
    measured = measure_products()
    verdicts = [
        {
            "name": f"{verdict.dtype}, {verdict.threads} thread{'s' * (verdict.threads > 1)}",
            "text": f"{verdict.name_ways()}; {verdict.describe()}",
            **asdict(verdict),
        }
        for verdict in measured.verdicts
    ]
    return {"problem": measured.problem, "verdicts": verdicts}


@dataclass(frozen=True)
class _Command:
    """The arguments of the ranks: their run file, the folder of their measurements, and how long they measure."""

    run_file: Path
    folder: Path
    iterations: int
    is_short: bool

    def argv(self, threads: int) -> List[str]:
        """A rank's Python and its arguments."""
        arguments = [str(self.run_file), str(self.folder), "--threads", str(threads)]
        arguments += ["--iterations", str(self.iterations), *(["--short"] if self.is_short else [])]
        return [sys.executable, "-m", _MODULE, *arguments]


def _run_ranks(
    config: RunConfig, command: _Command, start: Sequence[str], on_progress: Progress
) -> Tuple[str, Optional[int]]:
    """Let ranks measure; returns why they have not measured everything, or an empty text, and the signal to this
    process that stopped them, or None."""
    job_limit = read_job_limit(config.job)
    seconds = _SECONDS
    if job_limit is not None:  # the report is written in the margin before the job's end
        seconds = job_limit.end - job_limit.margin(config.job.stop_margin) - time.time()
        if seconds <= 0:
            return f"the ranks were not started: the job's time is nearly over: {job_limit}; raise job.elapse", None
    lines: List[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        on_progress(line)

    threads = config.node.threads_per_rank or max(1, len(local.usable_cores()) // config.ranks_per_node)
    try:
        prefix, environment = _start_of_ranks(config, threads, start)
        on_progress(f"starting {config.layout.ranks} ranks of {threads} threads")
        outcome = run_command([*prefix, *command.argv(threads)], environment, timeout=seconds, on_line=on_line)
    except UsageError as error:  # no mpirun, or the command of --start: the checks are reported all the same
        return "the ranks cannot be started: " + " / ".join(str(error).splitlines()), None
    measured = read_measurements(command.folder)
    if outcome.ok and measured is not None and not measured["section"]:
        return "", None
    section = measured["section"] if measured is not None else ""
    when = f"while measuring {section}" if section else "before they measured anything"
    if measured is not None and not section:
        when = "after they measured everything"
    if outcome.stopped_by is not None:
        return f"stopped by {signal.Signals(outcome.stopped_by).name} {when}", outcome.stopped_by
    return f"the ranks failed {when}: {_ending(outcome, seconds)}{_last_lines(lines, bool(start))}", None


def _start_of_ranks(config: RunConfig, threads: int, start: Sequence[str]) -> Tuple[List[str], Dict[str, str]]:
    """The arguments before a rank's Python, and the launcher's variables.

    Libraries are preloaded by the command of ``start`` itself: a job's script knows those of the build.
    """
    if start:
        return [*start, *rank_environment(config.node, threads)], {}
    launcher = find_launcher()
    libraries = preloaded_libraries(config.node, local.find_tcmalloc())
    prefix = [*launcher.command_prefix(config.layout.ranks), *rank_environment(config.node, threads, libraries)]
    return prefix, dict(launcher.environment)


def _ending(outcome: Outcome, limit: float) -> str:
    if outcome.timed_out:
        return f"not done after {limit:.0f} s"
    return f"ended by signal {outcome.signal}" if outcome.signal is not None else f"exit code {outcome.exit_code}"


def _last_lines(lines: Sequence[str], in_job: bool) -> str:
    """The last lines of the ranks' output, after a colon; empty if they have printed nothing."""
    output = " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
    if not output and in_job:  # PJM's mpiexec writes it to files of the job
        output = "what they have printed is in the files that the job's script names, such as output.*/"
    return f": {output}" if output else ""
