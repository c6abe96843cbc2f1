"""The time model of our own trainer: counts against formulas, times against a machine that is easy to reckon with."""

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
from fugaku_gpt.layout.operations import ALL_GATHER, ALL_REDUCE
from fugaku_gpt.layout.sequence import Collective, plan_of, program
from fugaku_gpt.machine.constants import load_machine, machine_yaml
from fugaku_gpt.machine.probed import ATTENTION, ATTENTION_BACKWARD, COMPILED_ATTENTION, SCORES, StepTiming
from fugaku_gpt.model.causal_attention import causal_attention
from fugaku_gpt.ops import native as kernels
from fugaku_gpt.planner.trainer.fitting import MeasuredRun, fit_local, machine_from_probe, usable_runs
from fugaku_gpt.planner.trainer.rates import ProbeRates
from fugaku_gpt.planner.trainer.seconds import TIME_COMPONENTS, RunCost, predict_run, prior_constants
from fugaku_gpt.planner.trainer.work import Tally, count_chunk_work, count_stage_work, message_bytes
from fugaku_gpt.records.run import OK, MetricsWriter, Result, RunDirectory
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


def whole(config: RunConfig, compiled: bool = False) -> Tally:
    """Of one micro-batch through all chunks, there and back."""
    found = Tally()
    for work in count_chunk_work(config, compiled):
        found.add(work.forward)
        found.add(work.backward)
    return found


def test_products_are_those_of_the_formula_but_for_attention_s_blocks() -> None:
    config = run()
    tally = whole(config)
    # one block of queries holds all 64 tokens: nothing is saved above the diagonal, and the scores are made twice
    b, s, h, layers = 2, 64, 128, 4
    again = layers * 2.0 * b * s * s * h
    assert flops(tally) == pytest.approx(exact_flops(config.model, b, config.padded_vocab) + again)


def test_blocks_skip_what_lies_above_the_diagonal() -> None:
    config = run("model.seq_len=256", "training.micro_batch=1", "training.global_batch=8")
    scores = sum(n * r * c * batch for (kind, batch, r, _, c), n in whole(config).products.items() if kind == "scores")
    # four blocks of 64 queries meet 64, 128, 192 and 256 keys; three products with keys in a step: 4 layers, 4 heads
    assert scores == 3 * 4 * 4 * 64 * (64 + 128 + 192 + 256)


def test_compiled_attention_is_one_product_of_each_layer_there_and_one_back() -> None:
    plain, kernels = whole(run()), whole(run(), compiled=True)
    attention = {key: n for key, n in kernels.products.items() if key[0] in COMPILED_ATTENTION}
    shape = (2 * 4, 64, 32, 64)  # samples times heads
    assert attention == {(kind, *shape): 4 for kind in (ATTENTION, ATTENTION_BACKWARD)}
    assert {key: n for key, n in kernels.products.items() if key not in attention} == {
        key: n for key, n in plain.products.items() if key[0] not in ("scores", "values", "keys")
    }
    assert {name for name, _ in plain.passes} - {name for name, _ in kernels.passes} == {"softmax", "softmax_backward"}
    again = whole(run("training.recompute=full"), compiled=True)
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
def test_compiled_kernels_compute_what_their_types_and_threads_allow(settings: Any, heads: int) -> None:
    tally = whole(run(*settings), compiled=True)
    assert {batch for kind, batch, *_ in tally.products if kind in COMPILED_ATTENTION} == ({heads} if heads else set())
    assert (SCORES in {key[0] for key in tally.products}) == (heads == 0)


def test_attention_costs_what_the_probe_measured_of_compiled_kernels_where_it_did() -> None:
    config = run()
    seconds = {}
    for compiled in (False, True):
        tally = whole(config, compiled)
        fast = sum(
            2.0 * n * b * r * i * c for (kind, b, r, i, c), n in tally.products.items() if kind in COMPILED_ATTENTION
        )
        seconds[compiled] = 8 * (flops(tally) - fast / 2) / FLOPS
        parts = RunCost(config, even_machine(compiled=compiled)).seconds_by_component(ONES)
        assert parts["compute"] == pytest.approx(seconds[compiled])
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
    assert flops(whole(config)) == pytest.approx(share * flops(whole(run())) + more)


def test_an_iteration_of_one_rank_is_the_sum_of_its_work() -> None:
    config = run()
    tally = whole(config)
    parts = RunCost(config, even_machine()).seconds_by_component(ONES)
    assert set(parts) == set(TIME_COMPONENTS)
    assert parts["compute"] == pytest.approx(8 * flops(tally) / FLOPS)
    elements = sum(count * size for (_, size), count in tally.passes.items())
    assert parts["memory_bound"] == pytest.approx(8 * elements * PASS_SECONDS)
    assert parts["overhead"] == pytest.approx(8 * 4 * 3 * LAYER_SECONDS)
    parameters = 4 * (12 * 128**2 + 13 * 128) + (512 + 64 + 2) * 128
    assert parts["optimiser"] == pytest.approx(3 * parameters * PASS_SECONDS, rel=1e-3)
    assert parts["pipeline"] == pytest.approx(0) and parts["tensor_parallel"] == parts["data_parallel"] == 0


def test_sums_and_messages_by_their_bytes() -> None:
    config = run("layout.dp=2", "training.bucket_mib=0.5")
    work = count_stage_work(config, 0)
    parameters = 4 * (12 * 128**2 + 13 * 128) + (512 + 64 + 2) * 128
    assert len(work.replicas) > 1 and sum(size for _, size in work.replicas) == pytest.approx(4 * parameters, rel=1e-3)
    parts = RunCost(config, even_machine()).seconds_by_component(ONES)
    assert parts["data_parallel"] == pytest.approx(4 * parameters * MESSAGE_SECONDS, rel=1e-3)
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
    parts = RunCost(run(*settings), machine).seconds_by_component(quiet)
    one = RunCost(run("model.layers=2", "model.vocab_size=128"), machine).seconds_by_component(quiet)
    busy = parts["compute"] + parts["overhead"]
    assert busy == pytest.approx(one["compute"] + one["overhead"])  # the last stage has the logits
    # 8 micro-batches: the first stage's pass, which has no logits, comes before; (p - 1) / m of it about
    head = 8 * 3 * 2.0 * 2 * 64 * 128 * 128 / FLOPS
    tied = 4 * 128 * 128 * MESSAGE_SECONDS
    assert parts["pipeline"] == pytest.approx((busy - head) / 8 + tied, rel=1e-6)


def test_ranks_without_cores_of_their_own_wait_for_them() -> None:
    two, four = (RunCost(run(f"layout.dp={dp}"), even_machine(cores=2)).seconds_by_component(ONES) for dp in (2, 4))
    assert two["shared_cores"] == 0
    work = four["compute"] + four["memory_bound"] + four["overhead"] + four["optimiser"]
    assert four["shared_cores"] == pytest.approx(work)  # twice as many ranks as cores: all of it once more
    stages = RunCost(run("layout.pp=4"), even_machine(cores=2))
    assert stages.seconds_by_component(ONES)["shared_cores"] > 0


def test_rates_lie_between_the_measured_ones_and_beyond_them_is_told() -> None:
    probed = even_machine()
    fast = [replace(one, seconds=one.seconds / (4.0 if one.rows == 512 else 1.0)) for one in probed.products]
    rates = ProbeRates(replace(probed, products=tuple(fast)), 1, 1)
    slow_one, fast_one = (2.0 * width**3 / rates.product("float32", "linear", 1, *[width] * 3) for width in (64, 512))
    between = 2.0 * 180**3 / rates.product("float32", "linear", 1, 180, 180, 180)
    assert slow_one == pytest.approx(FLOPS, rel=0.02) and fast_one == pytest.approx(4 * FLOPS, rel=0.02)
    assert 1.5 * FLOPS < between < 2.7 * FLOPS
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
    runs = [MeasuredRun(str(one), run(*one), RunCost(run(*one), probed).seconds(truth)) for one in settings]
    fitted, left_out = fit_local(probed, runs)
    assert fitted.values["products"] == pytest.approx(1.3, rel=0.02)
    assert fitted.values["exposed"] == pytest.approx(0.8)  # no run of these tells it
    assert max(abs(one.relative_error) for one in left_out) < 0.02
    assert len(fitted.covariance) == len(fitted.constants) and fitted.rows == tuple(str(one) for one in settings)


def test_runs_that_are_kept_are_fitted_to_and_others_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probed = even_machine()
    truth = {**prior_constants().values, "products": 1.4}
    kept = {
        "one": (run(), "even"),
        "two": (run("model.hidden=256"), "even"),
        "elsewhere": (run("model.layers=2"), "another processor"),
        "threads unknown": (run("model.layers=1"), "even"),
    }
    for name, (config, processor) in kept.items():
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
    words = ["plan", "fit", "--runs", str(tmp_path / "runs"), "--format", "json"]
    assert cli(["plan", "fit", "--runs", str(tmp_path / "runs"), "--machine", "v100"]) == 2
    assert cli([*words, "--machine", str(file), "--out", str(out)]) == 0
    caught = capsys.readouterr()
    assert len(json.loads(caught.out)) == 2 and "another processor, not on the machine of the file" in caught.err
    assert "does not record the threads of its ranks" in caught.err
    assert 1.2 < load_machine(str(out)).time.values["products"] <= 1.4  # two runs against what was taken for likely


@pytest.mark.parametrize(
    ("precision", "compiled"), [({}, False), ({"compiled": False}, False), ({"compiled": True}, True)]
)
def test_a_kept_run_is_fitted_to_with_the_kernels_that_it_had(tmp_path: Path, precision: Any, compiled: bool) -> None:
    directory = RunDirectory(tmp_path)
    directory.create(dump_run_config(run()))
    directory.write_environment({"processor": "even", "ranks": [{"threads": 1}], "precision": precision})
    metrics = MetricsWriter(directory.metrics_file)
    for iteration in range(6):
        metrics.write("iteration", {"iteration": iteration, "seconds": 1.0, "loss": 1.0})
    metrics.close()
    directory.write_result(Result(OK, "", 0.0, 1.0))
    (found,), left_out = usable_runs([tmp_path], even_machine())
    assert not left_out and found.config.node.compiled_kernels == compiled


def test_a_machine_of_the_probe_predicts_with_intervals_and_refuses_what_it_cannot() -> None:
    config = run("layout.dp=2")
    seconds = RunCost(config, even_machine()).seconds(prior_constants().values)
    settings = (*SHAPE, *BATCH, "layout.dp=2")
    machine, left_out = machine_from_probe(
        replace(even_machine(), steps=(StepTiming("one", settings, seconds, 0.01),)), 2**34
    )
    assert len(left_out) == 1 and machine.hardware == {"local": 2**14}
    found = predict_run(config, machine)
    assert found.seconds.value == pytest.approx(seconds, rel=0.01)
    assert found.seconds.low < seconds < found.seconds.high
    assert sum(part.value for part in found.components.values()) == pytest.approx(found.seconds.value)
    with pytest.raises(UsageError, match="one node"):
        predict_run(run("layout.dp=2", "job.nodes=2"), machine)
    with pytest.raises(UsageError, match="too short, or without that type"):
        predict_run(run("training.dtype=bfloat16"), machine)
    with pytest.raises(UsageError, match="not from `plan probe`"):
        predict_run(config, load_machine("v100"))


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
    [[], ["model.seq_len=256"], ["training.recompute=full", "model.dropout=0.1", "model.attention_dropout=0.1"]],
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
    def attention(qkv: torch.Tensor, *_: Any) -> Iterator[None]:
        _, b, s, _, heads, d = qkv.shape
        made[(ATTENTION, b * heads, s, d, s)] += 1
        yield

    @contextlib.contextmanager
    def backward(y_grad: torch.Tensor, qkv: torch.Tensor, *_: Any) -> Iterator[None]:
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
    for (kind, *shape), count in whole(config, compiled).products.items():
        counted[(kind if kind in COMPILED_ATTENTION else "", *shape)] += 2 * count
    assert made == counted
    assert any(kind == ATTENTION for kind, *_ in made) == compiled


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_copies_counted_of_attention_are_those_that_it_makes(dropout: float, compiled: bool) -> None:
    dispatch = pytest.importorskip("torch.utils._python_dispatch", reason="older builds do not show their operations")
    elements = 0

    class Watch(dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal elements
            if func.overloadpacket.__name__ in ("copy_", "mul_"):
                elements += args[0].numel()
            return func(*args, **(kwargs or {}))

    config = run(f"model.attention_dropout={dropout}", "model.layers=1", "training.global_batch=2")
    b, s, heads, d = 2, 64, 4, 32
    flags = torch.ones(b, heads, s, s, dtype=torch.bool)
    qkv = torch.randn(1, b, s, 3, heads, d, requires_grad=True)
    with Watch():
        y = causal_attention(qkv, (lambda: flags) if dropout else None, dropout)
        y.backward(torch.ones_like(y))
    embedding = b * s * heads * d
    counted = sum(n * size for (name, size), n in whole(config, compiled).passes.items() if name == "copy")
    assert elements == counted - embedding


@pytest.mark.parametrize(
    "settings",
    [
        ["layout.tp=2"],
        ["layout.tp=2", "layout.sequence_parallel=true", "training.recompute=full"],
        ["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.zero=1", "training.bucket_mib=0.5"],
        ["layout.pp=2", "layout.chunks=2", "layout.schedule=interleaved", "layout.tp=2"],
    ],
    ids=" ".join,
)
def test_messages_counted_are_those_of_the_plan_of_a_step(settings: List[str]) -> None:
    config = run(*settings)
    plan = plan_of(config)
    for stage in range(config.layout.pp):
        told: "Counter[Tuple[str, str, int]]" = Counter()
        for one in program(plan, stage):
            if isinstance(one, Collective):
                size = config.layout.tp if one.operation == ALL_GATHER and one.communicator == "tp" else 1
                size = config.layout.dp if one.operation == ALL_GATHER and one.communicator == "dp" else size
                told[one.communicator, one.operation, 4 * size * one.elements] += 1
        counted: "Counter[Tuple[str, str, int]]" = Counter()
        for work in count_chunk_work(config):
            if work.chunk.stage == stage:
                for tally in (work.forward, work.backward):
                    for (operation, size), count in tally.messages.items():
                        counted["tp", operation, size] += config.micro_batches * count
        end = count_stage_work(config, stage)
        for operation, size in end.replicas:
            counted["dp", operation, size] += 1
        if end.replicated_bytes:
            counted["tp", ALL_REDUCE, end.replicated_bytes] += 1
        told_tied = sum(size for (who, _, size), _ in told.items() if who == "embedding")
        assert end.tied_bytes == pytest.approx(told_tied, rel=0.02)  # gaps of alignment
        assert counted == Counter({key: n for key, n in told.items() if key[0] in ("tp", "dp")})
