"""The nodes and node-hours that a job is billed for."""

from __future__ import annotations

from typing import Optional

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import JobConfig
from fugaku_gpt.machine import fugaku
from fugaku_gpt.records.job import bulk_numbers


def billed_nodes(job: JobConfig) -> int:
    """Return the nodes that a job pays for: with PJM, those that Fugaku allocates; otherwise those that it uses."""
    if job.scheduler != "pjm":
        return job.nodes
    from fugaku_gpt.pjm.groups import fugaku_limits

    limits = fugaku_limits()
    group = limits.groups.get(job.resource_group or limits.default_group)
    is_torus = job.allocation == "torus" or (group is not None and group.allocations == ("torus",))
    dims = [int(side) for side in job.shape.split("x")] if job.shape else [job.nodes]
    return fugaku.allocated_nodes(dims, is_torus)


def node_hours(config: RunConfig) -> Optional[float]:
    """Return billed nodes times time limit, over all links of a chain and all sub-jobs; None without a time limit."""
    job = config.job
    if job.elapse is None:
        return None
    return billed_nodes(job) * job.elapse / 3600 * job.chain * max(1, len(bulk_numbers(job.bulk)))
