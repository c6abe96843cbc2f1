"""Tests that a run is submitted as a single job and that no job is lost."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import ConfigError, Uncertain, UsageError
from fugaku_gpt.jobs.billing import node_hours
from fugaku_gpt.jobs.schedulers.local import LocalScheduler
from fugaku_gpt.jobs.schedulers.pjm import PjmScheduler
from fugaku_gpt.jobs.schedulers.protocol import Overtaken, Refused, Scheduler, Submission
from fugaku_gpt.jobs.schedulers.slurm import SlurmScheduler
from fugaku_gpt.jobs.submission import (
    INTENT_SECONDS,
    load_prepared,
    new_attempt,
    plan_job,
    prepare_job,
    require_exclusion,
    resolve_intents,
    submissions,
    submit,
    with_absolute_paths,
)
from fugaku_gpt.records.job import ENDED, RUNNING, JobStatus, append_event, read_events, read_history
from tests.jobs.schedulers.fake import FakeScheduler
from tests.support.job_records import record_submission


def config(*settings: str) -> RunConfig:
    return load_run_config(preset="tiny", overrides=["job.elapse=2:00:00", "job.nodes=4", "layout.dp=4", *settings])


def kinds(directory: Path) -> Any:
    return [event.kind for event in read_events(directory)]


def test_a_prepared_directory_holds_the_run_and_the_script(tmp_path: Path) -> None:
    prepared = prepare_job(config("job.name=mine"), tmp_path / "run")
    assert (tmp_path / "run" / "job.sh").read_text(encoding="utf-8") == prepared.text
    assert load_run_config(tmp_path / "run" / "config.yaml") == prepared.config
    assert prepared.node_hours == 8 and any("job.group" in note for note in prepared.notes)
    again = load_prepared(tmp_path / "run")
    assert (again.text, again.config, again.node_hours) == (prepared.text, prepared.config, 8)


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    assert "#PJM" in plan_job(config(), tmp_path / "run").text
    assert not (tmp_path / "run").exists()


def test_node_hours_count_every_link_and_sub_job() -> None:
    assert node_hours(config("job.chain=3")) == 24
    assert node_hours(config("job.bulk=0-9")) == 80
    assert node_hours(load_run_config(preset="tiny")) is None


def test_paths_hold_wherever_the_job_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    absolute_config = with_absolute_paths(
        config("data.paths=[corpus, /data/other]", "job.tarball=env.tar", "job.local_tmp=9Gi", "job.transfer=[a]")
    )
    assert absolute_config.data.paths == (str(tmp_path / "corpus"), "/data/other")
    assert (absolute_config.job.tarball, absolute_config.job.transfer) == (
        str(tmp_path / "env.tar"),
        (str(tmp_path / "a"),),
    )
    assert (absolute_config.job.profile, absolute_config.job.template) == ("", "")


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_a_directory_with_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="already holds a run"):
        prepare_job(config(), tmp_path)


def test_a_directory_with_a_job_is_refused(tmp_path: Path) -> None:
    submit(prepare_job(config(), tmp_path), FakeScheduler())
    with pytest.raises(UsageError, match="already holds a job"):
        prepare_job(config(), tmp_path)


def test_a_chain_of_bulk_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chain"):
        plan_job(config("job.chain=2", "job.bulk=0-3"), tmp_path)


@pytest.mark.parametrize("missing", ["job.sh", "config.yaml"])
def test_a_directory_that_is_not_prepared_is_refused(tmp_path: Path, missing: str) -> None:
    prepare_job(config(), tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(UsageError, match=missing):
        submit(tmp_path, FakeScheduler())


@pytest.mark.slow
def test_a_script_older_than_the_settings_is_refused_and_mended_by_the_suggested_command(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    prepare_job(config(), directory)
    file = directory / "config.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("threads_per_rank: null", "threads_per_rank: 2"), encoding="utf-8")  # as ranks do
    assert load_prepared(directory).config.node.threads_per_rank == 2
    file.write_text(text.replace("2:00:00", "5:00:00"), encoding="utf-8")
    with pytest.raises(UsageError, match="before job.elapse was changed.*`fugaku-gpt job render ") as refusal:
        load_prepared(directory)
    command = str(refusal.value).partition("`fugaku-gpt ")[2].rstrip("`")
    assert run(shlex.split(command)) == 0
    assert "elapse=5:00:00" in load_prepared(directory).text


def test_the_job_is_recorded_with_command_and_tag(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    assert submit(prepare_job(config(), tmp_path), scheduler, clock=lambda: 5.0) == ["101"]
    assert kinds(tmp_path) == ["intent", "submitted"]
    values = read_events(tmp_path)[1].values
    assert (values["command"], values["script"], values["scheduler"]) == (["pjsub", "job.sh"], "job.sh", "pjm")
    assert values["tag"] == scheduler.submitted[0].tag != ""


def test_each_link_of_a_chain_follows_the_previous_link(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    assert submit(prepare_job(config("job.chain=3"), tmp_path), scheduler) == ["101", "102", "103"]
    assert [(submission.link, submission.chain, submission.after) for submission in scheduler.submitted] == [
        (1, 3, None),
        (2, 3, "101"),
        (3, 3, "102"),
    ]
    assert len({submission.tag for submission in scheduler.submitted}) == 3
    assert [job.link for job in read_history(tmp_path).jobs] == [1, 2, 3]


def test_the_submission_has_everything_that_a_scheduler_needs(tmp_path: Path) -> None:
    (submission,) = submissions(prepare_job(config("job.bulk=0-3", "job.name=mine"), tmp_path))
    assert (submission.elapse, submission.bulk, submission.name, submission.directory) == (
        7200,
        "0-3",
        "mine",
        tmp_path,
    )


def test_a_refusal_is_recorded_and_the_directory_stays_free(tmp_path: Path) -> None:
    def refuse(_: Submission) -> None:
        raise Refused("PJM 0071 no such group")

    with pytest.raises(Refused, match="0071"):
        submit(prepare_job(config(), tmp_path), FakeScheduler(refuse))
    assert kinds(tmp_path) == ["intent", "refused"]
    assert submit(tmp_path, FakeScheduler()) == ["101"]


def test_links_accepted_before_a_refusal_are_named(tmp_path: Path) -> None:
    def refuse(submission: Submission) -> None:
        if submission.link == 2:
            raise Refused("too many jobs")

    with pytest.raises(Refused, match="too many jobs[\\s\\S]*kept: 101"):
        submit(prepare_job(config("job.chain=2"), tmp_path), FakeScheduler(refuse))
    assert [job.job_id for job in read_history(tmp_path).jobs] == ["101"]


def test_a_chain_that_ends_meanwhile_is_submitted_up_to_the_overtaken_link(tmp_path: Path) -> None:
    def overtaken(submission: Submission) -> None:
        if submission.link == 3:
            raise Overtaken("PJM 0012 the step job is over")

    assert submit(prepare_job(config("job.chain=4"), tmp_path), FakeScheduler(overtaken)) == ["101", "102"]
    assert kinds(tmp_path)[-1] == "refused" and read_history(tmp_path).open == ()


def test_an_uncertain_link_names_those_that_were_accepted(tmp_path: Path) -> None:
    def vanish(submission: Submission) -> None:
        if submission.link == 3:
            raise Uncertain("pjsub: no answer")

    with pytest.raises(Uncertain, match="submitted before that, and kept: 101, 102"):
        submit(prepare_job(config("job.chain=4"), tmp_path), FakeScheduler(vanish))


def test_an_uncertain_submission_is_looked_up_by_tag(tmp_path: Path) -> None:
    scheduler = FakeScheduler()

    def vanish(submission: Submission) -> None:
        scheduler.tags[submission.tag] = "77"
        raise Uncertain("pjsub: no answer")

    with pytest.raises(Uncertain, match="may have been accepted"):
        submit(prepare_job(config(), tmp_path), FakeScheduler(vanish))
    assert kinds(tmp_path) == ["intent"]
    (job,) = resolve_intents(tmp_path, scheduler, timestamp=0.0).jobs
    assert (job.job_id, job.link) == ("77", 1)
    scheduler.statuses["77"] = JobStatus("77", RUNNING)
    with pytest.raises(UsageError, match="job 77 is running"):
        submit(tmp_path, scheduler)


def test_a_submission_without_a_job_is_abandoned_after_a_while(tmp_path: Path) -> None:
    prepare_job(config(), tmp_path)
    append_event(tmp_path, "intent", 1000.0, scheduler="pjm", tag="t", link=1, chain=1, bulk="")
    with pytest.raises(UsageError, match="was begun there and has not ended.*try again in"):
        submit(tmp_path, FakeScheduler(), clock=lambda: 1001.0)
    assert submit(tmp_path, FakeScheduler(), clock=lambda: 1001.0 + INTENT_SECONDS) == ["101"]
    assert kinds(tmp_path) == ["intent", "abandoned", "intent", "submitted"]


def test_of_two_submissions_at_once_the_first_in_the_file_is_made(tmp_path: Path) -> None:
    prepared = prepare_job(config(), tmp_path)
    times = iter([1.0, 2.0])

    def clock() -> float:
        moment = next(times, 3.0)
        if moment == 2.0:  # another submission comes between our look at the directory and our own intent
            append_event(tmp_path, "intent", 1.5, scheduler="pjm", tag="other", link=1, chain=1, bulk="")
        return moment

    scheduler = FakeScheduler()
    with pytest.raises(UsageError, match="came first"):
        submit(prepared, scheduler, clock)
    assert scheduler.submitted == []
    assert [intent.tag for intent in read_history(tmp_path).open] == ["other"]


@pytest.mark.slow
def test_many_processes_submit_a_single_job(tmp_path: Path) -> None:
    prepare_job(config(), tmp_path / "run")
    program = (
        "import sys, time; from pathlib import Path\n"
        "from fugaku_gpt.errors import UsageError\n"
        "from fugaku_gpt.jobs.submission import submit\n"
        "from tests.jobs.schedulers.fake import FakeScheduler\n"
        f"go = Path({str(tmp_path / 'go')!r})\n"
        "print('ready', flush=True)\n"
        "while not go.exists(): time.sleep(0.001)\n"
        "def wait(submission): time.sleep(0.3)\n"
        f"try: print(*submit(Path({str(tmp_path / 'run')!r}), FakeScheduler(wait)))\n"
        "except UsageError: pass\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root, text=True) for _ in range(6)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    output = "".join(process.communicate(timeout=300)[0] for process in processes)
    assert all(process.returncode == 0 for process in processes)
    assert output.split() == ["101"]


@pytest.mark.slow
def test_a_killed_submitter_leaves_an_intent(tmp_path: Path) -> None:
    prepare_job(config(), tmp_path / "run")
    program = (
        "import os, signal; from pathlib import Path\n"
        "from fugaku_gpt.jobs.submission import submit\n"
        "from tests.jobs.schedulers.fake import FakeScheduler\n"
        "def die(submission): print(submission.tag, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        f"submit(Path({str(tmp_path / 'run')!r}), FakeScheduler(die))\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root, text=True, check=False)
    assert done.returncode == -9
    (intent,) = read_history(tmp_path / "run").open
    assert intent.tag == done.stdout.strip()


def test_a_finished_job_is_submitted_again_only_as_a_new_attempt(tmp_path: Path) -> None:
    directory, scheduler = tmp_path / "run", FakeScheduler()
    submit(prepare_job(config(), directory), scheduler)
    scheduler.statuses["101"] = JobStatus("101", ENDED, "EXT")
    with pytest.raises(UsageError, match="holds job 101; `fugaku-gpt job resume`"):
        submit(directory, scheduler)
    (directory / "exit").mkdir()
    (directory / "exit" / "101.json").write_text("{}", encoding="utf-8")
    (directory / "result.json").write_text("{}", encoding="utf-8")
    earlier_attempt = new_attempt(directory, 9.0)
    assert earlier_attempt == tmp_path / "attempts" / "run" / "1"
    assert sorted(path.name for path in earlier_attempt.iterdir()) == [
        "config.yaml",
        "exit",
        "job.jsonl",
        "job.sh",
        "result.json",
    ]
    assert sorted(path.name for path in directory.iterdir()) == ["config.yaml", "job.jsonl", "job.sh"]
    assert submit(directory, scheduler) == ["102"]
    assert read_history(directory).attempts == 1
    assert new_attempt(directory, 9.0).name == "2"


def test_a_new_attempt_continues_from_the_existing_checkpoints(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    prepare_job(config(), directory)
    for folder in (directory, directory / "repeat-0", directory / "repeat-1"):
        folder.mkdir(exist_ok=True)
        for name in ("metrics.jsonl", "result.json"):
            (folder / name).write_text("{}\n", encoding="utf-8")
    for folder in (directory, directory / "repeat-1"):
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    tracker = {"version": 1, "name": "step-00000004"}
    (directory / "checkpoints" / "latest.json").write_text(json.dumps(tracker), encoding="utf-8")
    # the writer of repeat-1 was killed after the first checkpoint was visible, and before the tracker was written
    (directory / "repeat-1" / "checkpoints" / "step-00000004" / "manifest.json").touch()
    earlier_attempt = new_attempt(directory, 9.0)
    remaining_files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    assert remaining_files == [
        "checkpoints/latest.json", "config.yaml", "job.jsonl", "job.sh", "metrics.jsonl",
        "repeat-1/checkpoints/step-00000004/manifest.json", "repeat-1/metrics.jsonl",
    ]  # fmt: skip
    for name in ("result.json", "metrics.jsonl"):
        assert all((earlier_attempt / folder / name).exists() for folder in ("", "repeat-0", "repeat-1"))


def test_a_job_at_another_scheduler_is_not_forgotten(tmp_path: Path) -> None:
    prepare_job(config(), tmp_path)
    record_submission(tmp_path, "5", "slurm")
    with pytest.raises(UsageError, match="job 5 of slurm"):
        submit(tmp_path, FakeScheduler())


def test_a_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file.*cannot be"):
        prepare_job(config(), tmp_path / "file" / "run")


def test_nodes_are_excluded_from_all_links_of_a_chain(tmp_path: Path) -> None:
    prepared = prepare_job(config("job.chain=2"), tmp_path)
    assert [submission.excluded_nodes for submission in submissions(prepared, ["node7"])] == [("node7",), ("node7",)]


@pytest.mark.parametrize(
    ("scheduler", "node", "message"),
    [
        (SlurmScheduler(), "node7", ""),
        (SlurmScheduler(), "rack[1-3,7]", ""),
        (SlurmScheduler(), "--wrap=rm", "is not a node's name"),
        (SlurmScheduler(), "", "is not a node's name"),
        (PjmScheduler(), "node7", "pjsub has no option"),
        (LocalScheduler(), "node7", "the only node"),
    ],
)
def test_nodes_are_excluded_only_where_the_scheduler_can(scheduler: Scheduler, node: str, message: str) -> None:
    if not message:
        require_exclusion(scheduler, [node])
        return
    with pytest.raises(UsageError, match=f"--exclude-node .*{message}"):
        require_exclusion(scheduler, [node])
