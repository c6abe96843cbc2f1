"""The lint engine: it searches folders for scripts, runs the rules and applies ``# noqa`` comments."""

from __future__ import annotations

import datetime
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

from fugaku_gpt.input_files import read_bytes, read_stream
from fugaku_gpt.limits import SCRIPT_IN_FOLDER, SCRIPT_TEXT
from fugaku_gpt.machine.garbage_collection import gc_suspended
from fugaku_gpt.pjm.groups import SiteLimits, fugaku_limits, other_sites
from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.pjm.lint.facts import Facts
from fugaku_gpt.pjm.lint.registry import DATED, DOWNGRADE_REASONS, ERROR, INFO, Hit, Rule, all_rules, severity_of
from fugaku_gpt.pjm.lint.sites import ANY, AUTO, choose_site, site_named
from fugaku_gpt.pjm.script import PjmScript

STDIN = "-"
_COMMAND = re.compile(rb"^(?![ \t\r\v\f]*(?:#|\r?$))(?!\xef\xbb\xbf#)", re.MULTILINE)
_ALL_IDS = ""  # the prefix of every id
_NOQA_COMMENT = re.compile(
    r"#[ \t]*noqa(-file)?(?![\w-])(?:[ \t]*(:)[ \t]*(PJM\d*(?:[ \t]*[, \t][ \t]*PJM\d*)*)?)?", re.IGNORECASE
)


@dataclass(frozen=True)
class LintFinding:
    """A finding of a rule at one position in a script.

    Attributes:
        id, title: id and title of the rule.
        severity: ``error``, ``warning`` or ``info``.
        line, column: position, from 1.
        message: description of the finding.
        fix: how to correct it.
        downgraded: why an error of the rule is shown as a warning; empty if it is not.
    """

    id: str
    title: str
    severity: str
    line: int
    column: int
    message: str
    fix: str
    downgraded: str = ""


@dataclass(frozen=True)
class FileReport:
    """The findings of one file, in order of lines.

    Attributes:
        site: the site that its rules were chosen for.
        site_reason: what in the script decided that; empty if the user did.
        limits: limits of that site; None where no data file is for it.
    """

    path: str
    findings: Tuple[LintFinding, ...]
    site: str = ANY
    site_reason: str = ""
    limits: Optional[SiteLimits] = None


@dataclass(frozen=True)
class Linter:
    """Checks scripts against rules.

    Attributes:
        rules: rules to check; default: all.
        limits: limits of Fugaku's groups; default: those that come with the package.
        others: limits of other sites, likewise.
        site: ``fugaku``, ``fx1000``, ``any``, the name of another site, or ``auto``, which decides for each script by
            its directives.
        strict: whether errors that would be downgraded to warnings are shown as errors.
        today: day by which the site's data are judged: what rests on data that are too old is shown as info, ``strict``
            or not. None: their age does not count.
    """

    rules: Sequence[Rule] = field(default_factory=all_rules)
    limits: SiteLimits = field(default_factory=fugaku_limits)
    others: Sequence[SiteLimits] = field(default_factory=other_sites)
    site: str = AUTO
    strict: bool = False
    today: Optional[datetime.date] = None

    def check(self, text: str, path: str = "") -> FileReport:
        """Check a script. Never raises, whatever the text."""
        with gc_suspended():  # a long script has hundreds of thousands of words
            return self._check(text, path)

    def _check(self, text: str, path: str) -> FileReport:
        script = read_script(text, skips_template_tags=True)
        if self.site == AUTO:
            choice = choose_site(script, self.limits, self.others)
        else:
            choice = site_named(self.site, self.limits, self.others)
        limits = choice.limits if choice.limits is not None else SiteLimits("", self.limits.date, "", "")
        facts = Facts(script, limits, choice.site, "" if path == STDIN else path)
        silenced = _silenced_ids(script)
        findings: List[LintFinding] = []
        for rule in self.rules:
            if not rule.applies_to(choice.site):
                continue
            for hit in rule.check(facts):
                if hit.is_absence and facts.is_template:
                    continue
                if not _is_silenced(rule.id, hit.line, silenced):
                    findings.append(self._finding(rule, hit, limits))
        findings.sort(key=lambda item: (item.line, item.column, item.id))
        return FileReport(path, tuple(findings), choice.site, choice.reason, choice.limits)

    def _finding(self, rule: Rule, hit: Hit, limits: SiteLimits) -> LintFinding:
        severity = severity_of(rule, hit, self.strict)
        lowered = DOWNGRADE_REASONS[hit.downgrade] if hit.downgrade and severity != ERROR else ""
        date = hit.date or (limits.date if hit.downgrade == DATED else "")
        if date and self.today is not None and severity != INFO and limits.is_stale(date, self.today):
            severity, lowered = INFO, f"it rests on data of {date}, older than {limits.fresh_days} days"
        return LintFinding(
            rule.id, rule.title, severity, hit.line, hit.column, hit.message, hit.fix or rule.fix, lowered
        )

    def check_file(self, path: str) -> FileReport:
        """Check a file, or the standard input for ``-``.

        Raises:
            OSError: the file cannot be read, or is longer than ``SCRIPT_TEXT``.
        """
        if path == STDIN:
            content = read_stream(sys.stdin.buffer, SCRIPT_TEXT, "the standard input")
        else:
            content = read_bytes(path, SCRIPT_TEXT)
        return self.check(content.decode("utf-8", "surrogateescape"), path)


def find_scripts(paths: Sequence[str]) -> Iterator[str]:
    """Yield the files among ``paths`` and, of each folder, the files with a directive in force, sorted by name.

    Generators of scripts, documents and logs that merely quote ``#PJM`` lines are thus skipped in folders, and so are
    hidden files and folders, links to folders, and files of more than one MiB.
    """
    for path in paths:
        if path == STDIN or not os.path.isdir(path):
            yield path
            continue
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                file = os.path.join(folder, name)
                if not name.startswith(".") and _is_script(file):
                    yield file


def _is_script(path: str) -> bool:
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > SCRIPT_IN_FOLDER.value:
            return False
        content = read_bytes(path, SCRIPT_IN_FOLDER)
    except OSError:
        return False  # in a folder, an unreadable file is not a script
    if b"#PJM" not in content or b"\0" in content:
        return False
    head = _COMMAND.search(content)  # only the lines above the first command are then parsed twice
    text = (content[: head.start()] if head else content).decode("utf-8", "surrogateescape")
    return bool(read_script(text, skips_template_tags=True).directives)


def _silenced_ids(script: PjmScript) -> Dict[int, Set[str]]:
    """Return line → prefixes of the ids that are suppressed there; line 0 stands for the whole file."""
    silenced: Dict[int, Set[str]] = {}
    for number, line in enumerate(script.lines, 1):
        if "noqa" not in line and "NOQA" not in line:
            continue
        for comment in _NOQA_COMMENT.finditer(line):
            ids: Optional[Set[str]] = None
            if comment[3]:
                ids = set(re.findall(r"PJM\d*", comment[3].upper()))
            elif not comment[2]:
                ids = {_ALL_IDS}
            silenced.setdefault(0 if comment[1] else number, set()).update(ids or ())
    return silenced


def _is_silenced(id: str, line: int, silenced: Dict[int, Set[str]]) -> bool:
    return any(id.startswith(prefix) for number in (0, line) for prefix in silenced.get(number, ()))
