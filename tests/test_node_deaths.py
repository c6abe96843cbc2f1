"""Tests of nodes that die under a chain of jobs in the simulated PJM: real scripts and real ranks, some of which are
killed with their node. Whatever dies, the run ends with the curve of a run that was not interrupted."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.simulator.session import Simulator
from tests.support.commands import Capture, json_of
from tests.support.corpus import write_byte_corpus
from tests.support.forks import starting
from tests.support.simulated import simulated_pjm  # noqa: F401  # a fixture
from tests.support.waiting import until

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.usefixtures("forked_starts")]

ITERATIONS = 120
TINY = [
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab_size=256",
    f"training.iterations={ITERATIONS}", "training.global_batch=4", "layout.dp=2", "checkpoint.interval=10",
    "node.threads_per_rank=1", "job.elapse=10:00", "job.group=hp000000", "job.volumes=[/vol0004]", "job.nodes=2",
    "job.scheduler=pjm",
]  # fmt: skip


class Death(NamedTuple):
    """A node that dies once a run has begun an iteration.

    Attributes:
        iteration: iteration that the metrics have when it dies, or a later one.
        node: number of the node in the job; the script runs on node 0.
        seconds: time after which PJM notices.
    """

    iteration: int
    node: int
    seconds: float


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_corpus(tmp_path_factory.mktemp("corpus") / "bytes")


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory, forking_python: Optional[Path]) -> Path:
    """The run directory of a run without deaths."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    with starting(forking_python):
        assert run(["train", *set_options(corpus, "job.nodes=1"), "--ranks", "2", "--out", str(out)]) == 0
    return out


def set_options(corpus: Path, *settings: str) -> List[str]:
    options: List[str] = []
    for setting in (*TINY, f"data.paths=[{json.dumps(str(corpus))}]", *settings):
        options += ["--set", setting]
    return options


def last_iteration(directory: Path) -> int:
    """The last iteration in the metrics of a run, which may be of an earlier link."""
    last = 0
    with contextlib.suppress(FileNotFoundError):
        for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last line may not be complete
                values = parse_json(line)
                if values.get("kind") == "iteration":
                    last = int(values["iteration"])
    return last


def train_through(
    capsys: Capture, site: Simulator, corpus: Path, out: Path, uninterrupted: Path, deaths: Sequence[Death]
) -> None:
    """Submit a chain with a link more than there are deaths, let the nodes die, and compare its curve."""
    assert run(["job", "submit", *set_options(corpus, f"job.chain={len(deaths) + 1}"), "--out", str(out), "--yes"]) == 0
    number = capsys.readouterr().out.split("_")[0]
    for link, death in enumerate(deaths):

        def is_time(link: int = link, death: Death = death) -> bool:
            has_begun = (out / f"exit/.{number}_{link}.began").exists()
            saved = (int(path.parent.name[5:13]) for path in out.glob("checkpoints/step-*/manifest.json"))
            # without a checkpoint between two deaths the chain ends, and writing one may take longer than iterations
            has_saved = any(iteration >= death.iteration // 10 * 10 for iteration in saved)
            return has_begun and has_saved and last_iteration(out) >= death.iteration

        until(is_time, lambda: (out / "metrics.jsonl").read_text(), pause=0.005)
        site.inject_fault("node-down", f"{number}_{link}", str(death.node), str(death.seconds))
    rows = []

    def is_over() -> bool:
        rows[:] = json_of(capsys, "job", "status", str(out), codes=(0, 1))
        return bool(rows[0]["status"])

    until(is_over, lambda: rows, pause=0.2)
    assert rows[0]["status"] == "ok", (rows, [path.read_text() for path in sorted(out.glob("exit/*.json"))])
    ended = [json.loads((out / f"exit/{number}_{link}.json").read_text()) for link in range(len(deaths) + 1)]
    assert [record["exit_code"] for record in ended] == [75] * len(deaths) + [0]
    losses = [[line["loss"] for line in RunDirectory(path).metrics("iteration")] for path in (uninterrupted, out)]
    assert losses[0] == losses[1] and len(losses[0]) == ITERATIONS


def test_a_chain_continues_when_a_node_dies(
    simulated_pjm: Simulator,  # noqa: F811
    corpus: Path,
    uninterrupted: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    deaths = [Death(12, 1, 600.0), Death(40, 0, 0.0)]
    train_through(capsys, simulated_pjm, corpus, tmp_path / "run", uninterrupted, deaths)


@pytest.mark.long
def test_a_run_ends_with_the_uninterrupted_curve_whichever_nodes_die(
    simulated_pjm: Simulator,  # noqa: F811
    corpus: Path,
    uninterrupted: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    """Thirty nodes die, one to five in each run, at random iterations, noticed by PJM at once or late."""
    generator, remaining = random.Random(30), 30
    while remaining:
        count = min(remaining, generator.randint(1, 5))
        remaining -= count
        # 10 iterations from one to the next: a checkpoint lies between them, and the chain continues
        iterations = sorted(generator.sample(range(1, ITERATIONS // 10 - 3), count))
        deaths = [Death(10 * at + 5, generator.randrange(2), generator.choice([0.0, 0.05, 600.0])) for at in iterations]
        train_through(capsys, simulated_pjm, corpus, tmp_path / str(remaining), uninterrupted, deaths)
