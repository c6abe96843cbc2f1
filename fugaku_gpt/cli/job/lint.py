"""``fugaku-gpt job lint``: report mistakes in ``#PJM`` job scripts."""

from __future__ import annotations

import datetime
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.options import PATH, format_option, options_as
from fugaku_gpt.cli.output import echo, render_rows
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE, UsageError
from fugaku_gpt.input_files import read_stream, read_text
from fugaku_gpt.limits import STATISTICS
from fugaku_gpt.records.files import write_text_atomically

SITES = ("auto", "fugaku", "flow", "odyssey", "genkai", "fx700", "fx1000", "any")
_STDIN = "-"


@dataclass(frozen=True)
class LintOptions:
    """The options of the command."""

    form: str
    select: Tuple[str, ...]
    ignore: Tuple[str, ...]
    fail_on: str
    strict: bool
    site: str
    limits_file: Optional[Path]
    explain: Optional[str]
    list_rules: bool
    update_limits: bool
    out: Optional[Path]


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1)
@format_option(("text", "json", "sarif"), "findings")
@click.option(
    "--select",
    multiple=True,
    metavar="IDS",
    help="Check only these rules; ids may be shortened (PJM05), or separated by commas; repeatable.",
)
@click.option("--ignore", multiple=True, metavar="IDS", help="Check all rules but these; repeatable.")
@click.option(
    "--fail-on",
    type=click.Choice(("error", "warning", "info")),
    default="warning",
    show_default=True,
    help="Exit with code 3 if there is a finding of this severity or worse.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Report as errors also what depends on the site's current limits, or on the command line of pjsub.",
)
@click.option(
    "--site",
    type=click.Choice(SITES),
    default="auto",
    show_default=True,
    help="Site that the scripts are for: a site with a data file, another FX1000 system, or any; auto decides for each "
    "script by its directives, and prints what decided it.",
)
@click.option("--limits", "limits_file", metavar="FILE", type=PATH, help="File of a site's limits, in place of ours.")
@click.option("--explain", metavar="ID", help="Explain a rule: what it is about, why, and its source.")
@click.option("--rules", "list_rules", is_flag=True, help="List all rules.")
@click.option(
    "--update-limits",
    is_flag=True,
    help="Read FILEs as outputs of `pjacl --rg GROUP` and write a limits file to -o; FILE may be GROUP=FILE, or -.",
)
@click.option("-o", "--out", metavar="FILE", type=PATH, help="File that --update-limits writes.")
@options_as(LintOptions)
def lint(files: Tuple[str, ...], options: LintOptions) -> int:
    """Check #PJM job scripts for options that pjsub refuses, ignores or misreads, and for mistakes that waste the job.

    FILE - is the standard input; a folder is searched for scripts with a #PJM line above the first command. Nothing is
    executed or submitted.

    A finding is an error if the job fails on any day and with any command line of pjsub; otherwise it is a warning, and
    an error with --strict. Values with variables or placeholders are not checked (PJM098 names them).

    `# noqa: PJM052` at the end of a line silences that finding on the line, `# noqa` all of them, and
    `# noqa-file: PJM020` those in the file. Findings about missing options are reported at the first #PJM line.

    Exit codes: 0 no finding at or above --fail-on, 2 wrong usage or a file that cannot be read, 3 findings.
    """
    if options.explain is not None:
        echo(_explain(options.explain), nl=False)
        return EXIT_OK
    if options.list_rules:
        echo(_rules(options.form), nl=False)
        return EXIT_OK
    if not files:
        raise UsageError("nothing to check: name a FILE, a folder, or - for the standard input")
    if options.update_limits:
        return _update_limits(files, options.limits_file, options.out)
    if options.out is not None:
        raise UsageError("-o goes with --update-limits; findings are printed")
    return _check(files, options)


def _check(files: Sequence[str], options: LintOptions) -> int:
    from fugaku_gpt.pjm.lint.files import lint_files, linter_for
    from fugaku_gpt.pjm.lint.formats import as_json, as_sarif, as_text
    from fugaku_gpt.pjm.lint.registry import is_at_least

    linter = linter_for(options.site, options.limits_file, options.strict, options.select, options.ignore)
    reports, unreadable = lint_files(linter, files)
    if options.form == "sarif":
        text = as_sarif(reports, linter.rules, linter.limits)
    else:
        text = (as_json if options.form == "json" else as_text)(reports, linter.limits)
    echo(text, nl=False)
    for message in unreadable:
        echo(f"fugaku-gpt: {message}", err=True)
    if unreadable:
        return EXIT_USAGE
    fails = any(is_at_least(item.severity, options.fail_on) for report in reports for item in report.findings)
    return EXIT_FINDINGS if fails else EXIT_OK


def _explain(id: str) -> str:
    from fugaku_gpt.pjm.lint.formats import explain, explain_not_decided
    from fugaku_gpt.pjm.lint.registry import find_rule
    from fugaku_gpt.pjm.lint.undecided import NOT_DECIDED

    return explain_not_decided(id.upper()) if id.upper() in NOT_DECIDED else explain(find_rule(id))


def _rules(form: str) -> str:
    from fugaku_gpt.pjm.lint.formats import rule_rows
    from fugaku_gpt.pjm.lint.registry import all_rules

    rows = rule_rows(all_rules())
    return render_rows(("id", "severity", "site", "title"), rows, "json" if form == "json" else "table")


def _update_limits(files: Sequence[str], limits_file: Optional[Path], out: Optional[Path]) -> int:
    from fugaku_gpt.pjm.acl_groups import read_acl_groups
    from fugaku_gpt.pjm.groups import GroupLimits, format_limits, with_groups
    from fugaku_gpt.pjm.lint.files import chosen_limits

    groups: List[GroupLimits] = []
    for argument in files:
        name, equals, path = argument.partition("=")
        if not equals or os.path.exists(argument):
            name, path = "", argument
        text, date = _saved_output(path)
        groups.extend(read_acl_groups(text, date, path, name))
    limits = with_groups(chosen_limits(limits_file), groups, "pjacl")
    text = format_limits(limits)
    if out is None or str(out) == _STDIN:
        echo(text, nl=False)
        return EXIT_OK
    try:
        write_text_atomically(out, text)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}") from None
    names = ", ".join(f"{group.name} ({group.date})" for group in groups)
    echo(f"wrote {out}: {names}; use it with --limits {out}")
    return EXIT_OK


def _saved_output(path: str) -> Tuple[str, str]:
    """A text and its date: that of the file's last change, or today's for the standard input."""
    try:
        if path == _STDIN:
            content = read_stream(sys.stdin.buffer, STATISTICS, "the standard input")
            return content.decode("utf-8", "replace"), datetime.date.today().isoformat()
        changed = datetime.date.fromtimestamp(os.path.getmtime(path))
        return read_text(path, STATISTICS, "replace"), changed.isoformat()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
