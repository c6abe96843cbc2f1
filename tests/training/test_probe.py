"""Tests that the probe measures enough of each kind for every plan that may be asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import load_run_config
from fugaku_gpt.machine.probed import ATTENTION, ATTENTION_BACKWARD, COMPILED_ATTENTION, PASSES, PRODUCTS
from fugaku_gpt.planner.trainer.work import count_chunk_work
from fugaku_gpt.training.probe import Probe, small_runs, spread_of
from fugaku_gpt.training.probe_calls import (
    NumberPool,
    ProductShape,
    layer_calls,
    pass_calls,
    product_call,
    product_shapes,
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtypes", [["bfloat16"], ["float32", "bfloat16"]])
def test_small_runs_are_of_the_types_and_ranks_that_are_measured(ranks: int, dtypes: "list[str]") -> None:
    runs = small_runs(ranks, 1, dtypes)
    configs = [load_run_config(overrides=settings) for _, settings in runs]
    assert {config.training.dtype for config in configs} == set(dtypes)
    assert {config.layout.ranks for config in configs} == {ranks}
    assert len({name for name, _ in runs}) == len(runs)


def test_a_product_of_each_kind_is_measured_however_short_the_time() -> None:
    for narrow, compiled in itertools.product((False, True), repeat=2):
        kinds = (*PRODUCTS, *(COMPILED_ATTENTION if compiled else ()))
        first = itertools.islice(product_shapes(narrow, 1, compiled), len(kinds))
        assert {shape.kind for shape in first} == set(kinds)


@pytest.mark.parametrize(("threads", "heads"), [(1, 16), (2, 16), (3, 18), (12, 24), (48, 48)])
def test_compiled_attention_is_measured_with_work_for_all_threads(threads: int, heads: int) -> None:
    attention_shapes = [shape for shape in product_shapes(False, threads, True) if shape.kind in COMPILED_ATTENTION]
    assert {shape.batch for shape in attention_shapes} == {heads}
    assert all(shape.rows == shape.columns for shape in attention_shapes) and len(set(attention_shapes)) == len(
        attention_shapes
    )
    other_shapes = [shape for shape in product_shapes(False, threads, True) if shape.kind not in COMPILED_ATTENTION]
    assert other_shapes == list(product_shapes(False, threads, False))


@pytest.mark.skipif(not ops.has_native_kernels(), reason="no kernels are compiled here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_attention_is_timed_on_real_shapes(dtype: torch.dtype) -> None:
    pool = NumberPool(dtype)
    forward, backward = (
        product_call(ProductShape(kind, 16, 24, 8, 24), pool, pool) for kind in (ATTENTION, ATTENTION_BACKWARD)
    )
    assert forward()[0].shape == (1, 1, 24, 16, 8) and backward().shape == (1, 1, 24, 48, 8)


@pytest.mark.parametrize("threads", [1, 3, 4])
def test_an_empty_layer_has_heads_for_all_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    attended = []
    monkeypatch.setattr(ops, "has_native_attention", lambda packed, heads: attended.append(packed.shape[1] * heads))
    tokens, forward, _ = layer_calls("float32")
    forward()
    assert attended == [2 * -(-threads // 2)] and tokens == 8 * -(-threads // 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_probe_times_compiled_attention_if_kernels_are_compiled(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled and not ops.has_native_kernels():
        pytest.skip("no kernels are compiled here")
    monkeypatch.setattr(RANK_CONSENSUS, "compiled", None if compiled else False)
    probe = Probe(Communicator.alone(), 1, 0.5, lambda text: None)
    probe._clock.begin(0.2)
    products = probe._products(["float32"]).products
    assert {product.kind for product in products} == {*PRODUCTS, *(COMPILED_ATTENTION if compiled else ())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_pass_that_a_llama_counts_is_timed(dtype: str) -> None:
    llama = ("model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rope", "model.kv_heads=2", "model.heads=4")
    config = load_run_config(overrides=[*llama, "model.hidden=64", "model.qk_norm=true", f"training.dtype={dtype}"])
    counted = {
        name for work in count_chunk_work(config) for tally in (work.forward, work.backward) for name, _ in tally.passes
    }
    assert {"rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotary", "rotary_backward"} <= counted
    assert not {"layer_norm", "gelu_erf"} & counted
    kind, timed = getattr(torch, dtype), set()
    for name, elements, call in itertools.takewhile(
        lambda timing: timing[1] == 2**16, pass_calls(kind, NumberPool(kind))
    ):
        made = call()
        if name in ("rms_norm", "rotary"):
            assert made.numel() == elements and made.dtype == kind
        elif name == "swiglu":
            assert made.numel() == elements // 2
        timed.add(name)
    assert counted <= timed
    assert timed | {"layer", "layer_backward"} == set(PASSES)


def test_a_few_disturbed_timings_do_not_widen_the_spread() -> None:
    quiet = [1.0 + 0.01 * (step % 5) for step in range(20)]
    assert spread_of([*quiet, 50.0]) < 0.03 < spread_of([1.0, 2.0, 3.0, 4.0])
