"""Tests that our own kernels stay within their tensors."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fugaku_gpt import ops
from tests.ops.fenced import Fences

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not ops.has_native_kernels(), reason="no kernels are compiled here"),
    pytest.mark.skipif(not hasattr(torch, "frombuffer"), reason="PyTorch cannot use memory of others here"),
]


def test_kernels_read_and_write_nothing_outside_of_their_tensors() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.ops.fenced"], cwd=ROOT, capture_output=True, timeout=300)
    names = done.stdout.decode().splitlines()
    assert done.returncode == 0, f"{names[-1:]}, status {done.returncode}: {done.stderr.decode()}"
    kinds = {line.split()[0] for line in names}
    assert {"attention", "attention_gradient", "layer_norm_gradient", "loss_sums", "matmul_", "step_adamw"} <= kinds
    assert {"rms_norm", "rms_norm_gradient", "swiglu", "swiglu_gradient", "rotate_into"} <= kinds
    assert {"gemv", "decode_attention"} <= kinds


@pytest.mark.parametrize("at_end", [True, False])
def test_the_fences_detect_accesses_outside_of_a_tensor(at_end: bool) -> None:
    fences = Fences(at_end)
    x = fences.of(torch.ones(10))
    fences.check()
    ctypes.memset(x.data_ptr() + (-1 if at_end else 40), 0, 1)
    with pytest.raises(SystemExit, match="written beside"):
        fences.check()
    beyond = f"""
import ctypes, torch
from tests.ops.fenced import Fences
x = Fences({at_end}).of(torch.ones(10))
ctypes.string_at(x.data_ptr() + {40 if at_end else -1}, 1)
"""
    assert subprocess.run([sys.executable, "-c", beyond], cwd=ROOT, timeout=300).returncode == -11
