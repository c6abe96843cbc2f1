"""Tests of the job that runs both sides inside one allocation, on the simulated PJM."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.compare.pairs import read_comparison
from fugaku_gpt.errors import EXIT_OK
from fugaku_gpt.jobs.schedulers.pjm import PjmScheduler
from fugaku_gpt.jobs.submission import submit
from fugaku_gpt.records.job import OVER
from tests.support.corpus import write_byte_corpus
from tests.support.simulated import simulated
from tests.support.waiting import until_state


@pytest.mark.mpi
@pytest.mark.long
def test_both_sides_take_turns_inside_a_single_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.layers=1", "model.hidden=16", "model.seq_len=16", "model.vocab_size=256", "job.elapse=0:10:00"]
    settings.append(
        f"job.environment=[PYTHONPATH={Path(__file__).resolve().parents[2]}]"
    )  # this checkout, in the job too
    arguments = [argument for text in settings for argument in ("--set", text)]
    arguments += ["--preset", "tiny", "--data", str(write_byte_corpus(tmp_path / "bytes")), "--ranks", "2"]
    arguments += ["--iterations", "3", "--warm-up", "1", "--pairs", "1", "--load", "1"]
    out = tmp_path / "job"
    # side B has fewer ranks than the job: their number is passed to mpiexec
    assert run(["compare", "base", "ranks=1,threads=2", *arguments, "--job", "pjm", "--out", str(out)]) == EXIT_OK
    with simulated() as site:
        monkeypatch.setenv("PATH", site.environment["PATH"])
        pjm = PjmScheduler(sleep=lambda seconds: time.sleep(seconds / 20))
        (job_id,) = submit(out, pjm)
        until_state(pjm, job_id, *OVER)
    output = "".join(path.read_text() for path in out.glob("*.out"))
    comparison = read_comparison(out / "pairs")
    assert [pair.order for pair in comparison.counted] == ["AB"], output + os.linesep.join(comparison.failures())
    (pair,) = comparison.counted  # a pair that the host disturbs is run again, and its record stays
    assert [len(job.environment["ranks"]) for job in (pair.a, pair.b)] == [2, 1]
    assert "undecided" in output
    capsys.readouterr()
    assert run(["compare", str(out)]) == EXIT_OK
    assert "1 pair counts" in capsys.readouterr().out
