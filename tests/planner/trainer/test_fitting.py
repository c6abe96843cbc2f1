"""Tests of which recorded runs a fit can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest

from fugaku_gpt.config import dump_run_config, load_run_config
from fugaku_gpt.planner.trainer.fitting import MeasuredRun, fit_local, usable_runs
from fugaku_gpt.planner.trainer.seconds import RunCost, prior_constants
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import FAILED, OK, Result, RunDirectory
from tests.planner.probes import even_machine


def recorded(
    folder: Path, *settings: str, status: str = OK, iterations: int = 6, environment: "Dict[str, Any] | None" = None
) -> Path:
    run = RunDirectory(folder)
    run.create(dump_run_config(load_run_config(preset="tiny", overrides=settings)))
    run.write_environment({"processor": "even", "ranks": [{"threads": 1}], **(environment or {})})
    metrics = MetricsWriter(run.metrics_file)
    for iteration in range(iterations):
        metrics.write("iteration", {"iteration": iteration, "seconds": 1.5, "loss": 1.0})
    metrics.close()
    run.write_result(Result(status, "", 0.0, 1.0))
    return folder


def test_a_fit_uses_complete_runs_of_this_machine_and_says_why_it_leaves_out_a_run(tmp_path: Path) -> None:
    good = recorded(tmp_path / "good")
    reasons = {
        recorded(tmp_path / "failed", status=FAILED): "did not end well",
        recorded(tmp_path / "elsewhere", environment={"processor": "b"}): "ran on b, not on the machine of the file",
        recorded(tmp_path / "nodes", "job.nodes=2", "layout.dp=2", "node.ranks_per_node=1"): "ran on 2 nodes",
        recorded(tmp_path / "threads", environment={"ranks": []}): "does not record the threads of its ranks",
        recorded(tmp_path / "short", iterations=1): "iterations are logged, or none of the full batch",
    }
    used, left_out = usable_runs([good, *reasons], even_machine())
    assert [run.seconds for run in used] == [1.5]
    for text, (path, reason) in zip(left_out, reasons.items()):
        assert text.startswith(f"{path}: ") and text.endswith(reason)
    assert len(left_out) == len(reasons)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_is_fitted_to_with_the_threads_and_kernels_that_it_used(tmp_path: Path, compiled: bool) -> None:
    environment = {"ranks": [{"threads": 3}], "precision": {"compiled": compiled}}
    ((run,), _) = usable_runs([recorded(tmp_path, environment=environment)], even_machine())
    assert (run.config.node.threads_per_rank, run.config.node.compiled_kernels) == (3, compiled)


def test_each_run_is_predicted_by_a_fit_without_it() -> None:
    probed = even_machine()
    shape = ("model.heads=4", "model.seq_len=64", "model.vocab_size=512", "node.threads_per_rank=1")
    batch = ("training.micro_batch=2", "training.global_batch=16")
    configs = [
        load_run_config(overrides=[*shape, *batch, f"model.hidden={hidden}", f"model.layers={layers}"])
        for hidden in (64, 256) for layers in (2, 4)
    ]  # fmt: skip
    truth = {**prior_constants().values, "products": 1.3}
    runs = [MeasuredRun(str(n), config, RunCost(config, probed).seconds(truth)) for n, config in enumerate(configs)]
    fitted, left_out = fit_local(probed, runs)
    assert fitted.rows == ("0", "1", "2", "3") and fitted.values["products"] == pytest.approx(1.3, rel=0.1)
    assert [run.name for run in left_out] == ["0", "1", "2", "3"]
    assert [run.measured for run in left_out] == [run.seconds for run in runs]
    assert max(abs(run.relative_error) for run in left_out) < 0.2
    none, no_runs = fit_local(probed, [])
    assert none.values == prior_constants().values and no_runs == []
    single, (alone,) = fit_local(probed, runs[:1])
    assert single.rows == ("0",) and abs(alone.relative_error) < 0.2
