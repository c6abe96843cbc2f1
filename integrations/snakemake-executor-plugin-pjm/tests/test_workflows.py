"""Tests of the executor on a simulated PJM: Snakemake's own tests of executors, and what they do not ask.

They need an environment with Snakemake, this distribution and fugaku_gpt: ``make test-integrations``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator, List, Optional

import pytest
import snakemake.common.tests
from snakemake_executor_plugin_pjm import ExecutorSettings
from snakemake_interface_executor_plugins.settings import ExecutorSettingsBase

from fugaku_gpt.simulator.session import Simulator
from fugaku_gpt.simulator.settings import Settings

HANG_SECONDS = 120.0  # ends a test that would hang
PJM = ["--executor", "pjm", "--pjm-group", "hp000000", "--pjm-volumes", "/vol0004"]
QUICK = ["--jobs", "4", "--seconds-between-status-checks", "0", "--latency-wait", "2", "--nocolor"]


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    """A simulated PJM whose commands are on PATH."""
    before = os.environ["PATH"]
    with Simulator(tmp_path_factory.mktemp("sim"), Settings(min_elapse=1.0, grace=1.0, slots=4)) as simulator:
        os.environ["PATH"] = simulator.environment["PATH"]
        yield simulator
        os.environ["PATH"] = before


@pytest.fixture
def workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes a Snakefile into a folder of its own, which becomes the present one."""

    def write(text: str) -> Path:
        (tmp_path / "Snakefile").write_text(text, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return write


def run_snakemake(*arguments: str, code: int = 0) -> str:
    """Run Snakemake in the present folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *PJM, *QUICK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


class TestWorkflows(snakemake.common.tests.TestWorkflowsLocalStorageBase):  # type: ignore[misc]
    """Snakemake's own tests of an executor: a workflow of rules, and one of groups of jobs."""

    __test__ = True

    def get_executor(self) -> str:
        """Return the name by which the executor is found."""
        return "pjm"

    def get_executor_settings(self) -> Optional[ExecutorSettingsBase]:
        """Return settings for a site that asks for a group."""
        return ExecutorSettings(group="hp000000", volumes="/vol0004")


def test_resources_of_a_rule_reach_pjm(workflow: Callable[[str], Path]) -> None:
    folder = workflow(
        """
rule ranks:
    output: "ranks.txt"
    resources:
        nodes=2, tasks=4, tasks_per_node=2, runtime=90, pjm_rscgrp="small", pjm_options="-L freq=2000,eco_state=0"
    shell:
        "mpiexec -n {resources.tasks} sh -c 'echo rank $PMIX_RANK'; echo $GREETING > {output};"
        "env | grep ^PJM_ >> {output}; cat output.$PJM_JOBID/*/*/stdout.* >> {output}"
"""
    )
    printed = run_snakemake("--pjm-prelude", "export GREETING=hello")
    lines = (folder / "ranks.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "hello" and {f"rank {rank}" for rank in range(4)} <= set(lines)
    expected = ("PJM_NODE=2", "PJM_MPI_PROC=4", "PJM_PROC_BY_NODE=2", "PJM_ELAPSE_LIMIT=5400", "PJM_RSCGRP=small")
    assert set(expected) <= set(lines)
    assert any(line.startswith("PJM_CUSTOM_RESOURCES=freq=2000,eco_state=0,") for line in lines)
    assert "is job" in printed and not list((folder / ".snakemake" / "pjm").glob("*.*")), "leftovers of a success"


def test_a_failed_job_says_why_and_is_tried_again(workflow: Callable[[str], Path]) -> None:
    folder = workflow(
        """
rule fails_once:
    output: "done.txt"
    shell: "if test -e tried; then touch {output}; else touch tried; echo ValueError: no rows; exit 3; fi"
"""
    )
    printed = run_snakemake("--show-failed-logs", "--retries", "1")
    assert "ended with: exit code 1" in printed and "ValueError: no rows" in printed
    assert (folder / "done.txt").exists()


def test_the_time_limit_of_a_job_is_named(workflow: Callable[[str], Path]) -> None:
    workflow(
        """
rule late:
    output: "late.txt"
    resources: pjm_options="-L elapse=1"
    shell: "sleep 900; touch {output}"
"""
    )
    assert "PJM code 11" in run_snakemake(code=1)


@pytest.mark.parametrize(
    "resources, message",
    [
        ("nodes=0", " error: "),  # by the rules for Fugaku, before pjsub is called
        ('nodes=400, pjm_rscgrp="small"', "PJM 0057 pjsub node=400"),
    ],
)
def test_a_job_that_pjm_would_refuse_is_not_submitted(
    resources: str, message: str, workflow: Callable[[str], Path]
) -> None:
    workflow(f'rule bad:\n    output: "bad.txt"\n    resources: {resources}\n    shell: "touch {{output}}"\n')
    printed = run_snakemake(code=1)
    assert message in printed and "Traceback" not in printed


def test_a_job_that_pjm_may_have_accepted_ends_the_workflow_and_is_not_tried_again(
    workflow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = workflow('rule a:\n    output: "a.txt"\n    shell: "touch {output}"\n')
    silent = folder / "bin" / "pjsub"
    silent.parent.mkdir()
    silent.write_text(f"#!/bin/sh\necho called >> {folder}/calls\nexit 1\n")
    silent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{silent.parent}:{os.environ['PATH']}")
    printed = run_snakemake("--retries", "2", code=1)
    assert "may have been submitted to PJM" in printed and "comment fugaku-gpt-" in printed
    assert (folder / "calls").read_text() == "called\n" and "Traceback" not in printed


def test_files_that_cannot_be_removed_are_a_warning(workflow: Callable[[str], Path]) -> None:
    folder = workflow(
        """
rule a:
    output: "a.txt"
    shell: "cd .snakemake/pjm && mv *.sh aside && mkdir $(basename *.out .out).sh && cd - && touch {output}"
"""
    )
    printed = run_snakemake()
    assert "its files are still there" in printed and (folder / "a.txt").exists()


def test_a_job_is_followed_while_pjm_does_not_answer(workflow: Callable[[str], Path], site: Simulator) -> None:
    folder = workflow('rule a:\n    output: "a.txt"\n    shell: "sleep 1; touch {output}"\n')
    site.inject_fault("pjstat-fails", "4")  # a query is repeated three times
    run_snakemake()
    assert (folder / "a.txt").exists()


def test_an_interrupted_workflow_cancels_all_jobs(workflow: Callable[[str], Path]) -> None:
    folder = workflow('rule a:\n    output: "a.txt"\n    shell: "touch up; sleep 900; touch {output}"\n')
    log = folder / "log"
    with log.open("wb") as stream:
        running = subprocess.Popen(
            [sys.executable, "-m", "snakemake", *PJM, *QUICK], stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        until((folder / "up").exists)

        def is_interrupted() -> bool:
            """Interrupt it once more unless it has heard: it misses a signal while it works on its graph of jobs."""
            if "Terminating processes on user request" not in log.read_text(encoding="utf-8"):
                running.send_signal(signal.SIGINT)
                time.sleep(3.0)
            return running.poll() is not None

        until(is_interrupted)
    finally:
        running.kill()
        running.wait()
    assert running.returncode != 0, log.read_text(encoding="utf-8")

    def states() -> List[str]:
        rows = subprocess.run(["pjstat"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        return [line.split()[3] for line in rows.stdout.splitlines() if line[:1].isdigit()]

    until(lambda: not states())
    assert not (folder / "a.txt").exists()


def test_without_pjm_the_message_says_how_to_try_it(
    workflow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow('rule a:\n    output: "a.txt"\n    shell: "touch {output}"\n')
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    printed = run_snakemake(code=1)
    assert "pjstat is not on PATH" in printed and "fugaku-gpt sim start" in printed
