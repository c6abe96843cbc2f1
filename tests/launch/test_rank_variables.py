"""Tests of the variables that every rank gets, whichever command starts it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fugaku_gpt.config import NodeConfig
from fugaku_gpt.launch.rank_variables import rank_environment, thread_variables

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "PARALLEL", "LD_PRELOAD", "XOS_MMM_L_PAGING_POLICY")


def test_a_rank_gets_its_variables_and_loses_those_of_another_run_s_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("PARALLEL", "48")
    monkeypatch.setenv("XOS_MMM_L_PAGING_POLICY", "demand:demand:demand")
    program = f"import json, os; print(json.dumps([os.environ.get(name) for name in {NAMES!r}]))"
    command = [*rank_environment(NodeConfig(), 12, ["libm.so.6"]), sys.executable, "-c", program]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    assert json.loads(output) == ["12", "12", "2000", "12", "libm.so.6", None]


def test_the_user_and_the_build_choose_how_long_threads_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert thread_variables(2)["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT=9" in rank_environment(NodeConfig(), 2, build={"GOMP_SPINCOUNT": "9"})
