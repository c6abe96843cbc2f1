"""Tests of fits: they are robust, stay near their priors, and are scored on rows left out of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import FittedModel, load_machine
from fugaku_gpt.planner.least_squares import fit_least_squares
from fugaku_gpt.planner.tables.fitting import (
    LeftOutPrediction,
    Refit,
    interval_spread,
    log_slopes,
    memory_problem,
    predict_left_out,
    refit,
    time_problem,
)
from fugaku_gpt.planner.tables.footprint import MEMORY_CONSTANTS
from fugaku_gpt.planner.tables.predict import predict_rows
from fugaku_gpt.planner.tables.rows import Measurement
from fugaku_gpt.planner.tables.score import TimedRow, kendall_tau, pairs_in_order, score_figures, score_times
from fugaku_gpt.planner.tables.seconds import TIME_CONSTANTS
from fugaku_gpt.planner.tables.work import FACTS
from tests.planner.samples import of_hardware, row

LINE = np.linspace(0, 1, 20)


def _misfit(target: "np.ndarray") -> object:
    return lambda values: (values[0] + values[1] * LINE - target) / 0.05


def test_an_outlier_does_not_move_the_fit() -> None:
    target = 1 + 2 * LINE
    target[7] += 50
    fit = fit_least_squares(_misfit(target), np.zeros(2), np.full(2, 100.0))  # type: ignore[arg-type]
    assert fit.values == pytest.approx([1, 2], abs=0.02)


def test_a_constant_that_no_row_determines_stays_at_the_prior() -> None:
    fit = fit_least_squares(lambda values: (values[:1] - 3) / 0.1, np.array([0.0, 7.0]), np.array([10.0, 0.5]))
    assert fit.values == pytest.approx([3, 7], abs=0.01)
    assert np.sqrt(fit.covariance[1, 1]) == pytest.approx(0.5)


def test_contradicting_rows_widen_the_uncertainty() -> None:
    def width(distance: float) -> float:
        rows = np.array([1.0 - distance, 1.0 + distance])
        fit = fit_least_squares(lambda values: (values[:1] - rows) / 0.1, np.zeros(1), np.full(1, 100.0))
        assert fit.values == pytest.approx([1], abs=0.05)
        return float(np.sqrt(fit.covariance[0, 0]))

    assert width(0.0) == pytest.approx(0.1 / np.sqrt(2), rel=0.01)
    assert width(0.5) > 3 * width(0.0)


@pytest.mark.slow
def test_left_out_rows_are_not_in_their_fit() -> None:
    """Changing a row's measurement changes no prediction of that row."""
    machine, rows = load_machine("v100"), of_hardware("V100")
    problem = time_problem(machine, rows)
    start = problem.fit().values
    before = predict_left_out(problem, "configuration", start)
    index = 3
    same = [prediction.row.run_key == before[index].row.run_key for prediction in before]
    problem.target[np.array(same)] += 1.0
    after = predict_left_out(problem, "configuration", start)
    assert after[index].predicted == pytest.approx(before[index].predicted, rel=1e-6)
    elsewhere = same.index(False)
    assert after[elsewhere].predicted != before[elsewhere].predicted


def test_leaving_out_a_table_leaves_out_the_same_runs_in_other_tables() -> None:
    """The same run in another table, or on a card with less memory, does not contribute to a run's prediction."""
    problem = time_problem(load_machine("v100"), of_hardware("V100"))
    start = problem.fit().values
    before = predict_left_out(problem, "table", start)
    runs = {prediction.row.run_key for prediction in before if prediction.row.id.startswith("v100.t1.")}
    twins = [prediction.row.run_key in runs and prediction.row.id.startswith("v100.t4.") for prediction in before]
    assert any(twins)
    problem.target[np.array(twins)] += 1.0
    after = predict_left_out(problem, "table", start)
    for old, new in zip(before, after):
        if old.row.id.startswith("v100.t1."):
            assert new.predicted == pytest.approx(old.predicted, rel=1e-6)


def test_a_measurement_that_two_tables_show_is_fitted_to_once_and_orders_both() -> None:
    problem = time_problem(load_machine("a100"), of_hardware("A100"))
    shown = [row.id for (row, _), again in zip(problem.measured_rows, problem.repeated) if again]
    assert {"a100.t01.L60", "a100.t05.L168", "a100.t06.L179"} <= set(shown)
    assert not {row.id for row, _ in problem.distinct.measured_rows} & set(shown)
    twice = [TimedRow(table, 10.0 * n, 10.0 * n, 0, 99, table == "u") for table in "tu" for n in (1, 2, 3)]
    score = score_times(twice)
    assert score.rows == 3 and score.pairs_in_order == 1


def test_out_of_memory_rows_pull_the_peak_over_the_capacity() -> None:
    machine = load_machine("v100")
    problem = memory_problem(machine, of_hardware("V100"))
    _, peak = problem.outcome(problem.fit().values)
    assert list(peak > problem.capacity) == list(problem.out_of_memory)


def test_a_run_without_a_reading_that_has_enough_memory_has_no_part_in_the_misfit() -> None:
    problem = memory_problem(load_machine("v100"), [(row(), Measurement(1.0, memory, "ok")) for memory in (None, 1e3)])
    _, peak = problem.outcome(problem.initial_values)
    assert (peak < problem.capacity).all()
    missing, measured, *wrong_side = problem.misfit(problem.initial_values)
    assert missing == 0 and measured != 0 and wrong_side == [0, 0]


@pytest.mark.slow
def test_the_reference_rows_of_v100_are_predicted_when_left_out() -> None:
    refitted = refit(load_machine("v100"), of_hardware("V100"), ("configuration",))
    score = score_figures(refitted, "configuration")
    assert score["median"] < 0.03 and score["p90"] < 0.06 and score["memory_median"] < 0.08
    assert score["median"] * 3 < score["baseline_median"]
    assert score["oom_found"] == "3 of 3" and score["false_alarms"] == "0 of 15"
    assert 0.7 <= score["held_by_80"] <= 0.95
    rows = [
        prediction
        for prediction in refitted.seconds["configuration"]
        if prediction.measured.status == "ok" and not prediction.repeated
    ]
    assert refitted.machine.time.interval_spread == pytest.approx(interval_spread(rows))


@pytest.mark.parametrize("name", ["a64fx", "a100", "v100"])
def test_the_files_constants_are_those_of_the_reference_rows(name: str) -> None:
    """A fit that starts at the file's values stays there: they are the fit of these rows and models."""
    machine = load_machine(name)
    rows = of_hardware(next(iter(machine.hardware))[:4])
    for problem in (time_problem(machine, rows), memory_problem(machine, rows)):
        values = np.log([constant.value for constant in problem.fitted.free_constants])
        fit = problem.fit(values)
        deviations = np.abs(fit.values - values) / np.sqrt(np.diag(fit.covariance))
        assert np.max(deviations) < 0.1
        assert problem.fitted.rows == tuple(row.id for row, _ in problem.distinct.measured_rows)


def test_a_machine_file_that_lacks_a_constant_is_refused() -> None:
    machine, rows = load_machine("v100"), of_hardware("V100")

    def without(fitted: FittedModel, name: str) -> FittedModel:
        return replace(
            fitted, constants=tuple(constant for constant in fitted.constants if constant.name != name), covariance=()
        )

    for name in TIME_CONSTANTS:
        with pytest.raises(UsageError, match=f"machine v100: its file lacks time {name}"):
            refit(replace(machine, time=without(machine.time, name)), rows)
    for name in MEMORY_CONSTANTS:
        with pytest.raises(UsageError, match=f"its file lacks memory {name}"):
            predict_rows(replace(machine, memory=without(machine.memory, name)), [rows[0][0]])
    least = replace(machine, facts={name: machine.facts[name] for name in FACTS})
    for name in set(machine.time.values) - set(TIME_CONSTANTS):
        least = replace(least, time=without(least.time, name))
    for name in set(machine.memory.values) - set(MEMORY_CONSTANTS):
        least = replace(least, memory=without(least.memory, name))
    (prediction,) = predict_rows(least, [rows[0][0]])
    assert prediction.seconds.value > 0 and prediction.memory > 0


def test_slopes_are_derivatives_of_logarithms() -> None:
    slopes = log_slopes(lambda values: np.exp([values[0] ** 2 - 3 * values[1], values[1] ** 3]), np.array([3.0, 2.0]))
    assert slopes == pytest.approx(np.array([[6.0, -3.0], [0.0, 12.0]]), abs=1e-2)


def test_order_within_tables() -> None:
    assert kendall_tau([1, 2, 3], [1, 2, 3]) == 1
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 1], [1, 2]) is None
    close_rows = [TimedRow("t", 1.0, 10.0, 0, 20), TimedRow("t", 0.9, 10.1, 0, 20), TimedRow("t", 2.0, 20.0, 0, 20)]
    assert pairs_in_order(close_rows) == (2, 2)
    score = score_times([*close_rows, TimedRow("u", 5.0, 5.0, 6, 7)])
    assert score.best_costs == pytest.approx(0.01) and score.coverage == 0.75


def test_repeated_measurements_of_a_configuration_have_no_order() -> None:
    rows = [TimedRow("t", 10.0, 12.0, 9, 13), TimedRow("t", 10.0, 10.0, 9, 13), TimedRow("t", 20.0, 20.0, 9, 13)]
    score = score_times([*rows, TimedRow("t", 30.0, 31.0, 9, 40)])
    assert score.rows == 4 and score.tau == 1 and score.pairs_in_order == 1 and score.best_costs == 0


def test_memory_is_compared_in_the_unit_of_the_machine() -> None:
    machine = load_machine("v100")
    assert machine.memory_unit == "GB"
    measured_rows = [
        (row(mem_unit=unit), Measurement(1.0, memory, "ok"))
        for unit, memory in (("GB", 20.0), ("MiB", 20480.0), ("MiB", None), ("GB", None), ("%", 20.0))
    ]
    readings = [measured.memory for _, measured in memory_problem(machine, measured_rows).measured_rows]
    assert readings == [20.0, 20.0, None, None, None]


def test_the_memory_of_a_measurement_that_two_tables_show_counts_once() -> None:
    machine = load_machine("v100")
    capacity = machine.job_capacity("V100-32GB")

    def left_out(memory: float, predicted: float, status: str = "ok", repeated: bool = False) -> LeftOutPrediction:
        return LeftOutPrediction(row(), Measurement(1.0, memory, status), predicted, predicted, 0.0, 0.0, repeated)

    timed = [LeftOutPrediction(row(global_batch=size), Measurement(1.0, None, "ok"), 1.0, 1.0, 0.1) for size in (8, 16)]
    memory = [
        left_out(10.0, 11.0),
        left_out(10.0, 13.0, repeated=True),
        left_out(0.0, capacity + 1.0, "oom"),
        left_out(0.0, capacity - 1.0, "oom"),
        left_out(0.0, capacity - 1.0, "oom", repeated=True),
    ]
    score = score_figures(Refit(machine, {"table": timed}, {"table": memory}), "table")
    assert (score["memory_rows"], score["memory_median"], score["memory_p90"]) == (1, 0.1, 0.1)
    assert (score["oom_found"], score["false_alarms"]) == ("1 of 2", "0 of 1")
