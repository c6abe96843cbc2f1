"""The nodes of each call of ``mpiexec``: calls that run at once need nodes of their own, as on Fugaku.

A call without a file of coordinates takes the whole job, and is refused while another one runs: ``plexec`` reports PLE
0008. Calls with files of coordinates (``-vcoordfile``) may run at once if no node is in two of them (Fugaku user guide
1.49, "How to execute back ground job").
"""

from __future__ import annotations

import fcntl
import json
import math
import re
from pathlib import Path
from typing import IO, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.errors import UsageError

MAX_CALLS = 128  # at once in one job
Coordinate = Tuple[int, ...]
_LINE = re.compile(r"\(\s*\d+(?:\s*,\s*\d+){0,2}\s*\)")
_NODES_FILE = "nodes.json"


def read_coordinates(path: str, ranks: int, environment: Mapping[str, str]) -> List[Coordinate]:
    """Read a file of coordinates: one line such as ``(0,1)`` for each rank; ``#`` begins a comment.

    Args:
        path: the file.
        ranks: number of ranks of the call; further lines are not used.
        environment: variables of the job, which have its shape.

    Raises:
        UsageError: it cannot be read, a line is malformed or names no node of the job, or there are too few lines.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"mpiexec: -vcoordfile {path}: cannot be read: {error}") from None
    sides = _sides(environment)
    coordinates: List[Coordinate] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not _LINE.fullmatch(text):
            raise UsageError(f"mpiexec: -vcoordfile {path}:{number}: {text!r}: not a coordinate such as (0) or (0,1)")
        coordinate = tuple(int(number) for number in re.findall(r"\d+", text))
        if len(coordinate) != len(sides) or any(at >= side for at, side in zip(coordinate, sides)):
            shape = "x".join(map(str, sides))
            raise UsageError(f"mpiexec: -vcoordfile {path}:{number}: {text}: is no node of this job, node={shape}")
        coordinates.append(coordinate)
    if len(coordinates) < ranks:
        raise UsageError(f"mpiexec: -vcoordfile {path}: has {len(coordinates)} coordinates for {ranks} processes")
    return coordinates[:ranks]


def node_numbers(coordinates: Sequence[Coordinate], environment: Mapping[str, str]) -> List[int]:
    """The number of each rank's node in its job, from 0 with the first axis fastest, by the ranks' coordinates."""
    sides = _sides(environment)
    return [sum(at * math.prod(sides[:axis]) for axis, at in enumerate(coordinate)) for coordinate in coordinates]


def _sides(environment: Mapping[str, str]) -> List[int]:
    """The number of nodes of a job along each axis."""
    return [int(environment[f"PJM_NODE_{axis}"]) for axis in "XYZ" if f"PJM_NODE_{axis}" in environment]


def ranks_on_nodes(coordinates: Sequence[Coordinate]) -> List[int]:
    """The number of each rank on its node, by the coordinates of the ranks."""
    return [list(coordinates[:rank]).count(coordinate) for rank, coordinate in enumerate(coordinates)]


def claim_nodes(job_folder: Path, call_folder: Path, nodes: Optional[FrozenSet[Coordinate]]) -> IO[str]:
    """Claim nodes for a call until its process ends; return the open file that holds the claim.

    Args:
        job_folder: folder of the job, with a folder for each of its calls.
        call_folder: folder of this call.
        nodes: its nodes; None for all nodes of the job.

    Raises:
        UsageError: another call runs on one of these nodes, or too many calls run.
    """
    with open(job_folder / "mpiexec.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = [
            claimed for file in sorted(job_folder.glob(f"mpiexec.*/{_NODES_FILE}")) for claimed in _claimed_nodes(file)
        ]
        if len(running) >= MAX_CALLS:
            raise UsageError(f"mpiexec: {len(running)} calls run at once already; at most {MAX_CALLS}")
        if running and (nodes is None or None in running):
            raise UsageError(
                "PLE 0008 plexec must be started sequentially.(nid=own node): calls at the same time need nodes of "
                "their own, by -vcoordfile FILE"
            )
        shared = sorted({node for claimed in running for node in claimed or ()} & (nodes or frozenset()))
        if shared:
            node = ",".join(map(str, shared[0]))
            raise UsageError(f"mpiexec: -vcoordfile: the node ({node}) is used by another mpiexec")
        claim = open(call_folder / _NODES_FILE, "w", encoding="utf-8")  # noqa: SIM115  # open as long as the call runs
        fcntl.flock(claim, fcntl.LOCK_EX)
        json.dump(None if nodes is None else sorted(nodes), claim)
        claim.flush()
        return claim


def _claimed_nodes(file: Path) -> List[Optional[FrozenSet[Coordinate]]]:
    """The nodes of a call that still runs, in a list; an empty list if it has ended."""
    with open(file, encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # locked: its mpiexec runs
            nodes = json.load(stream)
            return [None if nodes is None else frozenset(tuple(node) for node in nodes)]
    return []
