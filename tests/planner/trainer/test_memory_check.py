"""Tests of the memory check: runs that do not fit are refused before they start, with a change that makes them fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Optional, Tuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.config.checks import problems_of
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine import fugaku, local
from fugaku_gpt.machine.framework import framework_of
from fugaku_gpt.machine.memory import guard_margin
from fugaku_gpt.planner.trainer.memory_check import NodeLimits, local_node_limits, refuse_too_large, set_options
from fugaku_gpt.planner.trainer.node_limits import job_node_limits, machine_node_limits, refuse_job_too_large
from fugaku_gpt.planner.trainer.shrink import Change, changes_between, smallest_change
from tests.planner.trainer.test_run_memory import layouts

BASE = framework_of()


def node_limits(limit: int, more_nodes: bool = True) -> NodeLimits:
    return NodeLimits(((limit, "test"),), BASE, 1, more_nodes)


def with_changes(config: RunConfig, change: Change) -> RunConfig:
    """A run with a change applied to it as ``--set`` options."""
    settings_of = [f"{key}={value}" for key, value in changes_between(RunConfig(), config)]
    return load_run_config(overrides=[*settings_of, *(option[len("--set ") :] for option in set_options(change))])


@settings(max_examples=80, deadline=None)
@given(layouts(), st.floats(0.1, 1.1), st.booleans())
def test_the_change_that_is_named_fits_and_is_valid(config: RunConfig, share: float, more_nodes: bool) -> None:
    limits = node_limits(0)
    base = BASE.private_bytes + BASE.shared_bytes
    needed = limits.run_memory(config).bytes_of_node
    limit = base * config.ranks_per_node + int(
        share * (needed - BASE.private_bytes * config.ranks_per_node - BASE.shared_bytes)
    )
    change = smallest_change(config, limits.run_memory, limit, more_nodes)
    if needed <= limit:
        assert change == ()
        return
    assume(change is not None)
    assert change
    changed = with_changes(config, change)
    assert limits.run_memory(changed).bytes_of_node <= limit
    assert problems_of(changed, lambda _: "") == []
    assert more_nodes or changed.job.nodes == config.job.nodes
    assert changed.model == config.model and changed.training.global_batch == config.training.global_batch


def change_of(limit_mib: float, *overrides: str, preset: str = "1.3b") -> Optional[Change]:
    return smallest_change(
        load_run_config(preset=preset, overrides=overrides), node_limits(0).run_memory, int(limit_mib * 2**20)
    )


def test_changes_come_in_order_of_cost() -> None:
    """Eight replicas of 1.3B on a node each."""
    run = ("layout.dp=8", "job.nodes=8", "training.micro_batch=2", "training.global_batch=64")
    needed = node_limits(0).run_memory(load_run_config(preset="1.3b", overrides=run)).bytes_of_node / 2**20
    changes = [dict(change_of(share * needed, *run) or ()) for share in (1.0, 0.8, 0.6, 0.4, 0.55, 0.1, 0.01)]
    assert changes[0] == {} and changes[1] == {"layout.zero": "1"}
    assert changes[2] == {"layout.zero": "1", "training.micro_batch": "1"}
    assert changes[3].items() >= {"layout.dp": "4", "layout.tp": "2", "layout.zero": "1"}.items()
    assert "training.recompute" not in changes[3]
    assert changes[4].items() > changes[2].items() and "training.recompute_budget_mib" in changes[4]
    assert "job.nodes" in changes[5] and not any("job.nodes" in change for change in changes[:5])
    assert changes[6] == {} and change_of(0.01 * needed, *run) is None  # less than a rank takes without a model


def test_more_nodes_are_only_suggested_where_available() -> None:
    config = load_run_config(preset="1.3b")
    limits = node_limits(0)
    limit = limits.run_memory(config).bytes_of_node // 3
    assert dict(smallest_change(config, limits.run_memory, limit) or ()).get("job.nodes") == "4"
    assert smallest_change(config, limits.run_memory, limit, more_nodes=False) is None


def test_a_budget_is_the_largest_that_fits() -> None:
    config = load_run_config(preset="350m", overrides=["training.global_batch=8", "training.micro_batch=1"])
    limits = node_limits(0)
    limit = limits.run_memory(config).bytes_of_node - 200 * 2**20
    change = smallest_change(config, limits.run_memory, limit, more_nodes=False)
    assert change is not None and [key for key, _ in change] == ["training.recompute", "training.recompute_budget_mib"]
    changed = with_changes(config, change)
    budget = changed.training.recompute_budget_mib
    assert budget is not None
    larger = replace(changed, training=replace(changed.training, recompute_budget_mib=budget + 1))
    assert limits.run_memory(changed).bytes_of_node <= limit < limits.run_memory(larger).bytes_of_node + 2**20


@pytest.mark.parametrize("guard", [True, False])
def test_a_run_is_refused_at_the_limit_and_not_below(guard: bool) -> None:
    config = load_run_config(preset="124m", overrides=[f"node.memory_guard={guard}", "job.scheduler=local"])
    needed = node_limits(0).run_memory(config).bytes_of_node
    limit = needed + (guard_margin(needed) if guard else 0) + 2**20
    refuse_too_large(config, node_limits(limit))
    with pytest.raises(
        UsageError, match=r"this run needs \d+ MiB of a node for 1 rank,.*--set node.memory_check=false"
    ):
        refuse_too_large(config, node_limits(limit - 2**25))
    refuse_too_large(replace(config, node=replace(config.node, memory_check=False)), node_limits(1))
    refuse_too_large(config, NodeLimits((), BASE, 1))  # no limit is known


def test_only_ranks_of_the_node_are_checked() -> None:
    """A pipeline's first stage holds more micro-batches than its last."""
    config = load_run_config(
        preset="124m", overrides=["layout.pp=4", "training.global_batch=8", "training.micro_batch=1"]
    )
    memory = node_limits(0).run_memory(config)
    limit = memory.bytes_of_ranks([3]) + 2**27
    refuse_too_large(config, node_limits(limit), [3])
    with pytest.raises(UsageError, match="for 2 ranks"):
        refuse_too_large(config, node_limits(limit), [0, 1])
    spread = replace(config, job=replace(config.job, nodes=4))
    with pytest.raises(UsageError, match="it would fit with 1 rank on a node"):
        refuse_too_large(spread, node_limits(memory.bytes_of_rank + 2**27), [0, 1])


def test_the_change_that_is_named_fits_as_many_ranks_as_are_on_the_node() -> None:
    """A run for two nodes, tried out on one."""
    config = load_run_config(preset="350m", overrides=["layout.dp=2", "job.nodes=2", "training.global_batch=8"])
    limits = replace(node_limits(int(0.92 * node_limits(0).run_memory(config).bytes_of_rank)), has_more_nodes=False)
    with pytest.raises(UsageError) as caught:
        refuse_too_large(config, limits, [0, 1])
    options = re.findall(r"--set (\S+)=(\S+?)(?=[ ;])", str(caught.value).split("smallest change")[1])
    change = tuple((key, value) for key, value in options if key != "node.memory_check")
    refuse_too_large(with_changes(config, change), limits, [0, 1])


@pytest.mark.parametrize("key", ["node.memory_limit", "job.node_memory"])
def test_the_smallest_limit_counts(key: str) -> None:
    config = load_run_config(preset="124m", overrides=[f"{key}=1Gi"])
    free = "less what the memory guard keeps free"
    assert node_limits(2**40).smallest_limit(config) == (2**30 - guard_margin(2**30), f"{key}, {free}")
    assert node_limits(2**29).smallest_limit(config) == (2**29 - guard_margin(2**29), f"test, {free}")
    unguarded = replace(config, node=replace(config.node, memory_guard=False))
    assert node_limits(2**29).smallest_limit(unguarded) == (2**29, "test")


def test_a_job_is_checked_against_the_nodes_of_the_scheduler() -> None:
    def limits(scheduler: str, *more: str) -> Tuple[Tuple[int, str], ...]:
        return job_node_limits(load_run_config(overrides=[f"job.scheduler={scheduler}", *more])).limits

    assert min(limits("pjm"))[0] <= fugaku.JOB_BYTES
    assert limits("local")[0][0] == local.memory_limit() == local_node_limits().limits[0][0]
    assert limits("slurm") == ()
    large = load_run_config(preset="13b")
    with pytest.raises(UsageError, match="the smallest change that fits: --set layout.*Fugaku|Fugaku.*smallest change"):
        refuse_job_too_large(large)
    refuse_job_too_large(replace(large, job=replace(large.job, scheduler="slurm")))
    with pytest.raises(UsageError, match="job.node_memory"):
        refuse_job_too_large(replace(large, job=replace(large.job, scheduler="slurm", node_memory="64Gi")))


def test_machines_of_accelerators_are_refused() -> None:
    with pytest.raises(UsageError, match="--machine a100: its memory is that of accelerators"):
        machine_node_limits("a100")
    with pytest.raises(UsageError, match="machine k: unknown"):
        machine_node_limits("k")


def test_the_refusal_names_a_change_that_ends_it() -> None:
    config = load_run_config(preset="1.3b", overrides=["layout.dp=4", "job.nodes=4"])
    limits = node_limits(20 * 2**30)
    with pytest.raises(UsageError) as caught:
        refuse_too_large(config, limits)
    options = re.findall(r"--set (\S+)=(\S+?)(?=[ ;])", str(caught.value).split("smallest change")[1])
    change = tuple((key, value) for key, value in options if key != "node.memory_check")
    refuse_too_large(with_changes(config, change), limits)
