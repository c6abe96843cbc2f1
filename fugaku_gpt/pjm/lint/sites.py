"""Decides for which site a script is written: rules for Fugaku must not apply to jobs of other PJM sites."""

from __future__ import annotations

import fnmatch
import re
from typing import NamedTuple, Optional, Tuple

from fugaku_gpt.pjm.groups import SiteLimits
from fugaku_gpt.pjm.options import KNOB_VALUES, OPTIONS
from fugaku_gpt.pjm.script import PjmScript
from fugaku_gpt.pjm.values import has_placeholder

AUTO = "auto"
FUGAKU = "fugaku"
FX1000 = "fx1000"  # another site with the nodes of Fugaku
ANY = "any"
NO_DIRECTIVE = "no directive"  # why a script without any is of no site
# resources that Fugaku does not have, but Flow, Wisteria, Genkai, ITO, HOKUSAI or the K computer do
FOREIGN_RESOURCES = ("gpu", "vnode", "vnode-core", "vnode-mem", "core-mem")
# Groups and units of FX1000 systems: Flow's Type I subsystem (Nagoya University), Wisteria's Odyssey (The University of
# Tokyo). Their limits are not known here, their nodes are.
_FX1000_UNITS = ("fx",)
_FX1000_GROUPS = ("fx-*", "*-o")
_K_OPTIONS = frozenset(option.name for option in OPTIONS if option.era == "k")
_K_SETUP = "/system/Env_base"  # read by every script of the K computer
# what names an older Fujitsu machine in a script's commands: processors of FX10, FX100 and the K computer
_OLDER_MACHINE = re.compile(r"\bFX100?(?![0-9])|sparc64|HPC_ACE2?\b", re.IGNORECASE)


class SiteChoice(NamedTuple):
    """The site that a script is checked for, and what in the script decided that."""

    site: str
    reason: str


def choose_site(script: PjmScript, limits: SiteLimits) -> SiteChoice:
    """Choose the site by a script's directives: Fugaku, another site with its nodes (FX1000), or any.

    The checks in this order: a resource unit decides; power knobs and ``PJM_LLIO_GFSCACHE`` mean Fugaku; file staging
    and the K computer's set-up file mean another site; a resource group decides; without one, virtual nodes, GPUs and
    ``--omp``, and commands that name an older machine, mean another site; a script with none of these counts as a
    script for Fugaku.
    """
    if not script.directives:
        return SiteChoice(ANY, NO_DIRECTIVE)
    resources = script.resources
    unit = resources.get("rscunit")
    if unit and not has_placeholder(unit):
        return SiteChoice(_site_of(unit, limits.has_unit(unit), _FX1000_UNITS), f"rscunit={unit}")
    mark = _mark_of_fugaku(script)
    if mark:
        return SiteChoice(FUGAKU, mark)
    if has_staging(script) or any(_K_SETUP in line for line in script.lines):
        return SiteChoice(ANY, "file staging, or the set-up of the K computer")
    group = resources.get("rscgrp")
    if group and not has_placeholder(group):
        return SiteChoice(_site_of(group, limits.has_group(group), _FX1000_GROUPS), f"rscgrp={group}")
    foreign = next((key for key in FOREIGN_RESOURCES if key in resources), "--omp" if "omp" in script.options else "")
    older = None if foreign else _older_machine(script)
    if foreign or older:
        return SiteChoice(ANY, foreign or older or "")
    return SiteChoice(FUGAKU, "nothing in it names a site")


def has_staging(script: PjmScript) -> bool:
    """Whether options of the K computer and FX10 are given: file staging, or the option that turns it off."""
    return not _K_OPTIONS.isdisjoint(script.options) or "use-rankdir" in script.mpi


def _site_of(name: str, is_of_fugaku: bool, patterns: Tuple[str, ...]) -> str:
    if is_of_fugaku:
        return FUGAKU
    return FX1000 if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) else ANY


def _mark_of_fugaku(script: PjmScript) -> str:
    """Return what only scripts for Fugaku have; empty if there is nothing of the kind."""
    knob = next((knob for knob in KNOB_VALUES if knob in script.resources), "")
    return knob or next((name for name in script.options.get("environment", {}) if name.startswith("PJM_LLIO_")), "")


def _older_machine(script: PjmScript) -> Optional[str]:
    first = script.body_line or len(script.lines) + 1
    for line in script.lines[first - 1 :]:
        match = _OLDER_MACHINE.search(line)
        if match:
            return f"{match[0]} in its commands"
    return None
