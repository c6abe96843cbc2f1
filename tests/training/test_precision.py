"""Tests of training in 16 bits on one rank: distance from float32, loss scaling, memory, choice of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from fugaku_gpt import compat, ops
from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.compat import probes
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.compat.probes import TRIALS
from fugaku_gpt.config import TrainingConfig
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.ops import activation, native
from fugaku_gpt.parallel.cross_entropy import LossOptions, vocab_parallel_cross_entropy
from fugaku_gpt.training import startup
from fugaku_gpt.training.loss_scale import LossScale
from fugaku_gpt.training.trainer import Step, Trainer
from tests.support.product_verdicts import product_verdict, use_verdict_file
from tests.support.text import ByteSamples
from tests.support.tiny import tiny_config
from tests.training.trainers import tiny_trainer
from tests.training.two_ranks import TwoRanks

SIXTEEN_BITS = ["bfloat16", "float16"]
STEPS = 8
# largest relative distance of a loss from the float32 curve: 2e-4 and 3e-5 were measured
CURVE_BOUND = {"bfloat16": 1e-3, "float16": 2e-4}
# largest relative distance of a gradient norm: 1.6e-3 and 1.1e-4 were measured
NORM_BOUND = {"bfloat16": 8e-3, "float16": 1e-3}


def trainer(*overrides: str) -> Trainer:
    return tiny_trainer("training.micro_batch=4", "training.lr=5e-3", *overrides)


def steps_of(run: Trainer, count: int = STEPS) -> List[Step]:
    return [run.step() for _ in range(count)]


def is_close(ours: List[Step], judge: List[Step], dtype: str) -> bool:
    losses = max(abs(a.loss / b.loss - 1) for a, b in zip(ours, judge))
    norms = max(abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(ours, judge))
    return 0 < losses <= CURVE_BOUND[dtype] and norms <= NORM_BOUND[dtype]


@pytest.mark.parametrize("settings", [(), ("training.recompute=full", "model.gelu=tanh")], ids=["plain", "recomputed"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_the_curve_in_16_bits_is_close_to_that_in_float32(dtype: str, settings: Any) -> None:
    judge, ours = trainer(*settings), trainer(*settings, f"training.dtype={dtype}")
    assert is_close(steps_of(ours), steps_of(judge), dtype)
    assert ours.validate() == pytest.approx(judge.validate(), rel=CURVE_BOUND[dtype])


@pytest.mark.parametrize("missing", [*TRIALS, "all"])
def test_the_curve_without_a_kernel_is_close_to_that_in_float32(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = steps_of(trainer(), 4)
    operations = list(TRIALS) if missing == "all" else [missing]
    monkeypatch.setitem(
        RANK_CONSENSUS.in_float32,
        torch.bfloat16,
        frozenset([*compat.operations_without_kernel(torch.bfloat16), *operations]),
    )
    assert is_close(steps_of(trainer("training.dtype=bfloat16"), 4), judge, "bfloat16")


def test_recomputing_changes_nothing_in_16_bits() -> None:
    plain, recomputed = (trainer("training.dtype=bfloat16", f"training.recompute={kind}") for kind in ("none", "full"))
    assert steps_of(plain, 3) == steps_of(recomputed, 3)
    assert torch.equal(plain.buffers.parameters, recomputed.buffers.parameters)


def test_parameters_are_the_rounded_masters() -> None:
    run = trainer("training.dtype=bfloat16")
    steps_of(run, 3)
    assert run.masters is not None
    assert torch.equal(run.buffers.parameters, run.masters.values.to(torch.bfloat16))
    assert not torch.equal(run.masters.values, run.buffers.parameters.float())


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_memory_is_2_bytes_of_parameters_and_4_each_of_masters_gradients_and_moments(dtype: str) -> None:
    run = trainer(f"training.dtype={dtype}")
    steps_of(run, 1)
    assert run.masters is not None
    elements = run.buffers.parameters.numel()
    moments = [tensor for both in run._optimizer.moments for tensor in both]
    sizes = [
        sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for tensors in ([run.buffers.parameters], [run.buffers.gradients], [run.masters.values], moments)
    ]
    assert sizes == [2 * elements, 4 * elements, 4 * elements, 8 * elements]
    assert all(parameter.grad is None for piece in run.model_chunks.values() for parameter in piece.parameters())


def test_the_scale_multiplies_gradients_before_they_are_rounded_and_not_the_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 8, generator=generator).half()
    weight = torch.randn(20, 8, generator=generator).half()
    targets = torch.arange(6)
    results = []
    for scale in (1e-7, 4096e-7):  # 1e-7 is next to nothing in float16
        x, w = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
        loss = vocab_parallel_cross_entropy(
            x, w, targets, Communicator.alone(), 20, options=LossOptions(gradient_scale=scale)
        )
        loss.backward()
        assert x.grad is not None and w.grad is not None and loss.dtype == torch.float32
        results.append((float(loss.detach()), x.grad, w.grad))
    assert results[0][0] == results[1][0]
    x, w = (tensor.float().requires_grad_() for tensor in (hidden, weight))
    vocab_parallel_cross_entropy(
        x, w, targets, Communicator.alone(), 20, options=LossOptions(gradient_scale=4096e-7)
    ).backward()
    for unscaled, scaled, judge in zip(results[0][1:], results[1][1:], (x.grad, w.grad)):
        assert judge is not None
        scale = float(judge.abs().max())
        assert float((scaled.float() - judge).abs().max()) < 0.01 * scale
        assert float((4096 * unscaled.float() - judge).abs().max()) > 0.1 * scale


def test_an_overflow_halves_the_scale_and_leaves_everything_else_as_it_was() -> None:
    run = trainer("training.dtype=float16", "training.loss_scale=1e30")
    before, masters = run.buffers.parameters.clone(), run.masters and run.masters.values.clone()
    step = run.step()
    assert step.skip_reason == "overflow" and step.loss_scale == 1e30 and run.loss_scale.value == 0.5e30
    assert torch.equal(run.buffers.parameters, before)
    assert run.masters is not None and masters is not None and torch.equal(run.masters.values, masters)
    assert run.iteration == 1 and run.consumed_samples == 8 and run.health.skipped_steps == 1


def test_a_scale_that_is_much_too_large_comes_down_until_steps_are_done() -> None:
    run, judge = trainer("training.dtype=float16", "training.loss_scale=1e9"), trainer()
    steps = steps_of(run, 20)
    done = [number for number, step in enumerate(steps) if not step.skip_reason]
    assert 2 <= done[0] < 15 and len(done) > 5
    assert run.loss_scale.overflows == run.health.skipped_steps == 20 - len(done)
    assert [step.loss_scale for step in steps[: done[0] + 1]] == [1e9 / 2**count for count in range(done[0] + 1)]
    judge.consumed_samples = 8 * done[0]  # the weights are still the initial ones, and the samples are later ones
    step = judge.step()
    assert (steps[done[0]].loss, steps[done[0]].grad_norm) == pytest.approx((step.loss, step.grad_norm), rel=1e-3)


def test_norms_and_clipping_do_not_depend_on_the_scale() -> None:
    # PyTorch's kernels leave the divided gradients where they were
    settings = ("training.dtype=float16", "node.compiled_kernels=false")
    small_scale, large_scale = (trainer(*settings, f"training.loss_scale={scale}") for scale in (256, 16384))
    a, b = small_scale.step(), large_scale.step()
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=2e-3) == pytest.approx(trainer().step().grad_norm, rel=2e-3)
    assert a.grad_norm > 0.5
    assert [float(run.buffers.gradients.norm()) for run in (small_scale, large_scale)] == pytest.approx(
        [0.5, 0.5], rel=1e-4
    )


def test_an_overflow_at_the_smallest_scale_ends_the_run() -> None:
    run = trainer("training.dtype=float16", "training.loss_scale=1e30", "training.loss_scale_min=5e29")
    assert run.step().skip_reason == "overflow"
    with pytest.raises(RunFailed, match="not finite"):
        run.step()


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_scale() -> None:
    run = trainer("training.dtype=float16")
    run.buffers.parameters[run.buffers.layout.embedding] = float("nan")
    with pytest.raises(RunFailed, match="loss nan"):
        run.step()
    assert run.loss_scale.value == 65536.0


def test_the_scale_doubles_after_a_window_without_overflow_and_halves_at_each() -> None:
    scale = LossScale(TrainingConfig(dtype="float16", loss_scale=8.0, loss_scale_window=3, loss_scale_min=2.0))
    seen = []
    for overflow in (False, False, False, False, False, True, False, False, False, True, True, True):
        scale.update(overflow)
        seen.append(scale.value)
    assert seen == [8, 8, 16, 16, 16, 8, 8, 8, 16, 8, 4, 2]
    assert scale.overflows == 4
    assert not scale.is_overflow(1.0, bad_ranks=1)  # as low as it may be
    scale.update(False)
    scale.value = 4.0
    assert scale.is_overflow(1.0, 1) and not scale.is_overflow(float("inf"), 1) and not scale.is_overflow(1.0, 0)


def test_a_run_that_resumes_with_a_shorter_window_doubles_the_scale_too() -> None:
    scale = LossScale(TrainingConfig(dtype="float16", loss_scale_window=3))
    scale.load({"value": 8.0, "since_overflow": 5, "overflows": 0})
    for _ in range(2):
        scale.update(False)
    assert (scale.value, scale.since_overflow) == (16.0, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_other_types_are_not_scaled(dtype: str) -> None:
    scale = LossScale(TrainingConfig(dtype=dtype))
    scale.update(False)
    assert scale.value == scale.gradient_scale(100) == 1.0 and not scale.is_overflow(1.0, 1)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for wrong, message in (
        (["training.dtype=float64", "training.gradient_dtype=bfloat16"], "training.gradient_dtype"),
        (["training.loss_scale=1", "training.loss_scale_min=2"], "training.loss_scale_min 2"),
        (["training.dtype=bf16"], "bfloat16"),
    ):
        with pytest.raises(UsageError, match=message):
            tiny_config(*wrong)


def test_a_dtype_that_the_build_cannot_train_in_is_refused_and_operations_in_float32_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config("training.dtype=float16")
    startup.check_precision(config)
    facts = startup.collect_environment(config, ProcessGrid.alone(), startup.prepare_process(1))
    assert facts["precision"] == startup.kernels_in_use(config)
    facts["precision"]["in_float32"] = ["linear", "softmax"]
    (line,) = [line for line in startup.describe_environment(facts) if line.startswith("computing in float16")]
    assert line.endswith("linear, softmax")
    monkeypatch.setattr(compat, "can_train", lambda dtype: False)
    with pytest.raises(UsageError, match="training.dtype: float16: this PyTorch"):
        startup.check_precision(config)


@pytest.mark.parametrize("kernels", ["true", "false"], ids="compiled kernels {}".format)
def test_a_resume_uses_the_kernels_of_the_first_start_whatever_is_measured(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = product_verdict("bfloat16", torch.get_num_threads(), onednn=0.9, compiled=1.2)
    use_verdict_file(monkeypatch, tmp_path / "products.json", verdict)
    config, alone = tiny_config("training.dtype=bfloat16", f"node.compiled_kernels={kernels}"), Communicator.alone()
    own = {
        "compiled": kernels == "true" and ops.has_native_kernels(),
        "compiled_products": kernels == "true" and ops.supports_native_matmul(torch.bfloat16),
    }
    monkeypatch.setattr(RANK_CONSENSUS, "in_float32", {})
    monkeypatch.setattr(RANK_CONSENSUS, "products_by_onednn", None)
    monkeypatch.setattr(probes, "_is_fast", lambda operation, dtype: operation != "linear")
    monkeypatch.setattr(probes, "_is_precise", lambda operation, dtype: True)
    monkeypatch.setattr(RANK_CONSENSUS, "gelu_by_erf", None)
    monkeypatch.setattr(activation, "_gelu_is_slow", lambda: True)
    by_erf = not own["compiled"]  # the compiled kernel is not timed
    first_kernels = startup.agree_on_kernels(config, alone)
    assert first_kernels == {
        "dtype": "bfloat16",
        "in_float32": ["linear"],
        "gelu_by_erf": by_erf,
        "onednn": False,
        **own,
    }
    assert first_kernels == startup.agree_on_kernels(config, alone) == startup.kernels_in_use(config)
    monkeypatch.setattr(RANK_CONSENSUS, "in_float32", {})
    monkeypatch.setattr(probes, "_is_fast", lambda operation, dtype: operation == "linear")
    monkeypatch.setattr(probes, "_is_precise", lambda operation, dtype: operation != "gelu")
    monkeypatch.setattr(RANK_CONSENSUS, "gelu_by_erf", None)
    monkeypatch.setattr(activation, "_gelu_is_slow", lambda: False)
    resumed_kernels = startup.agree_on_kernels(config, alone, first_kernels)
    expected = {"dtype": "bfloat16", "in_float32": ["linear", "gelu"], "gelu_by_erf": by_erf, "onednn": False, **own}
    assert resumed_kernels == expected
    Trainer(config, ProcessGrid.alone(), ByteSamples(config.model.seq_len))
    assert startup.kernels_in_use(config) == resumed_kernels


def test_a_resume_without_the_compiled_gelu_measures_gelu_even_if_the_first_start_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RANK_CONSENSUS, "in_float32", {})
    monkeypatch.setattr(RANK_CONSENSUS, "gelu_by_erf", None)
    monkeypatch.setattr(activation, "_gelu_is_slow", lambda: True)
    saved_kernels = {"dtype": "float32", "in_float32": [], "gelu_by_erf": False, "onednn": False, "compiled": True}
    config = tiny_config("node.compiled_kernels=false")
    kernels = startup.agree_on_kernels(config, Communicator.alone(), saved_kernels)
    assert kernels["gelu_by_erf"] and not kernels["compiled"]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_the_saved_choice_of_gelu_holds_in_types_without_compiled_kernels(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RANK_CONSENSUS, "in_float32", {})
    monkeypatch.setattr(RANK_CONSENSUS, "gelu_by_erf", None)
    monkeypatch.setattr(activation, "_gelu_is_slow", lambda: pytest.fail("asked of a clock"))
    saved_kernels = {"dtype": dtype, "in_float32": [], "gelu_by_erf": True, "onednn": False, "compiled": True}
    kernels = startup.agree_on_kernels(tiny_config(f"training.dtype={dtype}"), Communicator.alone(), saved_kernels)
    assert kernels["gelu_by_erf"]


def test_the_report_names_gelu_once() -> None:
    precision = {
        **startup.kernels_in_use(tiny_config()),
        **{"dtype": "bfloat16", "in_float32": ["gelu", "gelu_tanh", "linear"], "compiled": True, "gelu_by_erf": False},
    }
    (line,) = [line for line in startup._describe_precision(precision, ["GELU"]) if "in float32" in line]
    assert line.endswith("for lack of a good kernel: linear")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_gelu_that_is_slow_on_any_rank_is_replaced_on_all_ranks_and_reported(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(f"training.dtype={dtype}")
    monkeypatch.setattr(RANK_CONSENSUS, "in_float32", {})
    monkeypatch.setattr(RANK_CONSENSUS, "gelu_by_erf", None)
    monkeypatch.setattr(activation, "_gelu_is_slow", lambda: False)
    facts = startup.collect_environment(config, ProcessGrid.alone(), startup.prepare_process(1))
    assert not any(line.startswith("GELU from") for line in startup.describe_environment(facts))
    monkeypatch.setattr(TwoRanks, "other", {"gelu_by_erf": True}, raising=False)
    world = TwoRanks.alone()
    assert startup.agree_on_kernels(config, world)["gelu_by_erf"] and ops.uses_gelu_by_erf()
    facts = startup.collect_environment(config, ProcessGrid.alone(), startup.prepare_process(1))
    assert any(line.startswith("GELU from") for line in startup.describe_environment(facts))
    # from a checkpoint without this choice, and for a model that does not need it
    monkeypatch.setattr(RANK_CONSENSUS, "gelu_by_erf", None)
    monkeypatch.setattr(TwoRanks, "other", {})
    assert not startup.agree_on_kernels(config, world, {"dtype": dtype, "in_float32": []})["gelu_by_erf"]
    monkeypatch.setattr(activation, "_gelu_is_slow", lambda: pytest.fail("asked of a clock"))
    monkeypatch.setattr(RANK_CONSENSUS, "gelu_by_erf", None)
    tanh = tiny_config(f"training.dtype={dtype}", "model.gelu=tanh")
    assert not startup.agree_on_kernels(tanh, world)["gelu_by_erf"]


def test_creating_a_trainer_agrees_on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RANK_CONSENSUS, "in_float32", {})
    trainer("training.dtype=float16")
    assert list(RANK_CONSENSUS.in_float32) == [torch.float16]


def test_compiled_kernels_are_used_on_all_ranks_or_on_none_and_a_resume_does_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(has_kernels: bool, other: Dict[str, Any], saved: Any = None, is_enabled: bool = True) -> bool:
        monkeypatch.setattr(RANK_CONSENSUS, "compiled", None)
        monkeypatch.setattr(native, "has_native_kernels", lambda: has_kernels)
        monkeypatch.setattr(ops, "has_native_kernels", lambda: has_kernels)
        monkeypatch.setattr(TwoRanks, "other", other, raising=False)
        config = tiny_config(f"node.compiled_kernels={is_enabled}")
        kernels = startup.agree_on_kernels(config, TwoRanks.alone(), saved)
        assert kernels["compiled"] == ops.uses_native_kernels()
        if is_enabled:  # a trainer that is created later does not know of an earlier start
            assert startup.agree_on_kernels(config, TwoRanks.alone())["compiled"] == kernels["compiled"]
        facts = startup.collect_environment(config, ProcessGrid.alone(), startup.prepare_process(1))
        is_reported = any("own compiled" in line for line in startup.describe_environment(facts))
        assert is_reported == (kernels["compiled"] or is_enabled)  # used, or a note of why not
        return bool(kernels["compiled"])

    assert begin(True, {}) and not begin(False, {}) and not begin(True, {"compiled": False})
    assert not begin(True, {}, is_enabled=False)
    saved_kernels = {"dtype": "float32", "in_float32": [], "gelu_by_erf": False, "onednn": False}
    assert not begin(True, {}, saved_kernels)  # from a checkpoint older than compiled kernels
    assert begin(True, {}, {**saved_kernels, "compiled": True}) and not begin(
        True, {}, {**saved_kernels, "compiled": False}
    )
    assert not begin(False, {}, {**saved_kernels, "compiled": True})
