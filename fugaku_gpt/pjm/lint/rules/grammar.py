"""Rules for lines that ``pjsub`` may not read (PJM001 to PJM009)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, Iterator, List, Tuple

from fugaku_gpt.pjm.lexer import MAX_LINE_LENGTH
from fugaku_gpt.pjm.lint.facts import Facts, is_unfilled, printable
from fugaku_gpt.pjm.lint.foreign_options import UNDOCUMENTED, mend_of_foreign
from fugaku_gpt.pjm.lint.registry import ERROR, INFO, RUNS, UNSURE, WARNING, Hit, close_matches, rule
from fugaku_gpt.pjm.options import (
    ASSIGN,
    KEY_ALIASES,
    KEYED,
    KEYS,
    OPTIONS,
    SPELLINGS,
    TEXT,
    find_option,
)
from fugaku_gpt.pjm.script import Directive
from fugaku_gpt.pjm.shell_words import split_line
from fugaku_gpt.pjm.values import has_placeholder, parse_elapse

_CURLY = "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\uff02\uff07"
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uff0d"
_NON_ASCII_MARK = re.compile(rf"(?:^|(?<=[\s\"']))[{_DASHES}]|[{_CURLY}]")
_OPTION = re.compile(rf"#PJM\s+[\"']?[-{_DASHES}]")
# a key of a list, with a blank before or behind its equals sign
_SPACED_KEY = re.compile(r"(?:^|,) *[A-Za-z][\w-]*(?: +=| *= +)[^\s,]*")
_FOREIGN = re.compile(r"#(SBATCH|PBS|BSUB|COBALT|OAR)\s+-")


@rule(
    "PJM001",
    ERROR,
    "directive below the first command",
    why="pjsub reads directives only down to the first line that is neither blank nor a comment, and passes over all "
    "later ones without a word: the job runs with defaults in their place.",
    fix="move the line above the first command",
    source="Command Reference J2UL-2549, pjsub; End-user's Guide J2UL-2534, 2.1.1",
)
def misplaced_directive(facts: Facts) -> Iterator[Hit]:
    script = facts.script
    for line in script.ignored_lines:
        text = script.lines[line - 1]
        if _OPTION.match(text) and facts.is_shell and line not in facts.body.enclosed_lines:
            message = f"{printable(text)} stands below the first command (line {script.body_line}): pjsub ignores it"
            yield Hit(line, message, downgrade=RUNS)


@rule(
    "PJM002",
    WARNING,
    "looks like a directive, but is a comment",
    why="Only #PJM at column 1, followed by a space, is read. A space before or after the #, a second # or small "
    "letters make the line a comment. Many people switch lines off so; then nothing is wrong.",
    fix="write #PJM at column 1, or, if the line is meant to be off, add `# noqa: PJM002`",
    source="Command Reference J2UL-2549, pjsub",
)
def disabled_directive(facts: Facts) -> Iterator[Hit]:
    script = facts.script
    active = {_option_of(script.lines[directive.line - 1]) for directive in script.directives}
    off: List[Hit] = []  # lines that are off on purpose: one finding for all of them
    for line in script.disabled_lines:
        if script.body_line and line > script.body_line:
            continue  # it would be ignored in any case
        text = script.lines[line - 1]
        # a second #, a dash or a tab behind it is how editors and people switch a line off; so is any form beside
        # another value
        before = text.partition("PJM")[0]
        deliberate = "-" in before or before.count("#") > 1 or before.endswith("\t") or _option_of(text) in active
        column = len(text) - len(text.lstrip()) + 1
        hit = Hit(line, f"{printable(text.strip())} is a comment to pjsub", column, severity=INFO if deliberate else "")
        if deliberate:
            off.append(hit)
        else:
            yield hit
    if off:
        others = f", as {len(off) - 1} more such lines are" if len(off) > 1 else ""
        yield replace(off[0], message=off[0].message + others)


def _option_of(text: str) -> str:
    """The option of a line and the key of its first value, such as ``-L node``."""
    match = re.search(r"""PJM\s+(-\S+)(?:[\s="']+([A-Za-z][\w-]*))?""", text, re.IGNORECASE)
    return " ".join(filter(None, match.groups())) if match else text


@rule(
    "PJM003",
    ERROR,
    "a dash or quote that is not ASCII",
    why='Word processors and web pages turn - into – and " into “. pjsub takes such a word for something else.',
    fix="type the dash or quote again, in ASCII",
    source="seen in public scripts; Command Reference J2UL-2549, pjsub",
)
def not_ascii(facts: Facts) -> Iterator[Hit]:
    script = facts.script
    read = {directive.line for directive in script.directives} | {problem.line for problem in script.problems}
    for line in sorted(read):
        text = _without_comment(script.lines[line - 1])
        match = _NON_ASCII_MARK.search(text)
        if match and text.startswith("#PJM"):
            character = f"U+{ord(match[0]):04X} ({match[0]})"
            yield Hit(line, f"{character} in {printable(text)}", match.start() + 1, downgrade=UNSURE)


@rule(
    "PJM004",
    ERROR,
    "unbalanced quotes",
    why="pjsub refuses the script: [ERR.] PJM 0008.",
    fix="close the quote, or remove it",
    source="Command Reference J2UL-2549, pjsub, message 0008",
)
def unbalanced(facts: Facts) -> Iterator[Hit]:
    for problem in facts.script.problems:
        if problem.kind == "unbalanced-quotes":
            downgrade = UNSURE if has_placeholder(problem.text) else ""
            yield Hit(problem.line, f"a quote is never closed in {printable(problem.text)}", downgrade=downgrade)


@rule(
    "PJM005",
    ERROR,
    "unknown option or key",
    why="pjsub refuses options and keys that it does not know (PJM 0001, 0004), and asks the site about any other key "
    "of -L, which it takes for a custom resource (PJM 0076).",
    fix="write the option or key as the manual does",
    source="Command Reference J2UL-2549, pjsub",
)
def unknown(facts: Facts) -> Iterator[Hit]:
    script = facts.script
    elsewhere = "" if facts.is_fugaku else UNSURE
    for directive in script.directives:
        option = find_option(directive.option)
        if option is None and not _has_non_ascii_marks(directive.option):
            if is_unfilled(directive.option) and not directive.option.startswith("-"):
                continue
            suggestions = close_matches(directive.option, _spellings()) or _as_key(directive.option)
            is_unsure = has_placeholder(directive.option) or directive.option in UNDOCUMENTED
            name = printable(directive.option)
            yield Hit(
                directive.line,
                f"pjsub's manual has no option {name}" if is_unsure else f"pjsub has no option {name}",
                facts.column(directive.line, directive.option),
                mend_of_foreign(directive.option) or _suggest(suggestions),
                downgrade=UNSURE if is_unsure else elsewhere,
            )
        elif option is not None and directive.key is not None and option.era == "tcs":
            yield from _unknown_key(
                facts, directive.line, option.name, directive.option, directive.key, directive.is_supported
            )
    for problem in script.problems:
        column = facts.column(problem.line, problem.text)
        if problem.kind == "missing-argument":
            yield Hit(
                problem.line, f"{printable(problem.text)} lacks its argument", column, "add it, or remove the option"
            )
        elif problem.kind == "unexpected-argument":
            yield Hit(
                problem.line, f"{printable(problem.text)}: the option takes no argument", column, downgrade=UNSURE
            )
        elif (
            problem.kind == "stray-word"
            and not _has_non_ascii_marks(problem.text)
            and not _is_unfilled_line(facts, problem.line)
        ):
            message = f"{printable(problem.text)} belongs to no option"
            yield Hit(
                problem.line, message, column, "quote what belongs together, or remove the word", downgrade=UNSURE
            )


def _unknown_key(facts: Facts, line: int, name: str, option: str, key: str, is_supported: bool) -> Iterator[Hit]:
    if name == "mpi" and key == "use-rankdir" or name in ("environment", "vset"):
        return
    keys = set(KEYS.get(name, ())) | set(KEY_ALIASES.get(name, ()))
    if (
        key in keys
        or has_placeholder(key)
        or is_unfilled(key)
        and not key.replace("_", "").isalnum()
        or _has_non_ascii_marks(key)
    ):
        return
    suggestions = close_matches(key, keys, cutoff=0.8)
    custom = name == "resources"
    if custom and not suggestions:
        return  # it may be a custom resource of the site
    fix = _suggest(suggestions)
    downgrade = "" if facts.is_fugaku else UNSURE
    yield Hit(line, f"{option} has no key {printable(key)}", facts.column(line, key), fix, downgrade=downgrade)


@rule(
    "PJM006",
    ERROR,
    "option of the K computer or FX10",
    why="File staging (--stg..., -I, -O) and use-rankdir are not in today's job operation software: pjsub refuses "
    "them on Fugaku.",
    fix="read files in place, make them common with llio_transfer, or copy them to $PJM_LOCALTMP",
    source="Command Reference J2UL-2549, pjsub (they are not in it); Fugaku user guide 1.52, LayeredStorageAndLLIO",
)
def k_era(facts: Facts) -> Iterator[Hit]:
    for directive in facts.script.directives:
        option = find_option(directive.option)
        word = directive.option if option is not None and option.era == "k" else ""
        if option is not None and option.name == "mpi" and directive.key == "use-rankdir":
            word = "use-rankdir"
        if word:
            idle = word == "--no-stging"  # today's machines accept it: it requests nothing
            message = f"{word} is an option of the K computer and FX10"
            fix = "remove it: nothing is staged" if idle else ""
            severity = "" if facts.is_fugaku and not idle else INFO
            yield Hit(directive.line, message, facts.column(directive.line, word), fix, severity=severity)


@rule(
    "PJM007",
    ERROR,
    "directive of another scheduler",
    why="pjsub takes #SBATCH and #PBS lines for comments: what they ask for is not asked of PJM. A script that serves "
    "several schedulers may hold them on purpose.",
    fix="write the option as #PJM",
    source="Command Reference J2UL-2549, pjsub",
)
def other_scheduler(facts: Facts) -> Iterator[Hit]:
    script = facts.script
    last = script.body_line - 1 if script.body_line else len(script.lines)
    for line, text in enumerate(script.lines[:last], 1):
        match = _FOREIGN.match(text)
        if match:
            yield Hit(line, f"{printable(text)} is for {match[1]}, and a comment to pjsub", downgrade=RUNS)


@rule(
    "PJM008",
    WARNING,
    "a line too long or with too many options",
    why="pjsub refuses a line of more than 4096 characters (PJM 0025) and ignores options after the 64th (PJM 0024).",
    fix="spread the options over several lines",
    source="Command Reference J2UL-2549, pjsub, messages 0024 and 0025",
)
def too_long(facts: Facts) -> Iterator[Hit]:
    for problem in facts.script.problems:
        if problem.kind == "line-too-long":
            yield Hit(problem.line, f"{len(problem.text)} characters, more than 4096: pjsub refuses the line")
        elif problem.kind == "too-many-options":
            yield Hit(problem.line, f"more than 64 options: {printable(problem.text)} is ignored")


@rule(
    "PJM009",
    INFO,
    "no #! line",
    why="Without #! the script is run by your login shell, which may be another tomorrow or for a colleague.",
    fix="begin the script with #!/bin/bash",
    source="Command Reference J2UL-2549, pjsub; End-user's Guide J2UL-2534, 2.1.1",
)
def no_shebang(facts: Facts) -> Iterator[Hit]:
    lines = facts.script.lines
    if lines and not lines[0].lstrip("\ufeff").startswith("#!"):
        yield Hit(1, f"the first line is {printable(lines[0])!r}, no #!: the login shell runs the script")


@rule(
    "PJM017",
    ERROR,
    "lines that end as on Windows",
    why="The shell takes the carriage return at the end of a line for a part of its last word: `#!/bin/bash` names a "
    "program that does not exist, and so does the last word of each command.",
    fix="sed -i 's/\\r$//' FILE",
    source="bash(1); seen in public scripts",
)
def carriage_return(facts: Facts) -> Iterator[Hit]:
    for problem in facts.script.problems:
        if problem.kind == "carriage-return":
            count = int(problem.text)
            lines = "1 line ends" if count == 1 else f"{count} lines end"
            yield Hit(problem.line, f"{lines} in a carriage return, this being the first", downgrade=RUNS)


@rule(
    "PJM089",
    WARNING,
    "a byte order mark before the first line",
    why="The mark, which some editors of Windows write, is no blank: the kernel does not see the #! behind it, and the "
    "shell takes the first line for a command. What pjsub makes of a #PJM behind it is in no manual.",
    fix="sed -i '1s/^\\xEF\\xBB\\xBF//' FILE, or save it as UTF-8 without BOM",
    source="execve(2), interpreter scripts; bash(1)",
)
def byte_order_mark(facts: Facts) -> Iterator[Hit]:
    lines = facts.script.lines
    for problem in facts.script.problems:
        if problem.kind == "byte-order-mark":
            hides = "hides the #! line" if lines[0][1:].startswith("#!") else "is part of the first word"
            yield Hit(problem.line, f"U+FEFF, a byte order mark, stands before the first character, and {hides}")


@rule(
    "PJM026",
    WARNING,
    "a value that is given twice, and differs",
    why="Of an option or key that is given several times pjsub takes the last value, without a word on the others.",
    fix="keep the line that is meant",
    source="Command Reference J2UL-2549, pjsub, options given several times",
)
def given_twice(facts: Facts) -> Iterator[Hit]:
    earlier: Dict[Tuple[str, str], Directive] = {}
    for directive in facts.script.directives:
        option = find_option(directive.option)
        if option is None or option.kind not in (KEYED, ASSIGN, TEXT) or directive.value is None:
            continue
        key = directive.key or ""
        identity = (option.name, KEY_ALIASES.get(option.name, {}).get(key, key))
        before, earlier[identity] = earlier.get(identity), directive
        values = [] if before is None or before.value is None else [before.value, directive.value]
        if before is None or len(set(values)) < 2 or any(has_placeholder(value) for value in values):
            continue
        first, second = (f"{key}={value}" if key else f"{directive.option} {value}" for value in values)
        if not _is_same(identity, *values):
            message = f"{printable(second)}, and line {before.line} has {printable(first)}: the last holds"
            yield Hit(directive.line, message, facts.column(directive.line, directive.value))


def _is_same(identity: Tuple[str, str], first: str, second: str) -> bool:
    """Whether two values are the same time in another form."""
    if identity != ("resources", "elapse"):
        return False
    try:
        return parse_elapse(first) == parse_elapse(second)
    except ValueError:
        return False


@rule(
    "PJM027",
    INFO,
    "blanks around an equals sign",
    why="The manual writes key=value without blanks; whether pjsub takes others away is not in it.",
    fix="write key=value without blanks",
    source="Command Reference J2UL-2549, pjsub, -L, --mpi and --llio (the form of the keys)",
)
def blank_around_equals(facts: Facts) -> Iterator[Hit]:
    for line in sorted({directive.line for directive in facts.script.directives if _has_keys(directive)}):
        text = facts.script.lines[line - 1]
        if len(text) > MAX_LINE_LENGTH or "=" not in text:
            continue
        tokens = split_line(text[len("#PJM") :]).tokens
        for before, token in zip(["", *tokens], tokens):
            option = find_option(before)
            if option is not None and option.kind != KEYED:
                continue  # its value may hold any text
            match = _SPACED_KEY.search(token)
            if match:
                column = facts.column(line, match[0].strip(" ,"))
                yield Hit(line, f"{printable(match[0].strip(' ,'))!r} has a blank beside the equals sign", column)
                break


def _has_keys(directive: Directive) -> bool:
    """Whether its option takes keys of the scheduler; the variables of -x are the user's, and may hold any text."""
    option = find_option(directive.option)
    return option is not None and option.kind == KEYED and directive.key is not None


def _spellings() -> "list[str]":
    return [spelling for spelling in SPELLINGS if len(spelling) > 2]


def _as_key(option: str) -> "list[str]":
    """Suggest the option that has this key: ``--node-mem`` is not an option, but a key of -L."""
    word = option.lstrip("-")
    return [
        f"{option_with_key.spellings[0]} {word}=..."
        for option_with_key in OPTIONS
        if word in KEYS.get(option_with_key.name, ()) and option_with_key.era == "tcs"
    ]


def _suggest(suggestions: "list[str]") -> str:
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else ""


def _has_non_ascii_marks(text: str) -> bool:
    return bool(_NON_ASCII_MARK.search(text))


def _without_comment(text: str) -> str:
    return re.split(r"\s#", text, maxsplit=1)[0] if "#" in text[4:] else text


def _is_unfilled_line(facts: Facts, line: int) -> bool:
    return has_placeholder(facts.script.lines[line - 1]) or is_unfilled(facts.script.lines[line - 1])
