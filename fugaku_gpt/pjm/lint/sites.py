"""Decides for which site a script is written: rules for Fugaku must not apply to jobs of other PJM sites."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Sequence

from fugaku_gpt.pjm.groups import FX1000_NODES, SiteLimits
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
_K_OPTIONS = frozenset(option.name for option in OPTIONS if option.era == "k")
_K_SETUP = "/system/Env_base"  # read by every script of the K computer
# what names an older Fujitsu machine in a script's commands: processors of FX10, FX100 and the K computer
_OLDER_MACHINE = re.compile(r"\bFX100?(?![0-9])|sparc64|HPC_ACE2?\b", re.IGNORECASE)


class SiteChoice(NamedTuple):
    """The rules that a script is checked by, and what in the script decided that.

    ``site``: Fugaku, another site with its nodes (FX1000), or any. ``limits``: those of the site; None if no data file
    is for it.
    """

    site: str
    reason: str
    limits: Optional[SiteLimits] = None


def site_named(name: str, limits: SiteLimits, others: Sequence[SiteLimits]) -> SiteChoice:
    """Return the choice that a user has made: ``fugaku``, ``fx1000``, ``any``, or the name of another site's file."""
    other = next((other for other in others if other.site == name), None)
    if other is not None:
        return SiteChoice(_rules_of(other), "", other)
    return SiteChoice(name, "", limits if name == FUGAKU else None)


def choose_site(script: PjmScript, limits: SiteLimits, others: Sequence[SiteLimits]) -> SiteChoice:
    """Choose the site by a script's directives: Fugaku, another site with its nodes (FX1000), or any.

    Args:
        limits: those of Fugaku.
        others: those of other sites.

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
        return _choice(f"rscunit={unit}", next((site for site in (limits, *others) if site.has_unit(unit)), None))
    mark = _mark_of_fugaku(script)
    if mark:
        return SiteChoice(FUGAKU, mark, limits)
    if has_staging(script) or any(_K_SETUP in line for line in script.lines):
        return SiteChoice(ANY, "file staging, or the set-up of the K computer")
    group = resources.get("rscgrp")
    if group and not has_placeholder(group):
        return _choice(f"rscgrp={group}", next((site for site in (limits, *others) if site.has_group(group)), None))
    foreign = next((key for key in FOREIGN_RESOURCES if key in resources), "--omp" if "omp" in script.options else "")
    older = None if foreign else _older_machine(script)
    if foreign or older:
        return SiteChoice(ANY, foreign or older or "")
    return SiteChoice(FUGAKU, "nothing in it names a site", limits)


def has_staging(script: PjmScript) -> bool:
    """Whether options of the K computer and FX10 are given: file staging, or the option that turns it off."""
    return not _K_OPTIONS.isdisjoint(script.options) or "use-rankdir" in script.mpi


def _choice(reason: str, limits: Optional[SiteLimits]) -> SiteChoice:
    return SiteChoice(ANY if limits is None else _rules_of(limits), reason, limits)


def _rules_of(limits: SiteLimits) -> str:
    """The rules that hold for a site."""
    if limits.site == FUGAKU:
        return FUGAKU
    return FX1000 if limits.nodes == FX1000_NODES else ANY


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
