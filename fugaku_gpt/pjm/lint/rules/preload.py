"""Rules for preloaded libraries and large pages (PJM090 to PJM093)."""

from __future__ import annotations

import re
from typing import Iterator, Optional

from fugaku_gpt.pjm.lint.facts import Facts, printable
from fugaku_gpt.pjm.lint.launches import Assignment
from fugaku_gpt.pjm.lint.registry import WARNING, Hit, rule
from fugaku_gpt.pjm.lint.sites import FUGAKU

_PREVIOUS_VALUE = re.compile(r"\$\{?LD_PRELOAD\b")
_EMPTY = ("", '""', "''")
_LARGE_PAGES = "Fugaku user guide 1.52, AllocationOfLargePageArea; HPC Extensions guide J2UL-2535"
_HEAP_KNOBS = (
    "XOS_MMM_L_PAGING_POLICY", "XOS_MMM_L_ARENA_LOCK_TYPE", "XOS_MMM_L_ARENA_FREE", "XOS_MMM_L_MAX_ARENA_NUM",
    "XOS_MMM_L_HEAP_SIZE_MB", "XOS_MMM_L_HUGETLB_FALLBACK",
)  # fmt: skip
_FALLBACK_NEEDS = {
    "XOS_MMM_L_HPAGE_TYPE": re.compile("hugetlbfs"),
    "XOS_MMM_L_PAGING_POLICY": re.compile("[^:]*:[^:]*:prepage"),
    "XOS_MMM_L_ARENA_LOCK_TYPE": re.compile("1"),
    "XOS_MMM_L_MAX_ARENA_NUM": re.compile("1"),
}


@rule(
    "PJM090",
    WARNING,
    "LD_PRELOAD is exported",
    why="Every command after it loads the library: bash, cp, llio_transfer, the launcher itself. What fails there "
    "fails far from its cause.",
    fix="put it on the command: LD_PRELOAD=... mpiexec ..., or mpiexec -x LD_PRELOAD=...",
    source="Fugaku user guide 1.52, EnvironmentSettings; seen in public scripts",
)
def exported(facts: Facts) -> Iterator[Hit]:
    for assignment in facts.assignments_to("LD_PRELOAD"):
        if assignment.exported and not assignment.scoped and assignment.value not in _EMPTY:
            where = "-x of the directives" if assignment.directive else "export"
            yield Hit(
                assignment.line,
                f"LD_PRELOAD={printable(assignment.value)} by {where} holds for every command",
                assignment.column,
            )


@rule(
    "PJM091",
    WARNING,
    "tcmalloc is preloaded, and large pages of the heap are tuned",
    why="Large pages of the heap come from libmpg.so, which takes the place of malloc; so does tcmalloc. With both, "
    "the XOS_MMM_L_ settings of the heap have no effect.",
    fix="choose one: tcmalloc, or the XOS_MMM_L_ settings",
    source=_LARGE_PAGES + "; that other allocators cannot be combined with libmpg is theirs, the rest is inferred",
    site=FUGAKU,
)
def tcmalloc(facts: Facts) -> Iterator[Hit]:
    preload = next(
        (assignment for assignment in facts.assignments_to("LD_PRELOAD") if "tcmalloc" in assignment.value), None
    )
    if preload is None:
        return
    pages = facts.sole_text("XOS_MMM_L_HPAGE_TYPE")
    if pages and pages[0] == "none":
        return
    for name in _HEAP_KNOBS:
        assignment = _last_assignment(facts, name)
        if assignment:
            value = printable(assignment.value)
            message = f"{name}={value} has no effect on a heap that tcmalloc (line {preload.line}) manages"
            yield Hit(assignment.line, message, assignment.column)


@rule(
    "PJM092",
    WARNING,
    "LD_PRELOAD overwrites what was there",
    why="The libraries that were to be preloaded before are lost.",
    fix="LD_PRELOAD=NEW${LD_PRELOAD:+:$LD_PRELOAD}",
    source="Fugaku user guide 1.52, EnvironmentSettings",
)
def overwritten(facts: Facts) -> Iterator[Hit]:
    before: Optional[Assignment] = None
    for assignment in facts.assignments_to("LD_PRELOAD"):
        extends = assignment.append or bool(_PREVIOUS_VALUE.search(assignment.value))
        replaces = not extends and assignment.value not in _EMPTY
        branches = before is not None and assignment.nested and before.nested  # perhaps two branches of one condition
        if before is not None and replaces and assignment.value != before.value and not branches:
            message = f"LD_PRELOAD={printable(assignment.value)} drops {printable(before.value)} of line {before.line}"
            yield Hit(assignment.line, message, assignment.column)
        if not assignment.scoped:
            before = assignment if assignment.value not in _EMPTY else None


@rule(
    "PJM093",
    WARNING,
    "XOS_MMM_L_HUGETLB_FALLBACK=1 without what it needs",
    why="The fallback to normal pages works only with hugetlbfs, a heap that is paged in beforehand (prepage), arena "
    "lock type 1 and one arena.",
    fix="XOS_MMM_L_HPAGE_TYPE=hugetlbfs, XOS_MMM_L_PAGING_POLICY=demand:demand:prepage, XOS_MMM_L_ARENA_LOCK_TYPE=1, "
    "XOS_MMM_L_MAX_ARENA_NUM=1",
    source=_LARGE_PAGES,
    site=FUGAKU,
)
def fallback(facts: Facts) -> Iterator[Hit]:
    requested = facts.sole_text("XOS_MMM_L_HUGETLB_FALLBACK")
    if requested is None or requested[0] != "1":
        return
    for name, needed in _FALLBACK_NEEDS.items():
        setting_of_name = facts.sole_text(name)
        if setting_of_name and not needed.fullmatch(setting_of_name[0]):
            assignment = setting_of_name[1]
            yield Hit(
                assignment.line,
                f"{name}={printable(setting_of_name[0])}, and XOS_MMM_L_HUGETLB_FALLBACK=1",
                assignment.column,
            )


def _last_assignment(facts: Facts, name: str) -> Optional[Assignment]:
    items = facts.assignments_to(name)
    return items[-1] if items else None
