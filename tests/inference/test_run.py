"""Tests that texts are reported as they end, in the order of their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.inference.continuation import Continuation, GenerationLimits
from fugaku_gpt.inference.generation import Generator
from fugaku_gpt.inference.model_source import ReplicaLayout, find_model, inference_config
from fugaku_gpt.inference.replica import ModelReplica
from fugaku_gpt.inference.run import Listener, _generate
from fugaku_gpt.inference.sampling import Sampling
from tests.support.checkpoints import save_model
from tests.support.models import model_of_kind

PROMPTS = [[1, 2, 3], list(range(20)), [4], [5, 6]]  # of the second, the context of 24 tokens is soon full


def reports(folder: Path, slots: int) -> List[Tuple[int, int]]:
    """Generate the texts; return the prompts in the order of the reports, and the tokens generated until each."""
    source = find_model(save_model(folder, model_of_kind("llama")))
    grid = ProcessGrid.alone()
    replica = ModelReplica(inference_config(source, ReplicaLayout(), 1), grid)
    replica.load(source)
    limits = GenerationLimits(9, slots=slots)
    generator = Generator(replica, lambda context, ids: " ".join(map(str, ids)), Sampling(), limits)
    listed: List[Tuple[int, int]] = []

    def report(text: Continuation) -> None:
        listed.append((text.prompt, generator.speed.decode_tokens))

    _generate(grid, generator, PROMPTS, slots, Listener(on_end=report))
    return listed


def test_a_text_is_reported_before_the_next_is_begun(tmp_path: Path) -> None:
    assert reports(tmp_path, slots=1) == [(0, 8), (1, 12), (2, 20), (3, 28)]


def test_a_text_that_ends_before_an_earlier_one_waits_for_it(tmp_path: Path) -> None:
    assert [prompt for prompt, _ in reports(tmp_path, slots=4)] == [0, 1, 2, 3]
