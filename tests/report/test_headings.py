"""Tests of the settings that titles and lines above a table state."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import pytest

from fugaku_gpt.report.headings import (
    Heading,
    HeadingReader,
    StatedModel,
    activation_checkpointing,
    models_in,
    sizes_in,
)


def heading_of(*lines: str) -> Heading:
    """The heading after titles, which begin with ``#``, and other lines."""
    reader = HeadingReader()
    for line in lines:
        (reader.add_title if line.startswith("#") else reader.add_line)(line)
    return reader.heading


@pytest.mark.parametrize(
    "titles, size, torch, recompute",
    [
        (("# 13B, PyTorch 1.7", "## Table"), "13B", "1.7", False),
        (("# 13B", "## w/o activation checkpointing", "### Table"), "13B", "", False),
        (("# 13B", "## activation checkpointing", "## Table"), "13B", "", None),
        (("# 13B", "## 350M", "### Table"), "350M", "", None),
        (("# 13B", "## 350M", "## Table"), "13B", "", None),
        (("# 13B", "### 350M", "## Table"), "13B", "", None),
        (("## 13B", "# Table"), "", "", None),
        (("# 13B", "# Table"), "", "", None),
    ],
)
def test_a_title_begins_with_the_configuration_of_those_around_it(
    titles: Tuple[str, ...], size: str, torch: str, recompute: Optional[bool]
) -> None:
    heading = heading_of(*titles)
    assert (heading.text, heading.size) == (titles[-1], size)
    assert (heading.torch, heading.recompute) == (torch, recompute)


def test_batches_are_those_of_a_title_and_the_ranks_of_a_node_those_of_the_title_around_it() -> None:
    lines = ("# GPUs per node: 8", "GBS=16, MBS=2")
    assert [heading_of(*lines).global_batch, heading_of(*lines).micro_batch] == [16, 2]
    inner = heading_of(*lines, "## Table")
    assert (inner.global_batch, inner.micro_batch, inner.ranks_per_node) == (None, None, 8)
    assert heading_of(*lines, "# Table").ranks_per_node is None


def test_vocabulary_length_and_machine_hold_until_another_statement() -> None:
    lines = ["# Fugaku", "vocab_size=50257", "seq_len=2k", "# Table"]
    heading = heading_of(*lines)
    assert (heading.machine, heading.vocab, heading.seq_len) == ("a64fx", 50257, 2048)
    later = heading_of(*lines, "V100", "vocab_size=32k", "seq_len=512")
    assert (later.machine, later.vocab, later.seq_len) == ("v100", 32000, 512)


def test_of_a_section_that_has_ended_the_last_model_remains() -> None:
    small, large = StatedModel(12, 768, 12), StatedModel(24, 2048, 16)
    lines = ("# A", "NLAYERS=12 NHIDDEN=768 NHEADS=12", "NLAYERS=24 NHIDDEN=2048", "NHEADS=16")
    assert heading_of(*lines).models == (large, small)
    assert heading_of(*lines, "## B").models == (large, small)
    assert heading_of(*lines, "# B").models == (large,)
    assert heading_of(*lines, "# B", "NHEADS=8").models == (StatedModel(heads=8), large)


def test_after_a_table_a_statement_is_of_another_model() -> None:
    reader = HeadingReader()
    reader.add_line("NLAYERS=24 NHIDDEN=2048")
    reader.end_table()
    reader.add_line("NHEADS=16")
    assert reader.heading.models == (StatedModel(heads=16), StatedModel(24, 2048))


@pytest.mark.parametrize(
    "line, is_stated",
    [
        ("GBS=16", True),
        ("these are runs of GBS=16 and more", False),
        ("five words are around GBS=16 here", True),
        ("more than five words are around GBS=16 here", False),
        ("seven words are around both settings: GBS=16 MBS=2 here", True),
        ("more than seven words are around both settings: GBS=16 MBS=2 here", False),
        ("``` GBS=16", False),
        ("GBS=0", False),
    ],
)
def test_a_line_states_settings_with_few_further_terms(line: str, is_stated: bool) -> None:
    assert heading_of("# A", line).global_batch == (16 if is_stated else None)


@pytest.mark.parametrize(
    "text, models",
    [
        ("", []),
        ("layers=2 hidden=8 heads=2", [{"layers": 2, "hidden": 8, "heads": 2}]),
        ("layers=2 hidden=8, layers=4 hidden=1k", [{"layers": 2, "hidden": 8}, {"layers": 4, "hidden": 1000}]),
        ("--num-layers 2 --hidden_size 0", [{"layers": 2}]),
        ("layers=0", []),
    ],
)
def test_another_model_begins_where_a_setting_comes_again(text: str, models: List[Dict[str, int]]) -> None:
    assert models_in(text) == models


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("13B and 1.3b, 13 B", ["13B"]),
        ("350M tokens of 124M", ["124M"]),
        ("12 MiB, 8MB, x=3B, 1T", ["1T"]),
        ("", []),
    ],
)
def test_sizes_are_those_of_models(text: str, sizes: List[str]) -> None:
    assert sizes_in(text) == sizes


@pytest.mark.parametrize(
    "text, expected",
    [
        ("activation checkpointing", True),
        ("w/o activation checkpointing", False),
        ("no `checkpoint-activations`", False),
        ("full recompute", True),
        ("without full recompute", False),
        ("checkpoints", None),
    ],
)
def test_activation_checkpointing_is_on_off_or_unknown(text: str, expected: Optional[bool]) -> None:
    assert activation_checkpointing(text) is expected
