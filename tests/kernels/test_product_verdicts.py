"""Tests of the verdicts on products: what follows from ratios, and whose file is believed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.kernels import library_file, product_verdicts
from fugaku_gpt.kernels.product_verdicts import (
    COMPILED,
    MIN_TURNS,
    ONEDNN,
    ProductTimes,
    ProductVerdict,
    Stamp,
    add_verdicts,
    parse_verdict,
    read_settings,
    read_verdicts,
    verdict_file,
)

STAMP = Stamp("AMD EPYC 9654", "kernels-0.so 12", "2.13.0+cpu 34", "")
RATIOS = st.floats(0.05, 20.0)


def verdict(dtype: str = "float32", threads: int = 2, turns: int = MIN_TURNS, **speedups: float) -> ProductVerdict:
    times = [ProductTimes("forward", 512, 768, 3072, 0.02, speedups), ProductTimes("x", 9, 8, 7, 0.01, speedups)]
    return ProductVerdict(dtype, threads, turns, tuple(times) if turns else ())


def write(file: Path, *verdicts: ProductVerdict, stamp: Stamp = STAMP) -> Path:
    assert add_verdicts(file, stamp, verdicts, False)[1] == ""
    return file


def test_a_way_is_used_where_it_clearly_wins() -> None:
    for ratio in (0.5, 1.0, 1.02):
        assert not verdict(compiled=ratio).uses_compiled and not verdict(onednn=ratio).uses_onednn
    assert verdict(compiled=1.04).uses_compiled and verdict(onednn=1.04).uses_onednn
    both = verdict(compiled=1.25, onednn=1.24)
    assert both.uses_onednn and not both.uses_compiled and both.compiled_speedup == pytest.approx(1.25 / 1.24)
    assert verdict(compiled=1.3, onednn=1.2).uses_compiled
    assert not verdict().uses_compiled and verdict().compiled_speedup is None


def test_too_few_turns_are_no_measurement() -> None:
    few = verdict(turns=MIN_TURNS - 1, compiled=2.0, onednn=2.0)
    assert not few.uses_compiled and not few.uses_onednn and few.speedup(COMPILED) is None
    assert few.describe() == "too slow, or too busy, to be measured in the time for it (float32, 2 threads)"


def test_the_speedup_is_that_of_the_time_of_all_products() -> None:
    """Half of 2 s and the double of 1 s are 3 s again."""
    products = (
        ProductTimes("forward", 1, 1, 1, 2.0, {COMPILED: 2.0}),
        ProductTimes("gradient of inputs", 1, 1, 1, 1.0, {COMPILED: 0.5}),
    )
    assert ProductVerdict("float32", 1, MIN_TURNS, products).speedup(COMPILED) == pytest.approx(1.0)
    assert ProductVerdict("float32", 1, MIN_TURNS, products).speedup(ONEDNN) is None


def test_a_verdict_states_the_measurement() -> None:
    text = verdict(threads=1, compiled=1.3, onednn=1.1).describe()
    assert text == (
        "measured: ours 1.18 times as fast as oneDNN's, oneDNN's 1.10 times as fast as PyTorch's (float32, 1 thread)"
    )
    assert verdict("bfloat16").describe() == "measured: there is no other way (bfloat16, 2 threads)"
    ways = {verdict(compiled=1.3).name_ways(), verdict(onednn=1.3).name_ways(), verdict().name_ways()}
    assert ways == {"our own kernels", "oneDNN", "PyTorch"}


@pytest.mark.slow
@given(st.sampled_from(["float32", "bfloat16"]), st.integers(1, 256), st.integers(0, 99), RATIOS, RATIOS)
def test_a_verdict_that_is_written_is_read(
    tmp_path_factory: Any, dtype: str, threads: int, turns: int, compiled: float, onednn: float
) -> None:
    file = tmp_path_factory.mktemp("lib") / "new" / "products.json"
    written = verdict(dtype, threads, turns, compiled=compiled, onednn=onednn)
    write(file, written)
    assert read_verdicts(file, STAMP) == ({(dtype, threads): written}, "")
    (row,) = json.loads(file.read_text(encoding="utf-8"))["verdicts"]
    assert row["used"] == [
        *(["compiled"] if written.uses_compiled else []),
        "onednn" if written.uses_onednn else "pytorch",
    ]
    assert row["ratios"] == {"compiled": written.compiled_speedup, "onednn": written.speedup(ONEDNN)}
    assert parse_verdict(json.loads(json.dumps(asdict(written)))) == written


@pytest.mark.parametrize("name", [field.name for field in fields(Stamp)])
def test_each_stamp_has_a_file_and_a_missing_one_says_how_the_nearest_differs(name: str, tmp_path: Path) -> None:
    another, far = replace(STAMP, **{name: "another"}), Stamp("other", "other", "other", "other")
    file, other_file, far_file = (verdict_file(stamp, tmp_path) for stamp in (STAMP, another, far))
    other_verdict = verdict(compiled=2.0)
    write(other_file, other_verdict, stamp=another)
    write(far_file, verdict(), stamp=far)
    verdicts, reason = read_verdicts(file, STAMP)
    present = getattr(STAMP, name) or "none"
    assert not verdicts and reason == f"products were measured with {name} another, not {present}"
    in_force, _ = add_verdicts(file, STAMP, [verdict("bfloat16")], False)
    assert list(in_force) == [("bfloat16", 2)] and read_verdicts(file, STAMP) == (in_force, "")
    assert read_verdicts(other_file, another) == ({("float32", 2): other_verdict}, "")  # is measured no more


def test_the_verdicts_of_another_stamp_in_this_one_s_file_do_not_count(tmp_path: Path) -> None:
    file = write(tmp_path / "products.json", verdict(compiled=2.0), stamp=replace(STAMP, settings="MKL_X=1"))
    assert read_verdicts(file, STAMP) == ({}, "products were measured with settings MKL_X=1, not none")
    in_force, _ = add_verdicts(file, STAMP, [verdict("bfloat16")], False)
    assert list(in_force) == [("bfloat16", 2)] and read_verdicts(file, STAMP) == (in_force, "")


def test_processes_that_start_together_have_the_verdicts_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writes while this one is between reading and writing."""
    file, create = tmp_path / "products.json", product_verdicts.create_json_atomically

    def create_after_another(path: Path, content: Any) -> bool:
        monkeypatch.setattr(product_verdicts, "create_json_atomically", create)
        write(file, verdict(compiled=2.0))
        return create(path, content)

    monkeypatch.setattr(product_verdicts, "create_json_atomically", create_after_another)
    in_force, problem = add_verdicts(file, STAMP, [verdict(compiled=0.5), verdict(threads=1)], False)
    assert in_force["float32", 2].uses_compiled and not problem
    assert sorted(in_force) == [("float32", 1), ("float32", 2)] and read_verdicts(file, STAMP)[0] == in_force


def test_verdicts_in_the_file_after_writing_are_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replaces the file at the same moment."""
    file, replacing = write(tmp_path / "products.json", verdict(threads=1)), product_verdicts.write_json_atomically

    def write_before_another(path: Path, content: Any) -> None:
        replacing(path, content)
        content["verdicts"] = json.loads(other_file.read_text(encoding="utf-8"))["verdicts"]
        replacing(path, content)

    other_file = write(tmp_path / "other.json", verdict(threads=2, compiled=2.0))
    monkeypatch.setattr(product_verdicts, "write_json_atomically", write_before_another)
    in_force, _ = add_verdicts(file, STAMP, [verdict(threads=2, compiled=0.5)], False)
    assert in_force["float32", 2].uses_compiled


def _add_slowly(file: Path, threads: int, start: Any) -> None:
    """Add one verdict, with time for others between reading the file and writing it."""
    replacing = product_verdicts.write_json_atomically

    def write_slowly(path: Path, content: Any) -> None:
        time.sleep(0.02)
        replacing(path, content)

    product_verdicts.write_json_atomically = write_slowly  # type: ignore[assignment]  # in this process alone
    start.wait()
    in_force, problem = add_verdicts(file, STAMP, [verdict(threads=threads, compiled=2.0)], False)
    assert not problem and ("float32", threads) in in_force


@pytest.mark.slow
def test_no_verdict_is_lost_where_processes_add_to_the_same_file(tmp_path: Path) -> None:
    file = write(tmp_path / "products.json", verdict(threads=99))
    context = multiprocessing.get_context("fork")
    start, threads = context.Event(), range(1, 7)
    writers = [context.Process(target=_add_slowly, args=(file, count, start)) for count in threads]
    for writer in writers:
        writer.start()
    start.set()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * len(writers)
    assert sorted(read_verdicts(file, STAMP)[0]) == [*(("float32", count) for count in threads), ("float32", 99)]


def test_verdicts_for_other_threads_and_types_are_added_and_the_first_of_each_stays(tmp_path: Path) -> None:
    file = write(tmp_path / "products.json", verdict(threads=1, compiled=2.0))
    in_force, _ = add_verdicts(file, STAMP, [verdict(threads=12), verdict(threads=1, compiled=0.5)], False)
    assert sorted(in_force) == [("float32", 1), ("float32", 12)] and in_force["float32", 1].uses_compiled
    in_force, _ = add_verdicts(file, STAMP, [verdict(threads=1, compiled=0.5)], True)
    assert sorted(in_force) == [("float32", 1), ("float32", 12)] and not in_force["float32", 1].uses_compiled
    assert read_verdicts(file, STAMP)[0] == in_force


def test_a_disturbed_verdict_stays_until_there_is_one_that_was_disturbed_less(tmp_path: Path) -> None:
    file = write(tmp_path / "products.json", replace(verdict(compiled=2.0), wait_share=0.5))
    for share, ratio, is_used in ((0.6, 0.5, True), (0.4, 0.5, False), (0.01, 3.0, True), (0.001, 0.5, True)):
        added = replace(verdict(compiled=ratio), wait_share=share)
        in_force, _ = add_verdicts(file, STAMP, [added], False)
        assert in_force["float32", 2].uses_compiled == is_used and read_verdicts(file, STAMP)[0] == in_force
    add_verdicts(file, STAMP, [replace(verdict(compiled=0.5), wait_share=0.9)], True)
    assert read_verdicts(file, STAMP)[0]["float32", 2].is_disturbed
    add_verdicts(file, STAMP, [verdict(turns=0)], False)  # no measurement at all
    assert read_verdicts(file, STAMP)[0]["float32", 2].turns == MIN_TURNS


def test_without_a_file_the_reason_says_so(tmp_path: Path) -> None:
    assert read_verdicts(tmp_path / "none.json", STAMP) == ({}, "products have not been measured for this processor")


def _change(change: Callable[[Dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        values = json.loads(content)
        change(values)
        return json.dumps(values).encode()

    return changed


def _of_row(name: str, value: Any) -> Callable[[bytes], bytes]:
    return _change(lambda values: values["verdicts"][0].update({name: value}))


def _of_product(name: str, value: Any) -> Callable[[bytes], bytes]:
    return _change(lambda values: values["verdicts"][0]["products"][0].update({name: value}))


DAMAGES: Dict[str, Callable[[bytes], bytes]] = {
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "no UTF-8": lambda content: b"\xff" + content,
    "a list": lambda content: b"[]",
    "deep": lambda content: b"[" * 100_000,
    "huge": lambda content: content + b" " * 2**20,
    "another version": _change(lambda values: values.update(version=2)),
    "no stamp": _change(lambda values: values.pop("stamp")),
    "a longer stamp": _change(lambda values: values["stamp"].update(extra="x")),
    "no verdicts": _change(lambda values: values.update(verdicts=3)),
    "another type": _of_row("dtype", "float16"),
    "no threads": _of_row("threads", 0),
    "threads that are true": _of_row("threads", True),
    "turns of half": _of_row("turns", 4.5),
    "a use that the ratios contradict": _of_row("used", ["pytorch"]),
    "a negative time": _of_product("seconds", -1.0),
    "an infinite ratio": _of_product("speedups", {"compiled": math.inf}),
    "a ratio that is no number": _of_product("speedups", {"compiled": math.nan}),
    "a share above 1": _of_row("wait_share", 1.5),
    "a share of text": _of_row("wait_share", "0.1"),
    "a ratio of text": _of_product("speedups", {"compiled": "2"}),
    "a huge size": _of_product("rows", 2**80),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_a_reason_and_replaced_by_the_next_measurement(
    damage: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "products.json", verdict(compiled=2.0))
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    verdicts, reason = read_verdicts(file, STAMP)
    assert not verdicts and reason.startswith(f"{file}: ") and len(reason.splitlines()) == 1
    assert reason.endswith("remove it; products are then measured again")
    in_force, problem = add_verdicts(file, STAMP, [verdict(compiled=1.5)], False)
    assert not problem and read_verdicts(file, STAMP) == (in_force, "")


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "lib").touch()  # not even root can write below what is no folder
    file = tmp_path / "lib" / "products.json"
    in_force, problem = add_verdicts(file, STAMP, [verdict(compiled=2.0)], False)
    assert in_force["float32", 2].uses_compiled and problem.startswith(f"{file}: cannot be written: ")
    verdicts, reason = read_verdicts(file, STAMP)
    assert not verdicts and reason.startswith(f"{file}: cannot be read: ")


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_a_file_that_cannot_be_read_is_refused_with_a_reason(tmp_path: Path) -> None:
    file = write(tmp_path / "products.json", verdict(compiled=2.0))
    file.chmod(0)
    assert read_verdicts(file, STAMP)[1].startswith(f"{file}: cannot be read: ")


def test_the_file_is_beside_the_library_of_the_same_processor_and_sources(tmp_path: Path) -> None:
    file, library = verdict_file(STAMP, tmp_path), library_file(tmp_path)
    assert file.parent == library.parent and file.name == f"{library.stem}-products-{STAMP.digest()}.json"


def test_settings_of_pytorch_s_libraries_are_part_of_the_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    names: List[str] = [name for name in os.environ if name.startswith(("ATEN_CPU_", "MKL_", "DNNL_", "ONEDNN_"))]
    for name in names:
        monkeypatch.delenv(name)
    assert read_settings() == ""
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")  # threads are asked of PyTorch
    assert read_settings() == "ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=AVX2"
