"""Fits the factors of the local time model to steps of our trainer, and measures its errors on left-out steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.load import load_run_config
from fugaku_gpt.config.schema import RunConfig
from fugaku_gpt.machine.constants import LOCAL, FittedModel, Machine
from fugaku_gpt.machine.probed import ProbeResults
from fugaku_gpt.planner.intervals import NORMAL_80
from fugaku_gpt.planner.least_squares import Fit, fit_least_squares
from fugaku_gpt.planner.trainer.seconds import RunCost, measured_flops, prior_constants, probe_spread
from fugaku_gpt.records.run import OK, RunDirectory
from fugaku_gpt.records.summary import summarise

_LEAST_SAMPLES = 5  # least number of iterations of a run, without the first two
_LEAST_SPREAD = 0.02  # least spread: steps of the same run on a quiet machine


@dataclass(frozen=True)
class MeasuredRun:
    """Seconds per iteration of a run of our trainer."""

    name: str
    config: RunConfig
    seconds: float


@dataclass(frozen=True)
class LeftOutRun:
    """A run, and its prediction by a fit to all other runs."""

    name: str
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1.0


def probe_step_runs(probed: ProbeResults) -> List[MeasuredRun]:
    """The probe's own steps as runs."""
    return [MeasuredRun(step.name, load_run_config(overrides=step.settings), step.seconds) for step in probed.steps]


def usable_runs(directories: Sequence[Path], probed: ProbeResults) -> Tuple[List[MeasuredRun], List[str]]:
    """Run directories of our trainer that a fit can use, and the reasons why others cannot be used.

    Raises:
        UsageError: a file of a run is damaged.
    """
    runs, left_out = [], []
    for path in directories:
        run = _usable_run(path, probed)
        if isinstance(run, str):
            left_out.append(f"{path}: {run}")
        else:
            runs.append(run)
    return runs, left_out


def _usable_run(path: Path, probed: ProbeResults) -> "MeasuredRun | str":
    run = RunDirectory(path)
    result, environment = run.result(), run.environment()
    if result is None or result.status != OK or environment is None:
        return "did not end well"
    config = load_run_config(run.config_file, check=False)
    if config.model.is_grid_classifier:
        return f"model.kind {config.model.kind}: times are fitted of decoders"
    if environment.get("processor") != probed.facts.get("processor"):
        return f"ran on {environment.get('processor')}, not on the machine of the file"
    if config.job.nodes != 1:
        return f"ran on {config.job.nodes} nodes"
    ranks = environment.get("ranks") or [{}]
    threads = ranks[0].get("threads")
    if not threads:
        return "does not record the threads of its ranks"
    summary = summarise(config, run.metrics("iteration"), [])
    if summary["samples"] < _LEAST_SAMPLES or "timed_batch" in summary:
        return f"fewer than {_LEAST_SAMPLES} iterations are logged, or none of the full batch"
    # runs from before there were compiled kernels do not record them
    compiled = bool((environment.get("precision") or {}).get("compiled", False))
    config = replace(config, node=replace(config.node, threads_per_rank=int(threads), compiled_kernels=compiled))
    return MeasuredRun(str(path), config, float(summary["seconds_per_iteration"]))


def refit_local(machine: Machine, runs: Sequence[MeasuredRun]) -> Tuple[Machine, List[LeftOutRun]]:
    """Fits the constants of a probed machine to the probe's steps and to other runs."""
    assert machine.probed is not None
    fitted, left_out = fit_local(machine.probed, [*probe_step_runs(machine.probed), *runs])
    return replace(machine, time=fitted), left_out


def fit_local(probed: ProbeResults, runs: Sequence[MeasuredRun]) -> Tuple[FittedModel, List[LeftOutRun]]:
    """Fits the model's constants to runs, and predicts each run by a fit to the others.

    Intervals cover 80 % of the left-out runs, and are no narrower than the probe's own spread.
    """
    prior = prior_constants()
    spread = max(_LEAST_SPREAD, probe_spread(probed))
    if not runs:
        return replace(prior, interval_spread=spread), []
    costs = [RunCost(run.config, probed) for run in runs]
    target = np.log([run.seconds for run in runs])
    full_fit = _fit(prior, costs, target)
    left_out = []
    for index, run in enumerate(runs):
        other_indices = [other for other in range(len(runs)) if other != index]
        partial_fit = (
            _fit(prior, [costs[index] for index in other_indices], target[other_indices], full_fit.values)
            if other_indices
            else full_fit
        )
        predicted = costs[index].seconds(_named_values(prior, partial_fit.values))
        left_out.append(LeftOutRun(run.name, run.seconds, predicted))
    log_errors = sorted(abs(math.log(prediction.predicted / prediction.measured)) for prediction in left_out)
    covering_spread = log_errors[min(len(log_errors) - 1, math.ceil(0.8 * len(log_errors)) - 1)] / NORMAL_80
    widths = np.sqrt(np.diag(full_fit.covariance))
    constants = tuple(
        replace(constant, value=float(value), width=float(width))
        for constant, value, width in zip(prior.constants, np.exp(full_fit.values), widths)
    )
    fitted = replace(
        prior,
        constants=constants,
        covariance=tuple(tuple(float(number) for number in line) for line in full_fit.covariance),
        interval_spread=max(spread, covering_spread),
        rows=tuple(run.name for run in runs),
    )
    return fitted, left_out


def machine_from_probe(probed: ProbeResults, memory_bytes: int) -> Tuple[Machine, List[LeftOutRun]]:
    """The probed machine, with constants fitted to the probe's steps."""
    fitted, left_out = fit_local(probed, probe_step_runs(probed))
    machine = Machine(
        name=LOCAL,
        title=f"{probed.facts.get('processor', 'this machine')}, {probed.cores} cores, as `plan probe` found it",
        hardware={LOCAL: float(memory_bytes // 2**20)},
        facts={
            "peak_flops": float(f"{measured_flops(probed):.4g}"),
            "base_clock_ghz": 1.0,
            "devices_per_node": 1.0,
            "item_bytes": 4.0,
            "tile_units": 0.0,
        },
        memory_unit="MiB",
        memory_of="node",
        time=fitted,
        memory=FittedModel((), spread=0.05),
        probed=probed,
    )
    return machine, left_out


def _named_values(prior: FittedModel, values: "np.ndarray") -> Mapping[str, float]:
    values_by_name: Dict[str, float] = dict(
        zip((constant.name for constant in prior.constants), (float(v) for v in np.exp(values)))
    )
    return values_by_name


def _fit(prior: FittedModel, costs: Sequence[RunCost], target: "np.ndarray", start: "np.ndarray | None" = None) -> Fit:
    means = np.log([constant.prior for constant in prior.constants])
    widths = np.array([constant.prior_width for constant in prior.constants])

    def misfit(values: "np.ndarray") -> "np.ndarray":
        c = _named_values(prior, values)
        residuals: "np.ndarray" = (np.log([cost.seconds(c) for cost in costs]) - target) / prior.spread
        return residuals

    return fit_least_squares(misfit, means, widths, start, max_rounds=20, tolerance=1e-5)
