"""Tests of ``doctor node`` with real ranks on this machine, and of reports without them."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, Tuple

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.doctor import node
from fugaku_gpt.doctor.machine import FAIL, Check
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE, UsageError
from fugaku_gpt.kernels.product_check import MeasuredProducts
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.records.node_report import read_report, write_measurements
from tests.doctor.node_measurements import healthy_a64fx

TINY = ["--preset", "tiny", "--set", "model.layers=1", "--set", "model.hidden=16", "--set", "model.vocab_size=256"]


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_two_ranks_measure_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    arguments = [*TINY, "--ranks", "2", "--set", "node.threads_per_rank=1", "--iterations", "2", "--short"]
    code = run(["doctor", "node", *arguments, "--out", str(out)])
    printed = capsys.readouterr()
    report = read_report(out)
    assert report["failure"] == "" and report["short"], printed.err
    assert "measured for moments only (--short)" in printed.out
    deviating = [finding for finding in report["findings"] if finding["status"] == "deviates"]
    assert code == (EXIT_FINDINGS if deviating else EXIT_OK)
    assert printed.out == (out / "node-report.txt").read_text()
    assert "measuring: step" in printed.err and "iteration 4 of 4" in printed.err
    measured = report["measurements"]
    assert [rank["threads"] for rank in measured["environment"]["ranks"]] == [1, 1]
    (host,), (rates,) = measured["hosts"], measured["rates"]
    assert host["page_bytes"] > 0 and rates["host"] == host["host"]
    assert rates["bandwidth"]["all"] > 0 and set(host["numa_nodes"]) <= {*rates["bandwidth"], "unknown"}
    assert [timing["bytes"] for timing in measured["all_reduce"]] == [8, 2**13, 2**17, 2**20, 2**23, 2**26]
    step = measured["step"]
    assert len(step["seconds"]) == step["iterations"] == 2 and step["tokens_per_second"] > 0 and step["loss"] > 0
    assert {verdict["dtype"] for verdict in report["products"]["verdicts"]} == {"float32", "bfloat16"}


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the checks and products, which import PyTorch in processes of their own."""
    monkeypatch.setattr(node, "run_checks", lambda in_job, on_progress: [Check("Python", "ok", "3.8")])
    monkeypatch.setattr(node, "measure_products", lambda: MeasuredProducts(Path("none")))


def ranks_that(tmp_path: Path, program: str) -> "list[str]":
    """Words in place of a launcher: Python with a program, which gets the rank's command as its arguments."""
    file = tmp_path / "ranks.py"
    file.write_text(program)
    return [f"--start={sys.executable}", f"--start={file}"]


@pytest.mark.usefixtures("no_children")
def test_ranks_that_end_by_a_signal_leave_what_they_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    measured = {key: value for key, value in healthy_a64fx().items() if key in ("environment", "hosts")}
    program = (
        "import json, os, signal, sys\nfrom pathlib import Path\n"
        "from fugaku_gpt.records.node_report import write_measurements\n"
        f"write_measurements(Path({str(out)!r}), 'kernels', json.loads({json.dumps(json.dumps(measured))}))\n"
        "print('last words', flush=True)\nos.kill(os.getpid(), signal.SIGILL)\n"
    )
    code = run(["doctor", "node", "--preset", "tiny", "--out", str(out), *ranks_that(tmp_path, program)])
    printed = capsys.readouterr()
    assert code == EXIT_RUN_FAILED
    failure = "the ranks failed while measuring kernels: ended by signal 4: last words"
    assert read_report(out)["failure"] == failure and f"fugaku-gpt: {failure}" in printed.err
    assert "a01: cores" in printed.out and printed.out.splitlines()[2].endswith(f"seen {failure}")


@pytest.mark.usefixtures("no_children")
def test_ranks_that_do_not_start_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "node", "--preset", "tiny", "--format", "json"]
    assert run([*arguments, *ranks_that(tmp_path, "raise SystemExit('no such host')")]) == EXIT_RUN_FAILED
    report = json.loads(capsys.readouterr().out)
    assert report["failure"] == "the ranks failed before they measured anything: exit code 1: no such host"
    assert not list(tmp_path.glob("*.json"))  # without --out nothing is left


@pytest.mark.usefixtures("no_children")
def test_without_an_mpirun_there_is_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["doctor", "node", "--preset", "tiny", "--out", str(tmp_path / "report")]) == EXIT_RUN_FAILED
    report = read_report(tmp_path / "report")
    assert report["failure"].startswith("the ranks cannot be started: no mpirun beside ")
    assert report["checks"] and report["failure"] in capsys.readouterr().err


@pytest.mark.usefixtures("no_children")
def test_a_start_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    arguments = ["--preset", "tiny", "--out", str(tmp_path), "--start=/no/such/mpiexec"]
    assert run(["doctor", "node", *arguments]) == EXIT_RUN_FAILED
    failure = "the ranks cannot be started: /no/such/mpiexec: cannot be started: No such file or directory"
    assert read_report(tmp_path)["failure"] == failure


@pytest.mark.parametrize("folder", ["/proc/none", "file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_checked(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(node, "run_checks", lambda **_: pytest.fail("checked"))
    assert run(["doctor", "node", "--preset", "tiny", "--out", str(tmp_path / folder)]) == EXIT_USAGE
    assert f"{tmp_path / folder}: cannot be written: " in capsys.readouterr().err


@pytest.mark.usefixtures("no_children")
def test_a_report_of_an_earlier_call_is_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measurements.json", "node-report.json", "node-report.txt"):
        (tmp_path / name).write_text("old")

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(node, "run_checks", interrupted)
    assert run(["doctor", "node", "--preset", "tiny", "--out", str(tmp_path)]) == EXIT_RUN_FAILED
    assert [file.name for file in tmp_path.iterdir()] == ["node-run.yaml"]


@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_reported_as_one(tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    program = (
        "import os, time\nfrom pathlib import Path\n"
        "from fugaku_gpt.records.node_report import write_measurements\n"
        f"write_measurements(Path({str(out)!r}), 'step', {{}})\n"
        f"os.kill(os.getppid(), {int(number)})\ntime.sleep(600)\n"
    )
    code = run(["doctor", "node", "--preset", "tiny", "--out", str(out), *ranks_that(tmp_path, program)])
    assert code == 128 + number
    failure = f"stopped by {number.name} while measuring step"
    assert read_report(out)["failure"] == failure and f"fugaku-gpt: {failure}\n" in capsys.readouterr().err


@pytest.mark.usefixtures("no_children")
def test_ranks_end_before_the_job_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def run_command(*_: Any, timeout: float, **__: Any) -> Outcome:
        limits.append(timeout)
        return Outcome(-15, 15, True, timeout, 0)

    monkeypatch.setattr(node, "run_command", run_command)
    monkeypatch.setenv("PJM_ELAPSE_LIMIT", "1000")  # less than the 3600 s of the run file
    monkeypatch.setenv("FUGAKU_GPT_JOB_STARTED", str(int(time.time()) - 500))
    arguments = ["doctor", "node", "--preset", "tiny", "--set", "job.elapse=1:00:00", "--out", str(tmp_path)]
    assert run([*arguments, "--start=mpiexec"]) == EXIT_RUN_FAILED
    assert 0 < limits[0] <= 400  # a tenth of the job's time is for the report
    monkeypatch.setenv("FUGAKU_GPT_JOB_STARTED", str(int(time.time()) - 950))
    assert run([*arguments, "--start=mpiexec"]) == EXIT_RUN_FAILED
    assert len(limits) == 1
    assert read_report(tmp_path)["failure"].startswith("the ranks were not started: the job's time is nearly over")


@pytest.mark.usefixtures("no_children")
def test_ranks_are_started_as_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("PARALLEL", "48")
    program = "import subprocess, sys\ncommand = sys.argv[1:]\nsubprocess.run([*command[:command.index('-m')], '-c', "
    program += "'import os; print(*map(os.environ.get, "
    program += '("GOMP_SPINCOUNT", "PARALLEL", "XOS_MMM_L_HPAGE_TYPE")))\'])\nraise SystemExit(1)'
    arguments = ["--preset", "tiny", "--set", "node.threads_per_rank=1", "--set", "node.large_pages=hugetlbfs"]
    run(["doctor", "node", *arguments, "--out", str(tmp_path / "report"), *ranks_that(tmp_path, program)])
    assert read_report(tmp_path / "report")["failure"].endswith("exit code 1: 2000 1 hugetlbfs")


@pytest.mark.usefixtures("no_children")
def test_the_exit_code_says_whether_something_deviates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = healthy_a64fx()
    measured.pop("section")

    def ranks(config: Any, command: Any, *_: Any) -> Tuple[str, None]:
        write_measurements(command.folder, "", measured)
        return "", None

    monkeypatch.setattr(node, "_run_ranks", ranks)
    assert run(["doctor", "node", "--preset", "tiny"]) == EXIT_OK
    measured["hosts"][0]["page_bytes"] = 4096
    assert run(["doctor", "node", "--preset", "tiny"]) == EXIT_FINDINGS
    assert "a01: pages: expected 64 KiB, seen 4 KiB" in capsys.readouterr().out
    monkeypatch.setattr(node, "run_checks", lambda in_job, on_progress: [Check("MPI library", FAIL, "none")])
    assert run(["doctor", "node", "--preset", "tiny"]) == EXIT_RUN_FAILED
    assert "checks failed: MPI library" in capsys.readouterr().err


def test_a_report_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such file; give the folder of a report"):
        read_report(tmp_path)
    for text, reason in (('{"version": 2}', "version 2 of this format"), ('{"version": 1}', "it has no 'made'")):
        (tmp_path / "node-report.json").write_text(text)
        with pytest.raises(UsageError, match=reason):
            read_report(tmp_path)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("layout: {dp: 2}\n")
    for arguments, message in (
        (["--run", str(tmp_path / "run.yaml"), "--ranks", "2"], "--ranks: the run file has the layout"),
        (["--job", "pjm", "--start=mpiexec"], "--start: goes without --job"),
        (["--set", "job.nodes=2"], "job.nodes: 2: ranks are started on this machine only; valid: 1"),
    ):
        assert run(["doctor", "node", *arguments]) == EXIT_USAGE
        assert message in capsys.readouterr().err
