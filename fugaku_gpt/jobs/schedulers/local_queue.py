"""The queue of this machine: a background process that runs waiting jobs, oldest first, one at a time.

There is one for each user and machine, enforced by a lock that the kernel releases when its holder dies. The queue
exits when no job can run. On SIGTERM it ends its job and exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Dict, List, Optional, Tuple, Union

from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.schedulers.local_store import (
    LocalJob,
    LocalStore,
    is_alive,
    log_prefix,
    may_run,
    queue_file,
    read_json_object,
    this_process,
)
from fugaku_gpt.launch.processes import GRACE_SECONDS, MARK, end_marked_processes, marked_processes
from fugaku_gpt.machine.clock import steady_time
from fugaku_gpt.machine.local import out_of_memory_kills
from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.records.job import CANCELLED, ENDED, LOST, RUNNING

_POLL_SECONDS = 0.1


class Queue:
    """Runs the jobs of a store until none can run.

    Args:
        grace: seconds between SIGTERM and SIGKILL for a job at its time limit or a cancelled job.
    """

    def __init__(self, store: LocalStore, host: str, grace: float = GRACE_SECONDS) -> None:
        self._store = store
        self._host = host
        self._grace = grace
        self.stopped = False  # by a signal

    def serve(self) -> None:
        """Run jobs until none can run."""
        self._end_orphans()
        while not self.stopped:
            next_sub_job = self.next_sub_job()
            if next_sub_job is None:
                return
            job, sub = next_sub_job
            try:
                self._run(job, sub)
            except OSError as error:  # such as a full disk: for whoever asks why the job has no end
                print(f"{log_prefix(this_process(), job.sub_id(sub))}{line_of(error)}", flush=True)
                raise

    def next_sub_job(self) -> Optional[Tuple[LocalJob, str]]:
        """Return the oldest sub-job that may run; jobs that can never run are ended on the way."""
        for job in self._jobs_of_host():
            waiting = [sub for sub in job.subs if self._store.state(job, sub) is None]
            if not waiting or self._store.has_request(job, "cancel"):
                continue
            ready, refusal = may_run(self._store, job)
            if ready:
                return job, waiting[0]
            if refusal:
                timestamp = steady_time()
                for sub in waiting:
                    self._end(job, sub, CANCELLED, "CANCELLED", timestamp, reason=refusal)
        return None

    def _run(self, job: LocalJob, sub: str) -> None:
        started, kills = steady_time(), out_of_memory_kills()
        self._store.write_state(job, sub, {"state": RUNNING, "started": started, **this_process()})
        job_id = job.sub_id(sub)
        environment = {
            **job.environment,
            MARK: job.mark,
            "FUGAKU_GPT_JOB": job.job_id,
            "FUGAKU_GPT_SUB_JOB": job_id,
            **({"FUGAKU_GPT_SUB_NUMBER": sub} if sub else {}),
            **({"FUGAKU_GPT_AFTER": job.after} if job.after is not None else {}),
        }
        try:
            with open(job.output(sub), "ab") as sink:
                process = subprocess.Popen(
                    ["bash", job.script],
                    cwd=job.directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self._end(job, sub, ENDED, "LAUNCH_FAILED", started, exit_code=127, reason=line_of(error))
            return
        stop_reason = self._wait_for_end(job, process, started)
        code = process.returncode
        ending: Dict[str, Any] = {"exit_code": code} if code >= 0 else {"exit_code": 128 - code, "signal": -code}
        if stop_reason == "cancel":
            self._end(job, sub, CANCELLED, "CANCELLED", started, **ending)
        elif stop_reason == "elapse":
            reason = f"its time limit of {job.elapse:g} s was reached"
            self._end(job, sub, ENDED, "TIMEOUT", started, reason=reason, **ending)
        elif stop_reason == "stop":
            self._end(job, sub, ENDED, "STOPPED", started, reason="the queue of this machine was stopped", **ending)
        elif code != 0 and out_of_memory_kills() > kills:
            reason = "the kernel has killed processes for memory"
            self._end(job, sub, ENDED, "OUT_OF_MEMORY", started, reason=reason, **ending)
        else:
            self._end(job, sub, ENDED, "COMPLETED" if code == 0 else "FAILED", started, **ending)

    def _wait_for_end(self, job: LocalJob, process: "subprocess.Popen[bytes]", started: float) -> str:
        """Wait for the script's end; return what ended it: ``elapse``, ``cancel``, ``stop`` or "" for itself."""
        stop_reason = ""
        begun = time.monotonic()
        while process.poll() is None and not stop_reason:
            if job.elapse is not None and time.monotonic() - begun > job.elapse:
                stop_reason = "elapse"
            elif self._store.has_request(job, "cancel"):
                stop_reason = "cancel"
            elif self.stopped:
                stop_reason = "stop"
            else:
                time.sleep(_POLL_SECONDS)
        if stop_reason:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # as batch systems do: not only to the script
            deadline = time.monotonic() + self._grace
            while (process.poll() is None or marked_processes(job.mark)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            end_marked_processes(job.mark, 0.0, process)
        else:  # the script may have left processes in the background
            end_marked_processes(job.mark, min(self._grace, 2.0), process)
        process.wait()
        return stop_reason

    def _end_orphans(self) -> None:
        """End the jobs of a queue that was killed: none of their processes may run beside the next job."""
        for job in self._jobs_of_host():
            for sub in job.subs:
                state = self._store.state(job, sub)
                if state is not None and state["state"] == RUNNING and not is_alive(state):
                    end_marked_processes(job.mark, self._grace)
                    reason = "the queue that ran it was killed"
                    self._end(job, sub, LOST, "RUNNING", state["started"], reason=reason)

    def _end(self, job: LocalJob, sub: str, state: str, raw: str, started: float, **values: Any) -> None:
        ending = {"state": state, "raw": raw, "started": started, "ended": steady_time(), **values}
        self._store.write_state(job, sub, ending)

    def _jobs_of_host(self) -> List[LocalJob]:
        return [job for job in self._store.jobs() if job.host == self._host]


def main(root: Path) -> int:
    """Become the queue in the background, or exit at once if there is one.

    Returns in the process that was started, as soon as the queue runs: 0, or 1 if it cannot, and then a line on
    standard error names the cause. The queue itself never returns; it prints to standard output.
    """
    host = socket.gethostname()
    try:
        lock = _try_lock(root, host)
    except (OSError, UsageError) as error:
        print(line_of(error), file=sys.stderr)
        return 1
    if lock is None:
        return 0
    failure_read, failure_write = os.pipe()
    if os.fork() > 0:
        os.close(failure_write)
        with open(failure_read, "rb") as stream:
            failure = stream.read().decode("utf-8", "replace")
        print(failure, end="", file=sys.stderr)
        return 1 if failure else 0
    try:
        os.close(failure_read)
        os.setsid()
        os.chdir("/")
        os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
        try:
            write_json_atomically(root / queue_file(host), this_process())
        except OSError as error:
            os.write(failure_write, f"{line_of(error)}\n".encode())
            raise
        os.close(failure_write)
        _serve(LocalStore(root), host, lock)
        os._exit(0)
    except (OSError, UsageError) as error:
        print(line_of(error), flush=True)
        os._exit(1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def _serve(store: LocalStore, host: str, lock: Optional[int]) -> None:
    """Be the queue of this machine, which is recorded as that."""
    queue = Queue(store, host)

    def stop(_number: int, _frame: Optional[FrameType]) -> None:
        queue.stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while lock is not None:
        queue.serve()
        os.close(lock)
        # a job that was added after the last check and before the lock was free started no queue of its own
        lock = _try_lock(store.root, host) if not queue.stopped and queue.next_sub_job() is not None else None
        if lock is not None:  # another queue may have been recorded meanwhile
            write_json_atomically(store.root / queue_file(host), this_process())


def line_of(error: Union[OSError, UsageError]) -> str:
    """The message of an error, with the file that an error of the system names."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _try_lock(root: Path, host: str) -> Optional[int]:
    """Take the lock of this machine's queue; None if another process holds it.

    Where the file system has no locks, another queue is known by its record alone.
    """
    handle = os.open(root / f"queue-{host}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        other = read_json_object(root / queue_file(host))
        if other is not None and other.get("pid") != os.getpid() and is_alive(other):
            os.close(handle)
            return None
    return handle


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
