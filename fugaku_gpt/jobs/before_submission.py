"""Checks of a script before it is submitted: for what the job lacks, and for what PJM would refuse."""

from __future__ import annotations

import datetime
import re
from typing import List, Optional

from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.missing import refuse_missing_needs

# commands of a script that read the corpus of its run; one that measures nodes, or that was edited, reads none
_READS_CORPUS = re.compile(r"-m fugaku_gpt (?:train|compare)\b")


def check_run_script(config: RunConfig, text: str, path: str, today: Optional[datetime.date] = None) -> List[str]:
    """Check the job of a run before it is submitted.

    Args:
        text: its script, as it is on disk.
        path: name of the script, for messages.
        today: day by which the site's data are judged; default: today.

    Returns:
        The warnings of `job lint`, one line each.

    Raises:
        UsageError: a setting or a file is missing, or the scheduler would refuse the script.
    """
    refuse_missing_needs(config, trains=bool(_READS_CORPUS.search(text)))
    return check_script(text, config.job.scheduler, path, today)


def check_script(text: str, scheduler: str, path: str, today: Optional[datetime.date] = None) -> List[str]:
    """Run `job lint` on a script for PJM; scripts for other schedulers are not looked at.

    Args and return value are those of :func:`check_run_script`.

    Raises:
        UsageError: it has an error: pjsub refuses the script, or it fails, on any day.
    """
    if scheduler != "pjm":
        return []
    from fugaku_gpt.pjm.lint.engine import Linter
    from fugaku_gpt.pjm.lint.registry import ERROR, WARNING

    linter = Linter(today=today if today is not None else datetime.date.today())
    errors, warnings = [], []
    for finding in linter.check(text, path).findings:
        line = f"{path}:{finding.line}: {finding.id} {finding.severity}: {finding.message}; fix: {finding.fix}"
        if finding.severity == ERROR:
            errors.append(line)
        elif finding.severity == WARNING:
            warnings.append(line)
    if errors:
        silence = "a comment `# noqa: ID` at the end of a line takes its finding away"
        raise UsageError("\n".join([*errors, f"{path}: not submitted: `job lint` finds errors; {silence}"]))
    return warnings
