"""The executor ``pjm`` of PSI/J: submits with ``pjsub``, follows with ``pjstat``, cancels with ``pjdel``."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from pathlib import Path
from typing import Dict, List, Optional

from psij import (
    InvalidJobException,
    Job,
    JobExecutor,
    JobExecutorConfig,
    JobState,
    JobStatus,
    Launcher,
    SubmitException,
)

from fugaku_gpt.errors import FugakuGptError, Uncertain
from fugaku_gpt.jobs.tool_jobs import JobEnd, PolledJob, ToolJobs
from fugaku_gpt.records.job import RUNNING, SUSPENDED
from psij_pjm.config import PjmExecutorConfig
from psij_pjm.job_script import script_of

logger = logging.getLogger(__name__)
_LONGEST_MESSAGE = 4000  # characters of a launcher's message


class PjmJobExecutor(JobExecutor):
    """Runs jobs of PSI/J on PJM.

    How a job ended is decided by the record that its script leaves, then by PJM's codes. A job that PJM does not know
    for the moment, or a PJM that does not answer, changes nothing.

    Args:
        url: not used.
        config: settings; those of other executors are taken as far as they are common to all.
    """

    def __init__(self, url: Optional[str] = None, config: Optional[JobExecutorConfig] = None) -> None:
        self._settings = PjmExecutorConfig.with_defaults(config)
        super().__init__(url=url, config=self._settings)
        # absolute: a job's record is written from wherever the job runs
        self.work_directory = Path(self._settings.work_directory).absolute() / "pjm"
        self._pjm = ToolJobs(self.work_directory, lost_seconds=self._settings.lost_seconds)
        self._lock = threading.Lock()
        self._open: Dict[str, List[Job]] = {}  # id of PJM → jobs of PSI/J, several if some were attached
        self._has_jobs = threading.Event()
        self._is_over = threading.Event()
        weakref.finalize(self, _stop, self._is_over, self._has_jobs)
        poller = threading.Thread(target=_poll_until_over, args=(weakref.ref(self), self._has_jobs, self._is_over))
        poller.name, poller.daemon = "queue of PJM", True
        poller.start()

    def submit(self, job: Job) -> None:
        """See :meth:`psij.JobExecutor.submit`.

        Where PJM does not say whether it has accepted a job, that may run. It has failed for PSI/J, with the comment by
        which it can be found as its message, and cannot be submitted again.

        Raises:
            InvalidJobException: PJM has nothing of the kind that is asked for, or would refuse the script on any day.
            SubmitException: PJM has refused the job: there is none; the message is PJM's, with advice.
        """
        spec = self._check_job(job)
        path, output = self._files_of(job)
        try:
            script = script_of(spec, self._launcher_of(job).get_launch_command(job), output)
            for warning in self._pjm.write(script, path, is_linted=self._settings.is_linted):
                logger.info("Job %s: %s", job.id, warning)
        except (FugakuGptError, InvalidJobException) as error:
            job.executor = None  # it can be corrected and submitted
            if isinstance(error, InvalidJobException):
                raise
            raise InvalidJobException(str(error)) from None
        try:
            native_id = self._pjm.submit(path, Path.cwd(), script.name)
        except Uncertain as error:  # no exception: hosts submit a job whose submission raises one once more
            self._set_job_status(job, JobStatus(JobState.FAILED, message=f"may run all the same: {error}"))
            return
        except FugakuGptError as error:
            job.executor = None
            path.unlink()
            raise SubmitException(str(error)) from None
        job._native_id = native_id  # PSI/J has no other way to set it
        self._set_job_status(job, JobStatus(JobState.QUEUED, metadata={"native_id": native_id}))
        self._follow(job, native_id)

    def cancel(self, job: Job) -> None:
        """See :meth:`psij.JobExecutor.cancel`.

        Raises:
            SubmitException: it was not submitted, or PJM does not cancel it.
        """
        if job.native_id is None:
            raise SubmitException(f"job {job.id} was not submitted: there is nothing to cancel")
        if job.status.final:
            return
        try:
            refusals = self._pjm.cancel([job.native_id])
        except FugakuGptError as error:
            raise SubmitException(str(error), transient=True) from None
        if refusals:
            raise SubmitException(f"job {job.native_id} may still run: {refusals[job.native_id]}")

    def list(self) -> List[str]:
        """See :meth:`psij.JobExecutor.list`: the jobs of this user that wait or run.

        Raises:
            SubmitException: PJM does not answer.
        """
        try:
            return self._pjm.present_jobs()
        except FugakuGptError as error:
            raise SubmitException(str(error), transient=True) from None

    def attach(self, job: Job, native_id: str) -> None:
        """See :meth:`psij.JobExecutor.attach`. How a job ended that PSI/J has not submitted, only PJM's codes say.

        Raises:
            InvalidJobException: the job is not new, or the id is none of PJM's.
        """
        if job.status.state != JobState.NEW:
            raise InvalidJobException(f"job {job.id} is {job.status.state}: only a new job can be attached")
        try:
            self._pjm.scheduler.parse_job_id(native_id)
        except FugakuGptError as error:
            raise InvalidJobException(str(error)) from None
        job.executor = self
        job._native_id = native_id
        self._follow(job, native_id)

    def poll(self) -> None:
        """Ask PJM for all open jobs, and set their states. A query that fails changes nothing."""
        with self._lock:
            native_ids = list(self._open)
        if not native_ids:
            return
        try:
            polled = self._pjm.poll(native_ids)
        except FugakuGptError as error:
            logger.warning("PJM was not asked for %d jobs: %s", len(native_ids), error)
            return
        for native_id, pjm_job in polled.items():
            if pjm_job.end is None and pjm_job.status.state in ("unknown", "lost"):
                logger.warning("Job %s of PJM is followed on: %s", native_id, pjm_job.status.reason)
            try:
                self._set_status(native_id, pjm_job)
            except Exception:  # a defect that concerns one job must not keep the others from being followed
                logger.exception("Job %s of PJM", native_id)

    def _set_status(self, native_id: str, pjm_job: PolledJob) -> None:
        if pjm_job.end is None:
            if pjm_job.status.state in (RUNNING, SUSPENDED):
                for job in self._jobs_of(native_id):
                    self._set_job_status(job, JobStatus(JobState.ACTIVE))
            return
        with self._lock:
            jobs = self._open.pop(native_id, [])
            if not self._open:
                self._has_jobs.clear()
        for job in jobs:
            status = _status_of(pjm_job.end)
            if status.state == JobState.FAILED:
                status.message = f"{status.message}{self._launcher_message(job)}"
            self._set_job_status(job, status)  # whatever becomes of its files
            self._clean(job, native_id)

    def _follow(self, job: Job, native_id: str) -> None:
        with self._lock:
            self._open.setdefault(native_id, []).append(job)
            self._has_jobs.set()

    def _jobs_of(self, native_id: str) -> List[Job]:
        with self._lock:
            return list(self._open.get(native_id, ()))

    def _launcher_of(self, job: Job) -> Launcher:
        assert job.spec is not None
        return self._get_launcher(job.spec.launcher or Launcher.DEFAULT_LAUNCHER_NAME)

    def _files_of(self, job: Job) -> "tuple[Path, Path]":
        """The script of a job, and the output of its launcher."""
        return self.work_directory / f"{job.id}.sh", self.work_directory / f"{job.id}.out"

    def _launcher_message(self, job: Job) -> str:
        """Return the output of a launcher that failed before it had started the executable; empty for others."""
        try:
            text = self._files_of(job)[1].read_text(encoding="utf-8", errors="replace")[-_LONGEST_MESSAGE:]
        except OSError:  # nothing was started, or the job was attached
            return ""
        if job.spec is None or "\n" not in text or not self._launcher_of(job).is_launcher_failure(text):
            return ""
        return f"; {self._launcher_of(job).get_launcher_failure_message(text).strip()}"

    def _clean(self, job: Job, native_id: str) -> None:
        if self._settings.keep_files:
            return
        try:
            self._pjm.forget(native_id)
            for path in self._files_of(job):
                with contextlib.suppress(FileNotFoundError):  # of another process, if it was attached
                    path.unlink()
        except (FugakuGptError, OSError) as error:
            logger.warning("Job %s of PJM has ended, and its files are still there: %s", native_id, error)


def _status_of(end: JobEnd) -> JobStatus:
    if end.is_success:
        return JobStatus(JobState.COMPLETED, exit_code=end.exit_code)
    state = JobState.CANCELED if end.is_cancelled else JobState.FAILED
    return JobStatus(state, message=end.reason, exit_code=end.exit_code)


def _stop(is_over: threading.Event, has_jobs: threading.Event) -> None:
    is_over.set()
    has_jobs.set()


def _poll_until_over(
    executor: "weakref.ref[PjmJobExecutor]", has_jobs: threading.Event, is_over: threading.Event
) -> None:
    """Poll as long as the executor exists. Between polls only a weak reference to it is there, and no query is made
    while it has no jobs."""
    while not is_over.is_set():
        has_jobs.wait()
        present = executor()
        if present is None:
            return
        interval = present._settings.initial_queue_polling_delay
        while present is not None and has_jobs.is_set():
            longest = present._settings.queue_polling_interval
            del present
            if is_over.wait(interval):
                return
            interval = longest
            present = executor()
            if present is not None:
                try:
                    present.poll()
                except Exception:  # whatever it is: without this thread, no job would end
                    logger.exception("PJM was not asked for jobs")
        present = None
