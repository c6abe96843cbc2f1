"""The ``.stats`` file that ``pjsub -s`` and ``-S`` leave beside a job's output, as data.

Lines are `` KEY : value``; the site chooses the keys and their order. ``-`` and an empty value mean that a value was
not measured. Energies are in Wh and powers in W, summed over the job's nodes and sampled once a minute: for a shorter
job they are meaningless.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.limits import STATISTICS
from fugaku_gpt.pjm.pjstat import clean_value, parse_integer, parse_seconds
from fugaku_gpt.pjm.values import UNLIMITED, parse_shape
from fugaku_gpt.records.accounting import SAMPLING_SECONDS

MEASURED = "MEASURED"  # energy that the nodes drew
IDEAL = "IDEAL"  # a normalised estimate; differs by up to 40 %
_JOB_TITLE = "JOB STATISTICAL INFORMATION"
_NODE_TITLE = "NODE STATISTICAL INFORMATION"
_LINE_LENGTH = 65536  # characters of a line that are parsed
_JOULES = {"wh": 3600.0, "kwh": 3.6e6, "mwh": 3.6e9, "j": 1.0, "kj": 1e3, "mj": 1e6}
_WATTS = {"w": 1.0, "kw": 1e3, "mw": 1e6}
_QUANTITY = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)[ \t]*([A-Za-z]*)", re.ASCII)
_BYTES_IN_BRACKETS = re.compile(r"\((\d{1,20})\)", re.ASCII)
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)[ \t]*([KMGTP])?(i)?B?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_KNOB_KEY = re.compile(r"([a-z][a-z0-9_-]*) \((REQUIRE|ALLOC|USE)\)")  # PJM's own keys are in capitals
_RULE = re.compile(r"[ \t]*-{5,}[ \t]*")


@dataclass(frozen=True)
class NodeCount:
    """``NODE NUM``, such as ``16:4x4:noncont``.

    Attributes:
        count: number of nodes.
        shape: nodes along each axis; empty if not given.
        allocation: ``torus``, ``mesh``, ``noncont`` or empty.
    """

    count: int
    shape: Tuple[int, ...] = ()
    allocation: str = ""


@dataclass(frozen=True)
class KnobStatistics:
    """A custom resource, such as ``freq``: the values requested, granted and used, as text; None if not given."""

    require: Optional[str] = None
    alloc: Optional[str] = None
    use: Optional[str] = None


@dataclass(frozen=True)
class JobStatistics:
    """Statistics of one job or sub-job. Values that were not measured are None.

    Attributes:
        state: PJM's state, such as ``EXT``.
        exit_code, signal, code: exit code and signal of the script, and PJM code (see ``codes.ending_of``).
        group: resource group.
        elapsed_seconds, elapse_limit_seconds: run time and time limit of the job.
        nodes_required, nodes_allocated, nodes_used: node counts; the allocated nodes are billed.
        energy_joules, power_watts: ``MEASURED`` and ``IDEAL`` values of all nodes, as in the file; see
            ``is_energy_usable``.
        is_energy_usable: whether the job was long enough for the sampling interval.
        capping_date: when power capping lowered the clock.
        max_memory_bytes: largest memory use of a node.
        knobs: custom resources by name.
        values: all keys and values; None for ``-`` and an empty value.
        nodes: with ``-S``, one mapping for each node.
    """

    job_id: str = ""
    job_name: str = ""
    state: str = ""
    exit_code: Optional[int] = None
    signal: Optional[int] = None
    code: Optional[int] = None
    reason: str = ""
    group: str = ""
    elapsed_seconds: Optional[int] = None
    elapse_limit_seconds: Optional[int] = None
    nodes_required: Optional[NodeCount] = None
    nodes_allocated: Optional[NodeCount] = None
    nodes_used: Optional[NodeCount] = None
    energy_joules: Mapping[str, float] = field(default_factory=dict)
    power_watts: Mapping[str, float] = field(default_factory=dict)
    is_energy_usable: bool = False
    capping_date: Optional[str] = None
    max_memory_bytes: Optional[int] = None
    knobs: Mapping[str, KnobStatistics] = field(default_factory=dict)
    values: Mapping[str, Optional[str]] = field(default_factory=dict)
    nodes: Tuple[Mapping[str, Optional[str]], ...] = ()

    @property
    def measured_joules(self) -> Optional[float]:
        """Energy that the job's nodes drew; None if unknown, or if the job was too short."""
        return self.energy_joules.get(MEASURED) if self.is_energy_usable else None

    @property
    def measured_watts(self) -> Optional[float]:
        """Average power of all nodes of the job; None if unknown, or if the job was too short."""
        return self.power_watts.get(MEASURED) if self.is_energy_usable else None


def read_stats_file(path: Path) -> List[JobStatistics]:
    """Parse a file with :func:`parse_stats`; a job without an id gets that of the file name, ``<name>.<id>.stats``.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        jobs = parse_stats(read_bytes(path, STATISTICS).decode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return [job if job.job_id else replace(job, job_id=path.stem.rpartition(".")[2]) for job in jobs]


def parse_stats(text: str) -> List[JobStatistics]:
    """Return the jobs of a statistics file: one, or the sub-jobs of a bulk or step job.

    Never raises; a damaged line is skipped, and a text without any key gives no job.
    """
    jobs: List[Dict[str, Optional[str]]] = []
    nodes: List[List[Dict[str, Optional[str]]]] = []
    in_node_section = False
    starts_record = True  # the next key begins a new job or node
    for raw in text.split("\n"):
        line = raw.rstrip("\r")[:_LINE_LENGTH]
        title = line.strip(" \t[]").upper()
        if title in (_JOB_TITLE, _NODE_TITLE) or _RULE.fullmatch(line):
            in_node_section = title == _NODE_TITLE or (in_node_section and title != _JOB_TITLE)
            starts_record = starts_record or in_node_section or title == _JOB_TITLE
            continue
        key, colon, value = line.partition(" :")
        name = " ".join(key.split())
        if not colon or not name:
            continue
        if not in_node_section:
            if starts_record or not jobs or (name == "JOB ID" and name in jobs[-1]):
                jobs.append({})
                nodes.append([])
            jobs[-1][name] = clean_value(value)
        else:
            if not jobs:  # the job's own section is missing
                jobs.append({})
                nodes.append([])
            if starts_record or not nodes[-1] or name in nodes[-1][-1]:
                nodes[-1].append({})
            nodes[-1][-1][name] = clean_value(value)
        starts_record = False
    return [_statistics(values, tuple(job_nodes)) for values, job_nodes in zip(jobs, nodes)]


def _statistics(values: Dict[str, Optional[str]], nodes: Tuple[Mapping[str, Optional[str]], ...]) -> JobStatistics:
    elapsed = parse_seconds(values.get("ELAPSE TIME (USE)") or "")
    return JobStatistics(
        job_id=values.get("JOB ID") or "",
        job_name=values.get("JOB NAME") or "",
        state=values.get("STATE") or "",
        exit_code=parse_integer(values.get("EXIT CODE")),
        signal=parse_integer(values.get("SIGNAL NO")) or None,  # 0 means that there was none
        code=parse_integer(values.get("PJM CODE")),
        reason=values.get("REASON") or "",
        group=values.get("RESOURCE GROUP") or "",
        elapsed_seconds=elapsed,
        elapse_limit_seconds=parse_seconds(values.get("ELAPSE TIME (LIMIT)") or ""),
        nodes_required=_node_count(values.get("NODE NUM (REQUIRE)")),
        nodes_allocated=_node_count(values.get("NODE NUM (ALLOC)")),
        nodes_used=_node_count(values.get("NODE NUM (USE)")),
        energy_joules=_quantities(values, "ENERGY CONSUMPTION OF NODE", _JOULES, "wh"),
        power_watts=_quantities(values, "AVG POWER CONSUMPTION OF NODE", _WATTS, "w"),
        is_energy_usable=elapsed is not None and elapsed >= SAMPLING_SECONDS,
        capping_date=values.get("POWER CAPPING DATE"),
        max_memory_bytes=_bytes(values.get("MAX MEMORY SIZE (USE)")),
        knobs=_knobs(values),
        values=values,
        nodes=nodes,
    )


def _node_count(text: Optional[str]) -> Optional[NodeCount]:
    if text is None:
        return None
    count, *rest = text.split(":")
    number = parse_integer(count)
    if number is None or number < 0:
        return None
    shape: Tuple[int, ...] = ()
    allocation = ""
    for part in rest:
        if part[:1].isdecimal():
            try:
                shape = parse_shape(part)
            except ValueError:
                continue
        elif not allocation:
            allocation = part
    return NodeCount(number, shape, allocation)


def _quantities(
    values: Mapping[str, Optional[str]], name: str, units: Mapping[str, float], default_unit: str
) -> Dict[str, float]:
    quantities = {}
    for kind in (MEASURED, IDEAL):
        match = _QUANTITY.fullmatch(values.get(f"{name} ({kind})") or "")
        factor = units.get((match[2] or default_unit).lower()) if match else None
        if match and factor is not None:
            quantities[kind] = float(match[1]) * factor
    return quantities


def _bytes(text: Optional[str]) -> Optional[int]:
    """Parse ``12.3 GiB (13207024435)``; the exact number in brackets counts if there is one."""
    if text is None or text.lower() == UNLIMITED:
        return None
    exact = _BYTES_IN_BRACKETS.search(text)
    if exact:
        return int(exact[1])
    match = _SIZE.fullmatch(text)
    if not match:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[(match[2] or "").upper()])


def _knobs(values: Mapping[str, Optional[str]]) -> Dict[str, KnobStatistics]:
    fields_by_knob: Dict[str, Dict[str, Optional[str]]] = {}
    for key, value in values.items():
        match = _KNOB_KEY.fullmatch(key)
        if match:
            fields_by_knob.setdefault(match[1], {})[match[2].lower()] = value
    return {name: KnobStatistics(**fields) for name, fields in fields_by_knob.items()}
