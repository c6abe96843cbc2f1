"""Rules for options that exclude or need each other (PJM010 to PJM016)."""

from __future__ import annotations

import re
from typing import Iterator

from fugaku_gpt.pjm.lint.facts import Facts, is_unfilled, printable
from fugaku_gpt.pjm.lint.registry import COMMAND_LINE, ERROR, INFO, UNSURE, WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FUGAKU
from fugaku_gpt.pjm.options import find_option
from fugaku_gpt.pjm.values import parse_bulk, parse_step

_MODES = ("bulk", "step", "interact", "mswk")
_OWN_PATH = re.compile(r"%[bsJ]")


@rule(
    "PJM010",
    ERROR,
    "statistics options that do not fit together",
    why="-s (the job's statistics) and -S (also a record for each node) exclude each other, though public scripts give "
    "both; --spath needs one of them.",
    fix="keep one of -s and -S",
    source="Fugaku user guide 1.52, pjsubCommandOptions; Command Reference J2UL-2549, pjsub",
)
def statistics(facts: Facts) -> Iterator[Hit]:
    options = facts.script.options
    if "stats" in options and "stats_nodes" in options:
        line = max(facts.line_of("stats"), facts.line_of("stats_nodes"))
        yield Hit(line, "-s and -S are both given", downgrade=UNSURE)
    if "stats_path" in options and "stats" not in options and "stats_nodes" not in options:
        message = f"--spath {printable(options['stats_path'])} without -s or -S"
        yield Hit(facts.line_of("stats_path"), message, fix="add -S, or remove --spath", downgrade=COMMAND_LINE)


@rule(
    "PJM011",
    INFO,
    "no statistics file",
    why="Without -s or -S nothing is written about the job's energy, power, memory and knobs once it has ended.",
    fix="add #PJM -S",
    source="Fugaku user guide 1.52, pjsubCommandOptions",
    site=FUGAKU,
)
def no_statistics(facts: Facts) -> Iterator[Hit]:
    if "stats" not in facts.script.options and "stats_nodes" not in facts.script.options:
        yield Hit(facts.top, "neither -s nor -S: there will be no record of energy and power", is_absence=True)


@rule(
    "PJM012",
    ERROR,
    "option of the command line inside the script",
    why="On Fugaku --no-check-directory, --no-check-gfscache and --all-mount-gfscache are errors in a script; -C, "
    "--script-delimiter, --verbose and --help have a meaning on the command line alone.",
    fix="remove the line and give the option to pjsub: pjsub OPTION job.sh",
    source="Fugaku user guide 1.52, LayeredStorageAndLLIO/SelectAvailableVolumes; Command Reference J2UL-2549, pjsub",
)
def command_line_only(facts: Facts) -> Iterator[Hit]:
    for directive in facts.script.directives:
        option = find_option(directive.option)
        if option is not None and option.command_line_only:
            message = f"{directive.option} is for the command line of pjsub alone"
            yield Hit(directive.line, message, facts.column(directive.line, directive.option), downgrade=UNSURE)


@rule(
    "PJM018",
    WARNING,
    "mail without an address",
    why="-m names the events that send mail; without --mail-list the mail goes to the account on the login node, where "
    "few people read it.",
    fix="add #PJM --mail-list ADDRESS",
    source="Command Reference J2UL-2549, pjsub, -m and --mail-list",
)
def mail_without_address(facts: Facts) -> Iterator[Hit]:
    options = facts.script.options
    if "mail" in options and "mail_list" not in options:
        yield Hit(facts.line_of("mail"), f"-m {printable(options['mail'])} without --mail-list")


@rule(
    "PJM014",
    WARNING,
    "sub-jobs share one output file",
    why="All sub-jobs of a bulk or step job get the same path and overwrite each other's output.",
    fix="put %J (sub-job id), %b (bulk number) or %s (step number) into the path",
    source="Command Reference J2UL-2549, pjsub, -o",
)
def shared_output(facts: Facts) -> Iterator[Hit]:
    options = facts.script.options
    mode = next((mode for mode in ("bulk", "step") if mode in options), None)
    for name, option in (("out", "-o"), ("err", "-e"), ("stats_path", "--spath")):
        path = options.get(name)
        if mode and isinstance(path, str) and not _OWN_PATH.search(path) and path != "/dev/null":
            line, column = facts.position(name, path)
            yield Hit(line, f"{option} {printable(path)} is the same file for all sub-jobs of a {mode} job", column)


@rule(
    "PJM015",
    ERROR,
    "options that exclude each other",
    why="pjsub refuses the combination: [ERR.] PJM 0002.",
    fix="keep one of them",
    source="Command Reference J2UL-2549, pjsub, message 0002",
)
def exclusive(facts: Facts) -> Iterator[Hit]:
    options = facts.script.options
    modes = [mode for mode in _MODES if mode in options]
    if len(modes) > 1:
        yield Hit(max(facts.line_of(mode) for mode in modes), " and ".join(f"--{mode}" for mode in modes) + " together")
    if "restart" in options and "norestart" in options:
        line = max(facts.line_of("restart"), facts.line_of("norestart"))
        yield Hit(line, "--restart and --norestart together", downgrade=UNSURE)
    if "rank-map-bychip" in facts.mpi and "rank-map-bynode" in facts.mpi:
        line = max(facts.line_of("mpi.rank-map-bychip"), facts.line_of("mpi.rank-map-bynode"))
        yield Hit(line, "rank-map-bychip and rank-map-bynode together", downgrade=UNSURE)
    sparam = options.get("sparam")
    if "bulk" in options and not isinstance(sparam, str):
        message = "--bulk without --sparam: the bulk numbers are missing"
        yield Hit(facts.line_of("bulk"), message, fix='add --sparam "0-9"', downgrade=COMMAND_LINE)
    if isinstance(sparam, str) and len(modes) == 1 and modes[0] in ("bulk", "step"):
        yield from _parameters(facts, modes[0], sparam)


def _parameters(facts: Facts, mode: str, sparam: str) -> Iterator[Hit]:

    line, column = facts.position("sparam", sparam)
    try:
        if mode == "bulk":
            parse_bulk(sparam)
        else:
            step = parse_step(sparam)
            if step.job_id is not None and step.job_name is not None:
                yield Hit(line, f"--sparam {printable(sparam)} names the step job by jid and by jnam", column)
    except ValueError as error:
        if not is_unfilled(sparam):
            yield Hit(
                line, f"--sparam of a {mode} job: {printable(error)}", column, "see --sparam in the manual", UNSURE
            )


@rule(
    "PJM016",
    WARNING,
    "--sparam without its mode",
    why="--sparam says more of a bulk, step or interactive job; alone it is refused or says nothing. The mode may be "
    "on the command line.",
    fix="add --bulk or --step, or give both on the command line",
    source="Command Reference J2UL-2549, pjsub",
)
def lonely_sparam(facts: Facts) -> Iterator[Hit]:
    options = facts.script.options
    sparam = options.get("sparam")
    if sparam is None or any(mode in options for mode in _MODES):
        return
    fix = "add --interact: wait-time is of interactive jobs" if "wait-time" in str(sparam) else ""
    yield Hit(facts.line_of("sparam"), f"--sparam {printable(sparam)} without --bulk, --step or --interact", fix=fix)
