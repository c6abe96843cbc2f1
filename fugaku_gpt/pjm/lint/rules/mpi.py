"""Rules for the number and placement of processes, and for ``mpiexec`` (PJM060, PJM061, PJM063 to PJM066)."""

from __future__ import annotations

import math
from typing import Iterator, Tuple

from fugaku_gpt.machine.fugaku import CORES
from fugaku_gpt.pjm.lint.facts import Facts, is_unfilled, printable
from fugaku_gpt.pjm.lint.registry import ERROR, UNSURE, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FX1000
from fugaku_gpt.pjm.values import AXES, NodeShape, parse_count, parse_shape

_SOURCE = "End-user's Guide J2UL-2534, 2.3.6; Command Reference J2UL-2549, pjsub, --mpi"


@rule(
    "PJM060",
    ERROR,
    "more processes than there is room for",
    why="A node of Fugaku has 48 cores. pjsub refuses proc above 48 for each node, max-proc-per-node above 48, and a "
    "max-proc-per-node below what proc needs.",
    fix="ask for more nodes, or fewer processes",
    source=_SOURCE,
    site=FX1000,
)
def too_many(facts: Facts) -> Iterator[Hit]:
    for key in ("proc", "max-proc-per-node"):
        text = facts.mpi.get(key)
        if text is not None and not is_unfilled(text):
            try:
                is_valid = parse_count(text) > 0
            except ValueError:
                is_valid = False
            if not is_valid:
                line, column = facts.position(f"mpi.{key}", text)
                yield Hit(line, f"{key}={printable(text)} is no number of processes", column, "write a whole number")
    proc, most, nodes = facts.proc, facts.max_ranks_per_node, facts.nodes
    if most is not None and most > CORES:
        line, column = facts.position("mpi.max-proc-per-node")
        yield Hit(line, f"max-proc-per-node={most} is more than the {CORES} cores of a node", column)
    if proc is None or not nodes:
        return
    line, column = facts.position("mpi.proc", "proc=")
    if proc > CORES * nodes:
        yield Hit(line, f"proc={proc} is more than the {CORES * nodes} cores of {_nodes(nodes)}", column)
    elif most and -(-proc // nodes) > most:
        message = f"proc={proc} on {_nodes(nodes)} is {-(-proc // nodes)} on each, and max-proc-per-node={most}"
        yield Hit(line, message, column)


@rule(
    "PJM061",
    WARNING,
    "processes do not divide evenly over the nodes",
    why="Some nodes get fewer processes than others, and wait for them.",
    fix="make proc a multiple of the nodes",
    source=_SOURCE,
    site=FX1000,
)
def uneven(facts: Facts) -> Iterator[Hit]:
    proc, nodes = facts.proc, facts.nodes
    if proc and nodes and nodes > 1 and proc % nodes and proc <= CORES * nodes:
        if proc < nodes and any((launch.processes or 0) > proc for launch in facts.launches):
            return  # mpiexec itself says how many start, as with -vcoordfile
        line, column = facts.position("mpi.proc", "proc=")
        empty = f"proc={proc} leaves {nodes - proc} of {nodes} nodes without a process"
        yield Hit(line, empty if proc < nodes else f"proc={proc} is no multiple of {_nodes(nodes)}", column)


@rule(
    "PJM063",
    WARNING,
    "processes do not fit the core memory groups",
    why="A node has four core memory groups (CMG) of 12 cores, each with its own memory. With other than 1, 2 or a "
    "multiple of 4 processes on a node some lie across two groups, and are slower.",
    fix="use 1, 2 or a multiple of 4 processes on each node",
    source="MPI User's Guide J2UL-2565, tables 4.44 to 4.46",
    site=FX1000,
)
def groups(facts: Facts) -> Iterator[Hit]:
    ranks_per_node = facts.ranks_per_node
    if (
        ranks_per_node
        and ranks_per_node > 2
        and ranks_per_node % 4
        and ranks_per_node <= CORES
        and facts.mpi.keys() & {"proc", "max-proc-per-node"}
    ):
        if facts.nodes == 1 and facts.proc and facts.proc < 4:
            return  # three processes of a small test lie across no groups
        line = facts.line_of("mpi.max-proc-per-node", "mpi.proc")
        yield Hit(line, f"{ranks_per_node} processes on each node, which has 4 core memory groups")


@rule(
    "PJM064",
    ERROR,
    "shape or rank map does not fit the nodes",
    why="shape= needs as many axes as node=, and so does the order of axes of a rank map; rank-map-bychip takes it "
    "after a colon, rank-map-bynode after an equals sign.",
    fix="rank-map-bychip:XYZ or rank-map-bynode=XYZ, with the axes of node=",
    source=_SOURCE,
    site=FX1000,
)
def shapes(facts: Facts) -> Iterator[Hit]:
    node = facts.node_shape
    text = facts.mpi.get("shape")
    if text is not None and not is_unfilled(text):
        line, column = facts.position("mpi.shape", "shape=")
        try:
            axes = parse_shape(text)
            if node and len(axes) != len(node.dims):
                message = f"shape={text} has {len(axes)} axes, and node={facts.resources['node']} has {len(node.dims)}"
                yield Hit(line, message, column)
            elif node:
                yield from _shape_beside_node(facts, axes, node)
        except ValueError as error:
            yield Hit(line, f"shape={printable(text)}: {printable(error)}", column, "write shape=NxNxN")
    for problem in facts.script.problems:
        if problem.kind == "wrong-separator":
            column = facts.column(problem.line, problem.text)
            yield Hit(problem.line, f"{printable(problem.text)}: the wrong sign before the axes", column)
    for key in ("rank-map-bychip", "rank-map-bynode"):
        order = facts.mpi.get(key)
        if order is None or any(valid_order == order for valid_order in AXES.get(len(node.dims) if node else 0, ())):
            continue
        line, column = facts.position(f"mpi.{key}", key)
        if order not in AXES[2] and order not in AXES[3]:
            if not is_unfilled(order) or order.upper() in (*AXES[2], *AXES[3]) or set(order) <= set("XYZ"):
                yield Hit(line, f"{key}: {printable(order)!r} is no order of axes", column)
        elif node:
            yield Hit(line, f"{key}: {order} does not fit node={facts.resources['node']}", column)


def _shape_beside_node(facts: Facts, axes: Tuple[int, ...], node: NodeShape) -> Iterator[Hit]:
    """Compare the nodes of the first processes with those of the job."""
    line, column = facts.position("mpi.shape", "shape=")
    shapes_text = f"shape={facts.mpi['shape']} of node={facts.resources['node']}"
    count = math.prod(axes)
    if count > node.count:
        message = f"{shapes_text} asks for {count} of the job's {node.count} nodes"
        yield Hit(line, message, column, "make shape= as large as node=, or drop it", UNSURE)
    elif any(size > limit for size, limit in zip(axes, node.dims)):
        message = f"{shapes_text} is longer along an axis than the job's nodes are"
        yield Hit(line, message, column, "fit each axis of shape= into that of node=", UNSURE)
    proc = facts.proc
    if proc is not None and count <= node.count and CORES * count < proc <= CORES * node.count:
        message = f"proc={proc} is more than the {CORES * count} cores of shape={facts.mpi['shape']}"
        yield Hit(facts.line_of("mpi.proc"), message, fix="raise shape=, or lower proc=")


@rule(
    "PJM065",
    WARNING,
    "mpiexec starts another number of processes than the job has",
    why="More processes than --mpi allows are an error of mpiexec; fewer leave nodes or cores idle. Leave -n away and "
    "mpiexec starts all.",
    fix="align mpiexec -n with --mpi, or drop -n",
    source="End-user's Guide J2UL-2534, 2.3.6; MPI User's Guide J2UL-2565, mpiexec",
    site=FX1000,
)
def other_count(facts: Facts) -> Iterator[Hit]:
    ranks = facts.ranks
    if not ranks or not (facts.mpi.keys() & {"proc", "max-proc-per-node"}):
        return
    most = ranks
    if "max-proc-per-node" in facts.mpi and facts.nodes and facts.max_ranks_per_node:
        most = max(ranks, facts.nodes * facts.max_ranks_per_node)
    launches = [launch for launch in facts.launches if launch.processes is not None]
    for launch in launches:
        assert launch.processes is not None
        word = launch.count_word or launch.word
        if launch.processes > most:
            message = f"mpiexec starts {launch.processes} processes, and the job has room for {most}"
            yield Hit(word.line, message, word.column, "raise --mpi proc, or lower -n")
    (*earlier_launches, last) = launches or (None,)
    if earlier_launches or last is None or len(facts.launches) > 1 or last.processes is None or last.command.nested:
        return  # several calls may share the nodes, or use a part of them in turn
    if last.processes < ranks:
        word = last.count_word or last.word
        yield Hit(word.line, f"mpiexec starts {last.processes} processes of the {ranks} that the job has", word.column)


@rule(
    "PJM066",
    WARNING,
    "mpiexec without --mpi",
    why="With neither proc nor max-proc-per-node there is one process on each node, whatever -n says beyond it.",
    fix='add #PJM --mpi "max-proc-per-node=N", or proc=N',
    source="End-user's Guide J2UL-2534, 2.3.6, table 2.28",
    site=FX1000,
)
def unstated(facts: Facts) -> Iterator[Hit]:
    if facts.launches and not facts.mpi.keys() & {"proc", "max-proc-per-node"}:
        message = "mpiexec with neither proc nor max-proc-per-node: one process on each node"
        most = max(facts.launches, key=lambda launch: launch.processes or 0)
        if facts.nodes and most.processes and most.processes > facts.nodes:
            word = most.count_word or most.word
            message += f", and this one starts {most.processes} on {_nodes(facts.nodes)}: it fails"
        else:
            word = facts.launches[0].word
        yield Hit(word.line, message, word.column, is_absence=True)


def _nodes(count: int) -> str:
    return f"{count} node" + ("s" if count != 1 else "")
