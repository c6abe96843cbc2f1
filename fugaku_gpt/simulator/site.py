"""The rules of the simulated site: resource groups, power knobs, and the texts of refusals.

The limits of the groups are those of the packaged, dated file; on the real machine ``pjacl`` reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Mapping, Optional, Tuple

from fugaku_gpt.machine.fugaku import site_power_knobs
from fugaku_gpt.pjm.groups import GroupLimits, fugaku_limits
from fugaku_gpt.pjm.options import KNOB_VALUES

HOUR_SECONDS = 3600
SYSTEM_NODES = 82944  # largest number of nodes of one job, in any group
DEFAULT_ELAPSE = 60  # seconds, for a job that sets none
UNKNOWN_ELAPSE = 72 * HOUR_SECONDS  # seconds, in a group whose limit is not known
RANGE_EXTRA = 72 * HOUR_SECONDS  # seconds by which a range may exceed the fixed limit
ALLOCATIONS_BY_DEFAULT = ("noncont", "mesh", "torus")
RESOURCE_UNIT = "rscunit_ft01"
UNKNOWN_GROUP = 59999  # the group id that Fugaku names for a job without -g
DEFAULT_PRIORITY = 127


class Refusal(Exception):
    """A submission that ``pjsub`` refuses.

    Attributes:
        code: number of the message.
        text: text of the message, which follows the command's name.
        is_dated: whether it rests on the site's data, which change with time.
    """

    def __init__(self, code: int, text: str, is_dated: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.is_dated = is_dated


@dataclass(frozen=True)
class ResourceGroup:
    """One resource group.

    Attributes:
        min_nodes, max_nodes: limits of the number of nodes of a job.
        default_nodes: number of nodes of a job that sets none.
        max_elapse: upper limit in seconds of a fixed time and of the minimum of a range.
        range_max: upper limit in seconds of the maximum of a range.
        allocations: kinds of node allocation, the default first.
        remark: what a job should know of the group; empty for a group that the site lists.
    """

    name: str
    min_nodes: int
    max_nodes: int
    default_nodes: int
    max_elapse: int
    range_max: int
    allocations: Tuple[str, ...]
    remark: str = ""

    @property
    def is_spot(self) -> bool:
        """Whether its jobs have low priority; the group ``trial`` may use no other kind."""
        return self.name.startswith("spot-")


_FIXED_RESOURCES = {
    "retention_state_acores": (0,),
    "exepjrsh": (1,),
}
_FREE_RESOURCES = ("jobenv", "estimated-power", "nnum_cret")


def find_group(name: Optional[str], unit: Optional[str]) -> ResourceGroup:
    """The resource group of a job, with the packaged limits of Fugaku.

    Raises:
        Refusal: there is no such group, or only interactive jobs may use it.
    """
    limits = fugaku_limits()
    if unit is not None and not limits.has_unit(unit):
        raise Refusal(58, f"rscunit={unit} does not exist.", is_dated=True)
    group = limits.groups.get(name or limits.default_group)
    if group is None and name is not None and limits.report_of(name) is not None:
        group = GroupLimits(name, limits.date)  # seen by users: refusing it would be to know better than they
    if group is None:
        raise Refusal(58, f"rscgrp={name} does not exist.", is_dated=True)
    if group.name in ("int", "spot-int"):
        raise Refusal(70, f"No execute permission: rscgrp={group.name} is for interactive jobs.")
    report = limits.report_of(group.name)
    low = group.min_nodes or 1
    elapse = group.max_elapse or UNKNOWN_ELAPSE
    return ResourceGroup(
        name=group.name,
        min_nodes=low,
        max_nodes=group.max_nodes or SYSTEM_NODES,
        default_nodes=group.default_nodes or low,
        max_elapse=elapse,
        range_max=group.range_max or elapse + RANGE_EXTRA,
        allocations=group.allocations or ALLOCATIONS_BY_DEFAULT,
        remark=f"rscgrp={group.name} is in no list of the site as of {limits.date}; {report} name it" if report else "",
    )


def check_range(item: str, value: int, low: Optional[int], high: Optional[int], is_dated: bool = False) -> None:
    """Check that a value is within its limits.

    Args:
        is_dated: whether the limits are the site's data, and not those of this simulator or of PJM.

    Raises:
        Refusal: it is below (PJM 0054) or above (PJM 0057) them.
    """
    if low is not None and value < low:
        raise Refusal(54, f"{item}={value} is less than the lower limit ({low}).", is_dated)
    if high is not None and value > high:
        raise Refusal(57, f"{item}={value} is greater than the upper limit ({high}).", is_dated)


def knob_defaults(nodes: int) -> Dict[str, int]:
    """Default values of the power knobs in a job of ``nodes`` nodes."""
    return site_power_knobs(nodes)


def custom_resources(requested: Mapping[str, Optional[str]], nodes: int) -> Dict[str, str]:
    """Custom resources of a job, including power knobs with their defaults.

    Raises:
        Refusal: a value is not allowed, or there is no such resource.
    """
    resources: Dict[str, str] = {}
    for name, values in (*KNOB_VALUES.items(), *_FIXED_RESOURCES.items()):
        if name not in requested:
            continue
        text = requested[name] or ""
        if not text.isdecimal():
            raise Refusal(3, f"Invalid argument: {name}={text}.")
        check_range(name, int(text), min(values), max(values))
        if int(text) not in values:
            raise Refusal(76, f"{name}={text} must be one of {','.join(map(str, values))}.")
        resources[name] = text
    for name, value in requested.items():
        if name in _FREE_RESOURCES:
            resources[name] = value or ""
        elif name not in resources:
            raise Refusal(58, f"Custom resource {name} does not exist.")
    for name, default in knob_defaults(nodes).items():
        resources.setdefault(name, str(default))
    if resources["freq"] == "2200" and resources["eco_state"] != "2":
        text = f"eco_state={resources['eco_state']} must be one of 2 with freq=2200."
        raise Refusal(76, text, is_dated=True)
    return resources
