"""The options of ``pjsub`` and the keys of those that take a list of keys.

Sources: Command Reference J2UL-2549 (pjsub), End-user's Guide J2UL-2534, the Fugaku user guide (power control, layered
storage), and what public scripts use. ``era`` distinguishes options of TCS (today's job operation software) from those
of the K computer and FX10 (``k``) and from additions of single sites (``site``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

from fugaku_gpt.config.schema import POWER_KNOBS
from fugaku_gpt.pjm.values import (
    Elapse,
    NodeShape,
    StepParameters,
    expand_path,
    format_elapse,
    has_placeholder,
    parse_axes,
    parse_bulk,
    parse_condition,
    parse_count,
    parse_elapse,
    parse_flags,
    parse_limit,
    parse_name,
    parse_node,
    parse_shape,
    parse_size,
    parse_step,
    parse_switch,
    parse_vnode,
    parse_volumes,
)

__all__ = [
    "COMMAND_LINE_ONLY",
    "Elapse",
    "KEYS",
    "KEY_ALIASES",
    "KNOB_VALUES",
    "NodeShape",
    "OPTIONS",
    "Option",
    "SPELLINGS",
    "StepParameters",
    "expand_path",
    "format_elapse",
    "has_placeholder",
    "find_option",
    "parse_axes",
    "parse_bulk",
    "parse_condition",
    "parse_count",
    "parse_elapse",
    "parse_flags",
    "parse_limit",
    "parse_name",
    "parse_node",
    "parse_shape",
    "parse_size",
    "parse_step",
    "parse_switch",
    "parse_vnode",
    "parse_volumes",
]

# kinds of argument
FLAG = "flag"  # none
TEXT = "text"  # one word; the last one given wins
OPTIONAL = "optional"  # none, or one of `choices`
KEYED = "keyed"  # key[=value],...; per key the last one wins
ASSIGN = "assign"  # VAR=value,...; per variable the last one wins
MANY = "many"  # one word each; all count


@dataclass(frozen=True)
class Option:
    """An option of ``pjsub``.

    Attributes:
        name: canonical name.
        spellings: spellings in scripts; the first is the usual one.
        kind: kind of argument, see above.
        choices: the arguments that an ``optional`` option accepts, or all valid ones of a ``text`` option.
        command_line_only: whether it is refused, or without effect, in a script.
        era: ``tcs``, ``k`` or ``site``.
    """

    name: str
    spellings: Tuple[str, ...]
    kind: str = TEXT
    choices: Tuple[str, ...] = ()
    command_line_only: bool = False
    era: str = "tcs"


OPTIONS: Tuple[Option, ...] = (
    Option("resources", ("-L", "--rsc-list"), KEYED),
    Option("mpi", ("--mpi",), KEYED),
    Option("llio", ("--llio",), KEYED),
    Option("group", ("-g", "--gname")),
    Option("gid", ("--gid",)),
    Option("name", ("-N", "--name")),
    Option("out", ("-o", "--out")),
    Option("err", ("-e", "--err")),
    Option("join", ("-j",), FLAG),
    Option("stats", ("-s", "--stats"), FLAG),
    Option("stats_nodes", ("-S", "--STATS"), FLAG),
    Option("stats_path", ("--spath",)),
    Option("mail", ("-m",)),
    Option("mail_list", ("--mail-list",)),
    Option("environment", ("-x",), ASSIGN),
    Option("export_all", ("-X",), FLAG),
    Option("at", ("--at",)),
    Option("priority", ("-p",)),
    Option("restart", ("--restart",), FLAG),
    Option("norestart", ("--norestart",), FLAG),
    Option("when", ("-w",), TEXT, ("nowait", "jobchk")),
    Option("quiet", ("-z",), OPTIONAL, ("jid",)),
    Option("bulk", ("--bulk",), FLAG),
    Option("step", ("--step",), FLAG),
    Option("interact", ("--interact",), FLAG),
    Option("mswk", ("--mswk",), FLAG),
    Option("sparam", ("--sparam",)),
    Option("appname", ("--appname",)),
    Option("fs", ("--fs",)),
    Option("comment", ("--comment",)),
    Option("net_route", ("--net-route",), TEXT, ("dynamic", "static")),
    Option("vset", ("--vset",), ASSIGN),
    Option("policy", ("-P",), KEYED),
    Option("dir_prefix", ("-C", "--dir-prefix"), command_line_only=True),
    Option("script_delimiter", ("--script-delimiter",), command_line_only=True),
    Option("verbose", ("--verbose",), FLAG, command_line_only=True),
    Option("help", ("--help",), FLAG, command_line_only=True),
    Option("all_mount_gfscache", ("--all-mount-gfscache",), FLAG, command_line_only=True),
    Option("no_check_gfscache", ("--no-check-gfscache",), FLAG, command_line_only=True),
    Option("no_check_directory", ("--no-check-directory",), FLAG, command_line_only=True),
    Option("omp", ("--omp",), KEYED, era="site"),
    Option("no_staging", ("--no-stging",), FLAG, era="k"),  # pjsub's own spelling
    Option("stg_transfiles", ("--stg-transfiles",), era="k"),
    Option("stgin", ("--stgin",), MANY, era="k"),
    Option("stgout", ("--stgout",), MANY, era="k"),
    Option("stgin_dir", ("--stgin-dir",), MANY, era="k"),
    Option("stgout_dir", ("--stgout-dir",), MANY, era="k"),
    Option("stgin_basedir", ("--stgin-basedir",), era="k"),
    Option("stgout_basedir", ("--stgout-basedir",), era="k"),
    Option("stgin_file", ("-I",), MANY, era="k"),
    Option("stgout_file", ("-O",), MANY, era="k"),
)

SPELLINGS: Dict[str, Option] = {spelling: option for option in OPTIONS for spelling in option.spellings}
COMMAND_LINE_ONLY: Tuple[str, ...] = tuple(option.name for option in OPTIONS if option.command_line_only)

# PJM's name of a power knob → valid values; from the user guide's chapter on power control
KNOB_VALUES: Dict[str, Tuple[int, ...]] = {knob.resource: knob.values for knob in POWER_KNOBS}

# canonical option → other spelling of a key → the key
KEY_ALIASES: Dict[str, Dict[str, str]] = {"resources": {"rg": "rscgrp", "ru": "rscunit"}}

# canonical option → key → kind of value: elapse, node, size, count, int, switch, shape, axes, vnode, text or flag; a
# question mark means that it may be `unlimited`. Any other key of -L is a custom resource.
KEYS: Dict[str, Dict[str, str]] = {
    "resources": {
        "node": "node",
        "elapse": "elapse",
        "rscunit": "text",
        "rscgrp": "text",
        "node-mem": "size?",
        "proc-core": "size?",
        "proc-cpu": "elapse",
        "proc-crproc": "count?",
        "proc-data": "size?",
        "proc-lockm": "size?",
        "proc-msgq": "size?",
        "proc-openfd": "count?",
        "proc-psig": "count?",
        "proc-filesz": "size?",
        "proc-stack": "size?",
        "proc-vmem": "size?",
        "vnode": "vnode",
        "vnode-core": "count",
        "vnode-mem": "size?",
        "core-mem": "size?",
        **dict.fromkeys(KNOB_VALUES, "int"),
        "retention_state_acores": "int",
        "jobenv": "text",
        "exepjrsh": "int",
        "estimated-power": "text",
        "nnum_cret": "text",
        "gpu": "count",
    },
    "mpi": {
        "proc": "count",
        "max-proc-per-node": "count",
        "shape": "shape",
        "rank-map-bychip": "axes",
        "rank-map-bynode": "axes",
        "rank-map-hostfile": "text",
        "assign-online-node": "flag",
    },
    "llio": {
        "localtmp-size": "size",
        "sharedtmp-size": "size",
        "auto-readahead": "switch",
        "async-close": "switch",
        "cn-cache-size": "size",
        "cn-cached-write-size": "size",
        "cn-read-cache": "switch",
        "sio-read-cache": "switch",
        "stripe-count": "count",
        "stripe-size": "size",
        "uncompleted-fileinfo-path": "text",
        "perf": "flag",
        "perf-path": "text",
    },
    "policy": {"vn-policy": "text", "exec-policy": "text"},
    "omp": {"thread": "count"},
}
MAIL_FLAGS = "bersS"  # events of -m
K_ERA_MPI_KEYS = ("use-rankdir",)
RANK_MAP_SEPARATORS = {"rank-map-bychip": ":", "rank-map-bynode": "="}


def find_option(spelling: str) -> Optional[Option]:
    """Return the option with this spelling; long options have no abbreviations."""
    return SPELLINGS.get(spelling)
