"""Tests of the search for the largest batch, with a launcher without ranks that ends runs by their batch."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.launch.processes import Outcome
from fugaku_gpt.machine.framework import Framework
from fugaku_gpt.planner.trainer.memory_check import NodeLimits
from fugaku_gpt.records.run import FAILED, HUNG, OUT_OF_MEMORY, REFUSED, Result, RunDirectory
from fugaku_gpt.records.summary import summarise
from fugaku_gpt.report.bullets import read_bullets
from fugaku_gpt.report.collect import collect_rows, read_run
from fugaku_gpt.report.reference import read_reference, settings_of_row
from fugaku_gpt.report.sheet import import_bullets
from fugaku_gpt.sweep.frontier import Edge, Trial, find_frontier
from fugaku_gpt.sweep.frontier_plan import FrontierOptions, FrontierPlan, frontier_plan
from fugaku_gpt.sweep.frontier_text import bullets, edge_columns, edge_rows
from tests.sweep.fake import iteration, outcome

MIB = 2**20
RUN = """
preset: tiny
model.seq_len: 64
training.ramp_start: 4
training.ramp_increment: 4
training.ramp_samples: 100
node.memory_limit: 500Mi
"""
Status = Callable[[RunConfig], str]


class FakeNode:
    """Ends each run with the status that a function of its configuration gives; others than ``ok`` have a reason."""

    def __init__(self, status: Status, pace: Callable[[RunConfig], float] = lambda config: 0.5) -> None:
        self.status, self.pace = status, pace
        self.started: List[int] = []
        self.configs: List[RunConfig] = []
        self.stop_at: Optional[int] = None

    def __call__(self, config: RunConfig, directory: RunDirectory, **_: Any) -> Outcome:
        batch = config.training.micro_batch
        self.started.append(batch)
        self.configs.append(config)
        directory.log_file.write_text("log\n", encoding="utf-8")
        if len(self.started) == self.stop_at:
            return outcome(15, stopped_by=signal.SIGINT)
        status = self.status(config)
        summary = summarise(config, [iteration(1, self.pace(config))], []) if status == "ok" else {}
        reason = {"ok": "", OUT_OF_MEMORY: "600 of 500 MiB in use (limit: node.memory_limit)"}.get(
            status, f"ended as {status}"
        )
        directory.write_result(Result(status, reason, 1.7e9, 1.7e9 + 2, 1, summary))
        return outcome(0 if status == "ok" else 1)


class Quiet:
    """Records what is reported."""

    def __init__(self) -> None:
        self.earlier: List[int] = []

    def row_started(self, row: Any, planned: Optional[int]) -> None:
        """A combination begins."""

    def trial_started(self, row: Any, batch: int) -> None:
        """A trial begins."""

    def trial_ended(self, row: Any, ended: Trial) -> None:
        """A trial is over."""
        if ended.is_earlier:
            self.earlier.append(ended.batch)


LIMITS = NodeLimits(((8 * 2**30, "this machine"),), Framework(200 * MIB, 100 * MIB), 2)


def up_to(most: int, otherwise: str = OUT_OF_MEMORY) -> Status:
    return lambda config: "ok" if config.training.micro_batch <= most else otherwise


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RUN, encoding="utf-8")
    return path


def plan_of(file: Path, *matrix: str, settings: Any = (), **options: Any) -> FrontierPlan:
    return frontier_plan(file, None, settings, matrix, FrontierOptions(**{"most": 256, **options}))


def search_all(plan: FrontierPlan, out: Path, node: FakeNode, **options: Any) -> List[Edge]:
    return find_frontier(plan, out, node, Quiet(), LIMITS, **options)


def only(plan: FrontierPlan, out: Path, node: FakeNode, **options: Any) -> Edge:
    (edge,) = search_all(plan, out, node, **options)
    return edge


def batches(edge: Edge) -> Dict[str, Optional[int]]:
    """The largest batch, the one above it, and the fastest."""
    named = (("largest", edge.largest), ("above", edge.above), ("fastest", edge.fastest))
    return {name: trial.batch if trial else None for name, trial in named}


def test_each_trial_is_a_run_of_a_few_iterations_at_full_batch(file: Path, tmp_path: Path) -> None:
    plan, node = plan_of(file, "layout.dp=1,2", iterations=3, micro_batches=2), FakeNode(up_to(6))
    edges = search_all(plan, tmp_path / "out", node)
    assert [batches(edge)["largest"] for edge in edges] == [6, 6]
    for config in node.configs:
        training = config.training
        assert training.global_batch == 2 * training.micro_batch * config.layout.dp
        assert (training.iterations, training.log_interval, training.ramp_start) == (3, 1, None)
        assert not config.node.memory_check and config.node.memory_limit == "500Mi" and config.model.seq_len == 64
    merged, _ = collect_rows([tmp_path / "out"])
    assert [(row.dp, row.micro_batch) for row in merged] == [
        (edge.row.value("layout.dp"), trial.batch) for edge in edges for trial in edge.trials
    ]  # by combination and batch, not in the order in which they were tried
    assert {row.status for row in merged} == {"ok", OUT_OF_MEMORY}


def test_a_pipeline_has_as_many_micro_batches_as_stages(file: Path, tmp_path: Path) -> None:
    node = FakeNode(up_to(3))
    only(plan_of(file, settings=["layout.pp=2"]), tmp_path / "out", node)
    assert all(config.micro_batches == 2 for config in node.configs)


def test_the_first_try_is_the_largest_that_the_planner_lets_fit(file: Path, tmp_path: Path) -> None:
    plan, node = plan_of(file), FakeNode(up_to(1000))
    edge = only(plan, tmp_path / "out", node)
    assert edge.planned == node.started[0] and edge.planned is not None
    index = plan.batches.index(edge.planned)
    for batch, fits in ((edge.planned, True), (plan.batches[index + 1], False)):
        config = plan.run(plan.rows[0], batch).config
        assert config is not None
        size, _ = LIMITS.smallest_limit(config) or (0, "")
        assert (LIMITS.run_memory(config).bytes_of_node <= size) == fits


@pytest.mark.parametrize("most", [1, 3, 16, 52, 256])
def test_the_edge_may_be_anywhere(most: int, file: Path, tmp_path: Path) -> None:
    node = FakeNode(up_to(most))
    edge = only(plan_of(file), tmp_path / "out", node)
    assert edge.is_complete and edge.largest is not None and edge.largest.batch == most
    if most == 256:
        assert edge.above is None
        assert edge_rows([edge])[0]["remark"] == "everything fits that was allowed: --most"
    else:
        assert edge.above is not None and edge.above.result.status == OUT_OF_MEMORY
    assert len(node.started) == len(set(node.started)) <= 14


def test_nothing_fits(file: Path, tmp_path: Path) -> None:
    edge = only(plan_of(file), tmp_path / "out", FakeNode(up_to(0)))
    assert batches(edge) == {"largest": None, "above": 1, "fastest": None}
    row = edge_rows([edge])[0]
    assert (row["largest"], row["above"], row["remark"]) == (None, "1: OOM", "nothing fits")
    assert bullets([edge])[0] == "- global batch size 1, recompute=none, float32: OOM"
    by_machine = replace(edge.trials[0].result, reason="30 of 31 GiB in use (limit: this machine)")
    above = replace(edge.trials[0], result=by_machine)
    assert edge_rows([replace(edge, above=above)])[0]["remark"] == f"nothing fits; {above.result.reason}"


def test_exact_edges_are_right_to_a_sample(file: Path, tmp_path: Path) -> None:
    assert batches(only(plan_of(file), tmp_path / "coarse", FakeNode(up_to(75))))["largest"] == 72
    assert batches(only(plan_of(file, is_exact=True), tmp_path / "exact", FakeNode(up_to(75))))["largest"] == 75


def test_failures_below_the_largest_are_remarked(file: Path, tmp_path: Path) -> None:
    """Memory that does not grow with the batch: the batches of one doubling fail, larger ones fit."""
    node = FakeNode(lambda config: OUT_OF_MEMORY if 16 < config.training.micro_batch <= 32 else up_to(100)(config))
    edge = only(plan_of(file), tmp_path / "out", node, is_full_curve=True)
    assert batches(edge)["largest"] == 96 and batches(edge)["above"] == 104
    assert "32 below it: OOM" in edge_rows([edge])[0]["remark"]


def test_the_fastest_batch_may_be_below_the_largest(file: Path, tmp_path: Path) -> None:
    node = FakeNode(up_to(60), lambda config: 1.0 + abs(config.training.micro_batch - 16) ** 2)
    edge = only(plan_of(file), tmp_path / "out", node)
    assert batches(edge) == {"largest": 60, "above": 64, "fastest": 16}
    lines = bullets([edge])
    assert "- global batch size 16, recompute=none, float32: ~ 16.00 samples/s, ~ 1024 tokens/s (fastest)" in lines
    assert [line.split(",")[0] for line in lines if line.endswith("(largest)")] == ["- global batch size 60"]
    assert lines[-1].endswith(": OOM")


def test_a_hang_or_a_failure_is_an_edge_of_another_kind(file: Path, tmp_path: Path) -> None:
    for status, word in ((HUNG, "hang"), (FAILED, "failed")):
        node = FakeNode(up_to(30, status))
        edge = only(plan_of(file), tmp_path / status, node)
        assert batches(edge)["largest"] == 30
        row = edge_rows([edge])[0]
        assert (row["above"], row["remark"]) == (f"32: {word}", f"ended as {status}") and edge.has_failed
    everything = FakeNode(lambda config: FAILED)
    assert batches(only(plan_of(file), tmp_path / "all", everything))["largest"] is None
    assert only(plan_of(file), tmp_path / "all", everything).has_failed
    assert len(everything.started) == 2 and everything.started[1] == 1  # a broken run is not tried at each size


def test_a_refused_combination_is_a_row_and_stops_nothing_else(file: Path, tmp_path: Path) -> None:
    node = FakeNode(up_to(9))
    refused, valid = search_all(plan_of(file, "layout.tp=3,2"), tmp_path / "out", node)
    assert [trial.result.status for trial in refused.trials] == ["refused"] and valid.largest is not None
    reason = refused.trials[0].result.reason
    assert reason.startswith("--matrix layout.tp=3,2: layout.tp: 3: must divide model.heads 4")
    assert edge_rows([refused])[0]["above"] == "1: refused" and not refused.has_failed and not valid.has_failed
    corpus = only(plan_of(file), tmp_path / "no-corpus", FakeNode(lambda config: REFUSED))  # by its ranks
    assert corpus.largest is None and corpus.has_failed
    assert bullets([refused]) == ["- global batch size 1, recompute=none, float32, tp=3: refused"]
    assert len(collect_rows([tmp_path / "out"])[0]) == 1 + len(valid.trials)


def test_runs_beyond_the_machine_are_never_started(file: Path, tmp_path: Path) -> None:
    limits = replace(LIMITS, limits=((600 * MIB, "this machine"),))
    plan, node = plan_of(file, settings=["node.memory_limit=4Gi"]), FakeNode(up_to(1000))
    (edge,) = find_frontier(plan, tmp_path / "out", node, Quiet(), limits)
    assert edge.planned == max(node.started) and edge.above is not None
    assert edge.above.result.status == REFUSED and "(this machine" in edge.above.result.reason and not edge.has_failed
    free = plan_of(file, settings=["node.memory_limit=4Gi", "node.memory_check=false"])
    (edge,) = find_frontier(free, tmp_path / "free", FakeNode(up_to(1000)), Quiet(), limits)
    assert edge.above is None


def test_a_machine_too_small_for_any_batch_is_no_failure(file: Path, tmp_path: Path) -> None:
    limits, node = replace(LIMITS, limits=((250 * MIB, "this machine"),)), FakeNode(up_to(1000))
    (edge,) = find_frontier(plan_of(file), tmp_path / "out", node, Quiet(), limits)
    assert node.started == [] and not edge.has_failed and edge.above is not None and edge.above.batch == 1
    assert edge_rows([edge])[0]["remark"].startswith("nothing fits; this run needs ")


def test_the_memory_of_a_job_s_nodes_is_not_this_machine_s(file: Path, tmp_path: Path) -> None:
    file.write_text(RUN.replace("node.memory_limit: 500Mi", "job.scheduler: pjm"), encoding="utf-8")
    node = FakeNode(up_to(1000))
    edge = only(plan_of(file, settings=["job.node_memory=600Mi"]), tmp_path / "out", node)
    assert edge.planned == 256 and edge.above is None and edge.largest is not None and edge.largest.batch == 256


def test_the_plan_counts_all_ranks_on_this_machine(file: Path) -> None:
    settings = ["layout.dp=2", "node.memory_limit=900Mi"]
    plans = [plan_of(file, settings=[*settings, f"job.nodes={nodes}"]) for nodes in (1, 2)]
    planned = [plan.planned_index(plan.rows[0], LIMITS) for plan in plans]
    assert planned[0] == planned[1] > 0


def test_a_stopped_search_continues_with_recorded_trials(file: Path, tmp_path: Path) -> None:
    plan, full = plan_of(file, "training.recompute=none,full"), FakeNode(up_to(32))
    expected = [batches(edge) for edge in search_all(plan, tmp_path / "full", full)]
    first, out = FakeNode(up_to(32)), tmp_path / "out"
    first.stop_at = 3
    edges = search_all(plan, out, first)
    assert [edge.is_complete for edge in edges] == [False] and len(edges[0].trials) == 2
    assert edge_rows(edges)[0]["remark"].startswith("stopped")
    killed = out / plan.run_name(plan.rows[0], first.started[0])
    (killed / "result.json").unlink()  # as if the search had been killed before it wrote that
    second, progress = FakeNode(up_to(32)), Quiet()
    again = find_frontier(plan, out, second, progress, LIMITS)
    assert [batches(edge) for edge in again] == expected
    assert len(progress.earlier) == 1 and set(progress.earlier).isdisjoint(second.started[: len(edges[0].trials)])
    assert (out / "attempts" / killed.name / "1").is_dir()
    third = FakeNode(up_to(32))
    assert [batches(edge) for edge in search_all(plan, out, third)] == expected and third.started == []


def test_failures_are_tried_again_on_request(file: Path, tmp_path: Path) -> None:
    plan, out = plan_of(file), tmp_path / "out"
    search_all(plan, out, FakeNode(up_to(10)))
    node = FakeNode(up_to(24))
    assert batches(only(plan, out, node))["largest"] == 10 and node.started == []
    assert batches(only(plan, out, node, retry_failed=True))["largest"] == 24 and min(node.started) > 10


def test_a_folder_of_another_search_is_not_mixed(file: Path, tmp_path: Path) -> None:
    search_all(plan_of(file), tmp_path / "out", FakeNode(up_to(10)))
    with pytest.raises(UsageError, match=r"training.iterations: 5 then, 7 now\); choose another --out"):
        search_all(plan_of(file, iterations=7), tmp_path / "out", FakeNode(up_to(10)))
    search_all(plan_of(file, "training.recompute=full"), tmp_path / "full", FakeNode(up_to(10)))
    node = FakeNode(up_to(10))
    with pytest.raises(UsageError, match=r"training.iterations: 5 then, 7 now\); choose another --out"):
        search_all(plan_of(file, "training.recompute=none,full", iterations=7), tmp_path / "full", node)
    assert node.started == []  # not even of the first combination


def test_rates_have_the_units_that_the_run_has_measured(file: Path, tmp_path: Path) -> None:
    first, second = search_all(plan_of(file, "model.seq_len=32,64"), tmp_path / "out", FakeNode(up_to(4)))
    assert all(list(trial.rates) == (["samples/s", "tokens/s"] if trial.batch <= 4 else []) for trial in first.trials)
    assert first.largest is not None and first.largest.rates == {"samples/s": 8.0, "tokens/s": 256.0}
    for images, rates in ((8.0, {"images/s": 8.0}), (7.0, {"samples/s": 8.0, "images/s": 7.0})):
        summary = {**first.largest.result.summary, "images_per_second": images}
        trial = replace(first.largest, result=replace(first.largest.result, summary=summary))
        assert trial.rates == {**rates, "tokens/s": 256.0} and next(iter(trial.rates)) == next(iter(rates))
    line = (
        "- global batch size 4, recompute=none, float32, seq_len=64: "
        "~ 8.000 samples/s, ~ 512.0 tokens/s (largest, fastest)"
    )
    assert line in bullets([second])
    assert "tokens/s" in edge_columns([first]) and edge_rows([first])[0]["tokens/s"] == 256.0


def test_bullets_are_read_and_their_runs_stand_beside_them(file: Path, tmp_path: Path) -> None:
    """Every setting that a matrix may have is read from its bullet, and matched by the run that it is of."""
    matrix = ["layout.order='tp,dp,pp'", "node.memory_limit=500Mi,450Mi", 'model.name="a: b, c",d', "job.nodes=1,2"]
    matrix += ["layout.dp=2", "training.lr=1e-3", "model.kind=decoder", "data.paths=[[a/b.bin, c d.bin]]"]
    edges = search_all(plan_of(file, *matrix, most=2), tmp_path / "out", FakeNode(up_to(1), pace=lambda _: 0.0317))
    lines = bullets(edges)
    (tmp_path / "frontier.md").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    import_bullets([tmp_path / "frontier.md"], tmp_path / "sheet")
    references, _ = read_reference(tmp_path / "sheet")
    trials = [trial for edge in edges for trial in edge.trials]
    assert len(references) == len(trials) == 16
    settings = [settings_of_row(read_run(tmp_path / "out" / trial.run.name)) for trial in trials]
    for number, reference in enumerate(references):
        assert [reference.is_met_by(of_run) for of_run in settings] == [n == number for n in range(16)], lines[number]
    rates = [trial.samples_per_second for trial in trials]
    assert [row.row.samples_per_second for row in references] == [
        pytest.approx(rate, rel=0.0005) if rate else None for rate in rates
    ]


def test_a_value_that_no_field_accepts_is_in_the_bullet_of_the_refused_row(file: Path, tmp_path: Path) -> None:
    edges = search_all(plan_of(file, "training.dtype=int8", "layout.tp=x"), tmp_path / "out", FakeNode(up_to(1)))
    assert bullets(edges) == ['- global batch size 1, recompute=none, dtype="int8", tp="x": refused']
    (bullet,) = read_bullets(bullets(edges)[0], "frontier.md")
    assert (bullet.dtype, bullet.tp, bullet.more) == (None, None, ('dtype="int8"', 'tp="x"'))


@pytest.mark.parametrize(
    ("matrix", "settings", "message"),
    [
        (["training.dtype"], [], "expected FIELD=V1,V2"),
        (["training.dtyp=float32"], [], "unknown key .*did you mean training.dtype"),
        (["training.dtype=float32", "training.dtype=bfloat16"], [], "is in another --matrix, too"),
        (["training.dtype=float32"], ["training.dtype=bfloat16"], "is in --set, too"),
        (["layout.tp=1,2,1"], [], "--matrix layout.tp=1,2,1: 1 and 1 are the same value; leave out one"),
        (["training.lr=1e-4,0.0001"], [], "1e-4 and 0.0001 are the same value"),
        (["training.micro_batch=1,2"], [], "the search sets it itself; see --most"),
        ([], ["training.global_batch=8"], "the search sets it itself; see --micro-batches"),
        ([], ["training.iterations=8"], "see --iterations"),
        ([], ["node.memory_guard=false"], "node.memory_guard: false"),
        ([], ["no.such=1"], "unknown key"),
    ],
)
def test_mistakes_are_refused_before_anything_is_started(
    matrix: List[str], settings: List[str], message: str, file: Path
) -> None:
    with pytest.raises((ConfigError, UsageError), match=message):
        plan_of(file, *matrix, settings=settings)


def test_combinations_have_names_of_their_own(file: Path) -> None:
    long = "a" * 120
    plan = plan_of(file, f"job.name={long}1,{long}2", "training.dtype=float32,bfloat16")
    names = {row.name for row in plan.rows}
    assert len(names) == 4
    assert all(plan.run(row, 1024).row == f"{row.name}-mbs1024" for row in plan.rows)  # nothing is cut
    dp2 = plan_of(file, "layout.tp=1,2", settings=["layout.dp=2"])
    assert [dp2.run_name(row, 8) for row in dp2.rows] == ["dp2-tp1-mbs8-r1", "dp2-tp2-mbs8-r1"]


def test_a_preset_is_enough() -> None:
    plan = frontier_plan(None, "tiny", ["node.memory_limit=1Gi"], (), FrontierOptions(most=4))
    config = plan.run(plan.rows[0], 4).config
    expected = load_run_config(preset="tiny", overrides=["training.micro_batch=4"])
    assert config is not None and config.model == expected.model and plan.name == "tiny"


def test_the_picture_has_a_line_for_each_combination_and_the_same_bytes(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from fugaku_gpt.sweep.frontier_plot import draw_frontier

    node = FakeNode(lambda config: up_to(0 if config.training.recompute == "none" else 12)(config))
    edges = search_all(plan_of(file, "training.recompute=none,full"), tmp_path / "out", node)
    pictures = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for picture in pictures:
        draw_frontier(edges, "small within 500Mi", picture)
    text = pictures[0].read_text(encoding="utf-8")
    assert pictures[1].read_text(encoding="utf-8") == text
    for label in (
        "recompute=none, float32: nothing fits",
        "recompute=full, float32",
        "small within 500Mi",
        "samples/s",
    ):
        assert label in text
    draw_frontier([], "nothing was tried", tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0
