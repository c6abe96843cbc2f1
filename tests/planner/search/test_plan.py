"""Tests of what a search of layouts is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.constants import load_machine
from fugaku_gpt.planner.search.plan import TopologyRequest, _search_space


def test_a_request_names_nodes_or_a_limit_of_them_and_a_fit() -> None:
    for request in (TopologyRequest(), TopologyRequest(nodes=2, max_nodes=4)):
        with pytest.raises(UsageError, match="give one of --nodes or --max-nodes"):
            request.check()
    with pytest.raises(UsageError, match="--fit most: valid: both, rows, ours"):
        TopologyRequest(nodes=2, fit="most").check()
    TopologyRequest(nodes=2).check()
    TopologyRequest(max_nodes=2, fit="ours").check()


@pytest.mark.parametrize(
    ("machine", "devices", "choices", "problem"),
    [
        ("a64fx", 1, (1, 2, 4), "a node of a64fx has 48 cores"),
        ("a100", 8, (8,), "a node of a100 has 8 devices"),
        ("v100", 2, (2,), "a node of v100 has 2 devices"),
    ],
)
def test_ranks_of_a_node_are_as_many_as_devices_or_up_to_the_cores(
    machine: str, devices: int, choices: "tuple[int, ...]", problem: str
) -> None:
    loaded = load_machine(machine)
    loaded = replace(loaded, facts={**loaded.facts, "devices_per_node": devices})
    config, hardware = load_run_config(), next(iter(loaded.hardware))
    space = _search_space(config, loaded, TopologyRequest(max_nodes=3), hardware, "", (64,))
    assert (space.nodes, tuple(space.ranks_per_node), space.batches) == ((1, 3), choices, (64,))
    most = int(problem.split()[-2])
    space = _search_space(config, loaded, TopologyRequest(nodes=3, ranks_per_node=(1, most)), hardware, "", (64,))
    assert (space.nodes, tuple(space.ranks_per_node)) == ((3, 3), (1, most))
    with pytest.raises(UsageError, match=f"--ranks-per-node {most + 1}: {problem}"):
        _search_space(config, loaded, TopologyRequest(nodes=3, ranks_per_node=(most + 1,)), hardware, "", (64,))
    with pytest.raises(UsageError, match=f"--hardware other: machine {machine} has {hardware}"):
        _search_space(config, loaded, TopologyRequest(nodes=3), "other", "", (64,))
