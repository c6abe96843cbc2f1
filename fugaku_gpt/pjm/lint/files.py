"""Lints files for one site, by the rules and limits that a user chooses."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from fugaku_gpt.pjm.groups import SiteLimits, fugaku_limits, load_limits, other_sites
from fugaku_gpt.pjm.lint.engine import FileReport, Linter, find_scripts
from fugaku_gpt.pjm.lint.registry import select_rules
from fugaku_gpt.pjm.lint.sites import AUTO, FUGAKU


def chosen_limits(file: Optional[Path]) -> SiteLimits:
    """The limits of a file, or those of Fugaku that come with the package.

    Raises:
        UsageError: the file cannot be read, or is not one of a site's limits.
    """
    return fugaku_limits() if file is None else load_limits(file)


def linter_for(
    site: str = AUTO,
    limits_file: Optional[Path] = None,
    strict: bool = False,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    today: Optional[datetime.date] = None,
) -> Linter:
    """The linter of a site, as of today.

    Args:
        site: one of the sites of `job lint`; ``auto`` decides for each script.
        limits_file: limits of the site, in place of those that come with the package.
        strict: whether errors that depend on the day or the command line are shown as errors.
        select, ignore: ids of rules, which may be shortened, several in one text by commas; all, and none.
        today: day by which the site's data are judged; default: today.

    Raises:
        UsageError: an id is unknown, or the file of limits is not valid.
    """
    rules = select_rules(_ids(select), _ids(ignore))
    limits, further_limits = chosen_limits(limits_file), other_sites()
    if limits.site != FUGAKU:
        further_limits = [other for other in further_limits if other.site != limits.site] + [limits]
        limits = fugaku_limits()
    return Linter(rules, limits, further_limits, site, strict, today if today is not None else datetime.date.today())


def lint_files(linter: Linter, paths: Sequence[str]) -> Tuple[List[FileReport], List[str]]:
    """Check files, the scripts in folders, and the standard input for ``-``.

    Returns:
        The reports, and a message for each file that cannot be read.
    """
    reports: List[FileReport] = []
    unreadable: List[str] = []
    for path in find_scripts(paths):
        try:
            reports.append(linter.check_file(path))
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            unreadable.append(f"{path!r}: cannot be read: {reason}")
    return reports, unreadable


def _ids(texts: Sequence[str]) -> List[str]:
    return [rule_id for text in texts for rule_id in text.replace(",", " ").split()]
