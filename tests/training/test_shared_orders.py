"""Tests that a run whose corpora have many documents maps their order from files in its run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.comm import Communicator
from fugaku_gpt.data import samples
from fugaku_gpt.training.workload import open_sources, share_orders
from tests.data.files import write_megatron
from tests.support.tiny import tiny_config


def test_orders_of_many_documents_are_written_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_DOCUMENTS_IN_FILES", 50)
    write_megatron(tmp_path / "c", [[number % 256] * 40 for number in range(200)])
    config = tiny_config(f"data.paths=[{tmp_path}/c]", "data.split=[80, 20, 0]")
    for sentence in (" was built in ", " is there: "):
        train, valid, _ = open_sources(config, validates=True)
        lines = share_orders(Communicator.alone(), tmp_path / "order", (train, valid))  # 40 documents validate
        assert lines and all(line.startswith("the order of 160 documents") and sentence in line for line in lines)
    first = train.batch(0, 1)
    for file in (tmp_path / "order").iterdir():
        file.unlink()  # it is mapped already
    assert train.batch(0, 1).tolist() == first.tolist()


def test_small_corpora_have_no_files(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [[number % 256] * 40 for number in range(200)])
    train, valid, _ = open_sources(tiny_config(f"data.paths=[{tmp_path}/c]", "data.split=[80, 20, 0]"), validates=True)
    assert share_orders(Communicator.alone(), tmp_path / "order", (train, valid, None)) == []
    assert not (tmp_path / "order").exists()
