"""The job that runs both sides inside one allocation, run by the simulated PJM."""

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

WAIT_SECONDS = 600.0


@pytest.mark.mpi
def test_both_sides_take_turns_inside_one_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.layers=1", "model.hidden=16", "model.seq_len=16", "model.vocab_size=256", "job.elapse=0:10:00"]
    settings.append(
        f"job.environment=[PYTHONPATH={Path(__file__).resolve().parents[2]}]"
    )  # this checkout, in the job too
    words = [word for text in settings for word in ("--set", text)]
    words += ["--preset", "tiny", "--data", str(write_byte_corpus(tmp_path / "bytes")), "--ranks", "2"]
    words += ["--iterations", "3", "--warm-up", "1", "--pairs", "1", "--load", "1"]
    out = tmp_path / "job"
    # one side with another number of ranks than the job's: its mpiexec is told so
    assert run(["compare", "base", "ranks=1,threads=2", *words, "--job", "pjm", "--out", str(out)]) == EXIT_OK
    with simulated() as site:
        monkeypatch.setenv("PATH", site.environment["PATH"])
        pjm = PjmScheduler(sleep=lambda seconds: time.sleep(seconds / 20))
        (job_id,) = submit(out, pjm)
        deadline = time.monotonic() + WAIT_SECONDS
        while pjm.poll([job_id])[job_id].state not in OVER:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    said = "".join(path.read_text() for path in out.glob("*.out"))
    kept = read_comparison(out / "pairs")
    assert [pair.order for pair in kept.counted] == ["AB"], said + os.linesep.join(kept.failures())
    (pair,) = kept.counted  # a pair that the host disturbs is run again, and kept besides
    assert [len(job.environment["ranks"]) for job in (pair.a, pair.b)] == [2, 1]
    assert "undecided" in said
    capsys.readouterr()
    assert run(["compare", str(out)]) == EXIT_OK
    assert "1 pair counts" in capsys.readouterr().out
