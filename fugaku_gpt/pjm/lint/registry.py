"""The registry of rules: one small function per rule, registered under its id with the text of ``--explain``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set

from fugaku_gpt.errors import UsageError
from fugaku_gpt.pjm.lint.sites import ANY, FUGAKU, FX1000

if TYPE_CHECKING:
    from fugaku_gpt.pjm.lint.facts import Facts

ERROR = "error"
WARNING = "warning"
INFO = "info"
SEVERITIES = (INFO, WARNING, ERROR)  # in rising order
_SITES = (ANY, FX1000, FUGAKU)  # what holds for one holds for those after it

# Why an error is shown as a warning unless --strict is given; the package's docstring describes the policy.
DATED = "dated"
COMMAND_LINE = "command-line"
RUNS = "runs"
UNSURE = "unsure"
DOWNGRADE_REASONS: Dict[str, str] = {
    DATED: "it depends on limits of the site, which change with time",
    COMMAND_LINE: "the command line of pjsub can correct it",
    RUNS: "pjsub accepts it and the job runs, though not as written",
    UNSURE: "the manuals do not say that pjsub refuses it",
}


@dataclass(frozen=True)
class Hit:
    """One match of a rule.

    Attributes:
        line, column: position, from 1.
        message: description, with the value in question.
        fix: how to correct it; empty for the rule's own text.
        downgrade: why an error is shown as a warning, one of :data:`DOWNGRADE_REASONS`; empty if it is certain.
        severity: replaces the severity of the rule; empty for the rule's own.
        is_absence: whether it is about something that is not there; a template may put it there when it is filled in.
        date: date of the site's data that the match rests on, ``YYYY-MM-DD``; empty if it rests on none.
    """

    line: int
    message: str
    column: int = 1
    fix: str = ""
    downgrade: str = ""
    severity: str = ""
    date: str = ""
    is_absence: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        id: ``PJM`` and three digits.
        severity: severity in the reference's table; a :class:`Hit` may lower it.
        title: the mistake in a few words.
        why: the effect on the job.
        fix: how to correct it.
        source: manual and section.
        site: the scripts that it applies to: ``any`` for all, ``fx1000`` for sites with nodes such as Fugaku's, or
            ``fugaku``.
        check: function that yields the matches.
    """

    id: str
    severity: str
    title: str
    why: str
    fix: str
    source: str
    site: str
    check: Callable[["Facts"], Iterator[Hit]]

    def applies_to(self, site: str) -> bool:
        """Whether the rule holds for scripts of a site: what holds for any holds for all, and what holds for FX1000
        systems holds for Fugaku."""
        return _SITES.index(self.site) <= _SITES.index(site)


RULES: Dict[str, Rule] = {}
Check = Callable[["Facts"], Iterator[Hit]]


def rule(
    id: str, severity: str, title: str, *, why: str, fix: str, source: str, site: str = ANY
) -> Callable[[Check], Check]:
    """Register the decorated function as a rule's check."""

    def register(check: Check) -> Check:
        assert id not in RULES, f"two rules called {id}"
        RULES[id] = Rule(id, severity, title, " ".join(why.split()), " ".join(fix.split()), source, site, check)
        return check

    return register


def all_rules() -> List[Rule]:
    """Return every rule, sorted by id."""
    from fugaku_gpt.pjm.lint import rules  # noqa: F401  fills RULES

    return [RULES[id] for id in sorted(RULES)]


def select_rules(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> List[Rule]:
    """Return the rules whose ids begin with one of ``select`` (all if empty) and with none of ``ignore``.

    Raises:
        UsageError: no rule's id begins with one of these prefixes.
    """
    rules = all_rules()
    selected: Set[str] = _matching_ids(select, rules, "--select") if select else {rule.id for rule in rules}
    selected -= _matching_ids(ignore, rules, "--ignore")
    return [rule for rule in rules if rule.id in selected]


def _matching_ids(prefixes: Iterable[str], rules: Sequence[Rule], option: str) -> Set[str]:
    ids: Set[str] = set()
    for prefix in prefixes:
        matching = {rule.id for rule in rules if prefix and rule.id.startswith(prefix.upper())}
        if not matching:
            raise UsageError(f"{option} {prefix}: {_unknown_id_message(prefix, rules)}")
        ids |= matching
    return ids


def find_rule(id: str) -> Rule:
    """Return the rule with this id.

    Raises:
        UsageError: there is no such rule.
    """
    rules = all_rules()
    matching_rule = RULES.get(id.upper())
    if matching_rule is None:
        raise UsageError(f"{id}: {_unknown_id_message(id, rules)}")
    return matching_rule


def _unknown_id_message(id: str, rules: Sequence[Rule]) -> str:
    ids = [rule.id for rule in rules]
    similar = [rule_id for rule_id in ids if rule_id.startswith(id.upper()[:5])][:3] or close_matches(
        id.upper(), ids, cutoff=0.6
    )
    message = "there is no such rule"
    return message + (f"; similar: {', '.join(similar)}" if similar else "; `fugaku-gpt job lint --rules` lists all")


def close_matches(word: str, candidates: Iterable[str], cutoff: float = 0.75) -> List[str]:
    """Return up to three candidates that resemble ``word``, the closest first."""
    return difflib.get_close_matches(word[:100], list(candidates), 3, cutoff)


def severity_of(checked_rule: Rule, hit: Hit, strict: bool) -> str:
    """Return the severity to show: an uncertain error is a warning, unless ``strict``."""
    severity = hit.severity or checked_rule.severity
    if severity == ERROR and hit.downgrade and not strict:
        return WARNING
    return severity


def is_at_least(severity: str, threshold: Optional[str]) -> bool:
    """Whether a severity reaches the threshold."""
    return threshold is not None and SEVERITIES.index(severity) >= SEVERITIES.index(threshold)
