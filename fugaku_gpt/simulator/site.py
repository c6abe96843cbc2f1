"""The rules of the simulated site: resource groups, power knobs, and the words of a refusal.

The limits of the groups are those of the packaged, dated file; on the real machine ``pjacl`` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Mapping, Optional, Tuple

from fugaku_gpt.config import NodeConfig
from fugaku_gpt.machine.fugaku import power_knobs
from fugaku_gpt.pjm.groups import fugaku_limits
from fugaku_gpt.pjm.options import KNOB_VALUES

HOUR = 3600
SYSTEM_NODES = 82944  # of one job, in any group
DEFAULT_ELAPSE = 60  # seconds, where a job says nothing
UNKNOWN_ELAPSE = 72 * HOUR  # seconds, in a group whose limit is not known
RANGE_EXTRA = 72 * HOUR  # that a range may go beyond the fixed limit
ALLOCATIONS_BY_DEFAULT = ("noncont", "mesh", "torus")
RESOURCE_UNIT = "rscunit_ft01"
UNKNOWN_GROUP = 59999  # the group id that Fugaku names for a job without -g
DEFAULT_PRIORITY = 127


class Refusal(Exception):
    """A submission that ``pjsub`` refuses.

    Attributes:
        code: number of the message.
        text: after the command's name; None for site text that carries no number.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True)
class ResourceGroup:
    """One resource group.

    Attributes:
        low, high: nodes; ``usual`` where a job asks for none.
        elapse: seconds, upper limit of a fixed time and of a range's minimum.
        elapse_range: seconds, upper limit of a range's maximum.
        allocations: kinds of node allocation, the default first.
    """

    name: str
    low: int
    high: int
    usual: int
    elapse: int
    elapse_range: int
    allocations: Tuple[str, ...]

    @property
    def spot(self) -> bool:
        """Low priority, and the only kind that group ``trial`` may use."""
        return self.name.startswith("spot-")


_OTHER_RESOURCES = {
    "retention_state_acores": (0,),
    "exepjrsh": (1,),
}
_FREE_RESOURCES = ("jobenv", "estimated-power", "nnum_cret")


def find_group(name: Optional[str], unit: Optional[str]) -> ResourceGroup:
    """The group that a job goes to, as the packaged limits of Fugaku have it.

    Raises:
        Refusal: there is none of that name, or only interactive jobs may use it.
    """
    limits = fugaku_limits()
    if unit is not None and not limits.owns_unit(unit):
        raise Refusal(58, f"rscunit={unit} does not exist.")
    chosen = limits.groups.get(name or limits.default_group)
    if chosen is None:
        raise Refusal(58, f"rscgrp={name} does not exist.")
    if chosen.name in ("int", "spot-int"):
        raise Refusal(70, f"No execute permission: rscgrp={chosen.name} is for interactive jobs.")
    low = chosen.min_nodes or 1
    elapse = chosen.max_elapse or UNKNOWN_ELAPSE
    return ResourceGroup(
        name=chosen.name,
        low=low,
        high=chosen.max_nodes or SYSTEM_NODES,
        usual=chosen.default_nodes or low,
        elapse=elapse,
        elapse_range=chosen.range_max or elapse + RANGE_EXTRA,
        allocations=chosen.allocations or ALLOCATIONS_BY_DEFAULT,
    )


def check_range(item: str, value: int, low: Optional[int], high: Optional[int]) -> None:
    """Refuse what is below or above a limit, in PJM's words.

    Raises:
        Refusal: with PJM 0054 or 0057.
    """
    if low is not None and value < low:
        raise Refusal(54, f"{item}={value} is less than the lower limit ({low}).")
    if high is not None and value > high:
        raise Refusal(57, f"{item}={value} is greater than the upper limit ({high}).")


def knob_defaults(nodes: int) -> Dict[str, int]:
    """Values of the knobs that a job of so many nodes does not name."""
    return power_knobs(NodeConfig(), nodes)


def custom_resources(given: Mapping[str, Optional[str]], nodes: int) -> Dict[str, str]:
    """Custom resources of a job, power knobs with their defaults included.

    Raises:
        Refusal: a value is not allowed, or there is no such resource.
    """
    found: Dict[str, str] = {}
    for name, values in (*KNOB_VALUES.items(), *_OTHER_RESOURCES.items()):
        if name not in given:
            continue
        text = given[name] or ""
        if not text.isdigit():
            raise Refusal(3, f"Invalid argument: {name}={text}.")
        check_range(name, int(text), min(values), max(values))
        if int(text) not in values:
            raise Refusal(76, f"{name}={text} must be one of {','.join(map(str, values))}.")
        found[name] = text
    for name, value in given.items():
        if name in _FREE_RESOURCES:
            found[name] = value or ""
        elif name not in found:
            raise Refusal(58, f"Custom resource {name} does not exist.")
    for name, default in knob_defaults(nodes).items():
        found.setdefault(name, str(default))
    if found["freq"] == "2200" and found["eco_state"] != "2":
        raise Refusal(76, f"eco_state={found['eco_state']} must be one of 2 with freq=2200.")
    return found
