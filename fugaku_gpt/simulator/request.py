"""From the options in force to a :class:`Request`: every value read and checked against the site, and refused in PJM's
words where ``pjsub`` would refuse it."""

from __future__ import annotations

import grp
import os
import re
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, TypeVar

from fugaku_gpt.machine.fugaku import CORES, RETENTION_LIMIT, TEMPORARY_BYTES, TORUS_ABOVE
from fugaku_gpt.pjm.options import KEYS, KNOB_VALUES
from fugaku_gpt.pjm.values import (
    NodeShape,
    StepParameters,
    parse_axes,
    parse_bulk,
    parse_count,
    parse_elapse,
    parse_name,
    parse_node,
    parse_shape,
    parse_size,
    parse_step,
)
from fugaku_gpt.simulator.job import BULK, NORMAL, STEP, Request
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.site import (
    DEFAULT_ELAPSE,
    DEFAULT_PRIORITY,
    RESOURCE_UNIT,
    UNKNOWN_GROUP,
    Refusal,
    ResourceGroup,
    check_range,
    custom_resources,
    find_group,
)

Value = TypeVar("Value")
STEP_LIMIT = 65535
_MODES = ("bulk", "step", "interact", "mswk")
_FX_REFUSES = ("vnode", "vnode-core", "vnode-mem", "core-mem")
_ORIGIN = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "HOST", "MAIL", "TZ")
# of the operating system's own: never taken over, not even by -X
_NOT_EXPORTED = ("LD_LIBRARY_PATH", "LD_PRELOAD")


def read(reader: Callable[[str], Value], item: str, text: Optional[str]) -> Value:
    """A value, or PJM's refusal.

    Raises:
        Refusal: it is not of its form.
    """
    try:
        return reader(text or "")
    except ValueError as error:
        raise Refusal(3, f"Invalid argument: {item}={text or ''} ({error}).") from None


def step_parameters(options: Mapping[str, Any]) -> StepParameters:
    """``--sparam`` of a step job.

    Raises:
        Refusal: it is not of its form.
    """
    text = options.get("sparam")
    found = read(parse_step, "--sparam", text) if text else StepParameters()
    if found.job_id is not None and found.job_name is not None:
        raise Refusal(2, "Invalid combination of options: jid and jnam.")
    if found.number is not None and not 0 <= found.number <= STEP_LIMIT:
        raise Refusal(60, f"Step number {found.number} is out of range (0-{STEP_LIMIT}).")
    return found


def build_request(
    options: Mapping[str, Any],
    settings: Settings,
    *,
    name: str,
    directory: str,
    text: str,
    environment: Mapping[str, str],
    umask: int,
    now: float,
) -> Tuple[Request, List[str]]:
    """What the job is to be, and the site's remarks.

    Args:
        options: in force, see :func:`fugaku_gpt.simulator.words.merge`.
        name: of the script's file, or ``STDIN``.
        text: of the script. Where its copy lies is left open.

    Raises:
        Refusal: with PJM's code and words.
    """
    _check_combinations(options)
    resources: Dict[str, Optional[str]] = dict(options.get("resources", {}))
    mpi: Dict[str, Optional[str]] = dict(options.get("mpi", {}))
    llio: Dict[str, Optional[str]] = dict(options.get("llio", {}))
    model = BULK if "bulk" in options else STEP if "step" in options else NORMAL
    steps = step_parameters(options) if model == STEP else StepParameters()
    chosen_name = steps.job_name or options.get("name")
    if chosen_name is not None:
        read(parse_name, "--name", chosen_name)
    elif not name.isascii() or not all(part.isalnum() or part in "._-" for part in name):
        raise Refusal(3, f"Invalid argument: script file name {name}.")
    group = find_group(resources.get("rscgrp"), resources.get("rscunit"))
    project = _project(options, group, settings)
    shape, allocation = _nodes(resources, group, settings)
    minimum, maximum, ranged = _times(resources, group, settings)
    known = KEYS["resources"]
    extra = {key: value for key, value in resources.items() if key not in known or key in KNOB_VALUES}
    for key in ("jobenv", "exepjrsh", "estimated-power", "nnum_cret", "retention_state_acores"):
        if key in resources:
            extra[key] = resources[key]
    for key in (*_FX_REFUSES, "gpu"):
        if key in resources:
            raise Refusal(3, f"Invalid argument: {key}={resources[key] or ''} (this resource unit has none).")
    remarks = []
    if resources.get("retention_state") == "1" and shape.count > RETENTION_LIMIT:
        remarks.append("warn: specification of core retention is invalid because job size is too large.")
        extra["retention_state"] = "0"
    custom = custom_resources(extra, shape.count)
    processes, per_node = _processes(mpi, shape)
    _check_llio(llio)
    if "policy" in options:
        raise Refusal(2, "Invalid combination of options: -P needs vnode.")
    bulk = read(parse_bulk, "--sparam", options["sparam"]) if model == BULK else (0, 0)
    if model == BULK:
        check_range("bulkno", bulk[1] - bulk[0] + 1, None, settings.max_bulk)
    request = Request(
        name=chosen_name or name,
        model=model,
        directory=directory,
        script="",
        interpreter=interpreter_words(text, environment.get("SHELL") or "/bin/bash"),
        dims=shape.dims,
        allocation=allocation,
        elapse_min=minimum,
        elapse_max=maximum,
        ranged=ranged,
        group=project,
        rscgrp=group.name,
        rscunit=RESOURCE_UNIT,
        resources=resources,
        custom=custom,
        mpi=mpi,
        llio=llio,
        given=tuple(sorted({*options, *resources})),
        environment=_environment(options, environment),
        origin={**{key: environment[key] for key in _ORIGIN if key in environment}, "WORKDIR": directory},
        processes=processes,
        processes_per_node=per_node,
        out=str(options.get("out", "")),
        err=str(options.get("err", "")),
        join="join" in options,
        stats="S" if "stats_nodes" in options else "s" if "stats" in options else "",
        stats_path=str(options.get("stats_path", "")),
        priority=_priority(options),
        at=_start_date(options, now),
        restart="restart" in options,
        comment=_short(options, "comment", 255),
        appname=_short(options, "appname", 63),
        fs=_short(options, "fs", 63),
        mail=str(options.get("mail", "")),
        mail_list=_short(options, "mail_list", 255),
        net_route=str(options.get("net_route", "")),
        umask=umask,
        bulk=bulk,
        condition=steps.condition,
        deletion=steps.deletion,
        steps=steps.steps,
    )
    return request, remarks


def interpreter_words(text: str, login_shell: str) -> Tuple[str, ...]:
    """The words of the ``#!`` line, a carriage return at its end included, as the system takes them; the login shell
    where there is none."""
    first = text.split("\n", 1)[0]
    if first.startswith("#!"):
        words = [word for word in re.split(r"[ \t]+", first[2:].strip(" \t"), maxsplit=1) if word]
        if words:
            return tuple(words)
    return (login_shell,)


def _check_combinations(options: Mapping[str, Any]) -> None:
    given = [mode for mode in _MODES if mode in options]
    if len(given) > 1:
        raise Refusal(2, f"Invalid combination of options: --{given[0]} and --{given[1]}.")
    for mode in ("interact", "mswk"):
        if mode in options:
            raise Refusal(89, f"Option --{mode} is not supported by this simulator.")
    for one, other in (("stats", "stats_nodes"), ("restart", "norestart"), ("quiet", "verbose"), ("group", "gid")):
        if one in options and other in options:
            raise Refusal(2, f"Invalid combination of options: {one} and {other.replace('_', '-')}.")
    if "stats_path" in options and not {"stats", "stats_nodes"} & set(options):
        raise Refusal(2, "Invalid combination of options: --spath without -s or -S.")
    if "bulk" in options and "sparam" not in options:
        raise Refusal(2, "Invalid combination of options: --bulk without --sparam.")
    if "sparam" in options and not given:
        raise Refusal(2, "Invalid combination of options: --sparam without --bulk or --step.")
    if "rank-map-bychip" in options.get("mpi", {}) and "rank-map-bynode" in options.get("mpi", {}):
        raise Refusal(2, "Invalid combination of options: rank-map-bychip and rank-map-bynode.")


def _project(options: Mapping[str, Any], group: ResourceGroup, settings: Settings) -> str:
    """The group that the job belongs to."""
    chosen = options.get("group") or options.get("gid")
    if settings.strict_groups:
        if not chosen:
            raise Refusal(71, f"Group not authorized to submit a job: group({UNKNOWN_GROUP})")
        if chosen == "fugaku" or (chosen == "trial" and not group.spot):
            raise Refusal(71, f"Group not authorized to submit a job: group({chosen})")
    if chosen:
        return str(chosen)
    try:
        return grp.getgrgid(os.getgid()).gr_name
    except KeyError:
        return str(os.getgid())


def _nodes(resources: Mapping[str, Optional[str]], group: ResourceGroup, settings: Settings) -> Tuple[NodeShape, str]:
    shape = read(parse_node, "node", resources["node"]) if "node" in resources else NodeShape((group.usual,))
    check_range("node", shape.count, group.low, min(group.high, settings.nodes))
    allocation = shape.allocation or ("torus" if shape.count > TORUS_ABOVE else group.allocations[0])
    if allocation not in group.allocations or (allocation != "torus" and shape.count > TORUS_ABOVE):
        raise Refusal(3, f"Invalid argument: node={resources.get('node')} ({allocation} is not available).")
    if shape.strict and (len(shape.dims) != 3 or allocation != "torus"):
        raise Refusal(3, f"Invalid argument: node={resources.get('node')} ({shape.strict} needs a 3-D torus).")
    return shape, allocation


def _times(
    resources: Mapping[str, Optional[str]], group: ResourceGroup, settings: Settings
) -> Tuple[Optional[int], Optional[int], bool]:
    if "elapse" not in resources:
        usual = max(DEFAULT_ELAPSE, int(settings.min_elapse))
        return usual, usual, False
    elapse = read(parse_elapse, "elapse", resources["elapse"])
    low = int(settings.min_elapse)
    if elapse.minimum is None:
        raise Refusal(57, f"elapse=unlimited is greater than the upper limit ({group.elapse}).")
    check_range("elapse", elapse.minimum, low, group.elapse)
    if not elapse.ranged:
        return elapse.minimum, elapse.minimum, False
    maximum = elapse.maximum if elapse.maximum is not None else group.elapse_range
    check_range("elapse", maximum, low, group.elapse_range)
    if maximum <= elapse.minimum:
        raise Refusal(3, f"Invalid argument: elapse={resources['elapse']} (the maximum is not above the minimum).")
    return elapse.minimum, maximum, True


def _processes(mpi: Mapping[str, Optional[str]], shape: NodeShape) -> Tuple[int, int]:
    """(processes in all, on each node), by the table of the End-user's Guide."""
    dims = shape.dims
    if "shape" in mpi:
        dims = read(parse_shape, "shape", mpi["shape"])
        if len(dims) != len(shape.dims) or any(part > whole for part, whole in zip(dims, shape.dims)):
            raise Refusal(3, f"Invalid argument: shape={mpi['shape']} (not inside the nodes).")
    nodes = NodeShape(dims).count
    for key in ("rank-map-bychip", "rank-map-bynode"):
        if mpi.get(key):
            read(lambda text: parse_axes(text, len(shape.dims)), key, mpi[key])
    proc = read(parse_count, "proc", mpi["proc"]) if "proc" in mpi else None
    per_node = read(parse_count, "max-proc-per-node", mpi["max-proc-per-node"]) if "max-proc-per-node" in mpi else None
    if proc is not None:
        check_range("proc", proc, 1, CORES * nodes)
    if per_node is not None:
        check_range("max-proc-per-node", per_node, 1 if proc is None else -(-proc // nodes), CORES)
    if proc is None:
        return nodes * (per_node or 1), per_node or 1
    return proc, per_node or -(-proc // nodes)


def _check_llio(llio: Mapping[str, Optional[str]]) -> None:
    total = 0
    for key in ("localtmp-size", "sharedtmp-size"):
        if key in llio:
            total += read(parse_size, key, llio[key])
    if total > TEMPORARY_BYTES:
        raise Refusal(49, f"The sum of localtmp-size and sharedtmp-size ({total}) exceeds {TEMPORARY_BYTES}.")


def _priority(options: Mapping[str, Any]) -> int:
    if "priority" not in options:
        return DEFAULT_PRIORITY
    value = read(parse_count, "-p", options["priority"])
    check_range("-p", value, 0, 255)
    return value


def _start_date(options: Mapping[str, Any], now: float) -> Optional[float]:
    text = options.get("at")
    if text is None:
        return None
    for form in ("%Y%m%d%H%M", "%Y%m%d"):
        try:
            date = time.mktime(time.strptime(text, form))
        except ValueError:
            continue
        if date < now:
            raise Refusal(56, f"The start date {text} is in the past.")
        return date
    raise Refusal(3, f"Invalid argument: --at {text}.")


def _short(options: Mapping[str, Any], name: str, limit: int) -> str:
    value = str(options.get(name, ""))
    if len(value) > limit:
        raise Refusal(21, f"The argument of --{name.replace('_', '-')} is too long (limit: {limit}).")
    return value


def _environment(options: Mapping[str, Any], environment: Mapping[str, str]) -> Dict[str, str]:
    """``-X`` and ``-x``: what of the submitting shell's variables the job sees."""
    found: Dict[str, str] = {}
    if "export_all" in options:
        found.update({key: value for key, value in environment.items() if key not in _NOT_EXPORTED})
    for key, value in options.get("environment", {}).items():
        if value is not None:
            found[key] = value
        elif key in environment:  # -x VAR alone: as it is now
            found[key] = environment[key]
    return found
