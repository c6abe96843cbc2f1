"""Decides for which site a script is written: rules for Fugaku must not apply to jobs of other PJM sites."""

from __future__ import annotations

from fugaku_gpt.pjm.groups import SiteLimits
from fugaku_gpt.pjm.options import KNOB_VALUES, OPTIONS
from fugaku_gpt.pjm.script import PjmScript
from fugaku_gpt.pjm.values import has_placeholder

AUTO = "auto"
FUGAKU = "fugaku"
ANY = "any"
# resources that Fugaku does not have, but Flow, Wisteria, Genkai, ITO, HOKUSAI or the K computer do
_FOREIGN_RESOURCES = ("gpu", "vnode", "vnode-core", "vnode-mem", "core-mem")
_K_OPTIONS = frozenset(option.name for option in OPTIONS if option.era == "k")
_K_SETUP = "/system/Env_base"  # read by every script of the K computer


def looks_like_fugaku(script: PjmScript, limits: SiteLimits) -> bool:
    """Whether the directives fit Fugaku.

    The checks in this order: a resource unit decides; power knobs and ``PJM_LLIO_GFSCACHE`` mean Fugaku; virtual nodes,
    GPUs, ``--omp``, file staging and the K computer's set-up file mean another site; a resource group of Fugaku means
    Fugaku, and any other group another site; a script with none of these counts as a script for Fugaku.
    """
    if not script.directives:
        return False
    resources = script.resources
    unit = resources.get("rscunit")
    if unit and not has_placeholder(unit):
        return limits.has_unit(unit)
    if any(knob in resources for knob in KNOB_VALUES):
        return True
    if any(name.startswith("PJM_LLIO_") for name in script.options.get("environment", {})):
        return True
    if has_staging(script) or any(_K_SETUP in line for line in script.lines):
        return False
    if "omp" in script.options or any(key in resources for key in _FOREIGN_RESOURCES):
        return False
    group = resources.get("rscgrp")
    return not group or has_placeholder(group) or limits.has_group(group)


def has_staging(script: PjmScript) -> bool:
    """Whether options of the K computer and FX10 are given: file staging, or the option that turns it off."""
    return not _K_OPTIONS.isdisjoint(script.options) or "use-rankdir" in script.mpi
