"""Seconds of an iteration by component, from the counted work and a machine's constants.

A stage's layers cost their matrix products at an efficiency, memory-bound work at an effective bandwidth, a fixed time
for each pass, and the sums over tensor-parallel ranks. The last stage has the logits in addition, the first the
embedding's gradient. 1F1B takes m - 1 slots of its slowest stage and one walk through all stages. Sums over replicas,
the optimiser and a constant occur once per iteration.

Every machine's file has the :data:`TIME_CONSTANTS`, and some have others: the effect of a missing constant is ignored.
"""

from __future__ import annotations

from typing import Dict, Mapping

import numpy as np

from fugaku_gpt.planner.tables.work import Work

TIME_COMPONENTS = ("compute", "memory_bound", "tensor_parallel", "pipeline", "data_parallel", "optimiser", "fixed")
TIME_CONSTANTS = (
    "matrix_efficiency",
    "bandwidth",
    "softmax",
    "pass_overhead",
    "weight_bytes",
    "logit_bytes",
    "tensor_bandwidth",
    "tensor_latency",
    "pipeline_bandwidth",
    "replica_bandwidth",
    "fixed",
)
FULL_FROM = 0.9  # share of memory above which an allocator has to search; the slowdown reaches memory_pressure at 1
_OPTIMISER_BYTES = 28  # per parameter in float32: read gradient, parameter and two moments, write the last three


def seconds_by_component(
    work: Work, constants: Mapping[str, float], facts: Mapping[str, float]
) -> Dict[str, "np.ndarray"]:
    """Seconds [N] per iteration by component, which add up to the iteration.

    ``compute``, ``memory_bound`` and ``tensor_parallel`` are for the micro-batches of the slowest stage; ``pipeline``
    is the time in which stages wait for each other and send.
    """
    c = constants
    item = facts["item_bytes"]
    clock = np.where(work.clock_ghz > 0, work.clock_ghz, facts["base_clock_ghz"]) / facts["base_clock_ghz"]
    share = np.maximum(1.0, work.ranks_per_node / facts["devices_per_node"])  # ranks on one device
    flops = facts["peak_flops"] * clock / share * c["matrix_efficiency"]
    attention_flops = flops * c.get("attention_efficiency", c["matrix_efficiency"]) / c["matrix_efficiency"]
    build = np.array([c.get(f"build_{build}", 1.0) for build in work.builds])
    tcmalloc_share = c.get("tcmalloc", 1.0)  # share of memory-bound time that is not spent on allocation
    bandwidth = c["bandwidth"] / share * clock ** c.get("clock_power", 1.0) / build
    bandwidth = bandwidth / (
        tcmalloc_share / _ranks_gain(share, c, facts) + np.where(work.tcmalloc > 0, 0.0, (1 - tcmalloc_share) / share)
    )
    passes = 3 + c.get("recompute_passes", 1.0) * work.recompute

    scores = c["softmax"] * work.pass_scores + c.get("unaligned", 0.0) * work.unaligned
    layer_compute = work.layer_flops / flops + work.layer_attention_flops / attention_flops
    layer_memory = passes * item * (work.pass_elements + scores) / bandwidth
    layer_memory = (
        layer_memory + passes * c["pass_overhead"] * build * np.where(work.tcmalloc > 0, tcmalloc_share, 1.0) / clock
    )
    layer_memory = layer_memory + c["weight_bytes"] * work.layer_weights / bandwidth
    layer_tensor = item * work.reduced_elements / c["tensor_bandwidth"] + work.reductions * c["tensor_latency"]

    single_stage = work.stages == 1
    embedding = c["weight_bytes"] * work.embedding_weights / bandwidth
    head_compute = work.head_flops / flops
    head_memory = c["logit_bytes"] * work.logits / bandwidth + np.where(single_stage, 0.0, embedding)
    # all messages share the links between neighbouring stages, which are t * d ranks from each other in the tables
    hop_factor = np.maximum(1.0, work.stage_stride / work.ranks_per_node) ** c.get("pipeline_distance", 0.0)
    send = np.where(single_stage, 0.0, 2 * item * work.hidden_elements * hop_factor / c["pipeline_bandwidth"])

    layers = work.layers_per_stage
    middle = layers * (layer_compute + layer_memory + layer_tensor)
    head = head_compute + head_memory
    first, last = middle + embedding, middle + head
    slowest = np.where(single_stage, middle + embedding + head, np.maximum(first, last))
    walk = np.where(single_stage, slowest, first + last + (work.stages - 2) * middle)
    m = work.micro_batches
    v = work.chunks  # interleaving: 1 / v of the bubble for v times the messages
    # the slowest stage is busy except for 1 / v of the walk to and from it; or, with fewer micro-batches than stages,
    # it waits in each round for the first micro-batch, which passes through all chunks one after the other
    pipelined = np.maximum(m * slowest + (walk - slowest) / v, walk + (m - 1) * slowest / v)
    pipelined = pipelined + ((m - 1) * v + v * work.stages - 1) * send

    has_head = single_stage | (last >= first)
    compute = m * (layers * layer_compute + np.where(has_head, head_compute, 0.0))
    tensor = m * layers * layer_tensor
    memory = m * slowest - compute - tensor
    parameters = layers * work.layer_weights + work.embedding_weights
    stepped = parameters / np.where(work.sharded > 0, work.replicas, 1.0)
    slowdown = np.where(work.retention_off > 0, c.get("retention_off", 1.0), 1.0)
    slowdown = slowdown * (
        1 + c.get("memory_pressure", 0.0) * np.clip((work.fullness - FULL_FROM) / (1 - FULL_FROM), 0, 1)
    )
    replicas = np.where(work.replicas > 1, item * work.gradient_elements / c["replica_bandwidth"], 0.0)
    replicas = replicas + c.get("replica_latency", 0.0) * np.log2(work.replicas)
    replicas = replicas + np.where(work.tcmalloc > 0, c.get("tcmalloc_step", 0.0), 0.0) * 2 * (work.replicas - 1)
    return {
        "compute": compute * slowdown,
        "memory_bound": memory * slowdown,
        "tensor_parallel": tensor * slowdown,
        "pipeline": np.where(single_stage, 0.0, pipelined - m * slowest) * slowdown,
        "data_parallel": replicas,
        "optimiser": _OPTIMISER_BYTES * stepped / bandwidth,
        "fixed": c["fixed"] + np.zeros_like(m),
    }


def iteration_seconds(work: Work, constants: Mapping[str, float], facts: Mapping[str, float]) -> "np.ndarray":
    """Seconds [N] per iteration."""
    components = seconds_by_component(work, constants, facts)
    total: "np.ndarray" = np.sum([components[name] for name in TIME_COMPONENTS], axis=0)
    return total


def _ranks_gain(share: "np.ndarray", constants: Mapping[str, float], facts: Mapping[str, float]) -> "np.ndarray":
    """Factor [N] on a node's bandwidth with ``share`` ranks on it, because more of each rank's memory is then local."""
    groups = facts.get("memory_groups", 1.0)
    if groups <= 1:
        return np.ones_like(share)
    locality = np.minimum(np.log(share) / np.log(groups), 1.0)  # there is one rank at least
    gain: "np.ndarray" = constants.get("ranks_gain", 1.0) ** locality
    return gain
