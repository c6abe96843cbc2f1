"""Limits of a site's resource groups: a dated data file, which a user can refresh from what ``pjacl`` prints.

Limits are data, not rules: they change within a year and differ between projects. Each group therefore carries the
date of its limits, and every message that uses a limit shows that date.
"""

from __future__ import annotations

import datetime
import fnmatch
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from fugaku_gpt.config.tree import parse_yaml, plain_values
from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.limits import YAML_TEXT
from fugaku_gpt.pjm.values import ALLOCATIONS, format_elapse, parse_count, parse_elapse

FUGAKU = Path(__file__).parent / "sites" / "fugaku.yaml"
_GROUP_KEYS = (
    "nodes", "default_nodes", "elapse", "elapse_by_nodes", "range_max", "allocations", "interactive", "date",
)  # fmt: skip
_KEYS = (
    "site", "title", "nodes", "date", "source", "fresh_days", "default_group", "resource_units", "group_patterns",
    "volumes", "groups", "reported", "retired",
)  # fmt: skip
FX1000_NODES, OTHER_NODES = "fx1000", "any"
_FRESH_DAYS = 365


@dataclass(frozen=True)
class GroupLimits:
    """Limits of a resource group; None where a limit is unknown.

    Attributes:
        date: date of these limits, ``YYYY-MM-DD``.
        min_nodes, max_nodes: nodes of one job.
        default_nodes: nodes of a job that asks for none.
        min_elapse, max_elapse: bounds in seconds for a fixed time limit and for the lower end of a range.
        elapse_by_nodes: pairs of a number of nodes and the longest time limit in seconds of jobs up to that size, in
            rising order; empty where it does not depend on the size.
        range_max: upper bound in seconds for the upper end of a range.
        allocations: supported ways of allocating nodes; empty where unknown.
        interactive: whether the group takes interactive jobs alone.
    """

    name: str
    date: str
    min_nodes: Optional[int] = None
    max_nodes: Optional[int] = None
    default_nodes: Optional[int] = None
    min_elapse: Optional[int] = None
    max_elapse: Optional[int] = None
    range_max: Optional[int] = None
    allocations: Tuple[str, ...] = ()
    interactive: bool = False
    elapse_by_nodes: Tuple[Tuple[int, int], ...] = ()

    def longest(self, nodes: Optional[int]) -> Optional[int]:
        """Return the longest time limit in seconds of a job of this many nodes; None if it is not known."""
        fitting = [seconds for size, seconds in self.elapse_by_nodes if nodes is not None and nodes <= size]
        return fitting[0] if fitting else self.max_elapse


@dataclass(frozen=True)
class SiteLimits:
    """The resource groups of a site and their limits.

    Attributes:
        site: name of the site, as in ``--site``.
        title: name of the site in messages.
        nodes: ``fx1000`` for nodes such as Fugaku's, else ``any``.
        date: date of the file.
        group_patterns: patterns of names of groups by which a script is recognised as one for this site.
        fresh_days: age in days up to which limits count; what rests on older ones is advice.
        default_group: group of a job that names none.
        resource_units: patterns of the site's ``rscunit`` names.
        volumes: second-layer volumes.
        reported: pattern of the name of a group that the site does not list → who has seen it.
        retired: pattern of a retired group's name → its successor.
    """

    site: str
    date: str
    source: str
    default_group: str
    resource_units: Tuple[str, ...] = ()
    volumes: Tuple[str, ...] = ()
    groups: Mapping[str, GroupLimits] = field(default_factory=dict)
    reported: Mapping[str, str] = field(default_factory=dict)
    retired: Mapping[str, str] = field(default_factory=dict)
    fresh_days: int = _FRESH_DAYS
    title: str = ""
    nodes: str = FX1000_NODES
    group_patterns: Tuple[str, ...] = ()

    @property
    def has_limits(self) -> bool:
        """Whether the limits of any group are known."""
        return any(group.max_nodes or group.max_elapse for group in self.groups.values())

    def successor(self, group: str) -> Optional[str]:
        """Return the successor of a retired group; None for any other group."""
        return None if group in self.groups else _matching_value(self.retired, group)

    def report_of(self, group: str) -> Optional[str]:
        """Return who has seen a group that the site does not list; None for any other group."""
        return None if group in self.groups else _matching_value(self.reported, group)

    def is_stale(self, date: str, today: datetime.date) -> bool:
        """Whether limits of a date, ``YYYY-MM-DD``, are too old on a day to rest a finding on."""
        return (today - datetime.date.fromisoformat(date)).days > self.fresh_days

    def groups_for(self, nodes: Optional[int]) -> List[str]:
        """Return the names of the groups that are known to take jobs of this many nodes; empty if it is not known."""
        return [
            group.name
            for group in self.groups.values()
            if nodes is not None and group.max_nodes and (group.min_nodes or 1) <= nodes <= group.max_nodes
        ]

    def has_group(self, group: str) -> bool:
        """Whether this is, or was, a group of the site."""
        if group in self.groups or any(fnmatch.fnmatchcase(group, pattern) for pattern in self.group_patterns):
            return True
        return self.report_of(group) is not None or self.successor(group) is not None

    def has_unit(self, unit: str) -> bool:
        """Whether this is a resource unit of the site."""
        return any(fnmatch.fnmatchcase(unit, pattern) for pattern in self.resource_units)


def _matching_value(values: Mapping[str, str], name: str) -> Optional[str]:
    """Return the value of the first pattern that a name matches."""
    return next((value for pattern, value in values.items() if fnmatch.fnmatchcase(name, pattern)), None)


_loaded: Dict[Path, SiteLimits] = {}


def fugaku_limits() -> SiteLimits:
    """Return the limits of Fugaku that come with the package."""
    if FUGAKU not in _loaded:
        _loaded[FUGAKU] = load_limits(FUGAKU)
    return _loaded[FUGAKU]


def other_sites() -> List[SiteLimits]:
    """Return the limits of other sites that come with the package, by their names."""
    for path in sorted(FUGAKU.parent.glob("*.yaml")):
        if path not in _loaded:
            _loaded[path] = load_limits(path)
    return [limits for path, limits in sorted(_loaded.items()) if path != FUGAKU]


def load_limits(path: Path) -> SiteLimits:
    """Read a limits file.

    Raises:
        UsageError: the file cannot be read, or a key or value is not valid.
    """
    try:
        text = read_text(path, YAML_TEXT)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a limits file: {error}") from None
    return parse_limits(text, str(path))


def parse_limits(text: str, where: str) -> SiteLimits:
    """Parse the text of a limits file, as :func:`load_limits` does; errors name ``where``."""
    # every scalar as text: YAML itself reads 72:00:00 as a number and `no` as false
    top = _mapping(plain_values(parse_yaml(text, where)), where, "the file")
    _check_keys(top, _KEYS, where)
    date = _date(top.get("date"), where, "date")
    groups = {
        name: _read_group(name, _mapping(values, where, f"groups.{name}"), date, where)
        for name, values in _mapping(top.get("groups", {}), where, "groups").items()
    }
    reported, retired = (_mapping(top.get(key, {}), where, key) for key in ("reported", "retired"))
    fresh_days = top.get("fresh_days")
    return SiteLimits(
        site=_text(top.get("site", "fugaku"), where, "site"),
        date=date,
        source=_text(top.get("source", ""), where, "source"),
        default_group=_text(top.get("default_group", ""), where, "default_group"),
        resource_units=_texts(top.get("resource_units", []), where, "resource_units"),
        volumes=_texts(top.get("volumes", []), where, "volumes"),
        title=_text(top.get("title", ""), where, "title"),
        nodes=_one_of((FX1000_NODES, OTHER_NODES), top.get("nodes", FX1000_NODES), where, "nodes"),
        group_patterns=_texts(top.get("group_patterns", []), where, "group_patterns"),
        groups=groups,
        reported={name: _text(value, where, f"reported.{name}") for name, value in reported.items()},
        retired={name: _text(value, where, f"retired.{name}") for name, value in retired.items()},
        fresh_days=_FRESH_DAYS if fresh_days is None else _count(fresh_days, where, "fresh_days"),
    )


def format_limits(limits: SiteLimits) -> str:
    """Return the text of a limits file, which :func:`parse_limits` reads back."""
    import yaml

    top: Dict[str, Any] = {
        "site": limits.site,
        "title": limits.title,
        "nodes": limits.nodes,
        "date": limits.date,
        "source": limits.source,
        "fresh_days": str(limits.fresh_days),
        "default_group": limits.default_group,
        "resource_units": list(limits.resource_units),
        "group_patterns": list(limits.group_patterns),
        "volumes": list(limits.volumes),
        "groups": {name: _group_data(group) for name, group in limits.groups.items()},
        "reported": dict(limits.reported),
        "retired": dict(limits.retired),
    }
    return yaml.safe_dump(top, sort_keys=False, allow_unicode=True, width=200)


def with_groups(limits: SiteLimits, groups: Iterable[GroupLimits], source: str) -> SiteLimits:
    """Return ``limits`` with ``groups`` added or updated.

    A limit that is unknown in a new group keeps its previous value. The site's date becomes the newest of the dates.
    """
    merged = dict(limits.groups)
    dates = [limits.date]
    for group in groups:
        updates = {key: value for key, value in vars(group).items() if value not in (None, ())}
        merged[group.name] = replace(merged.get(group.name, group), **updates)
        dates.append(group.date)
    return replace(limits, groups=merged, date=max(dates), source=f"{source}; {limits.source}".rstrip("; "))


def _read_group(name: str, values: Mapping[str, Any], date: str, where: str) -> GroupLimits:
    prefix = f"groups.{name}"
    _check_keys(values, _GROUP_KEYS, where, prefix)
    nodes = _number_range(values.get("nodes"), where, f"{prefix}.nodes")
    elapse_text = values.get("elapse")
    shortest: Optional[int] = None
    longest: Optional[int] = None
    if elapse_text is not None:
        first, dash, last = _text(elapse_text, where, f"{prefix}.elapse").partition("-")
        shortest = _seconds(first, where, f"{prefix}.elapse") if dash else None
        longest = _seconds(last if dash else first, where, f"{prefix}.elapse")
    default = values.get("default_nodes")
    range_max = values.get("range_max")
    allocations = tuple(_text(values.get("allocations", ""), where, f"{prefix}.allocations").split())
    invalid = [word for word in allocations if word not in ALLOCATIONS]
    if invalid:
        raise UsageError(f"{where}: {prefix}.allocations: {invalid[0]} is none of {', '.join(ALLOCATIONS)}")
    return GroupLimits(
        name=name,
        date=_date(values.get("date", date), where, f"{prefix}.date"),
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        default_nodes=None if default is None else _count(default, where, f"{prefix}.default_nodes"),
        min_elapse=shortest,
        max_elapse=longest,
        range_max=None if range_max is None else _seconds(range_max, where, f"{prefix}.range_max"),
        allocations=allocations,
        interactive=_is_yes(values.get("interactive", "no"), where, f"{prefix}.interactive"),
        elapse_by_nodes=_elapse_by_nodes(values.get("elapse_by_nodes", ""), where, f"{prefix}.elapse_by_nodes"),
    )


def _group_data(group: GroupLimits) -> Dict[str, str]:
    data: Dict[str, str] = {}
    if group.max_nodes is not None:
        data["nodes"] = f"{group.min_nodes or 1}-{group.max_nodes}"
    if group.default_nodes is not None:
        data["default_nodes"] = str(group.default_nodes)
    if group.max_elapse is not None:
        start = "" if group.min_elapse is None else format_elapse(group.min_elapse) + "-"
        data["elapse"] = start + format_elapse(group.max_elapse)
    if group.elapse_by_nodes:
        data["elapse_by_nodes"] = ", ".join(
            f"{size} {format_elapse(seconds)}" for size, seconds in group.elapse_by_nodes
        )
    if group.range_max is not None:
        data["range_max"] = format_elapse(group.range_max)
    if group.allocations:
        data["allocations"] = " ".join(group.allocations)
    if group.interactive:
        data["interactive"] = "yes"
    data["date"] = group.date
    return data


def _elapse_by_nodes(value: Any, where: str, key: str) -> Tuple[Tuple[int, int], ...]:
    pairs: List[Tuple[int, int]] = []
    for part in filter(None, (text.strip() for text in _text(value, where, key).split(","))):
        size, _, elapse = part.partition(" ")
        pairs.append((_count(size, where, key), _seconds(elapse, where, key)))
    return tuple(sorted(pairs))


def _one_of(choices: Tuple[str, ...], value: Any, where: str, key: str) -> str:
    text = _text(value, where, key)
    if text not in choices:
        raise UsageError(f"{where}: {key}: {text[:40]!r} is none of {', '.join(choices)}")
    return text


def _mapping(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: {key}: expected keys with values")
    return value


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key}: expected a text")
    return value


def _texts(value: Any, where: str, key: str) -> Tuple[str, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: {key}: expected a list of texts")
    return tuple(_text(item, where, key) for item in value)


def _check_keys(values: Mapping[str, Any], valid_keys: Tuple[str, ...], where: str, prefix: str = "") -> None:
    for key in values:
        if key not in valid_keys:
            raise UsageError(
                f"{where}: unknown key {prefix + '.' if prefix else ''}{key}; known are {', '.join(valid_keys)}"
            )


def _date(value: Any, where: str, key: str) -> str:
    text = _text(value, where, key) if value is not None else ""
    try:
        datetime.datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise UsageError(f"{where}: {key}: expected a date such as 2026-03-26, not {text[:40]!r}") from None
    return text


def _is_yes(value: Any, where: str, key: str) -> bool:
    text = _text(value, where, key)
    if text not in ("yes", "no"):
        raise UsageError(f"{where}: {key}: expected yes or no, not {text[:40]!r}")
    return text == "yes"


def _count(value: Any, where: str, key: str) -> int:
    try:
        return parse_count(_text(value, where, key))
    except ValueError as error:
        raise UsageError(f"{where}: {key}: {error}") from None


def _number_range(value: Any, where: str, key: str) -> Tuple[Optional[int], Optional[int]]:
    if value is None:
        return None, None
    first, dash, last = _text(value, where, key).partition("-")
    numbers = _count(first, where, key), _count(last if dash else first, where, key)
    if numbers[0] > numbers[1]:
        raise UsageError(f"{where}: {key}: {value} starts above its end")
    return numbers


def _seconds(value: Any, where: str, key: str) -> int:
    try:
        elapse = parse_elapse(_text(value, where, key))
    except ValueError as error:
        raise UsageError(f"{where}: {key}: {error}") from None
    if elapse.minimum is None or elapse.is_range:
        raise UsageError(f"{where}: {key}: expected H:MM:SS")
    return elapse.minimum
