"""The values that are chosen for the user of a PJM job, and the pair of power knobs that Fugaku refuses."""

from __future__ import annotations

from typing import List, Mapping

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import POWER_KNOBS, NodeConfig
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.jobs.billing import billed_nodes
from fugaku_gpt.machine import fugaku

_PAIR_KEYS = ("freq_mhz", "eco_state")  # each follows the other
_RULES_DATE = "2025-09"  # of the briefing that says which pairs are refused


def choice_notes(config: RunConfig) -> List[str]:
    """Return one line for each value of a PJM job that the user has not set."""
    node, job = config.node, config.job
    notes = [*_clock_notes(node, job.nodes), *_knob_notes(node, job.nodes)]
    billed = billed_nodes(job)
    if billed != job.nodes:
        unit = "x".join(map(str, fugaku.allocation_unit(job.nodes)))
        shape = f"{job.shape}, {job.nodes} nodes" if job.shape else f"{job.nodes} nodes"
        notes.append(f"job.nodes: {shape} are used, {billed} are billed: a torus consists of units of {unit}")
    if not job.elapse:
        notes.append("no job.elapse: the resource group's default holds, which is one minute on Fugaku")
    return notes


def refuse_power_pair(node: NodeConfig) -> None:
    """Refuse clock and eco state together as Fugaku does.

    Raises:
        ConfigError: they are 2200 MHz without eco mode.
    """
    if node.freq_mhz == 2200 and node.eco_state in (0, 1):
        raise ConfigError(
            f"node.eco_state: {node.eco_state}: Fugaku refuses it with node.freq_mhz 2200 "
            f"(as of {_RULES_DATE}); valid: 2 with 2200, 0 or 2 with 2000"
        )


def _clock_notes(node: NodeConfig, nodes: int) -> List[str]:
    knobs = fugaku.power_knobs(node, nodes)
    pipes = "one of its two pipes" if knobs["eco_state"] in fugaku.ONE_PIPE_STATES else "both pipes"
    if node.freq_mhz is None and node.eco_state is None:
        default = fugaku.site_power_knobs(nodes)
        return [
            f"freq and eco_state are not set: {knobs['freq']} MHz with both pipes is written out, {_peak_text(knobs)} "
            f"a node; Fugaku's default, {default['freq']} MHz with one pipe, has {_peak_text(default)}"
        ]
    if node.eco_state is None:
        return [
            f"eco_state is not set: {knobs['eco_state']} is written out, as at {knobs['freq']} MHz; a core has "
            f"{pipes}, {_peak_text(knobs)} a node"
        ]
    if node.freq_mhz is None:
        return [
            f"freq is not set: {knobs['freq']} MHz is written out, as with eco_state {knobs['eco_state']}; a core has "
            f"{pipes}, {_peak_text(knobs)} a node"
        ]
    return []


def _knob_notes(node: NodeConfig, nodes: int) -> List[str]:
    """One line for the other power knobs, which get Fugaku's defaults."""
    values = fugaku.power_knobs(node, nodes)
    chosen = [
        f"{knob.resource}={values[knob.resource]}"
        for knob in POWER_KNOBS
        if knob.name not in _PAIR_KEYS and getattr(node, knob.name) is None
    ]
    notes = [f"not set, Fugaku's defaults are written out: {', '.join(chosen)}"] if chosen else []
    if values["retention_state"] == 1 and nodes > fugaku.RETENTION_LIMIT:
        notes.append(f"node.retention_state=1: is ignored on more than {fugaku.RETENTION_LIMIT} nodes")
    elif values["retention_state"] == 1:
        notes.append("retention_state=1: idle cores sleep, and take 3 ms to wake; OMP_WAIT_POLICY=active keeps them up")
    return notes


def _peak_text(knobs: Mapping[str, int]) -> str:
    return f"{fugaku.peak_flops(knobs['freq'], knobs['eco_state']) / 1e12:.2f} TFLOP/s"
