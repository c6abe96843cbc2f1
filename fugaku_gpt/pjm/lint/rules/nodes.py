"""Rules for the number and shape of nodes (PJM030 to PJM034)."""

from __future__ import annotations

import math
from typing import Iterator

from fugaku_gpt.machine.fugaku import TORUS_ABOVE, allocated_shape, allocation_unit
from fugaku_gpt.pjm.lint.facts import Facts, is_unfilled, printable
from fugaku_gpt.pjm.lint.registry import DATED, ERROR, UNSURE, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FUGAKU, FX1000
from fugaku_gpt.pjm.values import parse_node


@rule(
    "PJM030",
    ERROR,
    "node count outside the group's range",
    why="Each resource group takes jobs of a range of sizes: [ERR.] PJM 0054 (too small) or 0057 (too large). The "
    "ranges are data with a date; refresh them with --update-limits.",
    fix="choose the group that fits the size",
    source="Fugaku user guide 1.52, UsageRules; Command Reference J2UL-2549, messages 0054 and 0057",
)
def node_range(facts: Facts) -> Iterator[Hit]:
    group, nodes = facts.group_limits, facts.nodes
    if group is None or nodes is None or group.max_nodes is None:
        return
    least = group.min_nodes or 1
    if not least <= nodes <= group.max_nodes:
        text = facts.resources["node"] or ""
        line, column = facts.position("resources.node", text)
        shape = f"node={printable(text)}" + (f", {nodes} nodes," if str(nodes) != text else "")
        message = f"{shape} in the group {group.name}, which takes {least} to {group.max_nodes} (as of {group.date})"
        fitting = facts.limits.groups_for(nodes)
        fix = f"groups that take {nodes} nodes: {', '.join(fitting)}" if fitting else ""
        yield Hit(line, message, column, fix, DATED, date=group.date)


@rule(
    "PJM031",
    ERROR,
    "node shape that cannot be had",
    why=":strict and :strict-io ask for a box that is not turned, which only a three-dimensional torus has; above 384 "
    "nodes Fugaku allocates tori alone.",
    fix="write node=XxYxZ:torus:strict, or drop :strict",
    source="Command Reference J2UL-2549, pjsub, -L node; Fugaku user guide 1.52, UsageRules",
    site=FX1000,
)
def node_shape(facts: Facts) -> Iterator[Hit]:
    text = facts.resources.get("node")
    if text is None:
        return
    line, column = facts.position("resources.node", text)
    node = facts.node_shape
    if node is None:
        if not is_unfilled(text):
            try:
                parse_node(text)
            except ValueError as error:
                yield Hit(
                    line, f"node={printable(text)}: {printable(error)}", column, "write node=N, node=NxN or node=NxNxN"
                )
        return
    if node.strict and len(node.dims) != 3:
        yield Hit(line, f"node={text}: :{node.strict} needs three axes, here are {len(node.dims)}", column)
    elif node.strict and node.allocation in ("mesh", "noncont"):
        yield Hit(line, f"node={text}: :{node.strict} and :{node.allocation} exclude each other", column)
    group = facts.group_limits
    if node.allocation in ("mesh", "noncont") and node.count > TORUS_ABOVE:
        message = f"node={text}: :{node.allocation} is for up to {TORUS_ABOVE} nodes, here are {node.count}"
        yield Hit(line, message, column, "use :torus", DATED)
    elif group and node.allocation and group.allocations and node.allocation not in group.allocations:
        message = f"node={text}: the group {group.name} takes {' '.join(group.allocations)} (as of {group.date})"
        yield Hit(line, message, column, f"use :{group.allocations[0]}", DATED, date=group.date)


@rule(
    "PJM032",
    WARNING,
    "node count is rounded up, and billed so",
    why="A torus is allocated in units of 12 nodes (2x3x2), above 384 nodes in units of 48 (2x3x8). What is allocated "
    "is billed, not what was asked for.",
    fix="ask for a multiple of the unit",
    source="Fugaku user guide 1.52, UsageRules, definition of used computational resource",
    site=FUGAKU,
)
def rounded(facts: Facts) -> Iterator[Hit]:
    node, group = facts.node_shape, facts.group_limits
    if node is None:
        return
    asks_for_torus = node.allocation == "torus" or (bool(node.strict) and not node.allocation)
    torus = asks_for_torus or (group is not None and group.allocations == ("torus",))
    is_io_exclusive = torus and node.io == "io-exclusive"
    allocated = allocated_shape(node.dims, torus, is_io_exclusive)
    least = math.prod(allocated)
    if node.count != least:
        text = facts.resources["node"] or ""
        line, column = facts.position("resources.node", text)
        shape = "x".join(map(str, allocation_unit(node.count, is_io_exclusive)))
        message = f"node={text}: a torus consists of units of {shape}: {least} nodes for {node.count}, and billed so"
        box = "x".join(map(str, allocated))
        yield Hit(line, message, column, f"ask for {box}" + (f", {least} nodes" if len(allocated) > 1 else " nodes"))


@rule(
    "PJM033",
    WARNING,
    "no node count",
    why="Without node= the job gets the group's default: one node in small, the least that the group takes in large.",
    fix='add #PJM -L "node=N"',
    source="Fugaku user guide 1.52, pjsubCommandOptions and UsageRules",
    site=FUGAKU,
)
def no_node(facts: Facts) -> Iterator[Hit]:
    if "node" in facts.resources or "vnode" in facts.resources:
        return
    group = facts.group_limits
    default = f": {group.default_nodes} in {group.name} (as of {group.date})" if group and group.default_nodes else ""
    yield Hit(facts.top, f"no node=: the job gets the group's default{default}", is_absence=True)


@rule(
    "PJM034",
    ERROR,
    "resources that FX nodes do not have",
    why="vnode, vnode-core, vnode-mem, core-mem and -P are for PRIMERGY (x86) nodes, gpu for nodes with GPUs, and "
    "--omp is an addition of single sites; the nodes of Fugaku and its like are FX.",
    fix='ask for whole nodes: -L "node=N"',
    source="Command Reference J2UL-2549, pjsub, -L vnode and -P",
    site=FX1000,
)
def virtual_nodes(facts: Facts) -> Iterator[Hit]:
    for key in ("vnode", "vnode-core", "vnode-mem", "core-mem"):
        if key in facts.resources:
            line, column = facts.position(f"resources.{key}")
            yield Hit(line, f"{key}={printable(facts.resources[key])}: FX nodes have no virtual nodes", column)
    if "gpu" in facts.resources:
        line, column = facts.position("resources.gpu")
        yield Hit(line, f"gpu={printable(facts.resources['gpu'])}: FX nodes have no GPUs", column, "remove gpu=")
    if "omp" in facts.script.options and facts.is_fugaku:
        fix = "export OMP_NUM_THREADS=N in the script"
        yield Hit(facts.line_of("omp"), "pjsub of Fugaku has no option --omp", fix=fix, downgrade=UNSURE)
    if "policy" in facts.script.options:
        yield Hit(facts.line_of("policy"), "-P is for virtual nodes, which FX nodes have not", fix="remove -P")
