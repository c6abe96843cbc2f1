"""Tests of measuring products in another process: its answer, or why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Tuple

import pytest

from fugaku_gpt.kernels import check, product_check
from fugaku_gpt.kernels.check import run_in_child
from fugaku_gpt.kernels.product_check import MeasuredProducts, measure_products


def child(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Replaces the program of the measuring process."""
    monkeypatch.setattr(product_check, "_PROGRAM", program)


def test_a_child_that_answers_is_quoted_whatever_else_it_prints() -> None:
    assert run_in_child("print('noise'); answer('a ' + sys.argv[1])", ["b"], "trials", 60.0) == ("", "a b")


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import os; answer('early'); sys.stdout.flush(); os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("import os; os.abort()", "ended by SIGABRT"),
        ("answer('early'); sys.exit(3)", "ended: exit code 3"),
        ("raise ValueError('no such processor')", "ended: ValueError: no such processor"),
    ],
)
def test_a_child_that_dies_leaves_products_to_pytorch_with_the_reason(
    program: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, program)
    assert measure_products() == MeasuredProducts(problem=f"measurements of products {problem}")


def test_a_child_that_hangs_is_killed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "import time\nwhile True: time.sleep(60)")
    measured = measure_products(timeout=1.0)
    assert not measured.verdicts and measured.problem == "measurements of products were not done after 1 s"


def test_the_request_reaches_the_child_and_its_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answering(program: str, arguments: Any, subject: str, timeout: float) -> Tuple[str, str]:
        asked.append((json.loads(arguments[0]), timeout))
        product = {"kind": "forward", "rows": 4, "inner": 5, "columns": 6, "seconds": 0.5, "speedups": {"compiled": 2}}
        verdict = {"dtype": "bfloat16", "threads": 12, "turns": 7, "products": [product]}
        stamp = {"processor": "p", "library": "l", "torch": "t", "settings": "s"}
        answer = {
            "verdicts": [verdict],
            "stamp": stamp,
            "file": "/lib/p.json",
            "measured_anew": "asked for",
            "problem": "",
        }
        return "", json.dumps(answer)

    monkeypatch.setattr(product_check, "run_in_child", answering)
    measured = measure_products([12, 1], again=True)
    assert asked == [({"threads": [12, 1], "again": True}, check.TIMEOUT_SECONDS)]
    (verdict,) = measured.verdicts
    assert (verdict.dtype, verdict.threads, verdict.turns, verdict.uses_compiled) == ("bfloat16", 12, 7, True)
    assert measured.stamp is not None and measured.stamp.processor == "p" and measured.file == Path("/lib/p.json")


def test_a_library_that_cannot_be_tried_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert check.check_library(tmp_path / "none.so") == "none are compiled for this processor and version"
