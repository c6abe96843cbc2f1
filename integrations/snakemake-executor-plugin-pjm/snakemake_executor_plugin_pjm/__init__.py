"""Runs jobs of Snakemake on PJM, the batch system of Fugaku: ``snakemake --executor pjm``.

Each job becomes a script that starts Snakemake again on a compute node. How it ended is decided by the record that the
script leaves, then by PJM's codes; a job that PJM does not know for the moment is followed on.
"""

# Snakemake reads the types of settings as they are: they must not become text by `from __future__ import annotations`.
import shlex
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, AsyncGenerator, Dict, List, Mapping, Optional

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

if TYPE_CHECKING:  # jobs on compute nodes import this module, and need no fugaku_gpt
    from fugaku_gpt.jobs.tool_jobs import JobEnd, PolledJob, ToolJobs, ToolScript

_FOLDER = Path(".snakemake", "pjm")  # of scripts, outputs and records, below the folder of the workflow


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """Settings of the executor, on the command line ``--pjm-...``, for jobs whose rules say nothing else."""

    group: Optional[str] = field(
        default=None, metadata={"help": "Group to which jobs are billed (pjsub -g); a rule's resource: pjm_group."}
    )
    rscgrp: Optional[str] = field(
        default=None, metadata={"help": "Resource group, such as small; a rule's resource: pjm_rscgrp."}
    )
    default_runtime: int = field(
        default=60, metadata={"help": "Time limit in minutes of jobs whose rules have no resource runtime."}
    )
    volumes: Optional[str] = field(
        default=None,
        metadata={"help": "Volumes of the file system that jobs see besides home, such as /vol0004:/vol0005."},
    )
    options: Optional[str] = field(
        default=None,
        metadata={
            "help": "Further options of pjsub, such as '-L freq=2000,eco_state=0'; those of a rule's resource "
            "pjm_options are added."
        },
    )
    python: Optional[str] = field(
        default=None,
        metadata={
            "help": "Python with Snakemake on compute nodes; default: the present one, which does not run there where "
            "login nodes have other processors."
        },
    )
    prelude: Optional[str] = field(
        default=None, metadata={"help": "Shell command before each job, such as '. /path/to/setup-env.sh'."}
    )
    no_lint: bool = field(
        default=False, metadata={"help": "Submit scripts without a check by the rules for Fugaku, on other sites."}
    )


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=True,
    auto_deploy_default_storage_provider=False,
    init_seconds_before_status_checks=2,
)


class Executor(RemoteExecutor):
    """Submits jobs with ``pjsub``, asks for all of them with one ``pjstat``, and cancels them with ``pjdel``."""

    def __post_init__(self) -> None:
        """Find PJM's commands.

        Raises:
            WorkflowError: fugaku_gpt or PJM's commands are not there.
        """
        try:
            from fugaku_gpt.jobs.schedulers.registry import is_present
            from fugaku_gpt.jobs.tool_jobs import ToolJobs
        except ImportError as error:
            raise WorkflowError(f"executor pjm: {error}: install fugaku_gpt on this machine") from error
        if not is_present("pjm"):
            raise WorkflowError(
                "executor pjm: pjstat is not on PATH: run Snakemake on a login node, or try the workflow here with "
                '`fugaku-gpt sim start` and eval "$(fugaku-gpt sim env)"'
            )
        self._folder = Path.cwd() / _FOLDER
        self._jobs: "ToolJobs" = ToolJobs(self._folder)
        self._last_warning = ""
        # Snakemake's own list of jobs is empty while they are polled, and would leave jobs uncancelled that run.
        self._open: Dict[str, SubmittedJobInfo] = {}

    def get_python_executable(self) -> str:
        """Return the Python that starts Snakemake on compute nodes."""
        return str(self._settings.python or super().get_python_executable())

    def run_job(self, job: JobExecutorInterface) -> None:
        """Submit a job. If PJM refuses it, the job has failed, and the workflow's rules for failures apply.

        Raises:
            WorkflowError: PJM does not say whether it has accepted the job: ``--retries`` would submit it a second
                time.
        """
        from fugaku_gpt.errors import FugakuGptError, Uncertain
        from fugaku_gpt.jobs.tool_jobs import job_name

        name = job_name(self.get_jobname(job).removesuffix(".sh"))
        path = self._folder / f"{name}.{uuid.uuid4().hex[:12]}.sh"
        output = path.with_suffix(".out")
        try:
            self.write_jobscript(job, self.get_jobscript(job))
            script = script_of(name, job.resources, self._settings, output, self._commands(job))
            for warning in self._jobs.write(script, path, is_linted=not self._settings.no_lint):
                self.logger.debug(warning)
            job_id = self._jobs.submit(path, Path.cwd(), name)
        except Uncertain as error:
            raise WorkflowError(f"job {job.jobid} may have been submitted to PJM: {error}") from None
        except FugakuGptError as error:
            self.report_job_error(SubmittedJobInfo(job), msg=f"not submitted: {error}\n")
            return
        self.logger.info(f"Job {job.jobid} is job {job_id} of PJM; its output: {_FOLDER / output.name}")
        info = SubmittedJobInfo(job, external_jobid=job_id, aux={"script": path, "output": output})
        self._open[job_id] = info
        self.report_job_submission(info)

    async def check_active_jobs(self, active_jobs: List[SubmittedJobInfo]) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Report the jobs that have ended, and yield the others."""
        polled: "Mapping[str, PolledJob]" = {}
        if active_jobs:
            async with self.status_rate_limiter:
                polled = self._poll(active_jobs)
        for info in active_jobs:
            job = polled.get(str(info.external_jobid))
            if job is None or job.end is None:
                yield info
            else:
                self._report_end(info, job.end)

    def cancel_jobs(self, active_jobs: List[SubmittedJobInfo]) -> None:
        """Cancel all jobs that have not ended with one ``pjdel``; those that may still run are named."""
        from fugaku_gpt.errors import FugakuGptError

        job_ids = list(self._open)
        try:
            refusals = self._jobs.cancel(job_ids)
        except FugakuGptError as error:
            refusals = dict.fromkeys(job_ids, str(error))
        for job_id, why in refusals.items():
            self.logger.error(f"job {job_id} of PJM may still run: {why}; end it with: pjdel {job_id}")

    @property
    def _settings(self) -> ExecutorSettings:
        settings = self.executor_settings
        return settings if isinstance(settings, ExecutorSettings) else ExecutorSettings()

    def _commands(self, job: JobExecutorInterface) -> List[str]:
        prelude = [self._settings.prelude] if self._settings.prelude else []
        return [*prelude, shlex.quote(self.get_jobscript(job))]

    def _poll(self, active_jobs: List[SubmittedJobInfo]) -> "Mapping[str, PolledJob]":
        """Poll jobs; none where PJM does not answer, which is reported once: they run on all the same."""
        from fugaku_gpt.errors import FugakuGptError

        try:
            polled = self._jobs.poll([str(info.external_jobid) for info in active_jobs])
            unknown = [job for job in polled.values() if job.end is None and job.status.state in ("unknown", "lost")]
            problem = unknown[0].status.reason if unknown else ""
        except FugakuGptError as error:
            polled, problem = {}, str(error)
        if problem and problem != self._last_warning:
            self.logger.warning(
                f"PJM does not answer for all jobs, or does not know them; they are followed on: {problem}"
            )
        self._last_warning = problem
        return polled

    def _report_end(self, info: SubmittedJobInfo, end: "JobEnd") -> None:
        self._open.pop(str(info.external_jobid), None)
        self._clean(info, end)
        if end.is_success:
            self.report_job_success(info)
        else:
            message = f"PJM's job {info.external_jobid} ended with: {end.reason}. "
            self.report_job_error(info, msg=message, aux_logs=[str(_output_of(info))])

    def _clean(self, info: SubmittedJobInfo, end: "JobEnd") -> None:
        """Remove the record of a job's end, and its files if it succeeded. An error here would end the workflow, and
        leave its other jobs to themselves: it is a warning."""
        from fugaku_gpt.errors import FugakuGptError

        try:
            self._jobs.forget(str(info.external_jobid))
            for path in (info.aux or {}).values() if end.is_success else ():
                path.unlink(missing_ok=True)
        except (FugakuGptError, OSError) as error:
            self.logger.warning(f"PJM's job {info.external_jobid} has ended, and its files are still there: {error}")


def script_of(
    name: str, resources: Mapping[str, Any], settings: ExecutorSettings, output: Path, commands: List[str]
) -> "ToolScript":
    """Return the script of a job.

    Memory and threads are not passed on: PJM gives whole nodes, with all of their cores and memory.

    Args:
        name: name of the job.
        resources: resources of the job, of which these are read: ``runtime`` (minutes), ``nodes``, ``tasks`` and
            ``tasks_per_node`` (MPI), and ``pjm_node`` (such as ``4x6x16:torus``), ``pjm_group``, ``pjm_rscgrp`` and
            ``pjm_options``.
        output: file of what its commands print.
        commands: lines of bash.
    """
    from fugaku_gpt.jobs.tool_jobs import ToolScript
    from fugaku_gpt.pjm.values import format_elapse

    values: Dict[str, Any] = {key: value for key, value in resources.items() if value not in (None, "")}
    options = [
        ("-g", values.get("pjm_group", settings.group)),
        ("-L", f"node={values.get('pjm_node', values.get('nodes', 1))}"),
    ]
    rscgrp = values.get("pjm_rscgrp", settings.rscgrp)
    options.append(("-L", f"rscgrp={rscgrp}" if rscgrp else None))
    options.append(("-L", f"elapse={format_elapse(60 * int(values.get('runtime', settings.default_runtime)))}"))
    for key, resource in (("proc", "tasks"), ("max-proc-per-node", "tasks_per_node")):
        options.append(("--mpi", f"{key}={values[resource]}" if resource in values else None))
    options.append(("-x", f"PJM_LLIO_GFSCACHE={settings.volumes}" if settings.volumes else None))
    options.append(("-o", str(output)))
    directives = [text for text in (settings.options, values.get("pjm_options")) if text]
    given = [(option, str(value)) for option, value in options if value is not None]
    return ToolScript(name, [*given, ("-j", "")], commands, directives)


def _output_of(info: SubmittedJobInfo) -> Path:
    assert info.aux is not None
    path = info.aux["output"]
    assert isinstance(path, Path)
    return path
