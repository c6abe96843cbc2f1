"""Tests of what is reported as chosen for the user of a PJM job."""

from __future__ import annotations

from typing import List

import pytest

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.jobs.billing import billed_nodes, node_hours
from fugaku_gpt.jobs.choices import choice_notes, refuse_power_pair
from fugaku_gpt.jobs.render import render_job
from tests.jobs.cases import A64FX


def config(*settings: str, nodes: int = 1) -> RunConfig:
    size = [f"job.nodes={nodes}", f"layout.dp={nodes}", f"training.global_batch={nodes}"]
    return load_run_config(preset="124m", overrides=[*size, "job.elapse=1:00:00", *settings])


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (["node.freq_mhz=2200"], "eco_state is not set: 2 is written out, as at 2200 MHz; a core has one of its"),
        (["node.freq_mhz=2000"], "eco_state is not set: 0 is written out, as at 2000 MHz; a core has both pipes"),
        (["node.eco_state=2"], "freq is not set: 2200 MHz is written out, as with eco_state 2"),
        (["node.eco_state=0"], "freq is not set: 2000 MHz is written out, as with eco_state 0"),
        ([], "freq and eco_state are not set: 2000 MHz with both pipes is written out"),
        ([], "defaults are written out: retention_state=1, throttling_state=0, issue_state=0, ex_pipe_state=0"),
        (["node.retention_state=0"], "defaults are written out: throttling_state=0,"),
        ([], "retention_state=1: idle cores sleep, and take 3 ms to wake; OMP_WAIT_POLICY=active"),
        (["job.elapse=null"], "no job.elapse: the resource group's default holds, which is one minute"),
    ],
)  # fmt: skip
def test_each_value_that_the_user_has_not_set_is_named(settings: List[str], note: str) -> None:
    assert any(note in line for line in choice_notes(config(*settings)))
    script = render_job(config(*settings), A64FX)
    assert any(note in line for line in script.notes) and note in script.text


def test_nothing_is_noted_where_the_user_has_set_everything() -> None:
    knobs = ["freq_mhz=2000", "eco_state=0", "retention_state=0", "throttling_state=0", "issue_state=0"]
    settings = [f"node.{knob}" for knob in (*knobs, "ex_pipe_state=0", "threads_per_rank=48")]
    assert choice_notes(config(*settings)) == []
    assert render_job(config(*settings), A64FX).notes == ()


@pytest.mark.parametrize(
    ("nodes", "settings", "billed"),
    [
        (384, [], 384),
        (385, [], 432),  # nine shelves of 48 nodes
        (400, [], 432),
        (432, [], 432),
        (64, ["job.shape=4x4x4", "job.allocation=torus"], 96),  # units of 2x3x2: 4x6x4
        (64, ["job.shape=4x4x4"], 64),
        (1000, ["job.shape=10x10x10"], 1920),
        (10, ["job.allocation=torus"], 12),
        (10, ["job.resource_group=small-torus"], 12),  # a group of tori alone
        (10, ["job.scheduler=slurm"], 10),
    ],
)
def test_billed_nodes_are_multiples_of_a_torus_unit(nodes: int, settings: List[str], billed: int) -> None:
    run = config(*settings, nodes=nodes)
    assert billed_nodes(run.job) == billed
    assert node_hours(run) == billed
    notes = [note for note in choice_notes(run) if note.startswith("job.nodes")] if billed != nodes else []
    assert not notes or f"{nodes} nodes are used, {billed} are billed" in notes[0]


def test_more_than_384_nodes_are_noted_as_billed_by_shelves() -> None:
    (note,) = [note for note in choice_notes(config(nodes=400)) if note.startswith("job.nodes")]
    assert note == "job.nodes: 400 nodes are used, 432 are billed: a torus consists of units of 2x3x8"


def test_the_pair_that_fugaku_refuses_is_refused_at_rendering() -> None:
    run = config("node.freq_mhz=2200", "node.eco_state=0")
    with pytest.raises(
        ConfigError, match="node.eco_state: 0: Fugaku refuses it with node.freq_mhz 2200.*valid: 2 with"
    ):
        render_job(run, A64FX)
    for pair in (["node.freq_mhz=2200"], ["node.freq_mhz=2000", "node.eco_state=0"], ["node.eco_state=0"]):
        refuse_power_pair(config(*pair).node)
    assert "freq" in render_job(config("node.freq_mhz=2200", "node.eco_state=0", "job.scheduler=slurm"), A64FX).text


def test_retention_on_too_many_nodes_is_noted() -> None:
    notes = choice_notes(config("node.retention_state=1", nodes=9217))
    assert "node.retention_state=1: is ignored on more than 9216 nodes" in notes
