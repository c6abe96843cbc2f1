"""Tests of the commit of the running code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import fugaku_gpt
from fugaku_gpt.machine.checkout import git_commit


def test_the_commit_is_that_of_the_checkout() -> None:
    root = Path(fugaku_gpt.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], stdout=subprocess.PIPE, check=False)
    assert head.stdout.decode().startswith(git_commit())
