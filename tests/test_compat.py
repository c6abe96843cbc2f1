"""What the probes find in this PyTorch works as the rest of the package expects."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch
import torch.nn.functional as F

from fugaku_gpt import compat


@pytest.fixture
def denormals_kept() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("has_approximate", [True, False])
def test_gelu_tanh_is_its_formula_with_and_without_the_kernel(
    has_approximate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_approximate and not compat._GELU_HAS_APPROXIMATE:
        pytest.skip("this PyTorch has no tanh kernel of GELU")
    monkeypatch.setattr(compat, "_GELU_HAS_APPROXIMATE", has_approximate)
    x = torch.linspace(-6, 6, 101, dtype=torch.float64).requires_grad_()
    y = compat.gelu_tanh(x)
    y.sum().backward()
    for point, value, slope in zip(x.tolist(), y.tolist(), x.grad.tolist()):  # type: ignore[union-attr]
        scale = math.sqrt(2 / math.pi)
        t = math.tanh(scale * (point + 0.044715 * point**3))
        assert value == pytest.approx(0.5 * point * (1 + t), abs=1e-14)
        expected = 0.5 * (1 + t) + 0.5 * point * (1 - t * t) * scale * (1 + 3 * 0.044715 * point * point)
        assert slope == pytest.approx(expected, abs=1e-14)


def test_gelu_tanh_is_near_the_exact_gelu_and_not_equal_to_it() -> None:
    x = torch.linspace(-4, 4, 200)
    difference = float((compat.gelu_tanh(x) - F.gelu(x)).abs().max())
    assert 1e-5 < difference < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_optimiser_that_is_found_takes_the_first_step_of_adam(dtype: torch.dtype) -> None:
    kernel = compat.fused_adamw(dtype)
    if kernel is None:
        assert not compat.divides_gradients(dtype)
        pytest.skip("this PyTorch has no fused AdamW for the CPU")
    weights, gradients, first, second = ([torch.full((5,), value, dtype=dtype)] for value in (1.0, 3.0, 0.0, 0.0))
    rates = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    kernel(weights, gradients, first, second, [], [torch.tensor(1.0)], **rates, amsgrad=False, maximize=False)
    assert weights[0].tolist() == pytest.approx([0.99] * 5, rel=1e-6)  # the learning rate, by the gradient's sign
    assert first[0].tolist() == pytest.approx([0.3] * 5) and second[0].tolist() == pytest.approx([0.09] * 5)


def _other_words(*_: Any, learning_rate: float) -> None:
    raise AssertionError("is not called")


def _does_nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.mark.parametrize("kernel", [None, _other_words, _does_nothing])
def test_a_kernel_that_is_not_what_it_should_be_is_not_taken(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_adamw_", kernel, raising=False)
    assert compat.fused_adamw.__wrapped__(torch.float32) is None


def _adamw(
    weights: Any, gradients: Any, firsts: Any, seconds: Any, _: Any, steps: Any, wrong: str = "", **rates: Any
) -> None:
    """The algorithm, but for one thing."""
    (w,), (g,), (m,), (v,) = weights, gradients, firsts, seconds
    divisor, t = rates.get("grad_scale", torch.ones(())), float(steps[0])
    quotient = g / divisor
    g.copy_(g if wrong == "leaves gradients" else quotient)
    m.mul_(rates["beta1"]).add_((1.0 - rates["beta1"]) * quotient)
    v.mul_(rates["beta2"]).add_((1.0 - rates["beta2"]) * quotient**2)
    if wrong != "no decay":
        w.mul_(1.0 - rates["lr"] * rates["weight_decay"])
    root = (v / (1.0 - rates["beta2"] ** t)).sqrt() + (0.0 if wrong == "no eps" else rates["eps"])
    step = rates["lr"] / (1.0 - rates["beta1"] ** t) * m / root
    w.sub_(torch.cat((step[:64], 0.0 * step[64:])) if wrong == "no tail" else step)


@pytest.mark.parametrize("wrong", ["", "no decay", "no eps", "no tail", "leaves gradients"])
def test_each_part_of_the_algorithm_is_asked_of_a_kernel(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = functools.partial(_adamw, wrong=wrong)
    for dtype in (torch.float32, torch.float64):
        assert compat._steps_as_adamw(kernel, dtype) == (wrong in ("", "leaves gradients"))
    assert compat._steps_as_adamw(kernel, torch.float32, divisor=3.3) == (wrong == "")


def test_denormals_become_zero_where_the_build_says_so(denormals_kept: None) -> None:
    tiny = torch.tensor([1e-30, 1.0])
    assert float((tiny * 1e-10)[0]) > 0
    if compat.flush_denormals():
        assert float((tiny * 1e-10)[0]) == 0.0


def test_the_build_is_described_by_plain_values() -> None:
    facts = compat.build_facts()
    assert facts["torch"] == torch.__version__ and facts["torch_threads"] == torch.get_num_threads()
    assert isinstance(facts["fused_adamw"], bool)
    for name in ("blas", "instruction_set"):
        assert isinstance(facts[name], str) and facts[name]


def test_the_instruction_set_is_read_from_an_older_build_s_report() -> None:
    report = "PyTorch built with:\n  - GCC 7.3\n  - CPU capability usage: AVX2\n  - Build settings: ..."
    assert compat._instruction_set(report) == "AVX2"
    assert compat._instruction_set("nothing of the kind") == "unknown"


SIXTEEN_BITS = [torch.bfloat16, torch.float16]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dict[str, Any]]:
    """The trials, which a test may add to; nothing is agreed on yet."""
    before, found = dict(compat._TRIALS), (compat._is_precise, compat._is_fast)
    monkeypatch.setattr(compat, "_agreed", {})
    for cached in found:
        cached.cache_clear()
    yield compat._TRIALS
    compat._TRIALS.clear()
    compat._TRIALS.update(before)
    for cached in found:
        cached.cache_clear()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


OPERATIONS: Dict[str, Any] = {
    "linear": (compat.linear, F.linear, [random(5, 7, 16), random(12, 16), random(12)]),
    "matmul": (compat.matmul, torch.matmul, [random(5, 7, 16), random(16, 12)]),
    "layer_norm": (
        lambda *x: compat.layer_norm(*x, eps=1e-5),
        lambda x, weight, bias: F.layer_norm(x, (16,), weight, bias),
        [random(2000, 16), random(16), random(16)],
    ),
    "gelu": (compat.gelu, F.gelu, [random(9, 16)]),
    "gelu_tanh": (compat.gelu_tanh, compat._gelu_tanh, [random(9, 16)]),
}


@pytest.mark.parametrize("forced", [False, True], ids=["as found", "in float32"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_operations_in_16_bits_are_those_in_float32_rounded(
    name: str, dtype: torch.dtype, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        monkeypatch.setattr(compat, "has_kernel", lambda operation, kind: kind not in SIXTEEN_BITS)
    ours, judge, inputs = OPERATIONS[name]
    results: List[List[torch.Tensor]] = []
    for function, kind in ((ours, dtype), (judge, torch.float32)):
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in inputs]
        y = function(*leaves)
        assert y.dtype == kind
        y.backward((1.0 + 0.5 * random(*y.shape)).to(dtype).to(kind))
        results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == len(results[1]) == 1 + len(inputs)
    for found, expected in zip(*results):
        assert found.dtype == dtype
        scale = float(expected.abs().max())
        assert float((found.float() - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32, torch.float64], ids=str)
def test_sums_over_tokens_are_neither_rounded_nor_overflow_in_16_bits(dtype: torch.dtype) -> None:
    found = compat.sum_of_rows(torch.full((300, 2), 256.0).to(dtype))
    assert found.dtype == (torch.float32 if dtype in SIXTEEN_BITS else dtype)
    assert found.tolist() == [76800.0] * 2  # more than float16 can hold


def test_wide_types_are_computed_by_pytorch_s_own_operations_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "gelu_by_erf", lambda: False)
    for ours, judge, inputs in OPERATIONS.values():
        for dtype in (torch.float32, torch.float64):
            wide = [x.to(dtype) for x in inputs]
            assert torch.equal(ours(*wide), judge(*wide))


@pytest.mark.parametrize("slow", [True, False], ids=["by the error function", "PyTorch's"])
def test_gelu_is_the_same_by_whatever_kernel(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "gelu_by_erf", lambda: slow)
    x = torch.linspace(-12, 12, 400, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(compat.gelu, (x,))
    assert float((compat.gelu(x) - F.gelu(x)).detach().abs().max()) <= 1e-14
    for dtype in (torch.float32, *SIXTEEN_BITS):
        points = torch.linspace(-5, 5, 401).to(dtype)
        results = []
        for function, kind in ((compat.gelu, dtype), (F.gelu, torch.float64)):
            leaf = points.to(kind, copy=True).requires_grad_()
            y = function(leaf)
            y.sum().backward()
            assert leaf.grad is not None
            results.append((y.detach().double(), leaf.grad.double()))
        for found, expected in zip(*results):
            # what is computed in float32 may lose that type's last digits of 1 + erf(x), and no more
            near = 2 * torch.finfo(dtype).eps * expected.abs() + 8 * torch.finfo(torch.float32).eps
            assert bool(((found - expected).abs() <= near).all()), dtype


@pytest.mark.parametrize("own", [True, False], ids=["PyTorch's kernels", "by hand"])
def test_softmax_and_its_gradient_may_write_over_what_they_are_given(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:
        monkeypatch.setattr(compat, "_softmax_works_in_place", lambda dtype: False)
        monkeypatch.setattr(compat, "_softmax_gradient", lambda dtype: None)
    x, grad = random(3, 5, 70), random(5, 3, 70).view(3, 5, 70)
    leaf = x.clone().requires_grad_()
    judge = torch.softmax(leaf, dim=-1)
    judge.backward(grad)
    result = compat.softmax_(x)
    assert torch.equal(result, judge)
    assert torch.allclose(compat.softmax_gradient_(grad.clone(), result), leaf.grad, rtol=0, atol=1e-7)


def _refuses(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not implemented for 'BFloat16'")


@pytest.mark.parametrize("kernel", [None, _refuses, lambda *_, **__: torch.zeros(())])
def test_softmax_kernels_that_are_not_what_they_should_be_are_not_taken(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_softmax", "_softmax_backward_data"):
        if kernel is None:
            monkeypatch.delattr(torch, name, raising=False)
        else:
            monkeypatch.setattr(torch, name, kernel, raising=False)
    for dtype in (torch.float32, torch.bfloat16):
        assert not compat._softmax_works_in_place.__wrapped__(dtype)
        assert compat._softmax_gradient.__wrapped__(dtype) is None


def test_kernels_are_tried_also_where_gradients_are_off(trials: Dict[str, Any]) -> None:
    with torch.no_grad():
        inside = compat.without_kernel(torch.bfloat16)
    compat._is_precise.cache_clear()
    assert inside == compat.without_kernel(torch.bfloat16)


def test_a_kernel_that_is_missing_or_adds_up_in_16_bits_is_found_out(trials: Dict[str, Any]) -> None:
    def missing(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.bfloat16:
            raise RuntimeError("\"sum_cpu\" not implemented for 'BFloat16'")
        return x.sum(0)

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        total = x[0]
        for row in x[1:]:
            total = total + row
        return total

    ones: Callable[[], Any] = lambda: (torch.ones(400, 2),)  # noqa: E731
    trials.update({"missing": (missing, ones), "one by one": (one_by_one, ones), "good": (lambda x: x * 2.0, ones)})
    assert not compat.has_kernel("missing", torch.bfloat16) and compat.has_kernel("missing", torch.float16)
    assert not compat.has_kernel("one by one", torch.bfloat16)  # 256 + 1 is 256 there
    assert compat.has_kernel("good", torch.bfloat16)
    assert compat.has_kernel("one by one", torch.float32)
    assert {"missing", "one by one"} <= set(compat.in_float32(torch.bfloat16))
    assert compat.in_float32(torch.float32) == []


def test_a_product_that_is_much_slower_than_in_float32_is_not_used(
    trials: Dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: 2.0, torch.float16: 4.0}
    monkeypatch.setattr(compat, "_seconds", lambda operation, dtype: seconds[dtype])
    trials["linear"] = (lambda x: x * 1.0, lambda: (torch.ones(4),))
    assert compat.has_kernel("linear", torch.bfloat16) and not compat.has_kernel("linear", torch.float16)


def test_what_was_agreed_on_counts_and_no_clock_is_asked_again(
    trials: Dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "_is_precise", lambda operation, dtype: operation != "softmax")
    compat.compute_in_float32(["gelu", "softmax"], torch.bfloat16)
    seconds = {torch.float32: 1.0, torch.bfloat16: 100.0, torch.float16: 100.0}
    monkeypatch.setattr(compat, "_seconds", lambda operation, dtype: seconds[dtype])
    assert compat.in_float32(torch.bfloat16) == ["gelu", "softmax"]
    assert not compat.has_kernel("gelu", torch.bfloat16) and compat.has_kernel("linear", torch.bfloat16)
    assert compat.in_float32(torch.float16) == ["linear", "matmul", "bmm", "baddbmm", "softmax"]
    assert compat.without_kernel(torch.bfloat16) == ["softmax"] and compat.without_kernel(torch.float64) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_backward_pass_from_a_given_gradient_is_pytorch_s(dtype: torch.dtype) -> None:
    if not compat.can_train(dtype):
        pytest.skip("this PyTorch cannot train in that type")
    gradient, found = random(3, 4).to(dtype), []
    for backward in (compat.backward, torch.Tensor.backward):
        x, y = (random(3, 4).to(dtype).requires_grad_() for _ in range(2))
        backward(x * y + x, gradient)
        found.append((x.grad, y.grad))
    for mine, judge in zip(*found):
        assert mine is not None and judge is not None and torch.equal(mine, judge)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):  # as in a function of autograd
        compat.backward(random(3), random(3))
    x = random(3).requires_grad_()
    compat.backward((2.0 * x).sum())
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_type_that_cannot_be_added_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.can_train(torch.float32) and compat.can_train(torch.float64)

    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("\"mul_cpu\" not implemented for 'Half'")

    monkeypatch.setattr(torch.Tensor, "masked_fill_", refuse)
    assert not compat.can_train(torch.float16)


def test_the_profiler_sees_operators_inside_named_parts() -> None:
    assert compat.has_profiler()  # in every build that is tested

    def run() -> None:
        with compat.named("outer"):
            torch.ones(300, 300).mm(torch.ones(300, 300))
        torch.ones(3).exp_()

    calls = {call.name: call for call in compat.profiled(run)}
    outer, product, after = calls["outer"], calls["aten::mm"], calls["aten::exp_"]
    assert outer.start < product.start < product.end < outer.end < after.start
    assert outer.thread == product.thread and 1e-6 < product.end - product.start < 10.0


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """float32 products are oneDNN's where this build can; what they were asked for."""
    if not compat.has_onednn():
        pytest.skip("this PyTorch has no operator of oneDNN's for float32 layers")
    asked: List[Any] = []
    by_onednn = compat._by_onednn

    def noted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        asked.append(tuple(x.shape))
        return by_onednn(x, *others)

    monkeypatch.setattr(compat, "_by_onednn", noted)
    monkeypatch.setattr(compat, "_agreed_onednn", True)
    return asked


@pytest.mark.parametrize("shape", [(compat._ROWS_FOR_ONEDNN,), (3, compat._ROWS_FOR_ONEDNN), (257,)], ids=str)
def test_products_by_onednn_are_those_of_pytorch_rounded(shape: Any, onednn: List[Any]) -> None:
    x, weight, bias = random(*shape, 40), random(24, 40), random(24)
    inner = weight.t().contiguous()
    with torch.no_grad():
        found = (
            compat.linear(x, weight, bias),
            compat.linear(x, weight),
            compat.linear(x, inner.t(), bias),
            compat.matmul(x, inner),
            compat.matmul(x, weight.t()),
        )
    assert len(onednn) == len(found)
    plain = x.double().matmul(inner.double())
    for y, judge in zip(found, (plain + bias, plain, plain + bias, plain, plain)):
        assert y.dtype == torch.float32 and y.shape == judge.shape and y.is_contiguous()
        assert float((y - judge).abs().max()) <= 16 * torch.finfo(torch.float32).eps * float(judge.abs().max())


def test_products_that_onednn_does_not_suit_are_not_handed_to_it(
    onednn: List[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = compat._ROWS_FOR_ONEDNN
    x, weight = random(rows, 16), random(8, 16)
    leaf = weight.clone().requires_grad_()
    compat.linear(x, leaf).sum().backward()  # its operator is unknown to autograd
    assert leaf.grad is not None and torch.allclose(leaf.grad, x.sum(0).expand(8, 16), atol=1e-4)
    with torch.no_grad():
        for dtype in (torch.float64, torch.bfloat16):
            compat.linear(x.to(dtype), weight.to(dtype))
        compat.linear(x[1:], weight)
        compat.linear(x[:0], weight)
        compat.linear(x[:, :0], weight[:, :0])
        compat.matmul(random(16, rows).t(), weight.t())
        monkeypatch.setattr(compat, "_agreed_onednn", False)
        compat.linear(x, weight)
    assert not onednn


@pytest.mark.parametrize(
    ("processor", "flags", "mkl", "better"),
    [
        ("AMD EPYC 9654", ["avx512f", "avx2"], True, True),
        ("AMD EPYC 7742", ["avx2"], True, False),
        ("Intel(R) Xeon(R) Platinum 8480+", ["avx512f", "avx2"], True, False),
        ("AMD EPYC 9654", ["avx512f", "avx2"], False, False),
        ("Fujitsu A64FX", ["sve", "asimd"], False, False),
    ],
)
def test_onednn_is_taken_where_mkl_would_use_other_kernels_and_never_where_it_is_not(
    processor: str, flags: List[str], mkl: bool, better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "processor_name", lambda: processor)
    monkeypatch.setattr(compat, "vector_flags", lambda: flags)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(compat, "has_onednn", lambda: True)
    assert compat._onednn_is_better.__wrapped__() is better
    monkeypatch.setattr(compat, "_agreed_onednn", None)
    compat.compute_products_by_onednn(True)  # as another start of the run did, wherever it was
    assert compat.products_by_onednn()
    monkeypatch.setattr(compat, "has_onednn", lambda: False)
    assert not compat._onednn_is_better.__wrapped__()


@pytest.mark.parametrize("operator", [_refuses, lambda x, weight, *_: torch.zeros(len(x), len(weight))])
def test_an_operator_of_onednn_s_that_is_not_what_it_should_be_is_not_taken(
    operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "_by_onednn", operator)
    assert not compat.has_onednn.__wrapped__()
