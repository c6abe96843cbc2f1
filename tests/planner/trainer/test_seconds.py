"""Tests of the time model of this trainer: counts against formulas, and times against a machine with round figures."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.cli.main import run as cli
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.comm.observed import scoped_call
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import RunConfig, dump_run_config, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.flops import exact_flops
from fugaku_gpt.layout.communications import Collective, forward_communications, plan_of, program
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE
from fugaku_gpt.machine.constants import load_machine, machine_yaml
from fugaku_gpt.machine.probed import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COMPILED_ATTENTION,
    KEYS,
    SCORES,
    VALUES,
    StepTiming,
)
from fugaku_gpt.model.attention_core import attend
from fugaku_gpt.ops import native as kernels
from fugaku_gpt.planner.run_time import plan_time
from fugaku_gpt.planner.trainer.fitting import MeasuredRun, fit_local, machine_from_probe, usable_runs
from fugaku_gpt.planner.trainer.rates import ProbeRates
from fugaku_gpt.planner.trainer.seconds import TIME_COMPONENTS, RunCost, predict_run, prior_constants
from fugaku_gpt.planner.trainer.work import Tally, count_chunk_work, count_stage_work, message_bytes
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import OK, Result, RunDirectory
from fugaku_gpt.training.trainer import Trainer
from tests.planner.probes import FLOPS, LAYER_SECONDS, MESSAGE_SECONDS, PASS_SECONDS, even_machine
from tests.support.text import ByteSamples

SHAPE = ("model.layers=4", "model.hidden=128", "model.heads=4", "model.seq_len=64", "model.vocab_size=512")
BATCH = ("training.micro_batch=2", "training.global_batch=16", "node.threads_per_rank=1")
ONES: Dict[str, float] = {**dict.fromkeys(prior_constants().values, 1.0), "fixed": 0.0}


def run(*settings: str) -> RunConfig:
    return load_run_config(overrides=[*SHAPE, *BATCH, *settings])


def flops(tally: Tally) -> float:
    return sum(2.0 * n * batch * r * i * c for (_, batch, r, i, c), n in tally.products.items())


def micro_batch_work(config: RunConfig, compiled: bool = False) -> Tally:
    """Work of a micro-batch in all chunks, forward and backward."""
    tally = Tally()
    for work in count_chunk_work(config, compiled):
        tally.add(work.forward)
        tally.add(work.backward)
    return tally


def test_products_are_those_of_the_formula_but_for_attention_s_blocks() -> None:
    config = run()
    tally = micro_batch_work(config)
    # one block of queries holds all 64 tokens: nothing is saved above the diagonal, and the scores are made twice
    b, s, h, layers = 2, 64, 128, 4
    again = layers * 2.0 * b * s * s * h
    assert flops(tally) == pytest.approx(exact_flops(config.model, b, config.padded_vocab) + again)


def test_blocks_skip_scores_above_the_diagonal() -> None:
    config = run("model.seq_len=256", "training.micro_batch=1", "training.global_batch=8")
    scores = sum(
        n * r * c * batch for (kind, batch, r, _, c), n in micro_batch_work(config).products.items() if kind == "scores"
    )
    # four blocks of 64 queries meet 64, 128, 192 and 256 keys; three products with keys in a step: 4 layers, 4 heads
    assert scores == 3 * 4 * 4 * 64 * (64 + 128 + 192 + 256)


def test_compiled_attention_is_a_single_product_per_layer_and_pass() -> None:
    plain, kernels = micro_batch_work(run()), micro_batch_work(run(), compiled=True)
    attention = {key: n for key, n in kernels.products.items() if key[0] in COMPILED_ATTENTION}
    shape = (2 * 4, 64, 32, 64)  # samples times heads
    assert attention == {(kind, *shape): 4 for kind in (ATTENTION, ATTENTION_BACKWARD)}
    assert {key: n for key, n in kernels.products.items() if key not in attention} == {
        key: n for key, n in plain.products.items() if key[0] not in ("scores", "values", "keys")
    }
    assert {name for name, _ in plain.passes} - {name for name, _ in kernels.passes} == {"softmax", "softmax_backward"}
    again = micro_batch_work(run("training.recompute=full"), compiled=True)
    assert {key[0]: n for key, n in again.products.items() if key[0] in COMPILED_ATTENTION} == {
        ATTENTION: 8,
        ATTENTION_BACKWARD: 4,
    }


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ((), 8),
        (("node.threads_per_rank=3",), 9),  # the third round leaves one thread idle
        (("node.threads_per_rank=12", "layout.tp=2"), 0),
        (("training.dtype=float64",), 0),
        (("training.dtype=bfloat16",), 8),
        (("node.compiled_kernels=false",), 0),
    ],
)
def test_compiled_kernels_are_used_for_supported_types_and_threads(settings: Any, heads: int) -> None:
    tally = micro_batch_work(run(*settings), compiled=True)
    assert {batch for kind, batch, *_ in tally.products if kind in COMPILED_ATTENTION} == ({heads} if heads else set())
    assert (SCORES in {key[0] for key in tally.products}) == (heads == 0)


def test_attention_costs_the_time_that_the_probe_measured_of_compiled_kernels() -> None:
    config = run()
    seconds = {}
    for compiled in (False, True):
        tally = micro_batch_work(config, compiled)
        fast = sum(
            2.0 * n * b * r * i * c for (kind, b, r, i, c), n in tally.products.items() if kind in COMPILED_ATTENTION
        )
        seconds[compiled] = 8 * (flops(tally) - fast / 2) / FLOPS
        components = RunCost(config, even_machine(compiled=compiled)).seconds_by_component(ONES)
        assert components["compute"] == pytest.approx(seconds[compiled])
    assert seconds[True] < seconds[False]
    off = RunCost(run("node.compiled_kernels=false"), even_machine(compiled=True)).seconds_by_component(ONES)
    assert off["compute"] == pytest.approx(seconds[False])


@pytest.mark.parametrize(
    ("settings", "share"), [(["layout.tp=2"], 0.5), (["layout.tp=4"], 0.25), (["training.recompute=full"], 1.0)]
)
def test_tensor_parallelism_shares_out_products_and_recompute_adds_a_forward_pass(settings: Any, share: float) -> None:
    config = run(*settings)
    layers = [work.forward for work in count_chunk_work(run())]
    head = 3 * 2.0 * 2 * 64 * 512 * 128
    more = flops(layers[0]) - head if share == 1.0 else 0.0
    assert flops(micro_batch_work(config)) == pytest.approx(share * flops(micro_batch_work(run())) + more)


def test_an_iteration_of_a_single_rank_is_the_sum_of_the_work() -> None:
    config = run()
    tally = micro_batch_work(config)
    components = RunCost(config, even_machine()).seconds_by_component(ONES)
    assert set(components) == set(TIME_COMPONENTS)
    assert components["compute"] == pytest.approx(8 * flops(tally) / FLOPS)
    elements = sum(count * size for (_, size), count in tally.passes.items())
    assert components["memory_bound"] == pytest.approx(8 * elements * PASS_SECONDS)
    assert components["overhead"] == pytest.approx(8 * 4 * 3 * LAYER_SECONDS)
    parameters = 4 * (12 * 128**2 + 13 * 128) + (512 + 64 + 2) * 128
    assert components["optimiser"] == pytest.approx(3 * parameters * PASS_SECONDS, rel=1e-3)
    assert (
        components["pipeline"] == pytest.approx(0) and components["tensor_parallel"] == components["data_parallel"] == 0
    )


def test_sums_and_messages_by_their_bytes() -> None:
    config = run("layout.dp=2", "training.bucket_mib=0.5")
    work = count_stage_work(config, 0)
    parameters = 4 * (12 * 128**2 + 13 * 128) + (512 + 64 + 2) * 128
    assert len(work.replicas) > 1 and sum(size for _, size in work.replicas) == pytest.approx(4 * parameters, rel=1e-3)
    components = RunCost(config, even_machine()).seconds_by_component(ONES)
    assert components["data_parallel"] == pytest.approx(4 * parameters * MESSAGE_SECONDS, rel=1e-3)
    hidden = 4 * 2 * 64 * 128
    tensor = RunCost(run("layout.tp=2"), even_machine()).seconds_by_component(ONES)["tensor_parallel"]
    losses = 4 * 3 * 2 * 64 * 2
    # of each layer two sums forward and two back; the embedding's, the loss's gradient and its three numbers a token
    assert tensor == pytest.approx(8 * (18 * hidden + losses) * MESSAGE_SECONDS, rel=1e-6)
    assert message_bytes(run("layout.pp=2")) == hidden


def test_without_stages_no_sum_counts_as_the_pipeline_s() -> None:
    config = run("layout.tp=2", "layout.sequence_parallel=true")
    assert count_stage_work(config, 0).replicated_bytes > 0
    assert RunCost(config, even_machine()).seconds_by_component(ONES)["pipeline"] == pytest.approx(0)


def test_the_bubble_is_that_of_the_schedule() -> None:
    settings = ["layout.pp=2", "model.vocab_size=128", "layout.split=[2, 2]"]
    machine = even_machine()
    quiet = {**ONES, "sends": 1e-9, "passes": 1e-9}
    components = RunCost(run(*settings), machine).seconds_by_component(quiet)
    single_stage = RunCost(run("model.layers=2", "model.vocab_size=128"), machine).seconds_by_component(quiet)
    busy = components["compute"] + components["overhead"]
    assert busy == pytest.approx(single_stage["compute"] + single_stage["overhead"])  # the last stage has the logits
    # 8 micro-batches: the first stage's pass, which has no logits, comes before; (p - 1) / m of it about
    head = 8 * 3 * 2.0 * 2 * 64 * 128 * 128 / FLOPS
    tied = 4 * 128 * 128 * MESSAGE_SECONDS
    assert components["pipeline"] == pytest.approx((busy - head) / 8 + tied, rel=1e-6)


def test_ranks_without_cores_of_their_own_wait_for_them() -> None:
    two, four = (RunCost(run(f"layout.dp={dp}"), even_machine(cores=2)).seconds_by_component(ONES) for dp in (2, 4))
    assert two["shared_cores"] == 0
    work = four["compute"] + four["memory_bound"] + four["overhead"] + four["optimiser"]
    assert four["shared_cores"] == pytest.approx(work)  # twice as many ranks as cores: all of it once more
    stages = RunCost(run("layout.pp=4"), even_machine(cores=2))
    assert stages.seconds_by_component(ONES)["shared_cores"] > 0


def test_rates_are_interpolated_and_extrapolation_is_reported() -> None:
    probed = even_machine()
    fast = [
        replace(timing, seconds=timing.seconds / (4.0 if timing.rows == 512 else 1.0)) for timing in probed.products
    ]
    rates = ProbeRates(replace(probed, products=tuple(fast)), 1, 1)
    slow_rate, fast_rate = (2.0 * width**3 / rates.product("float32", "linear", 1, *[width] * 3) for width in (64, 512))
    middle_rate = 2.0 * 180**3 / rates.product("float32", "linear", 1, 180, 180, 180)
    assert slow_rate == pytest.approx(FLOPS, rel=0.02) and fast_rate == pytest.approx(4 * FLOPS, rel=0.02)
    assert 1.5 * FLOPS < middle_rate < 2.7 * FLOPS
    assert not rates.extrapolated
    rates.product("float32", "linear", 1, 64, 64, 4096)
    assert any("64 x 64 x 4096" in text for text in rates.extrapolated)
    assert rates.message(ALL_REDUCE, 1, 100) == 0.0


def test_a_fit_finds_the_factor_that_the_steps_were_made_with() -> None:
    probed = even_machine()
    settings = [
        [f"model.hidden={hidden}", f"model.layers={layers}"] for hidden in (64, 128, 256, 512) for layers in (2, 4)
    ]
    truth = {**prior_constants().values, "products": 1.3}
    runs = [
        MeasuredRun(str(overrides), run(*overrides), RunCost(run(*overrides), probed).seconds(truth))
        for overrides in settings
    ]
    fitted, left_out = fit_local(probed, runs)
    assert fitted.values["products"] == pytest.approx(1.3, rel=0.02)
    assert fitted.values["exposed"] == pytest.approx(0.8)  # none of these runs determines it
    assert max(abs(prediction.relative_error) for prediction in left_out) < 0.02
    assert len(fitted.covariance) == len(fitted.constants) and fitted.rows == tuple(
        str(overrides) for overrides in settings
    )


def test_recorded_runs_are_fitted_to_and_unusable_runs_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = even_machine()
    truth = {**prior_constants().values, "products": 1.4}
    recorded = {
        "one": (run(), "even"),
        "two": (run("model.hidden=256"), "even"),
        "elsewhere": (run("model.layers=2"), "another processor"),
        "threads unknown": (run("model.layers=1"), "even"),
    }
    for name, (config, processor) in recorded.items():
        directory = RunDirectory(tmp_path / "runs" / name)
        directory.create(dump_run_config(replace(config, node=replace(config.node, threads_per_rank=None))))
        directory.write_environment({"processor": processor, "ranks": [] if "unknown" in name else [{"threads": 1}]})
        seconds = RunCost(config, probed).seconds(truth)
        metrics = MetricsWriter(directory.metrics_file)
        for iteration in range(6):
            metrics.write("iteration", {"iteration": iteration, "seconds": seconds, "loss": 1.0})
        metrics.close()
        directory.write_result(Result(OK, "", 0.0, 1.0))
    machine, _ = machine_from_probe(probed, 2**34)
    file, out = tmp_path / "machine.yaml", tmp_path / "fitted.yaml"
    file.write_text(machine_yaml(machine))
    arguments = ["plan", "fit", "--runs", str(tmp_path / "runs"), "--format", "json"]
    assert cli(["plan", "fit", "--runs", str(tmp_path / "runs"), "--machine", "v100"]) == 2
    assert cli([*arguments, "--machine", str(file), "--out", str(out)]) == 0
    caught = capsys.readouterr()
    assert len(json.loads(caught.out)) == 2 and "another processor, not on the machine of the file" in caught.err
    assert "does not record the threads of its ranks" in caught.err
    assert 1.2 < load_machine(str(out)).time.values["products"] <= 1.4  # two runs against the prior


@pytest.mark.parametrize(
    ("precision", "compiled"), [({}, False), ({"compiled": False}, False), ({"compiled": True}, True)]
)
def test_a_recorded_run_is_fitted_to_with_the_kernels_that_it_used(
    tmp_path: Path, precision: Any, compiled: bool
) -> None:
    directory = RunDirectory(tmp_path)
    directory.create(dump_run_config(run()))
    directory.write_environment({"processor": "even", "ranks": [{"threads": 1}], "precision": precision})
    metrics = MetricsWriter(directory.metrics_file)
    for iteration in range(6):
        metrics.write("iteration", {"iteration": iteration, "seconds": 1.0, "loss": 1.0})
    metrics.close()
    directory.write_result(Result(OK, "", 0.0, 1.0))
    (measured_run,), left_out = usable_runs([tmp_path], even_machine())
    assert not left_out and measured_run.config.node.compiled_kernels == compiled


def test_a_probed_machine_predicts_with_intervals_and_refuses_unmeasured_runs() -> None:
    config = run("layout.dp=2")
    seconds = RunCost(config, even_machine()).seconds(prior_constants().values)
    settings = (*SHAPE, *BATCH, "layout.dp=2")
    machine, left_out = machine_from_probe(
        replace(even_machine(), steps=(StepTiming("one", settings, seconds, 0.01),)), 2**34
    )
    assert len(left_out) == 1 and machine.hardware == {"local": 2**14}
    prediction = predict_run(config, machine)
    assert prediction.seconds.value == pytest.approx(seconds, rel=0.01)
    assert prediction.seconds.low < seconds < prediction.seconds.high
    assert sum(part.value for part in prediction.components.values()) == pytest.approx(prediction.seconds.value)
    with pytest.raises(UsageError, match="one node"):
        predict_run(run("layout.dp=2", "job.nodes=2"), machine)
    with pytest.raises(UsageError, match="too short, or without that type"):
        predict_run(run("training.dtype=bfloat16"), machine)
    with pytest.raises(UsageError, match="not from `plan probe`"):
        predict_run(config, load_machine("v100"))


def grid_run(*settings: str) -> RunConfig:
    small = ("model.layers=4", "model.seq_len=64", "data.buckets=[8]", "training.global_batch=16")
    return load_run_config(preset="arc-nano", overrides=[*small, "node.threads_per_rank=1", *settings])


def test_products_of_grids_are_those_of_the_formula_but_for_scores_that_are_made_twice() -> None:
    config = grid_run()
    model, b = config.model, config.training.micro_batch
    scores = 2.0 * b * model.seq_len**2 * model.query_width
    expected = exact_flops(model, b, config.padded_outputs) + model.layers * scores
    assert flops(micro_batch_work(config)) == pytest.approx(expected)
    # a compiled kernel's rate is of a causal mask, which leaves out half: twice as many heads stand for all scores
    attention = {
        kind: 2.0 * count * batch * rows * inner * columns
        for (kind, batch, rows, inner, columns), count in micro_batch_work(config, compiled=True).products.items()
        if kind in COMPILED_ATTENTION
    }
    assert attention == dict.fromkeys(COMPILED_ATTENTION, 2 * model.layers * scores)


@pytest.mark.parametrize("settings", [(), ("layout.sequence_parallel=true",)], ids=["tp2", "tp2 sp"])
def test_messages_of_grids_are_those_of_the_communication_plan(settings: Tuple[str, ...]) -> None:
    config = grid_run("layout.tp=2", *settings)
    work = count_chunk_work(config)[0]
    plan = plan_of(config)
    planned: "Counter[Tuple[str, int]]" = Counter()
    for collective in forward_communications(plan, plan.model_chunks[0]):
        # a gather is planned by a rank's share and counted by the full tensor
        share = 2 if collective.operation == ALL_GATHER else 1
        planned[collective.operation, 4 * share * collective.elements] += 1
    assert work.forward.messages == planned


def test_a_grid_classifier_is_predicted_as_extrapolated_by_its_images() -> None:
    config = grid_run("data.buckets=[4,8]")
    machine, _ = machine_from_probe(even_machine(compiled=True), 2**34)
    plan = plan_time(config, machine)
    figures = {figure.name: figure for figure in plan.figures}
    seconds = figures["iteration"].estimate.value
    assert any(text.startswith("model.kind grid_classifier: ") for text in plan.extrapolated)
    assert figures["speed"].unit == "images/s" and figures["speed"].estimate.value == pytest.approx(16 / seconds)
    smaller = predict_run(grid_run("data.buckets=[4]", "model.seq_len=16"), machine).seconds
    speed = figures["speed of grids of 4 x 4"]
    assert speed.unit == "images/s" and speed.estimate.value == pytest.approx(16 / smaller.value)
    assert smaller.value < seconds
    decoder = replace(config, model=replace(config.model, kind="decoder"))
    widths = [predict_run(each, machine).seconds for each in (config, decoder)]
    assert widths[0].high / widths[0].low > widths[1].high / widths[1].low


@pytest.fixture(params=[False, True], ids=["by operators", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Attention without compiled kernels and with them, on one thread."""
    if request.param and not ops.has_native_kernels():
        pytest.skip("no kernels are compiled here")
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", request.param)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.seq_len=256"],
        ["training.recompute=full", "model.dropout=0.1", "model.attention_dropout=0.1"],
    ],
    ids=["plain", "four blocks", "recompute"],
)
def test_products_counted_are_those_that_a_step_makes(settings: List[str], compiled: bool) -> None:
    dispatch = pytest.importorskip("torch.utils._python_dispatch", reason="older builds do not show their products")
    made: "Counter[Tuple[Any, ...]]" = Counter()

    class Watch(dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__.rstrip("_")
            if name in ("mm", "bmm", "addmm", "baddbmm"):
                first, second = args[-2:]
                batch = first.shape[0] if first.dim() == 3 else 1
                made[("", batch, first.shape[-2], first.shape[-1], second.shape[-1])] += 1
            elif name == "_linear_pointwise":  # of oneDNN
                x, weight = args[:2]
                made[("", 1, x.numel() // x.shape[-1], x.shape[-1], weight.shape[0])] += 1
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def attention(packed: torch.Tensor, heads: int, *_: Any) -> Iterator[None]:
        _, b, s, _, d = packed.shape
        made[(ATTENTION, b * heads, s, d, s)] += 1
        yield

    @contextlib.contextmanager
    def backward(y_grad: torch.Tensor, *_: Any) -> Iterator[None]:
        _, b, s, heads, d = y_grad.shape
        made[(ATTENTION_BACKWARD, b * heads, s, d, s)] += 1
        yield

    @contextlib.contextmanager
    def multiply(into: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Iterator[None]:
        made[("", 1, *x.shape, into.shape[1])] += 1
        yield

    config = run("training.global_batch=4", "model.layers=2", f"node.compiled_kernels={compiled}", *settings)
    trainer = Trainer(config, ProcessGrid.alone(), ByteSamples(config.model.seq_len))
    of_attention = scoped_call(ops, "attention", attention), scoped_call(ops, "attention_gradient", backward)
    with Watch(), of_attention[0], of_attention[1], scoped_call(kernels, "matmul_", multiply):
        trainer.step()
    counted: "Counter[Tuple[Any, ...]]" = Counter()
    for (kind, *shape), count in micro_batch_work(config, compiled).products.items():
        counted[(kind if kind in COMPILED_ATTENTION else "", *shape)] += 2 * count
    assert made == counted
    assert any(kind == ATTENTION for kind, *_ in made) == compiled


@pytest.mark.parametrize(("dropout", "kv_heads"), [(0.0, 4), (0.1, 4), (0.1, 2)])
def test_copies_and_products_counted_of_attention_are_those_that_it_makes(
    dropout: float, kv_heads: int, compiled: bool
) -> None:
    dispatch = pytest.importorskip("torch.utils._python_dispatch", reason="older builds do not show their operations")
    products: "Counter[Tuple[Any, ...]]" = Counter()
    elements, masked = 0, 0

    class Watch(dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal elements, masked
            name = func.overloadpacket.__name__
            if name in ("copy_", "mul_"):
                elements += args[0].numel()
            elif name == "add_" and args[1].numel() < args[0].numel():  # a mask that heads share
                masked += args[0].numel()
            elif name == "bmm":
                products[(*args[0].shape, args[1].shape[2])] += 1
            return func(*args, **(kwargs or {}))

    shared = [] if kv_heads == 4 else [f"model.kv_heads={kv_heads}"]
    config = run(f"model.attention_dropout={dropout}", "model.layers=1", "training.global_batch=2", *shared)
    b, s, heads, d = 2, 64, 4, 32
    flags = torch.ones(b, heads, s, s, dtype=torch.bool)
    packed = torch.randn(1, b, s, heads + 2 * kv_heads, d, requires_grad=True)
    with Watch():
        y = attend(packed, heads, (lambda: flags) if dropout else None, dropout)
        y.backward(torch.ones_like(y))
    beside = b * s * heads * d  # the embedding's; and those that bring queries, keys and values beside each other
    beside += 2 * b * s * (heads + 2 * kv_heads) * d if shared else 0
    counted = sum(n * size for (name, size), n in micro_batch_work(config, compiled).passes.items() if name == "copy")
    assert elements == counted - beside
    expected: "Counter[Tuple[Any, ...]]" = Counter()
    for (kind, *shape), n in micro_batch_work(config, compiled).products.items():
        expected[tuple(shape)] += n if kind in (KEYS, SCORES, VALUES) else 0
    assert products == +expected
    others, all_adds = (
        sum(n * size for (name, size), n in micro_batch_work(config, native).passes.items() if name == "add")
        for native in (True, False)
    )
    assert masked == (0 if compiled else all_adds - others)


@pytest.mark.parametrize(
    "settings",
    [
        ["layout.tp=2"],
        ["layout.tp=2", "layout.sequence_parallel=true", "training.recompute=full"],
        ["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1", "training.bucket_mib=0.5"],
        ["layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.tp=2"],
        ["layout.tp=2", "model.kv_heads=1"],
    ],
    ids=" ".join,
)
def test_messages_counted_are_those_of_the_plan_of_a_step(settings: List[str]) -> None:
    config = run(*settings)
    plan = plan_of(config)
    for stage in range(config.layout.pp):
        planned: "Counter[Tuple[str, str, int]]" = Counter()
        for call in program(plan, stage):
            if isinstance(call, Collective):
                size = config.layout.tp if call.operation == ALL_GATHER and call.communicator == "tp" else 1
                size = config.layout.dp if call.operation == ALL_GATHER and call.communicator == "dp" else size
                planned[call.communicator, call.operation, 4 * size * call.elements] += 1
        counted: "Counter[Tuple[str, str, int]]" = Counter()
        for work in count_chunk_work(config):
            if work.chunk.stage == stage:
                for tally in (work.forward, work.backward):
                    for (operation, size), count in tally.messages.items():
                        counted["tp", operation, size] += config.micro_batches * count
        stage_work = count_stage_work(config, stage)
        for operation, size in stage_work.replicas:
            counted["dp", operation, size] += 1
        if stage_work.replicated_bytes:
            counted["tp", ALL_REDUCE, stage_work.replicated_bytes] += 1
        if stage_work.copied_bytes:
            counted["kv", ALL_REDUCE, stage_work.copied_bytes] += 1
        planned_tied = sum(size for (communicator, _, size), _ in planned.items() if communicator == "embedding")
        assert stage_work.tied_bytes == pytest.approx(planned_tied, rel=0.02)  # gaps of alignment
        assert counted == Counter({key: n for key, n in planned.items() if key[0] in ("tp", "dp", "kv")})
