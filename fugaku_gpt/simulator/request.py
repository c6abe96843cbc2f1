"""Builds a :class:`JobRequest` from the options in force; it refuses values that ``pjsub`` would refuse."""

from __future__ import annotations

import grp
import os
import re
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, TypeVar

from fugaku_gpt.machine.fugaku import CORES, NODE_TEMPORARY_BYTES, RETENTION_LIMIT, TEMPORARY_BYTES, TORUS_ABOVE
from fugaku_gpt.pjm.options import KEYS, KNOB_VALUES, MAIL_FLAGS
from fugaku_gpt.pjm.values import (
    NodeShape,
    StepParameters,
    parse_axes,
    parse_bulk,
    parse_count,
    parse_elapse,
    parse_flags,
    parse_name,
    parse_node,
    parse_shape,
    parse_size,
    parse_step,
)
from fugaku_gpt.simulator.job import BULK, NORMAL, STEP, JobRequest
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
_EXCLUSIVE_MODES = ("bulk", "step", "interact", "mswk")
_UNSUPPORTED_RESOURCES = ("vnode", "vnode-core", "vnode-mem", "core-mem")
_ORIGIN_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "HOST", "MAIL", "TZ")
# variables of the dynamic linker, which not even -X exports
_NOT_EXPORTED = ("LD_LIBRARY_PATH", "LD_PRELOAD")


def parse_value(parser: Callable[[str], Value], item: str, text: Optional[str]) -> Value:
    """The parsed value of an item.

    Raises:
        Refusal: the text is malformed.
    """
    try:
        return parser(text or "")
    except ValueError as error:
        raise Refusal(3, f"Invalid argument: {item}={text or ''} ({error}).") from None


def step_parameters(options: Mapping[str, Any]) -> StepParameters:
    """The parameters of a step job (``--sparam``).

    Raises:
        Refusal: they are malformed.
    """
    text = options.get("sparam")
    parameters = parse_value(parse_step, "--sparam", text) if text else StepParameters()
    if parameters.job_id is not None and parameters.job_name is not None:
        raise Refusal(2, "Invalid combination of options: jid and jnam.")
    if parameters.number is not None and not 0 <= parameters.number <= STEP_LIMIT:
        raise Refusal(60, f"Step number {parameters.number} is out of range (0-{STEP_LIMIT}).")
    return parameters


def build_request(
    options: Mapping[str, Any],
    settings: Settings,
    *,
    name: str,
    directory: str,
    text: str,
    environment: Mapping[str, str],
    umask: int,
    timestamp: float,
) -> Tuple[JobRequest, List[str]]:
    """Build the request of a job; return it with the site's remarks.

    Args:
        options: options in force, see :func:`fugaku_gpt.simulator.command_line.merge_options`.
        name: file name of the script, or ``STDIN``.
        directory: working directory of ``pjsub``.
        text: text of the script; the path of its copy is left empty in the request.
        environment: variables of ``pjsub``.
        umask: umask of ``pjsub``.
        timestamp: current time, in seconds since the epoch.

    Raises:
        Refusal: PJM would refuse the request; it has PJM's code and text.
    """
    _check_combinations(options)
    resources: Dict[str, Optional[str]] = dict(options.get("resources", {}))
    mpi: Dict[str, Optional[str]] = dict(options.get("mpi", {}))
    llio: Dict[str, Optional[str]] = dict(options.get("llio", {}))
    model = BULK if "bulk" in options else STEP if "step" in options else NORMAL
    steps = step_parameters(options) if model == STEP else StepParameters()
    job_name = steps.job_name or options.get("name")
    if job_name is not None:
        parse_value(parse_name, "--name", job_name)
    elif not name.isascii() or not all(character.isalnum() or character in "._-" for character in name):
        raise Refusal(3, f"Invalid argument: script file name {name}.")
    group = find_group(resources.get("rscgrp"), resources.get("rscunit"))
    project = _project_group(options, group, settings)
    shape, allocation = _node_shape(resources, group, settings)
    minimum, maximum, ranged = _elapse_limits(resources, group, settings)
    standard_keys = KEYS["resources"]
    extra = {key: value for key, value in resources.items() if key not in standard_keys or key in KNOB_VALUES}
    for key in ("jobenv", "exepjrsh", "estimated-power", "nnum_cret", "retention_state_acores"):
        if key in resources:
            extra[key] = resources[key]
    for key in (*_UNSUPPORTED_RESOURCES, "gpu"):
        if key in resources:
            raise Refusal(3, f"Invalid argument: {key}={resources[key] or ''} (this resource unit has none).")
    remarks = [group.remark] if group.remark else []
    if resources.get("retention_state") == "1" and shape.count > RETENTION_LIMIT:
        remarks.append("warn: specification of core retention is invalid because job size is too large.")
        extra["retention_state"] = "0"
    custom = custom_resources(extra, shape.count)
    processes, per_node = _processes(mpi, shape)
    remarks += _check_llio(llio)
    if "policy" in options:
        raise Refusal(2, "Invalid combination of options: -P needs vnode.")
    bulk = parse_value(parse_bulk, "--sparam", options["sparam"]) if model == BULK else (0, 0)
    if model == BULK:
        check_range("bulkno", bulk[1] - bulk[0] + 1, None, settings.max_bulk)
    request = JobRequest(
        name=job_name or name,
        model=model,
        directory=directory,
        script="",
        interpreter=interpreter_command(text, environment.get("SHELL") or "/bin/bash"),
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
        origin={**{key: environment[key] for key in _ORIGIN_VARIABLES if key in environment}, "WORKDIR": directory},
        processes=processes,
        processes_per_node=per_node,
        out=str(options.get("out", "")),
        err=str(options.get("err", "")),
        join="join" in options,
        stats="S" if "stats_nodes" in options else "s" if "stats" in options else "",
        stats_path=str(options.get("stats_path", "")),
        priority=_priority(options),
        at=_start_date(options, timestamp),
        restart="restart" in options,
        comment=_limited_text(options, "comment", 255),
        appname=_limited_text(options, "appname", 63),
        fs=_limited_text(options, "fs", 63),
        mail=_mail(options),
        mail_list=_limited_text(options, "mail_list", 255),
        net_route=str(options.get("net_route", "")),
        umask=umask,
        bulk=bulk,
        condition=steps.condition,
        deletion=steps.deletion,
        steps=steps.steps,
    )
    return request, remarks


def interpreter_command(script_text: str, login_shell: str) -> Tuple[str, ...]:
    """The interpreter of the ``#!`` line and its argument, with a carriage return at the end of the line, as the system
    reads them; without such a line the login shell."""
    first_line = script_text.split("\n", 1)[0]
    if first_line.startswith("#!"):
        command = [item for item in re.split(r"[ \t]+", first_line[2:].strip(" \t"), maxsplit=1) if item]
        if command:
            return tuple(command)
    return (login_shell,)


def _check_combinations(options: Mapping[str, Any]) -> None:
    modes = [mode for mode in _EXCLUSIVE_MODES if mode in options]
    if len(modes) > 1:
        raise Refusal(2, f"Invalid combination of options: --{modes[0]} and --{modes[1]}.")
    for mode in ("interact", "mswk"):
        if mode in options:
            raise Refusal(89, f"Option --{mode} is not supported by this simulator.")
    for first, second in (("stats", "stats_nodes"), ("restart", "norestart"), ("quiet", "verbose"), ("group", "gid")):
        if first in options and second in options:
            raise Refusal(2, f"Invalid combination of options: {first} and {second.replace('_', '-')}.")
    if "stats_path" in options and not {"stats", "stats_nodes"} & set(options):
        raise Refusal(2, "Invalid combination of options: --spath without -s or -S.")
    if "bulk" in options and "sparam" not in options:
        raise Refusal(2, "Invalid combination of options: --bulk without --sparam.")
    if "sparam" in options and not modes:
        raise Refusal(2, "Invalid combination of options: --sparam without --bulk or --step.")
    if "rank-map-bychip" in options.get("mpi", {}) and "rank-map-bynode" in options.get("mpi", {}):
        raise Refusal(2, "Invalid combination of options: rank-map-bychip and rank-map-bynode.")


def _project_group(options: Mapping[str, Any], group: ResourceGroup, settings: Settings) -> str:
    """The group to which the job belongs."""
    name = options.get("group") or options.get("gid")
    if settings.strict_groups:
        if not name:
            raise Refusal(71, f"Group not authorized to submit a job: group({UNKNOWN_GROUP})")
        if name == "fugaku" or (name == "trial" and not group.is_spot):
            raise Refusal(71, f"Group not authorized to submit a job: group({name})")
    if name:
        return str(name)
    try:
        return grp.getgrgid(os.getgid()).gr_name
    except KeyError:
        return str(os.getgid())


def _node_shape(
    resources: Mapping[str, Optional[str]], group: ResourceGroup, settings: Settings
) -> Tuple[NodeShape, str]:
    shape = (
        parse_value(parse_node, "node", resources["node"]) if "node" in resources else NodeShape((group.default_nodes,))
    )
    if group.max_nodes > settings.nodes:  # a simulator that is smaller than the site
        check_range("node", shape.count, None, settings.nodes)
    check_range("node", shape.count, group.min_nodes, group.max_nodes, is_dated=True)
    allocation = shape.allocation or ("torus" if shape.count > TORUS_ABOVE else group.allocations[0])
    if allocation not in group.allocations or (allocation != "torus" and shape.count > TORUS_ABOVE):
        raise Refusal(3, f"Invalid argument: node={resources.get('node')} ({allocation} is not available).")
    if shape.strict and (len(shape.dims) != 3 or allocation != "torus"):
        raise Refusal(3, f"Invalid argument: node={resources.get('node')} ({shape.strict} needs a 3-D torus).")
    return shape, allocation


def _elapse_limits(
    resources: Mapping[str, Optional[str]], group: ResourceGroup, settings: Settings
) -> Tuple[Optional[int], Optional[int], bool]:
    if "elapse" not in resources:
        default = max(DEFAULT_ELAPSE, int(settings.min_elapse))
        return default, default, False
    elapse = parse_value(parse_elapse, "elapse", resources["elapse"])
    lowest = int(settings.min_elapse)
    if elapse.minimum is None:
        raise Refusal(57, f"elapse=unlimited is greater than the upper limit ({group.max_elapse}).")
    check_range("elapse", elapse.minimum, lowest, None)
    check_range("elapse", elapse.minimum, None, group.max_elapse, is_dated=True)
    if not elapse.is_range:
        return elapse.minimum, elapse.minimum, False
    maximum = elapse.maximum if elapse.maximum is not None else group.range_max
    check_range("elapse", maximum, lowest, None)
    check_range("elapse", maximum, None, group.range_max, is_dated=True)
    if maximum <= elapse.minimum:
        raise Refusal(3, f"Invalid argument: elapse={resources['elapse']} (the maximum is not above the minimum).")
    return elapse.minimum, maximum, True


def _processes(mpi: Mapping[str, Optional[str]], shape: NodeShape) -> Tuple[int, int]:
    """(number of processes, processes per node), by the table of the End-user's Guide."""
    dims = shape.dims
    if "shape" in mpi:
        dims = parse_value(parse_shape, "shape", mpi["shape"])
        if len(dims) != len(shape.dims) or any(requested > available for requested, available in zip(dims, shape.dims)):
            raise Refusal(3, f"Invalid argument: shape={mpi['shape']} (not inside the nodes).")
    nodes = NodeShape(dims).count
    for key in ("rank-map-bychip", "rank-map-bynode"):
        if mpi.get(key):
            parse_value(lambda text: parse_axes(text, len(shape.dims)), key, mpi[key])
    proc = parse_value(parse_count, "proc", mpi["proc"]) if "proc" in mpi else None
    per_node = (
        parse_value(parse_count, "max-proc-per-node", mpi["max-proc-per-node"]) if "max-proc-per-node" in mpi else None
    )
    if proc is not None:
        check_range("proc", proc, 1, CORES * nodes)
    if per_node is not None:
        check_range("max-proc-per-node", per_node, 1 if proc is None else -(-proc // nodes), CORES)
    if proc is None:
        return nodes * (per_node or 1), per_node or 1
    return proc, per_node or -(-proc // nodes)


def _check_llio(llio: Mapping[str, Optional[str]]) -> List[str]:
    """Check the temporary space of a node; returns the remarks."""
    total = 0
    for key in ("localtmp-size", "sharedtmp-size"):
        if key in llio:
            total += parse_value(parse_size, key, llio[key])
    if total > NODE_TEMPORARY_BYTES:
        text = f"The sum of localtmp-size and sharedtmp-size ({total}) exceeds {TEMPORARY_BYTES}."
        raise Refusal(49, text, is_dated=True)
    if total > TEMPORARY_BYTES:
        return [
            f"localtmp-size and sharedtmp-size: the guide has {TEMPORARY_BYTES} bytes; jobs of June 2026 ran with 87Gi"
        ]
    return []


def _mail(options: Mapping[str, Any]) -> str:
    text = str(options.get("mail", ""))
    if text:
        parse_value(lambda letters: parse_flags(letters, MAIL_FLAGS), "-m", text)
    return text


def _priority(options: Mapping[str, Any]) -> int:
    if "priority" not in options:
        return DEFAULT_PRIORITY
    value = parse_value(parse_count, "-p", options["priority"])
    check_range("-p", value, 0, 255)
    return value


def _start_date(options: Mapping[str, Any], timestamp: float) -> Optional[float]:
    text = options.get("at")
    if text is None:
        return None
    for date_format in ("%Y%m%d%H%M", "%Y%m%d"):
        try:
            date = time.mktime(time.strptime(text, date_format))
        except ValueError:
            continue
        if date < timestamp:
            raise Refusal(56, f"The start date {text} is in the past.")
        return date
    raise Refusal(3, f"Invalid argument: --at {text}.")


def _limited_text(options: Mapping[str, Any], name: str, limit: int) -> str:
    value = str(options.get(name, ""))
    if len(value) > limit:
        raise Refusal(21, f"The argument of --{name.replace('_', '-')} is too long (limit: {limit}).")
    return value


def _environment(options: Mapping[str, Any], environment: Mapping[str, str]) -> Dict[str, str]:
    """Variables that a job takes from the submitting shell (``-X`` and ``-x``)."""
    variables: Dict[str, str] = {}
    if "export_all" in options:
        variables.update({key: value for key, value in environment.items() if key not in _NOT_EXPORTED})
    for key, value in options.get("environment", {}).items():
        if value is not None:
            variables[key] = value
        elif key in environment:  # -x VAR without a value: as in the submitting shell
            variables[key] = environment[key]
    return variables
