"""Tests of a job from its run file to its row, through every scheduler that this machine can have: render, check,
submit, train on real ranks, follow, collect, table; and of a sweep through the simulated PJM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.errors import EXIT_FINDINGS
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.simulator.session import Simulator
from tests.support import slurm
from tests.support.commands import Capture, json_of
from tests.support.corpus import write_byte_corpus
from tests.support.forks import starting
from tests.support.simulated import simulated_pjm  # noqa: F401  # a fixture
from tests.support.waiting import until

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("forked_starts")]

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab_size=256",
    "training.iterations=4", "training.global_batch=4", "training.eval_interval=2", "layout.dp=2",
    "node.threads_per_rank=1", "job.elapse=10:00", "job.group=hp000000", "job.volumes=[/vol0004]",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_corpus(tmp_path_factory.mktemp("corpus") / "bytes")


@pytest.fixture
def cluster() -> Iterator[Path]:
    reason = slurm.missing()
    if reason:
        pytest.skip(f"REAL SLURM IS NOT TESTED HERE: {reason}")
    with slurm.slurm_cluster() as logs:
        yield logs


@pytest.fixture
def local_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def set_options(corpus: Path, *settings: str) -> List[str]:
    options: List[str] = []
    for setting in (*TINY, f"data.paths=[{json.dumps(str(corpus))}]", *settings):
        options += ["--set", setting]
    return options


def read(capsys: Capture, *arguments: str) -> Any:
    """JSON output of a command that reads; its exit code is 0, or 1 where a run has failed."""
    return json_of(capsys, *arguments, codes=(0, 1))


def wait_for_row(capsys: Capture, directory: Path, is_awaited: Callable[[Dict[str, Any]], bool]) -> Dict[str, Any]:
    """The row of a job in `job status` once it is the awaited one."""
    rows: List[Dict[str, Any]] = []

    def is_there() -> bool:
        rows[:] = read(capsys, "job", "status", str(directory))
        (row,) = rows
        return is_awaited(row)

    until(is_there, lambda: rows, pause=0.2)
    return rows[0]


def wait_until_over(capsys: Capture, directory: Path) -> Dict[str, Any]:
    """The row of a job in `job status` once it is over."""
    return wait_for_row(capsys, directory, lambda row: row["state"] not in ("queued", "running", "held"))


def train_and_collect(capsys: Capture, corpus: Path, out: Path, *settings: str) -> Dict[str, Any]:
    """Submit a run, wait for its end and collect it; returns the row of its table."""
    assert run(["job", "submit", *set_options(corpus, *settings), "--out", str(out), "--yes"]) == 0
    status = wait_until_over(capsys, out)
    assert (status["state"], status["status"]) == ("ended", "ok"), status
    (row,) = read(capsys, "job", "collect", str(out))
    assert (row["status"], row["iterations"], row["dp"]) == ("ok", 4, 2)
    assert row["seconds_per_iteration"] > 0 and row["last_validation_loss"] < row["first_validation_loss"] + 1
    assert status["job"] in row["job_id"]
    return dict(row)


def test_a_job_goes_through_the_simulated_pjm_and_power_knobs_that_it_grants_are_not_in_the_table_as_applied(
    simulated_pjm: Simulator,  # noqa: F811
    corpus: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    script = tmp_path / "job.sh"
    assert run(["job", "render", *set_options(corpus), "--scheduler", "pjm", "--out", str(script)]) == 0
    # two ranks with a thread each on 48 cores: the check reports that, and nothing else
    assert run(["job", "lint", str(script), "--ignore", "PJM062"]) == 0
    assert run(["job", "lint", str(script)]) == EXIT_FINDINGS
    row = train_and_collect(capsys, corpus, tmp_path / "run", "job.scheduler=pjm", "node.freq_mhz=2200")
    assert row["freq_mhz_applied"] is None and "2.2GHz" in row["not_applied"]
    accounting = json.loads((tmp_path / "run" / "accounting.json").read_text())
    assert accounting and list((tmp_path / "run").glob("*.stats"))
    assert run(["report", "table", str(tmp_path / "run"), "--format", "md"]) == 0
    table = capsys.readouterr().out
    assert "| 1 (max-proc-per-node=2) | " in table and f", {row['job_id']}, not applied: 2.2GHz |" in table


def test_a_job_goes_through_real_slurm(
    cluster: Path, corpus: Path, uninterrupted: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings = [
        "job.scheduler=slurm",
        "job.nodes=2",
        "job.volumes=[]",
        f"job.profile={ROOT / 'env' / 'torch-2.13.yaml'}",
    ]
    row = train_and_collect(capsys, corpus, tmp_path / "run", *settings)
    assert row["nodes"] == 2
    hosts = json.loads((tmp_path / "run" / "environment.json").read_text())["ranks"]
    assert len(hosts) == 2
    train_in_a_chain(capsys, corpus, uninterrupted, tmp_path / "chain", *settings)
    long = [*settings, "training.iterations=100000", "training.log_interval=50"]
    assert run(["job", "submit", *set_options(corpus, *long), "--out", str(tmp_path / "long"), "--yes"]) == 0
    until(lambda: (tmp_path / "long" / "metrics.jsonl").exists())
    assert run(["job", "cancel", str(tmp_path / "long")]) == 0
    status = wait_until_over(capsys, tmp_path / "long")
    assert status["state"] == "cancelled" and status["status"] == "interrupted", status


def test_a_job_goes_through_this_machines_queue(
    local_queue: None, corpus: Path, tmp_path: Path, capsys: Capture
) -> None:
    train_and_collect(capsys, corpus, tmp_path / "run", "job.scheduler=local", "job.volumes=[]")


# Each link may run until a millisecond after its start, so it stops after its first iteration, however fast this
# machine is: with a second, all three were over before it where Python and PyTorch start in less.
THREE_LINKS = ["job.chain=3", "training.iterations=3", "job.elapse=10:00", "job.stop_margin=9:59.999"]


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory, forking_python: Optional[Path]) -> Path:
    """The run directory of three uninterrupted iterations, to which every chain is compared."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    with starting(forking_python):
        assert run(["train", *set_options(corpus, "training.iterations=3"), "--ranks", "2", "--out", str(out)]) == 0
    return out


def train_in_a_chain(capsys: Capture, corpus: Path, uninterrupted: Path, chained: Path, *settings: str) -> None:
    """Three links, each resuming where the one before has stopped, draw the curve of a run that was not interrupted."""
    assert run(["job", "submit", *set_options(corpus, *THREE_LINKS, *settings), "--out", str(chained), "--yes"]) == 0
    row = wait_for_row(capsys, chained, lambda row: bool(row["status"]))
    assert row["status"] == "ok", (row, sorted(path.name for path in chained.iterdir()))
    codes = [json.loads(path.read_text())["exit_code"] for path in sorted((chained / "exit").glob("*.json"))]
    assert codes == [75, 75, 0]
    for number, limit in ((1, 1), (2, 2)):
        stopped = json.loads((chained / f"result.{number}.json").read_text())
        assert (stopped["status"], stopped["iterations"]) == ("interrupted", limit)
        assert "0:09:59 before the time limit of 0:10:00" in stopped["reason"]
    for kind in ("iteration", "validation"):
        losses = [[line["loss"] for line in RunDirectory(out).metrics(kind)] for out in (uninterrupted, chained)]
        assert losses[0] == losses[1] and len(losses[0]) == 3


def test_a_chain_resumes_by_itself_in_the_simulated_pjm(
    simulated_pjm: Simulator,  # noqa: F811
    corpus: Path,
    uninterrupted: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    train_in_a_chain(capsys, corpus, uninterrupted, tmp_path / "chain", "job.scheduler=pjm")


def test_a_chain_resumes_by_itself_in_this_machines_queue(
    local_queue: None, corpus: Path, uninterrupted: Path, tmp_path: Path, capsys: Capture
) -> None:
    train_in_a_chain(capsys, corpus, uninterrupted, tmp_path / "chain", "job.scheduler=local", "job.volumes=[]")


def test_a_sweep_goes_through_the_simulated_pjm(
    simulated_pjm: Simulator,  # noqa: F811
    corpus: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    file = tmp_path / "two.yaml"
    lines = [f"  {key}: {value}" for key, _, value in (setting.partition("=") for setting in TINY)]
    file.write_text(
        "\n".join(
            ["defaults:", *lines, f"  data.paths: [{corpus}]", "matrix:", "  layout.tp: [1, 2]", "  layout.pp: [1]"]
        ),
        encoding="utf-8",
    )
    out = tmp_path / "sweep"
    submit = ["sweep", "submit", str(file), "--out", str(out), "--scheduler", "pjm", "--yes"]
    assert run([*submit, "--max-in-flight", "1"]) == 0
    submitted_count = len(list(out.glob("*/job.jsonl")))
    assert submitted_count == 1

    def are_both_over() -> bool:
        assert run(submit) == 0  # never blocks, submits nothing twice
        return len(list(out.glob("*/result.json"))) == 2

    until(are_both_over, pause=0.5)
    rows = read(capsys, "sweep", "status", str(out))
    assert [row["status"] for row in rows] == ["ok", "ok"], rows
    jobs = [json.loads(line) for path in out.glob("*/job.jsonl") for line in path.read_text().splitlines()]
    assert len([event for event in jobs if event["kind"] == "submitted"]) == 2
    assert run(["job", "collect", *map(str, sorted(path.parent for path in out.glob("*/job.jsonl")))]) == 0
    table = read(capsys, "report", "table", str(out))
    assert sorted((row["dp"], row["tp"]) for row in table) == [(2, 1), (2, 2)]
    assert len({round(row["last_validation_loss"], 5) for row in table}) == 1  # the same curve in both layouts
