"""Tests of this machine as a scheduler: the queue outlives the process that started it and leaves no process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, List

import psutil
import pytest

import fugaku_gpt
from fugaku_gpt.errors import Uncertain, UsageError
from fugaku_gpt.jobs.outcome import outcome_of_other_job
from fugaku_gpt.jobs.schedulers import local as local_module
from fugaku_gpt.jobs.schedulers.local import LocalScheduler
from fugaku_gpt.jobs.schedulers.local_queue import Queue, _try_lock
from fugaku_gpt.jobs.schedulers.local_store import (
    LocalStore,
    is_alive,
    log_prefix,
    queue_file,
    read_json_object,
    this_process,
)
from fugaku_gpt.jobs.schedulers.protocol import Refused, Submission
from fugaku_gpt.launch.processes import MARK, end_marked_processes, marked_processes
from fugaku_gpt.records.job import CANCELLED, ENDED, LOST, ON_HOLD, OVER, QUEUED, RUNNING, UNKNOWN, JobStatus
from tests.support.waiting import until, until_state

pytestmark = pytest.mark.slow


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalScheduler]:
    scheduler = LocalScheduler(tmp_path / "queue")
    yield scheduler
    for job in scheduler.store.jobs():
        scheduler.store.set_request(job, "cancel")
        end_marked_processes(job.mark, grace=0.0)


def write(directory: Path, body: str, **more: Any) -> Submission:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "job.sh").write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    return Submission("job.sh", directory, "test", **more)


def queue_of(local: LocalScheduler) -> Any:
    return read_json_object(local.store.root / queue_file(local._host))


def test_a_job_runs_in_the_run_directory_and_reports_how_it_ended(local: LocalScheduler, tmp_path: Path) -> None:
    body = "echo $FUGAKU_GPT_JOB $FUGAKU_GPT_SUB_JOB in $PWD; echo wrong >&2; exit 3"
    submission = write(tmp_path / "a run", body, tag="t-1")
    job_id = local.submit(submission)
    assert job_id == "local-1"
    status = until_state(local, job_id, *OVER)
    assert status == JobStatus(job_id, ENDED, "FAILED", exit_code=3, group="this machine")
    (output,) = local.output_files(submission.directory, job_id)
    assert output.read_text(encoding="utf-8") == f"local-1 local-1 in {tmp_path / 'a run'}\nwrong\n"
    assert local.find(["t-1", "t-2"]) == {"t-1": job_id}
    measured = local.accounting(submission.directory, job_id)
    assert measured is not None and measured.elapsed_seconds is not None and measured.nodes == 1


def test_jobs_run_sequentially_in_the_order_of_submission(local: LocalScheduler, tmp_path: Path) -> None:
    body = "mkdir ../busy || echo overlap >> ../order; echo $FUGAKU_GPT_JOB >> ../order; sleep 0.3; rmdir ../busy"
    ids = [local.submit(write(tmp_path / str(number), body)) for number in range(4)]
    until_state(local, ids[-1], *OVER)
    assert (tmp_path / "order").read_text(encoding="utf-8").split() == ids


def test_a_job_outlives_the_process_that_submitted_it(local: LocalScheduler, tmp_path: Path) -> None:
    write(tmp_path / "run", "sleep 1; echo done")
    program = (
        "import os, signal; from pathlib import Path; from fugaku_gpt.jobs.schedulers.local import LocalScheduler; "
        "from fugaku_gpt.jobs.schedulers.protocol import Submission; "
        f"LocalScheduler(Path({str(local.store.root)!r})).submit("
        f"Submission('job.sh', Path({str(tmp_path / 'run')!r}), 'x')); os.kill(0, signal.SIGKILL)"
    )
    starter = subprocess.run([sys.executable, "-c", program], start_new_session=True, check=False)
    assert starter.returncode == -signal.SIGKILL
    assert until_state(local, "local-1", *OVER).exit_code == 0


def test_the_time_limit_sends_sigterm_first_and_then_ends_everything(local: LocalScheduler, tmp_path: Path) -> None:
    polite = write(tmp_path / "polite", "trap 'echo asked; exit 75' TERM; sleep 900 & wait", elapse=2.5)
    status = until_state(local, local.submit(polite), *OVER)
    assert (status.raw, status.exit_code) == ("TIMEOUT", 75) and "2.5 s" in status.reason
    assert "asked" in (tmp_path / "polite" / "local-1.out").read_text(encoding="utf-8")


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "queue")
    job = store.add(write(tmp_path / "deaf", "trap '' TERM; exec sleep 900", elapse=2.0), "here")
    Queue(store, "here", grace=0.5).serve()
    state = store.state(job, "")
    assert state is not None and (state["raw"], state["signal"]) == ("TIMEOUT", 9)
    assert marked_processes(job.mark) == []


def test_background_processes_of_a_script_are_ended(local: LocalScheduler, tmp_path: Path) -> None:
    job_id = local.submit(write(tmp_path, "setsid sleep 900 & disown; exit 0"))
    until_state(local, job_id, *OVER)
    assert marked_processes(local.store.jobs()[0].mark) == []


def test_running_and_waiting_jobs_are_cancelled(local: LocalScheduler, tmp_path: Path) -> None:
    first = local.submit(write(tmp_path / "first", "touch up; sleep 900"))
    second = local.submit(write(tmp_path / "second", "touch up"))
    until((tmp_path / "first" / "up").exists)
    assert local.cancel([second, first]) == {second: "", first: ""}
    assert until_state(local, first, *OVER).state == CANCELLED
    assert until_state(local, second, *OVER).state == CANCELLED
    assert not (tmp_path / "second" / "up").exists()
    assert local.cancel([first]) == {first: "is over"}


def test_a_job_on_hold_lets_later_jobs_pass_until_it_is_released(local: LocalScheduler, tmp_path: Path) -> None:
    first = local.submit(write(tmp_path / "first", "touch up; while [ ! -e go ]; do sleep 0.1; done"))
    until((tmp_path / "first" / "up").exists)
    second = local.submit(write(tmp_path / "second", "true"))
    third = local.submit(write(tmp_path / "third", "true"))
    assert local.hold([second, first]) == {second: "", first: "is running"}
    (tmp_path / "first" / "go").touch()
    until_state(local, third, *OVER)
    assert local.poll([second])[second].state == ON_HOLD
    assert local.release([second, third]) == {second: "", third: "is ended"}
    assert until_state(local, second, *OVER).exit_code == 0


@pytest.mark.parametrize(("code", "states"), [(75, [ENDED, ENDED]), (0, [ENDED, CANCELLED]), (1, [ENDED, CANCELLED])])
def test_a_link_runs_only_after_a_link_to_be_resumed(
    local: LocalScheduler, tmp_path: Path, code: int, states: Any
) -> None:
    first = local.submit(write(tmp_path / "first", f"until [[ -e go ]]; do sleep 0.1; done; exit {code}"))
    second = local.submit(write(tmp_path / "second", "echo $FUGAKU_GPT_AFTER", after=first, link=2, chain=2))
    assert local.poll([second])[second].reason == f"after {first}"
    (tmp_path / "first" / "go").touch()
    assert [until_state(local, job_id, *OVER).state for job_id in (first, second)] == states
    output = tmp_path / "second" / f"{second}.out"
    assert (output.read_text(encoding="utf-8").strip() if output.exists() else "") == (first if code == 75 else "")


def test_a_job_that_ends_with_its_queue_between_two_looks_is_not_lost(
    local: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = local.submit(write(tmp_path, "until [[ -e go ]]; do sleep 0.1; done"))
    until_state(local, job_id, RUNNING)
    asked: List[int] = []

    def end_meanwhile(process: Any) -> bool:
        """Lets the job, and then the queue, end between the look at the job's state and that at the queue."""
        if not asked:
            asked.append(process["pid"])
            (tmp_path / "go").touch()
            until(lambda: not is_alive(process))
        return is_alive(process)

    monkeypatch.setattr(local_module, "is_alive", end_meanwhile)
    assert local.poll([job_id])[job_id].state == ENDED and asked


def test_a_bulk_job_runs_as_sub_jobs(local: LocalScheduler, tmp_path: Path) -> None:
    job_id = local.submit(write(tmp_path, "echo $FUGAKU_GPT_SUB_JOB; exit $FUGAKU_GPT_SUB_NUMBER", bulk="0-2"))
    status = until_state(local, job_id, *OVER)
    assert (status.state, status.exit_code, status.raw) == (ENDED, 1, "COMPLETED:1 FAILED:2")
    assert local.poll([f"{job_id}[2]"])[f"{job_id}[2]"].exit_code == 2
    assert [path.name for path in local.output_files(tmp_path, job_id)] == [f"local-1[{n}].out" for n in range(3)]
    assert local.poll([f"{job_id}[7]"])[f"{job_id}[7]"].state == LOST


def test_a_job_of_a_killed_queue_is_lost_and_cancel_ends_the_remaining_processes(
    local: LocalScheduler, tmp_path: Path
) -> None:
    job_id = local.submit(write(tmp_path, "touch up; sleep 900"))
    until((tmp_path / "up").exists)
    os.kill(queue_of(local)["pid"], signal.SIGKILL)
    status = until_state(local, job_id, LOST)
    assert "still run" in status.reason
    assert local.cancel([job_id]) == {job_id: ""}
    assert marked_processes(local.store.jobs()[0].mark) == []
    assert "still run" not in local.poll([job_id])[job_id].reason


def test_the_queue_after_a_killed_queue_cleans_up_and_continues(local: LocalScheduler, tmp_path: Path) -> None:
    first = local.submit(write(tmp_path / "first", "touch up; sleep 900"))
    second = local.submit(write(tmp_path / "second", "true"))
    until((tmp_path / "first" / "up").exists)
    os.kill(queue_of(local)["pid"], signal.SIGKILL)
    assert until_state(local, second, *OVER).exit_code == 0  # asking for it has started the queue again
    assert local.poll([first])[first].state == LOST
    assert marked_processes(local.store.jobs()[0].mark) == []


def test_a_stopped_queue_stops_the_running_job_and_exits(local: LocalScheduler, tmp_path: Path) -> None:
    job_id = local.submit(write(tmp_path, "touch up; sleep 900"))
    until((tmp_path / "up").exists)
    queue = queue_of(local)
    os.kill(queue["pid"], signal.SIGTERM)
    assert until_state(local, job_id, *OVER).raw == "STOPPED"
    until(lambda: not is_alive(queue))


def test_an_idle_queue_exits(local: LocalScheduler, tmp_path: Path) -> None:
    until_state(local, local.submit(write(tmp_path, "true")), *OVER)
    until(lambda: not is_alive(queue_of(local)))


def test_the_queue_inherits_neither_mark_nor_variables_of_the_starter(
    local: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "starter")
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    job_id = local.submit(write(tmp_path, "touch up; echo ${SECRET_OF_THE_USER:-none}; sleep 0.3"))
    until((tmp_path / "up").exists)
    assert marked_processes("starter") == []
    until_state(local, job_id, *OVER)
    assert (tmp_path / f"{job_id}.out").read_text(encoding="utf-8") == "none\n"


def test_a_missing_script_is_refused(local: LocalScheduler, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no such job script"):
        local.submit(Submission("job.sh", tmp_path, "x"))


def test_foreign_job_ids_are_refused_and_unknown_jobs_are_lost(local: LocalScheduler, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'238': not a job of this machine"):
        local.poll(["238"])
    assert local.poll(["local-9"])["local-9"].state == LOST
    with pytest.raises(UsageError, match="no such job") as caught:
        local.cancel(["local-9"])
    assert local.is_gone(str(caught.value)) and not local.is_gone("runs on another-host: ask there")
    elsewhere = local.store.add(write(tmp_path, "true"), "another-host")
    assert local.poll([elsewhere.job_id])[elsewhere.job_id].state == QUEUED
    local.store.write_state(elsewhere, "", {"state": RUNNING, "started": 0.0, "pid": 1, "created": 0.0})
    assert local.poll([elsewhere.job_id])[elsewhere.job_id].state == UNKNOWN
    assert "another-host" in local.cancel([elsewhere.job_id])[elsewhere.job_id]


def test_jobs_added_at_once_get_distinct_numbers(tmp_path: Path) -> None:
    write(tmp_path / "run", "true")
    program = (
        "from pathlib import Path; from fugaku_gpt.jobs.schedulers.local_store import LocalStore; "
        "from fugaku_gpt.jobs.schedulers.protocol import Submission; "
        f"s = LocalStore(Path({str(tmp_path / 'queue')!r})); "
        f"[print(s.add(Submission('job.sh', Path({str(tmp_path / 'run')!r}), 'x'), 'h').number) for _ in range(25)]"
    )
    adders = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(4)]
    numbers = [int(word) for adder in adders for word in adder.communicate()[0].split()]
    assert sorted(numbers) == list(range(1, 101))


def test_a_submission_to_a_queue_that_does_not_start_is_uncertain(
    local: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Uncertain, match="cannot be started"):
        local.submit(write(tmp_path / "run", "true", tag="a-tag"))
    assert list(local.find(["a-tag"])) == ["a-tag"]  # so it is not submitted again


def test_a_queue_without_a_record_is_refused_with_the_file(local: LocalScheduler, tmp_path: Path) -> None:
    """As on a full disk, or in a folder that somebody has made read-only."""
    record = local.store.root / queue_file(local._host)
    record.mkdir(parents=True)
    with pytest.raises(Uncertain, match=f"cannot be started: {re.escape(str(record))}: Is a directory"):
        local.submit(write(tmp_path / "run", "true"))


FULL_QUEUE_PROGRAM = """
import errno, os, sys
from pathlib import Path
from fugaku_gpt.jobs.schedulers import local_queue, local_store

def full(store, job, sub, values):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state.json")

local_store.LocalStore.write_state = full
sys.exit(local_queue.main(Path(sys.argv[1])))
"""


def test_a_job_that_waits_for_a_queue_that_always_ends_has_the_cause(
    local: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full.py").write_text(FULL_QUEUE_PROGRAM, encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/full.py "$3"\n', encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PYTHONPATH", str(Path(fugaku_gpt.__file__).parent.parent))
    job_id = local.submit(write(tmp_path / "run", "true"))
    status = until(lambda: (status := local.poll([job_id])[job_id]).reason and status)
    assert status.state == QUEUED
    assert status.reason.startswith("the queue has ended and is started again: state.json: No space left")


def test_a_line_of_another_queue_is_not_the_cause(local: LocalScheduler, tmp_path: Path) -> None:
    """As after a reboot: the log has a line about the job, by a queue that ended before the one that ran it."""
    job = local.store.add(write(tmp_path / "run", "true"), local._host)
    dead = {"pid": 2**22 + 7, "created": 1000.0}
    earlier, later = {**dead, "created": 500.0}, {**dead, "created": 2000.0}
    log = local.store.root / "queue.log"
    log.write_text(f"{log_prefix(earlier, job.job_id)}old\n{job.job_id}: of an old version\n", encoding="utf-8")
    local.store.write_state(job, "", {"state": RUNNING, "started": 1.0, **dead})
    assert local.poll([job.job_id])[job.job_id].reason == "the queue that ran it was killed"
    with log.open("a") as stream:
        stream.write(f"{log_prefix(dead, 'local-12')}other\n{log_prefix(dead, job.job_id)}a cause\n")
        stream.write(f"{log_prefix(later, job.job_id)}new\n")
    assert local.poll([job.job_id])[job.job_id].reason == "the queue that ran it has ended: a cause"
    waiting = local.store.add(write(tmp_path / "waits", "true"), local._host)
    local.store.set_request(waiting, "hold")
    (local.store.root / queue_file(local._host)).write_text(json.dumps(this_process()), encoding="utf-8")
    with log.open("a") as stream:
        stream.write(f"{log_prefix(this_process(), waiting.job_id)}of the queue that runs\n")
    local.store.set_request(waiting, "hold", False)
    assert local.poll([waiting.job_id])[waiting.job_id].reason == "", "the queue is running"


def test_a_job_that_cannot_be_started_says_why(
    local: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = write(tmp_path / "run", "true")
    (tmp_path / "run" / "local-1.out").mkdir()
    status = until_state(local, local.submit(submission), *OVER)
    assert (status.state, status.raw, status.exit_code) == (ENDED, "LAUNCH_FAILED", 127)
    assert status.reason == f"{tmp_path}/run/local-1.out: Is a directory"
    cause = f"it could not be started: {status.reason}"
    assert outcome_of_other_job("local", status, []).cause == cause
    monkeypatch.setenv("PATH", str(tmp_path))
    status = until_state(local, local.submit(submission), *OVER)
    assert (status.raw, status.reason) == ("LAUNCH_FAILED", "bash: No such file or directory")


def test_a_job_whose_end_cannot_be_recorded_is_lost_with_the_cause(local: LocalScheduler, tmp_path: Path) -> None:
    body = f"rm -r {tmp_path}/queue/1; touch {tmp_path}/queue/1"  # somebody removes the folder of the job
    job_id = local.submit(write(tmp_path / "run", f"cp -r {tmp_path}/queue/1 {tmp_path}/copy; {body}"))
    until(lambda: (tmp_path / "queue" / "1").is_file() and not local._is_queue_running())
    (tmp_path / "queue" / "1").unlink()
    (tmp_path / "copy").rename(tmp_path / "queue" / "1")
    status = local.poll([job_id])[job_id]
    assert status.state == LOST
    assert status.reason.startswith("the queue that ran it has ended: ") and "state.json" in status.reason


def test_without_locks_a_living_queue_is_known_by_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    record = tmp_path / queue_file("host")
    parent = psutil.Process(os.getppid())
    record.write_text(json.dumps({"pid": parent.pid, "created": parent.create_time()}), encoding="utf-8")
    assert _try_lock(tmp_path, "host") is None
    for process in (
        {**this_process(), "pid": os.getppid(), "created": 1.0},  # its number was used before
        this_process(),  # the queue itself, which looks for more jobs before it ends
    ):
        record.write_text(json.dumps(process), encoding="utf-8")
        lock = _try_lock(tmp_path, "host")
        assert lock is not None
        os.close(lock)
