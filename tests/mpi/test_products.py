"""Tests that real ranks agree on how layers' products are computed, whatever each of them has measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, List, Optional

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import Communicator
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS, KernelChoices
from fugaku_gpt.kernels.product_verdicts import ProductVerdict
from fugaku_gpt.ops import product_choice, product_timing
from fugaku_gpt.training import products
from fugaku_gpt.training.startup import agree_on_kernels
from tests.support.product_verdicts import product_verdict, use_verdict_file
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.skipif(not ops.has_native_kernels(), reason="no kernels are compiled here")

Begin = Callable[..., Any]


@pytest.fixture
def begin(world: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Starts a run; returns on every rank whether it uses products of our own, and why.

    Arguments: the speedup in this rank's file (None: there is no file), the processor of this rank, whether it is alone
    on its node.
    """

    before = dict(vars(RANK_CONSENSUS))

    def start(speedup: Optional[float], processor: str = "", has_own_node: bool = True) -> Any:
        vars(RANK_CONSENSUS).update(vars(KernelChoices()))
        stamp = replace(product_choice.current_stamp.__wrapped__(), processor=processor)
        with monkeypatch.context() as patch:
            for module in (products, product_choice, product_timing):
                patch.setattr(module, "current_stamp", lambda: stamp)
            verdicts = () if speedup is None else (_verdict(speedup),)
            if has_own_node:
                patch.setattr(Communicator, "on_this_node", lambda group, name: Communicator.alone(name))
            use_verdict_file(patch, tmp_path / f"rank{world.rank}" / "products.json", *verdicts)
            kernels = agree_on_kernels(tiny_config(), world)
        world.barrier()
        return kernels["compiled_products"], RANK_CONSENSUS.products_reason

    yield start
    vars(RANK_CONSENSUS).update(before)
    product_choice.forget_recorded()


def _verdict(speedup: float) -> ProductVerdict:
    return product_verdict("float32", torch.get_num_threads(), compiled=speedup)


def test_products_are_ours_on_all_ranks_or_on_none(world: Communicator, begin: Begin) -> None:
    assert begin(1.5)[0]
    last = world.size - 1
    uses_compiled, reason = begin(0.5 if world.rank == last else 1.5, f"processor {world.rank}")
    assert not uses_compiled and "ours 0.50 times as fast" in reason
    if last:
        assert f" on rank {last} (" in reason
    # of one processor, the first rank's is believed by all
    assert begin(1.5 if world.rank == 0 else 0.5)[0]


def test_one_rank_of_a_node_reads_the_library_and_the_verdict(
    world: Communicator, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: List[int] = []
    recorded = products.recorded_verdict

    def counted(dtype: str, threads: int) -> Any:
        read.append(world.rank)
        return recorded(dtype, threads)

    monkeypatch.setattr(products, "recorded_verdict", counted)
    uses_compiled, reason = begin(1.5 if world.rank == 0 else None, has_own_node=False)
    assert uses_compiled and "ours 1.50 times as fast" in reason
    assert read == ([0] if world.on_this_node("node").rank == 0 else [])


def test_one_rank_of_each_processor_measures(
    world: Communicator, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: List[int] = []

    def time_products(dtype: str, threads: int, *limits: float) -> ProductVerdict:
        measured.append(world.rank)
        return _verdict(1.5)

    monkeypatch.setattr(product_timing, "time_products", time_products)
    uses_compiled, reason = begin(None, f"processor {world.rank % 2}")
    assert uses_compiled and "at this start, since products have not been measured" in reason
    assert measured == ([world.rank] if world.rank < 2 else [])
    assert begin(1.5 if world.rank == world.size - 1 else None)[0] and measured == (
        [world.rank] if world.rank < 2 else []
    )


def test_ranks_that_have_run_alone_before_agree_with_those_that_have_not(
    world: Communicator, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (0, world.size - 1):
        vars(RANK_CONSENSUS).update(vars(KernelChoices()))
        if world.rank == first:
            ops.choose_native_matmul(False, torch.float32)
            ops.choose_onednn_matmul(False)
        monkeypatch.setattr(products, "recorded_verdict", lambda dtype, threads: (_verdict(1.5), ""))
        assert not agree_on_kernels(tiny_config(), world)["compiled_products"]
