"""Tests of how ranks agree on the way in which layers' products are computed, and of what they report."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple
from unittest.mock import Mock

import pytest
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.compat import probes
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.errors import UsageError
from fugaku_gpt.kernels.product_verdicts import ProductVerdict, read_verdicts
from fugaku_gpt.ops import native, product_timing
from fugaku_gpt.ops.product_choice import current_stamp
from fugaku_gpt.training import products, startup
from tests.support.product_verdicts import product_verdict, use_verdict_file
from tests.support.tiny import tiny_config
from tests.training.two_ranks import TwoRanks

SAVED: Dict[str, Any] = {"dtype": "float32", "in_float32": [], "gelu_by_erf": False, "onednn": False, "compiled": True}
ANOTHER = {"stamp": "of another processor", "missing": ""}

Begin = Callable[..., Tuple[Dict[str, Any], str]]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Starts a run on the first of two ranks; returns the kernels in use and the report's lines on products.

    Arguments: the speedups in the verdict that was recorded (None: there is no file), what the other rank says
    differently, the kernels of an earlier start, settings.
    """
    monkeypatch.setattr(ops, "has_onednn", lambda: True)
    monkeypatch.setattr(ops, "supports_native_matmul", lambda dtype: ops.has_native_kernels())
    monkeypatch.setattr(product_timing, "time_products", lambda *arguments: pytest.fail("asked of a clock"))

    def start(
        speedups: Any, other: Dict[str, Any], saved: Any = None, *settings: str, file: Optional[Path] = None
    ) -> Tuple[Dict[str, Any], str]:
        for name, value in vars(type(RANK_CONSENSUS)()).items():
            monkeypatch.setattr(RANK_CONSENSUS, name, value)
        config = tiny_config(*settings)
        verdicts = (
            () if speedups is None else (product_verdict(config.training.dtype, torch.get_num_threads(), **speedups),)
        )
        use_verdict_file(monkeypatch, file or tmp_path / "products.json", *verdicts)
        monkeypatch.setattr(TwoRanks, "other", other, raising=False)
        kernels = startup.agree_on_kernels(config, TwoRanks.alone(), saved)
        monkeypatch.setattr(TwoRanks, "other", {})  # the other has agreed, too
        assert startup.agree_on_kernels(config, TwoRanks.alone()) == kernels  # as the trainer does
        facts = startup.collect_environment(config, ProcessGrid.alone(), startup.prepare_process(1))
        lines = startup.describe_environment(facts)
        return kernels, "\n".join(line for line in lines if "products of layers" in line)

    return start


needs_kernels = pytest.mark.skipif(not ops.has_native_kernels(), reason="no kernels are compiled here")


def test_products_are_onednn_s_on_all_ranks_or_on_none_and_a_resume_does_the_same(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "node.compiled_products=off"
    kernels, report = begin({"onednn": 1.2}, {}, None, settings)
    assert kernels["onednn"] and ops.uses_onednn_matmul()
    assert report.startswith("products of layers by oneDNN: ") and "oneDNN's 1.20 times as fast as PyTorch's" in report
    assert not begin({"onednn": 1.01}, {}, None, settings)[0]["onednn"] and not ops.uses_onednn_matmul()
    assert not begin({"onednn": 1.2}, {**ANOTHER, "is_onednn_faster": False}, None, settings)[0]["onednn"]
    assert not begin({"onednn": 1.2}, {"has_onednn": False}, None, settings)[0]["onednn"]
    older = {name: value for name, value in SAVED.items() if name != "onednn"}
    assert not begin({"onednn": 1.2}, {}, older, settings)[0]["onednn"]  # from a checkpoint older than this choice
    assert begin(None, {}, {**SAVED, "onednn": True}, settings)[0]["onednn"]
    assert not begin({"onednn": 1.2}, {}, SAVED, settings)[0]["onednn"]
    assert not begin(None, {"has_onednn": False}, {**SAVED, "onednn": True}, settings)[0]["onednn"]
    monkeypatch.setattr(ops, "has_onednn", lambda: False)
    assert not begin(None, {}, {**SAVED, "onednn": True}, settings)[0]["onednn"]


def test_products_of_16_bits_are_onednn_s_if_they_are_slow_on_any_rank(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_is_precise", lambda operation, dtype: True)
    settings = ("training.dtype=bfloat16", "node.compiled_products=off")

    def uses_onednn(slow: List[str], other: Dict[str, Any], saved: Any = None, speedup: float = 1.2) -> Any:
        monkeypatch.setattr(probes, "_is_fast", lambda operation, dtype: operation not in slow)
        kernels, _ = begin({"onednn": speedup}, other, saved, *settings)
        # without products in float32 nothing is agreed on: a run in float32 in this process may choose otherwise
        assert RANK_CONSENSUS.products_by_onednn is (
            kernels["onednn"] if {"linear", "matmul"} & set(kernels["in_float32"]) else None
        )
        return kernels["onednn"]

    assert not uses_onednn([], {}) and not uses_onednn(["gelu"], {})
    assert uses_onednn(["linear"], {}) and uses_onednn(["gelu", "matmul"], {})
    assert uses_onednn([], {"in_float32": ["matmul"]})
    assert not uses_onednn(["linear"], {**ANOTHER, "is_onednn_faster": False})
    assert not uses_onednn(["linear"], {}, speedup=0.9)
    saved = {"dtype": "bfloat16", "gelu_by_erf": False}
    assert uses_onednn([], {}, {**saved, "in_float32": ["linear"], "onednn": True}, speedup=0.9)
    assert not uses_onednn([], {}, {**saved, "in_float32": ["linear"], "onednn": False})
    # there were none at the first start, and there must be some in this build
    monkeypatch.setattr(probes, "_is_precise", lambda operation, dtype: operation != "linear")
    assert uses_onednn([], {}, {**saved, "in_float32": [], "onednn": False})


@needs_kernels
def test_products_are_compiled_on_all_ranks_or_on_none(begin: Begin) -> None:
    kernels, report = begin({"compiled": 1.2}, {})
    assert kernels["compiled_products"] and ops.uses_native_matmul(torch.float32)
    assert report.startswith("products of layers that are large enough too: measured: ours 1.20 times as fast as")
    kernels, report = begin({"compiled": 1.02}, {})
    assert not kernels["compiled_products"] and not ops.uses_native_matmul(torch.float32)
    assert report.startswith("products of layers by PyTorch: measured: ours 1.02 times as fast as PyTorch's (float32, ")
    assert report.endswith("; ours are used from 1.03 on")
    slow = {**ANOTHER, "is_compiled_faster": False, "text": "measured: ours 0.50 times as fast", "host": "n2"}
    kernels, report = begin({"compiled": 1.2}, slow)
    assert not kernels["compiled_products"]
    assert report.endswith("by PyTorch: measured: ours 0.50 times as fast on rank 1 (n2)")
    kernels, report = begin({"compiled": 1.2}, {"has_compiled": False, "host": "n2"})
    assert not kernels["compiled_products"]
    assert report == "products of layers by PyTorch: our kernels have no products in float32 on rank 1 (n2)"
    assert not begin({"compiled": 1.2}, {"compiled": False})[0]["compiled_products"]  # the other has no kernels
    kernels, report = begin({"compiled": 1.2}, {}, None, "node.compiled_kernels=false")
    assert not kernels["compiled_products"] and "ours" not in report.split("measured")[0]


@needs_kernels
def test_ranks_of_one_stamp_believe_the_first_of_them(begin: Begin) -> None:
    """Their folders may be each node's own, and have been measured at other times."""
    assert begin({"compiled": 1.2}, {"is_compiled_faster": False})[0]["compiled_products"]
    assert not begin({"compiled": 0.9}, {"is_compiled_faster": True})[0]["compiled_products"]
    assert begin({"compiled": 1.2}, {"missing": "no file", "is_compiled_faster": False})[0]["compiled_products"]


@needs_kernels
def test_a_setting_decides_whatever_was_measured(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, report = begin({"compiled": 0.5}, {}, None, "node.compiled_products=on")
    assert kernels["compiled_products"] and "too: node.compiled_products is on; measured: ours 0.50" in report
    kernels, report = begin({"compiled": 1.5}, {}, None, "node.compiled_products=off")
    assert not kernels["compiled_products"] and "by PyTorch: node.compiled_products is off" in report
    kernels, report = begin({"compiled": 1.5}, {"has_compiled": False, "host": "n2"}, None, "node.compiled_products=on")
    assert not kernels["compiled_products"]
    expected = "node.compiled_products is on, but our kernels have no products in float32 on rank 1 (n2)"
    assert report == f"products of layers by PyTorch: {expected}"
    monkeypatch.setattr(ops, "supports_native_matmul", lambda dtype: False)
    kernels, report = begin({"onednn": 1.0}, {}, None, "node.compiled_products=on")
    assert not kernels["compiled_products"] and "is on, but our kernels have no products in float32" in report


def test_products_of_our_own_cannot_be_asked_for_without_our_kernels() -> None:
    with pytest.raises(UsageError, match="node.compiled_products"):
        tiny_config("node.compiled_products=on", "node.compiled_kernels=false")


@needs_kernels
def test_a_resumed_run_keeps_its_way_or_reports_that_it_changed(begin: Begin) -> None:
    kernels, report = begin(None, {}, {**SAVED, "compiled_products": True})
    assert kernels["compiled_products"] and report.endswith("too: as in the start that this run resumes from")
    kernels, report = begin({"compiled": 1.5}, {}, {**SAVED, "compiled_products": False})
    assert not kernels["compiled_products"] and report.endswith("as in the start that this run resumes from")
    assert not begin({"compiled": 1.5}, {}, SAVED)[0]["compiled_products"]  # older than products of our own
    changed = "in the start that this run resumes from: results are rounded differently"
    kernels, report = begin(None, {}, {**SAVED, "compiled_products": True}, "node.compiled_products=off")
    assert not kernels["compiled_products"] and report.endswith(f"is off; they were ours {changed}")
    kernels, report = begin(None, {}, {**SAVED, "compiled_products": False}, "node.compiled_products=on")
    assert kernels["compiled_products"] and report.endswith(f"is on; they were PyTorch's or oneDNN's {changed}")
    kernels, report = begin(None, {"has_compiled": False}, {**SAVED, "compiled_products": True})
    assert not kernels["compiled_products"] and report.endswith(f"they were ours {changed}")
    # in another type it is another run
    assert begin({"compiled": 1.5}, {}, {**SAVED, "dtype": "float64", "compiled_products": False})[0][
        "compiled_products"
    ]


@needs_kernels
def test_unmeasured_products_are_measured_by_the_first_rank_and_written(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: List[Tuple[str, int]] = []

    def measured(dtype: str, threads: int, *limits: float) -> ProductVerdict:
        asked.append((dtype, threads))
        return product_verdict(dtype, threads, compiled=1.3)

    monkeypatch.setattr(product_timing, "time_products", measured)
    threads = torch.get_num_threads()
    kernels, report = begin(None, {})
    assert kernels["compiled_products"] and asked == [("float32", threads)]  # not again by the trainer
    remark = "at this start, since products have not been measured for this processor"
    assert "measured: ours 1.30 times as fast as PyTorch's (float32, " in report and report.endswith(f"; {remark}")
    verdicts, _ = read_verdicts(tmp_path / "products.json", current_stamp())
    assert verdicts["float32", threads].uses_compiled
    # the other has another processor, and its verdict
    slow = {**ANOTHER, "is_compiled_faster": False}
    assert not begin(None, slow)[0]["compiled_products"] and len(asked) == 2


@needs_kernels
def test_a_measurement_without_time_or_that_fails_leaves_products_to_pytorch_and_no_file(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        product_timing, "time_products", lambda dtype, threads, *limits: product_verdict(dtype, threads, 0)
    )
    kernels, report = begin(None, {})
    assert not kernels["compiled_products"] and "too slow, or too busy, to be measured in the time for it" in report

    for error, reason in (
        (RuntimeError("[enforce fail] not enough memory\nand a stack"), "[enforce fail] not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),  # mmap's
        (MemoryError(), "MemoryError"),
    ):
        monkeypatch.setattr(product_timing, "time_products", Mock(side_effect=error))
        kernels, report = begin(None, {})
        assert not kernels["compiled_products"] and not kernels["onednn"]
        assert f"they could not be measured: {reason}" in report and "stack" not in report
    assert not (tmp_path / "products.json").exists()


@needs_kernels
def test_a_folder_that_cannot_be_written_is_reported_and_no_error(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "products.json"  # not even root can write below what is no folder
    monkeypatch.setattr(
        product_timing, "time_products", lambda dtype, threads, *limits: product_verdict(dtype, threads, compiled=1.3)
    )
    kernels, report = begin(None, {}, file=file)
    assert kernels["compiled_products"] and f"{file}: cannot be written: " in report


def test_without_products_of_this_type_nothing_is_measured_or_reported(begin: Begin) -> None:
    kernels, report = begin(None, {}, None, "training.dtype=float64")
    assert not kernels["compiled_products"] and not kernels["onednn"] and not report
    assert native.RANK_CONSENSUS.compiled_products == {}


def test_a_library_that_cannot_be_read_leaves_products_to_pytorch(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "current_stamp", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    kernels, report = begin({"onednn": 1.5}, {}, None, "node.compiled_kernels=false")
    assert not kernels["onednn"] and not kernels["compiled_products"]
    assert "the verdict on them cannot be looked up: [Errno 5] Input/output error" in report
