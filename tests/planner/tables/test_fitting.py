"""Fits: robust, held by their priors, and judged on what they have not seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import FittedModel, load_machine
from fugaku_gpt.planner.least_squares import fit_least_squares
from fugaku_gpt.planner.tables.fitting import interval_spread, memory_problem, predict_left_out, refit, time_problem
from fugaku_gpt.planner.tables.footprint import MEMORY_CONSTANTS
from fugaku_gpt.planner.tables.predict import predict_rows
from fugaku_gpt.planner.tables.score import TimedRow, kendall_tau, pairs_in_order, score_figures, score_times
from fugaku_gpt.planner.tables.seconds import TIME_CONSTANTS
from fugaku_gpt.planner.tables.work import FACTS
from tests.planner.samples import of_hardware

LINE = np.linspace(0, 1, 20)


def _misfit(target: "np.ndarray") -> object:
    return lambda values: (values[0] + values[1] * LINE - target) / 0.05


def test_one_wild_row_does_not_move_the_fit() -> None:
    target = 1 + 2 * LINE
    target[7] += 50
    found = fit_least_squares(_misfit(target), np.zeros(2), np.full(2, 100.0))  # type: ignore[arg-type]
    assert found.values == pytest.approx([1, 2], abs=0.02)


def test_what_no_row_tells_stays_at_its_prior() -> None:
    found = fit_least_squares(lambda values: (values[:1] - 3) / 0.1, np.array([0.0, 7.0]), np.array([10.0, 0.5]))
    assert found.values == pytest.approx([3, 7], abs=0.01)
    assert np.sqrt(found.covariance[1, 1]) == pytest.approx(0.5)


def test_rows_that_contradict_each_other_tell_less() -> None:
    def width(apart: float) -> float:
        rows = np.array([1.0 - apart, 1.0 + apart])
        found = fit_least_squares(lambda values: (values[:1] - rows) / 0.1, np.zeros(1), np.full(1, 100.0))
        assert found.values == pytest.approx([1], abs=0.05)
        return float(np.sqrt(found.covariance[0, 0]))

    assert width(0.0) == pytest.approx(0.1 / np.sqrt(2), rel=0.01)
    assert width(0.5) > 3 * width(0.0)


def test_left_out_rows_are_not_in_their_fit() -> None:
    """Changing a row's measurement changes no prediction of that row."""
    machine, rows = load_machine("v100"), of_hardware("V100")
    problem = time_problem(machine, rows)
    start = problem.fit().values
    before = predict_left_out(problem, "configuration", start)
    place = 3
    same = [one.row.run_key == before[place].row.run_key for one in before]
    problem.target[np.array(same)] += 1.0
    after = predict_left_out(problem, "configuration", start)
    assert after[place].predicted == pytest.approx(before[place].predicted, rel=1e-6)
    elsewhere = same.index(False)
    assert after[elsewhere].predicted != before[elsewhere].predicted


def test_a_left_out_table_takes_its_runs_in_other_tables_with_it() -> None:
    """Neither a run's twin in another table, nor the same run on a card with less memory, tells what it will take."""
    problem = time_problem(load_machine("v100"), of_hardware("V100"))
    start = problem.fit().values
    before = predict_left_out(problem, "table", start)
    runs = {one.row.run_key for one in before if one.row.id.startswith("v100.t1.")}
    twins = [one.row.run_key in runs and one.row.id.startswith("v100.t4.") for one in before]
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
    judged = score_times(twice)
    assert judged.rows == 3 and judged.pairs_in_order == 1


def test_memory_deaths_pull_the_peak_over_the_limit() -> None:
    machine = load_machine("v100")
    problem = memory_problem(machine, of_hardware("V100"))
    _, peak = problem.outcome(problem.fit().values)
    assert list(peak > problem.capacity) == list(problem.out_of_memory)


def test_the_reference_rows_of_v100_are_met_when_left_out() -> None:
    found = refit(load_machine("v100"), of_hardware("V100"), ("configuration",))
    judged = score_figures(found, "configuration")
    assert judged["median"] < 0.03 and judged["p90"] < 0.06 and judged["memory_median"] < 0.08
    assert judged["median"] * 3 < judged["baseline_median"]
    assert judged["oom_found"] == "3 of 3" and judged["false_alarms"] == "0 of 15"
    assert 0.7 <= judged["held_by_80"] <= 0.95
    rows = [one for one in found.seconds["configuration"] if one.measured.status == "ok" and not one.repeated]
    assert found.machine.time.interval_spread == pytest.approx(interval_spread(rows))


@pytest.mark.parametrize("name", ["a64fx", "a100", "v100"])
def test_the_files_constants_are_those_of_the_reference_rows(name: str) -> None:
    """A fit that starts at the file's values stays there: the file is what these rows and these models give."""
    machine = load_machine(name)
    rows = of_hardware(next(iter(machine.hardware))[:4])
    for problem in (time_problem(machine, rows), memory_problem(machine, rows)):
        values = np.log([one.value for one in problem.fitted.free_constants])
        found = problem.fit(values)
        off = np.abs(found.values - values) / np.sqrt(np.diag(found.covariance))
        assert np.max(off) < 0.1
        assert problem.fitted.rows == tuple(row.id for row, _ in problem.distinct.measured_rows)


def test_a_file_that_lacks_what_the_models_need_is_refused() -> None:
    machine, rows = load_machine("v100"), of_hardware("V100")

    def without(fitted: FittedModel, name: str) -> FittedModel:
        return replace(fitted, constants=tuple(one for one in fitted.constants if one.name != name), covariance=())

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
    (found,) = predict_rows(least, [rows[0][0]])
    assert found.seconds.value > 0 and found.memory > 0


def test_order_within_tables() -> None:
    assert kendall_tau([1, 2, 3], [1, 2, 3]) == 1
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 1], [1, 2]) is None
    near = [TimedRow("t", 1.0, 10.0, 0, 20), TimedRow("t", 0.9, 10.1, 0, 20), TimedRow("t", 2.0, 20.0, 0, 20)]
    assert pairs_in_order(near) == (2, 2)
    judged = score_times([*near, TimedRow("u", 5.0, 5.0, 6, 7)])
    assert judged.best_costs == pytest.approx(0.01) and judged.coverage == 0.75


def test_one_configuration_measured_twice_has_no_order() -> None:
    rows = [TimedRow("t", 10.0, 12.0, 9, 13), TimedRow("t", 10.0, 10.0, 9, 13), TimedRow("t", 20.0, 20.0, 9, 13)]
    judged = score_times([*rows, TimedRow("t", 30.0, 31.0, 9, 40)])
    assert judged.rows == 4 and judged.tau == 1 and judged.pairs_in_order == 1 and judged.best_costs == 0
