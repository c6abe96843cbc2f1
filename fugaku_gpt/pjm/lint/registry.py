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
REASONS: Dict[str, str] = {
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
    because: str = ""
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


def choose(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> List[Rule]:
    """The rules whose ids begin with one of ``select`` (all, where empty) and with none of ``ignore``.

    Raises:
        UsageError: a word that is the beginning of no rule's id.
    """
    rules = all_rules()
    wanted: Set[str] = _ids(select, rules, "--select") if select else {rule.id for rule in rules}
    wanted -= _ids(ignore, rules, "--ignore")
    return [rule for rule in rules if rule.id in wanted]


def _ids(prefixes: Iterable[str], rules: Sequence[Rule], option: str) -> Set[str]:
    ids: Set[str] = set()
    for prefix in prefixes:
        matching = {rule.id for rule in rules if prefix and rule.id.startswith(prefix.upper())}
        if not matching:
            raise UsageError(f"{option} {prefix}: {_unknown(prefix, rules)}")
        ids |= matching
    return ids


def find_rule(id: str) -> Rule:
    """The rule of that id.

    Raises:
        UsageError: there is none.
    """
    rules = all_rules()
    found = RULES.get(id.upper())
    if found is None:
        raise UsageError(f"{id}: {_unknown(id, rules)}")
    return found


def _unknown(id: str, rules: Sequence[Rule]) -> str:
    ids = [rule.id for rule in rules]
    near = [known for known in ids if known.startswith(id.upper()[:5])][:3] or nearest(id.upper(), ids, cutoff=0.6)
    words = "no rule is called so"
    return words + (f"; near: {', '.join(near)}" if near else "; `fugaku-gpt job lint --rules` lists all")


def nearest(word: str, known: Iterable[str], cutoff: float = 0.75) -> List[str]:
    """Up to three known words that look like ``word``, the nearest first."""
    return difflib.get_close_matches(word[:100], list(known), 3, cutoff)


def severity_of(found: Rule, hit: Hit, strict: bool) -> str:
    """The severity that is shown: an error that may be none is a warning, unless all are wanted."""
    severity = hit.severity or found.severity
    if severity == ERROR and hit.because and not strict:
        return WARNING
    return severity


def at_least(severity: str, threshold: Optional[str]) -> bool:
    """Whether a severity reaches a threshold."""
    return threshold is not None and SEVERITIES.index(severity) >= SEVERITIES.index(threshold)
