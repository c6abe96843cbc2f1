"""Rules for the threads of each process (PJM062 and PJM067)."""

from __future__ import annotations

from typing import Iterator

from fugaku_gpt.machine.fugaku import CORES
from fugaku_gpt.pjm.lint.facts import Facts
from fugaku_gpt.pjm.lint.registry import WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FX1000


@rule(
    "PJM062",
    WARNING,
    "threads and processes do not fill the 48 cores",
    why="More threads than cores take turns; fewer leave cores idle that are billed. Cores may be left idle on "
    "purpose, for more memory bandwidth or memory for each thread.",
    fix="make OMP_NUM_THREADS times the processes on each node 48",
    source="Fugaku user guide 1.52, JobExecution/SampleScripts; End-user's Guide J2UL-2534, 2.3.6",
    site=FX1000,
)
def threads(facts: Facts) -> Iterator[Hit]:
    omp_threads = facts.sole_number("OMP_NUM_THREADS")
    ranks_per_node = facts.ranks_per_node
    if omp_threads is None or not ranks_per_node or ranks_per_node > CORES:
        return
    count, setting = omp_threads
    nodes, ranks = facts.nodes, facts.ranks
    for launch in facts.launches:
        if launch.count_word is not None and launch.processes != ranks:
            return  # PJM065 reports it, or the number is unknown
    if facts.proc and nodes and facts.proc < nodes * ranks_per_node:
        return  # some nodes have no process in any case
    total = count * ranks_per_node
    processes = "1 process" if ranks_per_node == 1 else f"{ranks_per_node} processes"
    if total > CORES:
        message = f"{count} threads of {processes} on each node are {total}, more than {CORES} cores"
        yield Hit(setting.line, message, setting.column)
    elif total < CORES and count > 0:
        idle = CORES - total
        message = f"{count} threads of {processes} on each node use {total} of {CORES} cores; {idle} are idle"
        yield Hit(setting.line, message, setting.column)


@rule(
    "PJM067",
    WARNING,
    "PARALLEL and OMP_NUM_THREADS differ",
    why="Fujitsu's OpenMP takes the smaller of the two and warns (jwe1042i-w).",
    fix="set both to the same number",
    source="Fugaku user guide 1.52, JobExecution/SampleScripts; Fujitsu's language guides, jwe1042i-w",
    site=FX1000,
)
def parallel(facts: Facts) -> Iterator[Hit]:
    parallel_count, omp_count = facts.sole_number("PARALLEL"), facts.sole_number("OMP_NUM_THREADS")
    if parallel_count and omp_count and parallel_count[0] != omp_count[0]:
        setting = max(parallel_count[1], omp_count[1], key=lambda count_and_assignment: count_and_assignment.line)
        yield Hit(
            setting.line, f"PARALLEL is {parallel_count[0]}, and OMP_NUM_THREADS is {omp_count[0]}", setting.column
        )
