"""Tests of the job that measures its nodes: its script, and its report under the simulated PJM."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import EXIT_OK, ConfigError
from fugaku_gpt.jobs.node_report import render_node_report
from fugaku_gpt.jobs.poll import poll_runs
from fugaku_gpt.jobs.schedulers.pjm import PjmScheduler
from fugaku_gpt.jobs.submission import submit
from fugaku_gpt.records.job import OVER
from fugaku_gpt.records.node_report import read_report
from tests.support.simulated import simulated
from tests.support.waiting import until_state

FUGAKU = ["job.group=hp000000", "job.volumes=[/vol0004]"]
SMALL = ["model.layers=1", "model.hidden=16", "model.seq_len=16", "model.vocab_size=256"]


def settings(texts: List[str]) -> List[str]:
    return [argument for text in texts for argument in ("--set", text)]


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 4), (2, 8)])
def test_the_job_has_a_rank_on_each_core_memory_group_and_no_finding_of_lint(
    tmp_path: Path, nodes: int, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job"
    arguments = [*settings([*FUGAKU, f"job.nodes={nodes}", "node.tcmalloc=true"]), "--job", "pjm", "--out", str(out)]
    assert run(["doctor", "node", *arguments]) == EXIT_OK
    printed = capsys.readouterr().err
    assert f"submit it with `fugaku-gpt job submit {out}`" in printed and f"{out}/node-report.txt" in printed
    text = (out / "job.sh").read_text()
    assert f'#PJM -L "node={nodes}"\n#PJM -L "elapse=0:30:00"\n' in text
    assert f'#PJM --mpi "proc={ranks}"\n#PJM --mpi "max-proc-per-node=4"\n' in text
    assert f"launch=(mpiexec -n {ranks}\n" in text
    assert "doctor node --run config.yaml --out . --set node.threads_per_rank=12 --iterations=10)" in text
    assert 'launch+=(env LD_PRELOAD=libtcmalloc.so"${LD_PRELOAD:+:$LD_PRELOAD}")' in text
    assert "fugaku_gpt train" not in text
    config = load_run_config(out / "config.yaml")
    assert config.layout.dp == config.training.global_batch == ranks and config.model.layers == 12
    assert run(["job", "lint", str(out / "job.sh"), "--fail-on", "warning"]) == EXIT_OK
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(out / "job.sh")], check=True)


def test_the_script_is_printed_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "node", "--job", "slurm", "--ranks", "3", "--iterations", "4", "--short"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "#SBATCH --ntasks=3\n" in text and "--iterations=4 --short)" in text
    assert 'run "${doctor[@]}" "${launch[@]/#/--start=}"' in text


def test_a_chain_of_such_jobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="nodes are measured by one job"):
        render_node_report(load_run_config(overrides=["job.chain=2"]), [])


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_job_of_two_ranks_leaves_the_report_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "job"
    checkout = f"job.environment=[PYTHONPATH={Path(__file__).resolve().parents[2]}]"
    texts = [*FUGAKU, *SMALL, checkout, "node.threads_per_rank=1", "job.elapse=0:10:00"]
    arguments = ["--preset", "tiny", "--ranks", "2", "--iterations", "2", "--short", *settings(texts)]
    assert run(["doctor", "node", *arguments, "--job", "pjm", "--out", str(out)]) == EXIT_OK
    with simulated() as site:
        monkeypatch.setenv("PATH", site.environment["PATH"])
        pjm = PjmScheduler(sleep=lambda seconds: time.sleep(seconds / 20))
        (job_id,) = submit(out, pjm)
        until_state(pjm, job_id, *OVER)
        output = "".join(path.read_text() for path in out.glob("doctor-node.*"))
        (polled,) = poll_runs([out])
    assert polled.outcome.status == "ok", output
    report = read_report(out)
    assert report["failure"] == "" and (out / "node-report.txt").read_text() in output
    ranks = report["measurements"]["environment"]["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1] and len(report["measurements"]["step"]["seconds"]) == 2
    assert {check["name"] for check in report["checks"]}.isdisjoint({"mpirun", "two ranks"})
    # the simulator grants power knobs that it does not have
    assert report["measurements"]["hosts"][0]["power"] == {}
