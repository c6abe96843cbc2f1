"""Measures the nodes of a job, or this machine: checks, products, then ranks that measure everything together.

The ranks are processes of their own, started as a run's are, and leave what they measured in a file. A section that
ends them, such as a kernel with an instruction that the processor lacks, is a finding of the report and not its end.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import fugaku_gpt
from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.doctor import machine
from fugaku_gpt.doctor.machine import FAIL, Check
from fugaku_gpt.doctor.node_findings import DEVIATES, Finding, findings_of
from fugaku_gpt.doctor.node_text import report_text
from fugaku_gpt.kernels.product_check import measure_products
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.launch.processes import run_command
from fugaku_gpt.machine import local
from fugaku_gpt.machine.checkout import git_commit
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.records.node_report import MEASUREMENTS_FILE, read_measurements, write_report

_MODULE = "fugaku_gpt.training.node_check"
_LAST_LINES = 5  # of the ranks' output, in a report of their failure
_ELAPSE_SHARE = 0.9  # of the job's time limit, after which ranks are ended so that there is a report
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
    """

    values: Dict[str, Any]
    findings: List[Finding]
    failed_checks: List[str]
    failure: str

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
        UsageError: the folder cannot be written.
    """
    started = time.time()
    checks = run_checks(has_launcher=bool(start), on_progress=on_progress)
    on_progress("measuring: products")
    products = _measure_products()
    with tempfile.TemporaryDirectory(prefix="fugaku-gpt-node-") as temporary:
        working = folder if folder is not None else Path(temporary)
        working.mkdir(parents=True, exist_ok=True)
        (working / MEASUREMENTS_FILE).unlink(missing_ok=True)  # of an earlier call
        failure = _run_ranks(config, working, iterations, start, on_progress, is_short)
        measurements = read_measurements(working) or {}
    findings = findings_of(measurements, products, failure)
    values = {
        "made": started,
        "fugaku_gpt": fugaku_gpt.__version__,
        "git_commit": git_commit(),
        "checks": [asdict(check) for check in checks],
        "products": products,
        "measurements": measurements,
        "failure": failure,
        "findings": [asdict(finding) for finding in findings],
    }
    failed = [check.name for check in checks if check.status == FAIL]
    report = NodeReport(values, findings, failed, failure)
    if folder is not None:
        write_report(folder, values, report.text)
    return report


def run_checks(has_launcher: bool, on_progress: Progress) -> List[Check]:
    """The checks of the machine; where a job starts the ranks, without those of an ``mpirun`` on PATH."""
    checks = [machine.check_python(), machine.check_package("numpy", FAIL, "pip install numpy")]
    slow = [machine.check_torch, machine.check_mpi]
    slow += [] if has_launcher else [machine.check_launcher, machine.check_ranks]
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


def _run_ranks(
    config: RunConfig,
    folder: Path,
    iterations: int,
    start: Sequence[str],
    on_progress: Progress,
    is_short: bool,
) -> str:
    """Let ranks measure; returns why they have not measured everything, or an empty text."""
    run_file = folder / "node-run.yaml"
    write_text_atomically(run_file, dump_run_config(config))
    prefix, environment = list(start), {}
    if not start:
        launcher = find_launcher()
        prefix, environment = launcher.command_prefix(config.layout.ranks), dict(launcher.environment)
    ranks_per_node = config.ranks_per_node
    threads = config.node.threads_per_rank or max(1, len(local.usable_cores()) // ranks_per_node)
    argv = [*prefix, "env", f"OMP_NUM_THREADS={threads}", f"MKL_NUM_THREADS={threads}", sys.executable, "-m", _MODULE]
    argv += [str(run_file), str(folder), "--threads", str(threads), "--iterations", str(iterations)]
    argv += ["--short"] if is_short else []
    lines: List[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        on_progress(line)

    on_progress(f"starting {config.layout.ranks} ranks of {threads} threads")
    limit = _ELAPSE_SHARE * config.job.elapse if config.job.elapse is not None else _SECONDS
    outcome = run_command(argv, environment, timeout=limit, on_line=on_line)
    measured = read_measurements(folder)
    if outcome.ok and measured is not None and not measured["section"]:
        return ""
    ending = f"exit code {outcome.exit_code}"
    if outcome.timed_out:
        ending = f"not done after {limit:.0f} s"
    elif outcome.signal is not None:
        ending = f"ended by signal {outcome.signal}"
    section = measured["section"] if measured is not None else ""
    where = f"while measuring {section}" if section else "before they measured anything"
    output = " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
    if not output and start:  # PJM's mpiexec writes it to files of the job
        output = "what they have printed is in the files that the job's script names, such as output.*/"
    return f"the ranks failed {where}: {ending}" + (f": {output}" if output else "")
