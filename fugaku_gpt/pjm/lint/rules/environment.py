"""Rules for the environment that the job expects (PJM094 to PJM097)."""

from __future__ import annotations

import re
from typing import Iterator

from fugaku_gpt.pjm.lint.facts import Facts, printable
from fugaku_gpt.pjm.lint.registry import WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FUGAKU

_SPACK = re.compile(r"share/spack/setup-env|^spack$")
_ENVIRONMENT_VARIABLE = re.compile(r"\$\{?(VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|PYENV_VERSION)\b(?!:?[-+])")
_ACTIVATION = re.compile(r"\bactivate\b|\bconda\.sh\b|\bsetup-env\b|\bmodulecmd\b")
_HARMLESS_COMMANDS = (
    "[",
    "[[",
    "test",
    "if",
    "echo",
    "printf",
    "deactivate",
)  # commands that a missing value does not harm
_ID_WITH_BRACKETS = re.compile(r"\d+\[[-\d,]+\]")
_PJM_COMMANDS = ("pjstat", "pjdel", "pjwait", "pjhold", "pjrls", "pjalter", "pjsig")


@rule(
    "PJM094",
    WARNING,
    "Spack without /lib64 first in LD_LIBRARY_PATH",
    why="Packages of Spack bring libraries that hide those of the compute nodes' operating system; with /lib64 first "
    "the system's own are found.",
    fix="after `spack load`: export LD_LIBRARY_PATH=/lib64:$LD_LIBRARY_PATH",
    source="Fugaku user guide 1.52, EnvironmentSettings",
    site=FUGAKU,
)
def spack_libraries(facts: Facts) -> Iterator[Hit]:
    if "spack" not in facts.body_text:
        return
    command = next(
        (item for item in facts.commands if item.argv and any(_SPACK.search(word.text) for word in item.argv[:2])),
        None,
    )
    if command is None:
        return
    paths = [item.value for item in facts.assignments_to("LD_LIBRARY_PATH")]
    if any(path.startswith("/lib64") or "sort_libp" in path for path in paths):  # sort_libp puts it first
        return
    yield Hit(command.line, "Spack is used, and LD_LIBRARY_PATH does not begin with /lib64", command.column)


@rule(
    "PJM095",
    WARNING,
    "the job counts on the environment it was submitted from",
    why="pjsub does not hand the environment of the login shell on: what was active there is not active in the job. "
    "(-X does hand it on, from an x86 login node to Arm compute nodes.)",
    fix="activate it in the script: source .../bin/activate",
    source="Command Reference J2UL-2549, pjsub, -X and -x",
)
def inherited(facts: Facts) -> Iterator[Hit]:
    if "export_all" in facts.script.options:
        return
    for command, (line, column) in facts.find_uses(_ENVIRONMENT_VARIABLE):
        tokens = (
            *(item.value for item in command.settings),
            *command.argv,
            *(item for _, item in command.redirections),
        )
        name = next(match[1] for match in (_ENVIRONMENT_VARIABLE.search(word.raw) for word in tokens) if match)
        before = [item for item in facts.commands if item.line < command.line]
        activated = any(_ACTIVATION.search(word.text) or word.text == "module" for item in before for word in item.argv)
        if not activated and not facts.assignments_to(name) and command.name not in _HARMLESS_COMMANDS:
            yield Hit(line, f"${name} is used, and nothing in the script sets it", column)
            return


@rule(
    "PJM096",
    WARNING,
    "unquoted job id with brackets",
    why="The shell reads 239[1-5] as a pattern of file names: it works until a file of such a name is there, and "
    "fails in zsh and csh at once.",
    fix="quote it: '239[1-5]'",
    source="Command Reference J2UL-2549, pjstat and pjdel",
)
def unquoted_id(facts: Facts) -> Iterator[Hit]:
    for command in facts.commands if "[" in facts.body_text else ():
        if command.name in _PJM_COMMANDS:
            for word in command.argv[1:]:
                if _ID_WITH_BRACKETS.fullmatch(word.raw):
                    yield Hit(
                        word.line,
                        f"{command.name} {printable(word.raw)}",
                        word.column,
                        f"write '{printable(word.raw)}'",
                    )


@rule(
    "PJM097",
    WARNING,
    "pjrsh without exepjrsh=1",
    why="pjrsh starts commands on other nodes of the job, which the job must have asked for.",
    fix='add #PJM -L "exepjrsh=1"',
    source="Fugaku user guide 1.52, JobExecution/HowToUseCustomResource",
    site=FUGAKU,
)
def remote_shell(facts: Facts) -> Iterator[Hit]:
    if facts.resources.get("exepjrsh") is not None or "pjrsh" not in facts.body_text:
        return
    for command in facts.commands:
        word = next((word for word in command.argv if word.text.rpartition("/")[2] == "pjrsh"), None)
        if word:
            yield Hit(word.line, "pjrsh is used, and the job does not ask for exepjrsh=1", word.column)
            return
