"""Parsers for the values of ``pjsub`` options. Every parser raises only ValueError, with the reason.

The forms are those of the Command Reference (J2UL-2549, pjsub). A parser accepts what ``pjsub`` is known to accept and,
in doubt, more: refusing a script that would have run is worse than leaving the refusal to ``pjsub`` itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

UNLIMITED = "unlimited"
ALLOCATIONS = ("torus", "mesh", "noncont")
STRICT = ("strict", "strict-io")
SHARED_IO = ("io-exclusive", "no-io-exclusive")
AXES = {2: ("XY", "YX"), 3: ("XYZ", "XZY", "YXZ", "YZX", "ZXY", "ZYX")}
NAME_BYTES = 63
DELETIONS = ("one", "after", "all")
BULK_LIMIT = 999_999
_MAX_VALUE_LENGTH = 1000  # characters of a value that is parsed
_MAX_DIGITS = 15  # digits of a number; no node count, size or time needs more

_CLOCK = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+)")
_LETTERS = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE)
_SIZE = re.compile(r"(\d+)\s*(?:([KMGTPE])(i?)B?)?", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"\$[\w{(]|`|\{\{|\}\}|@\w+@|%\(\w+\)|<[^<>]*>|\[[^\[\]]*\]|\{[A-Za-z_]\w*\}|__\w+__|%[A-Z_]{2,}%|##\w+##"
    r"|\bHH:MM\b|\*{2,}|\?{2,}|\.{3}|…"
)
_VNODE = re.compile(r"(\d*)(?:\((.*)\))?")
_CONDITION = re.compile(r"(ec|pc|sn)\s*(==|!=|<=|>=|<|>)\s*(-?\d+(?:,-?\d+)*)")
_PATH_METACHARACTER = re.compile(r"%([%jJbsn])")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@dataclass(frozen=True)
class Elapse:
    """``elapse=``, in seconds.

    Attributes:
        minimum: time that the job is guaranteed; None if unlimited.
        maximum: time after which it ends at the latest; the minimum if there is no range, None if open or unlimited.
        is_range: whether it is a range (``min-`` or ``min-max``). ``1-00:00:00``, a day to Slurm, is the range from one
            second to zero: the minimum is then above the maximum.
    """

    minimum: Optional[int]
    maximum: Optional[int]
    is_range: bool = False


@dataclass(frozen=True)
class NodeShape:
    """``node=``.

    Attributes:
        dims: nodes along one to three axes.
        allocation: ``torus``, ``mesh``, ``noncont`` or empty (the group's default).
        strict: ``strict``, ``strict-io`` or empty.
        io: ``io-exclusive``, ``no-io-exclusive`` or empty.
    """

    dims: Tuple[int, ...]
    allocation: str = ""
    strict: str = ""
    io: str = ""

    @property
    def count(self) -> int:
        """Total number of nodes."""
        count = 1
        for size in self.dims:
            count *= size
        return count


@dataclass(frozen=True)
class StepParameters:
    """``--sparam`` of a step job.

    Attributes:
        job_id, job_name: id or name of the step job that this step joins; at most one of them should be given.
        number: number of this step; None if not given.
        depends: complete text after ``sd=``; empty if not given.
        condition: condition on the end of an earlier step that cancels steps, such as ``ec!=0``; ``NONE`` for none.
        deletion: steps to cancel: ``one`` (this step), ``after`` (it and those that depend on it) or ``all``.
        steps: numbers of the steps that the condition refers to; empty for the previous step.
    """

    job_id: Optional[int] = None
    job_name: Optional[str] = None
    number: Optional[int] = None
    depends: str = ""
    condition: str = ""
    deletion: str = ""
    steps: Tuple[int, ...] = ()


def has_placeholder(text: str) -> bool:
    """Whether a value holds a placeholder for a shell or a template; ``pjsub`` itself replaces nothing."""
    return bool(_PLACEHOLDER.search(text[:_MAX_VALUE_LENGTH]))


def _invalid(text: str, expected: str) -> ValueError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    if has_placeholder(text):
        return ValueError(f"{shown!r} holds a placeholder, which pjsub does not replace; expected {expected}")
    return ValueError(f"{shown!r} is not {expected}")


def _check_length(text: str, expected: str) -> str:
    if len(text) > _MAX_VALUE_LENGTH:
        raise _invalid(text, expected)
    return text.strip()


def _number(digits: str, value: str, expected: str) -> int:
    if not (digits.isascii() and digits.isdecimal()) or len(digits.lstrip("0")) > _MAX_DIGITS:
        raise _invalid(value, expected)
    return int(digits)


def parse_count(text: str) -> int:
    """Parse a whole number, 0 or more."""
    expected = "a whole number"
    return _number(_check_length(text, expected), text, expected)


def parse_flags(text: str, allowed: str) -> Tuple[str, ...]:
    """Parse a comma list of single letters, such as ``b,e,s`` of ``-m``."""
    expected = "a list of " + ", ".join(allowed)
    flags = tuple(item.strip() for item in _check_length(text, expected).split(","))
    if not all(len(flag) == 1 and flag in allowed for flag in flags):
        raise _invalid(text, expected)
    return flags


def parse_elapse(text: str) -> Elapse:
    """Parse ``[[H:]M:]S``, ``1h30m0s``, ``unlimited``, or a range ``min-`` or ``min-max`` of these."""
    expected = "a time such as 1:00:00 (hours, minutes, seconds), or a range of two"
    first, dash, last = _check_length(text, expected).partition("-")
    minimum = _seconds(first, text, expected)
    if not dash:
        return Elapse(minimum, minimum)
    if minimum is None:
        raise ValueError("a range cannot start at unlimited")
    return Elapse(minimum, _seconds(last, text, expected) if last else None, is_range=True)


def _seconds(text: str, value: str, expected: str) -> Optional[int]:
    if text.lower() == UNLIMITED:
        return None
    match = _CLOCK.fullmatch(text) or (_LETTERS.fullmatch(text) if text else None)
    if not match or not text.isascii():
        raise _invalid(value, expected)
    hours, minutes, seconds = (_number(part or "0", value, expected) for part in match.groups())
    return (hours * 60 + minutes) * 60 + seconds


def format_elapse(seconds: int) -> str:
    """Format seconds as ``H:MM:SS``."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def parse_node(text: str) -> NodeShape:
    """Parse ``12``, ``4x4`` or ``8x8x8`` with suffixes in any order, such as ``8x8x8:torus:strict-io``."""
    expected = "a number of nodes or a shape such as 4x6x16:torus:strict"
    shape, *suffixes = _check_length(text, expected).split(":")
    dims = parse_shape(shape)
    chosen: Dict[str, str] = {}
    for suffix in suffixes:
        for kind, choices in (("allocation", ALLOCATIONS), ("strict", STRICT), ("io", SHARED_IO)):
            if suffix in choices:
                if chosen.get(kind, suffix) != suffix:
                    raise ValueError(f"{chosen[kind]} and {suffix} exclude each other")
                chosen[kind] = suffix
                break
        else:
            raise ValueError(
                f"unknown suffix :{suffix[:40]}; known are " + ", ".join((*ALLOCATIONS, *STRICT, *SHARED_IO))
            )
    return NodeShape(dims, chosen.get("allocation", ""), chosen.get("strict", ""), chosen.get("io", ""))


def parse_shape(text: str) -> Tuple[int, ...]:
    """Parse ``N``, ``NxN`` or ``NxNxN``."""
    expected = "a shape of one to three axes such as 4x6x16"
    dims = tuple(_number(part.strip(), text, expected) for part in _check_length(text, expected).split("x"))
    if len(dims) > 3 or 0 in dims:
        raise _invalid(text, expected)
    return dims


def parse_size(text: str, bare: int = 2**20) -> int:
    """Parse a size in bytes: ``Ki`` to ``Ei`` are powers of 1024, ``K`` to ``E`` of 1000; ``bare`` is the default."""
    expected = "a size such as 28Gi"
    match = _SIZE.fullmatch(_check_length(text, expected))
    if not match:
        raise _invalid(text, expected)
    digits, unit, binary = match.groups()
    number = _number(digits, text, expected)
    if unit is None:
        return number * bare
    return number * int((1024 if binary else 1000) ** _POWERS[unit.upper()])


def parse_limit(text: str, reader: Callable[[str], int] = parse_size) -> Optional[int]:
    """Parse a value with ``reader``; return None for ``unlimited``."""
    return None if text.strip().lower() == UNLIMITED else reader(text)


def parse_switch(text: str) -> bool:
    """Parse ``on`` or ``off``."""
    if text.strip() not in ("on", "off"):
        raise _invalid(text, "on or off")
    return text.strip() == "on"


def parse_vnode(text: str) -> Dict[str, str]:
    """Parse ``2``, ``2(core=4;mem=1Gi)`` or ``(core=4)`` (one node) into ``count`` and the resources of each node."""
    expected = "a number of virtual nodes such as 2(core=4;mem=1Gi)"
    match = _VNODE.fullmatch(_check_length(text, expected))
    if not match or not (match[1] or match[2]):
        raise _invalid(text, expected)
    values = {"count": str(_number(match[1] or "1", text, expected))}
    for item in filter(None, re.split("[;,]", match[2] or "")):
        key, equals, value = item.partition("=")
        if not equals:
            raise _invalid(text, expected)
        values[key.strip()] = value.strip()
    return values


def parse_volumes(text: str) -> Tuple[str, ...]:
    """Parse ``/vol0004:/vol0003``, the mount points of ``PJM_LLIO_GFSCACHE``."""
    volumes = tuple(_check_length(text, "a list of volumes").split(":"))
    for volume in volumes:
        if not re.fullmatch(r"/\S+", volume):
            raise _invalid(volume, "a volume such as /vol0004; several are joined by colons")
    return volumes


def parse_bulk(text: str) -> Tuple[int, int]:
    """Parse ``a-b``, the first and last bulk number."""
    expected = f"a range of bulk numbers such as 0-9 (0 to {BULK_LIMIT})"
    first, dash, last = _check_length(text, expected).partition("-")
    if not dash:
        raise _invalid(text, expected)
    numbers = _number(first.strip(), text, expected), _number(last.strip(), text, expected)
    if not numbers[0] <= numbers[1] <= BULK_LIMIT:
        raise _invalid(text, expected)
    return numbers


def parse_step(text: str) -> StepParameters:
    """Parse ``jid=12,sn=2,sd=ec!=0:after:1``; ``jnam=`` names the step job, and every part is optional."""
    assignments: List[str] = []
    for piece in _check_length(text, "step parameters").split(","):
        if assignments and re.fullmatch(r"\s*-?\d+(:.*)?", piece):  # a list of values inside sd
            assignments[-1] += "," + piece.strip()
        else:
            assignments.append(piece.strip())
    values: Dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or key not in ("jid", "jnam", "sn", "sd"):
            raise ValueError(f"unknown part {assignment[:60]!r} of --sparam; a step job has jid= or jnam=, sn= and sd=")
        values[key] = value
    job_id = parse_count(values["jid"]) if "jid" in values else None
    number = parse_count(values["sn"]) if "sn" in values else None
    condition, deletion, steps = _parse_dependency(values["sd"]) if "sd" in values else ("", "", ())
    return StepParameters(job_id, values.get("jnam"), number, values.get("sd", ""), condition, deletion, steps)


def _parse_dependency(text: str) -> Tuple[str, str, Tuple[int, ...]]:
    form, *rest = text.split(":")
    if form.upper() != "NONE" and not _CONDITION.fullmatch(form):
        raise _invalid(form, "a condition such as ec!=0 or pc==11, or NONE")
    deletion = rest[0] if rest else ""
    if deletion and deletion not in DELETIONS:
        raise _invalid(deletion, "one of " + ", ".join(DELETIONS))
    return form, deletion, tuple(parse_count(step) for step in rest[1:])


def parse_condition(text: str) -> Optional[Tuple[str, str, Tuple[int, ...]]]:
    """Parse ``ec!=0`` into (``ec``, ``!=``, (0,)), and ``NONE`` into None."""
    if text.upper() == "NONE":
        return None
    match = _CONDITION.fullmatch(_check_length(text, "a condition"))
    if not match or any(len(value) > _MAX_DIGITS for value in match[3].split(",")):
        raise _invalid(text, "a condition such as ec!=0 or pc==11, or NONE")
    return match[1], match[2], tuple(int(value) for value in match[3].split(","))


def parse_axes(text: str, dims: Optional[int] = None) -> str:
    """Parse an order of axes such as ``YXZ``; ``dims`` is the required number of axes."""
    orders = AXES.get(dims, ()) if dims is not None else (*AXES[2], *AXES[3])
    if text not in orders:
        raise _invalid(text, "one of " + ", ".join(orders) if orders else "valid: one axis has no order")
    return text


def parse_name(text: str) -> str:
    """Check a job name: a letter, then letters, digits, ``.``, ``_`` and ``-`` (Fugaku's ASCII set), up to 63 bytes."""
    if len(text.encode("utf-8", "surrogateescape")) > NAME_BYTES:
        raise ValueError(f"a job name has {NAME_BYTES} bytes at most")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", text):
        raise _invalid(text, "a job name: a letter, then letters, digits, '.', '_' and '-'")
    return text


def expand_path(
    path: str,
    job_id: str,
    name: str = "",
    sub_job_id: Optional[str] = None,
    bulk: Optional[int] = None,
    step: Optional[int] = None,
) -> str:
    """Expand ``%j`` (job id), ``%J`` (sub-job id), ``%b`` (bulk number), ``%s`` (step number), ``%n`` (job name) and
    ``%%`` in an output path; values that the job does not have become empty, and any other ``%`` stays."""
    values = {
        "j": job_id,
        "J": sub_job_id if sub_job_id is not None else job_id,
        "b": "" if bulk is None else str(bulk),
        "s": "" if step is None else str(step),
        "n": name,
        "%": "%",
    }
    return _PATH_METACHARACTER.sub(lambda match: values[match[1]], path)
