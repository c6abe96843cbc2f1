"""Rules and what they find: one small function per rule, registered under its id with what ``--explain`` prints."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set

from fugaku_gpt.errors import UsageError

if TYPE_CHECKING:
    from fugaku_gpt.pjm.lint.facts import Facts

ERROR = "error"
WARNING = "warning"
INFO = "info"
SEVERITIES = (INFO, WARNING, ERROR)  # in rising order

# Why an error is shown as a warning unless --strict is given; the policy stands in the package's docstring.
DATED = "dated"
COMMAND_LINE = "command-line"
RUNS = "runs"
UNSURE = "unsure"
DOWNGRADE_REASONS: Dict[str, str] = {
    DATED: "it depends on limits of the site, which change with time",
    COMMAND_LINE: "the command line of pjsub can mend it",
    RUNS: "pjsub accepts it and the job runs, though not as written",
    UNSURE: "the manuals do not say that pjsub refuses it",
}


@dataclass(frozen=True)
class Hit:
    """What a rule says about one place.

    Attributes:
        line, column: from 1.
        message: with the value in question.
        fix: empty for the rule's own.
        because: one of :data:`REASONS`: an error that may be none; empty where it is sure.
        severity: in place of the rule's own.
    """

    line: int
    message: str
    column: int = 1
    fix: str = ""
    downgrade: str = ""
    severity: str = ""


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: ``PJM`` and three digits.
        severity: of the reference's table; a :class:`Hit` may say less.
        title: what is wrong, in a few words.
        why: what happens to the job.
        fix: what to write instead.
        source: the manual and section that says so.
        fugaku_only: whether it says nothing of other PJM sites.
        check: yields what it finds.
    """

    id: str
    severity: str
    title: str
    why: str
    fix: str
    source: str
    fugaku_only: bool
    check: Callable[["Facts"], Iterator[Hit]]


RULES: Dict[str, Rule] = {}
Check = Callable[["Facts"], Iterator[Hit]]


def rule(
    id: str, severity: str, title: str, *, why: str, fix: str, source: str, fugaku_only: bool = False
) -> Callable[[Check], Check]:
    """Register the decorated function as a rule's check."""

    def register(check: Check) -> Check:
        assert id not in RULES, f"two rules called {id}"
        RULES[id] = Rule(id, severity, title, " ".join(why.split()), " ".join(fix.split()), source, fugaku_only, check)
        return check

    return register


def all_rules() -> List[Rule]:
    """Every rule, by id."""
    from fugaku_gpt.pjm.lint import rules  # noqa: F401  fills RULES

    return [RULES[id] for id in sorted(RULES)]


def select_rules(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> List[Rule]:
    """The rules whose ids begin with one of ``select`` (all, where empty) and with none of ``ignore``.

    Raises:
        UsageError: a word that is the beginning of no rule's id.
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
    """The rule of that id.

    Raises:
        UsageError: there is none.
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
    message = "no rule is called so"
    return message + (f"; near: {', '.join(similar)}" if similar else "; `fugaku-gpt job lint --rules` lists all")


def close_matches(word: str, candidates: Iterable[str], cutoff: float = 0.75) -> List[str]:
    """Up to three known words that look like ``word``, the nearest first."""
    return difflib.get_close_matches(word[:100], list(candidates), 3, cutoff)


def severity_of(checked_rule: Rule, hit: Hit, strict: bool) -> str:
    """The severity that is shown: an error that may be none is a warning, unless all are wanted."""
    severity = hit.severity or checked_rule.severity
    if severity == ERROR and hit.downgrade and not strict:
        return WARNING
    return severity


def is_at_least(severity: str, threshold: Optional[str]) -> bool:
    """Whether a severity reaches a threshold."""
    return threshold is not None and SEVERITIES.index(severity) >= SEVERITIES.index(threshold)
