"""The errors that a user can mend, and the exit codes of the command line."""

from __future__ import annotations

import sys
from typing import Dict, Optional

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_USAGE = 2
EXIT_FINDINGS = 3  # a check has findings, at or above --fail-on
EXIT_RESUME = 75  # a run has stopped before its end and can be resumed (EX_TEMPFAIL of sysexits.h)
EXIT_CODES: Dict[int, str] = {
    EXIT_OK: "The command did what it was asked to do.",
    EXIT_RUN_FAILED: "A run, a job or a check of a machine failed, or it is not known whether a job was accepted.",
    EXIT_USAGE: "The command line, a run file or another input is not valid; nothing was started or written.",
    EXIT_FINDINGS: "A check found what it looks for, such as `job lint`, `report check` or `ckpt verify`.",
    EXIT_RESUME: "A run stopped before its end, with a checkpoint, and can be resumed.",
}


class FugakuGptError(Exception):
    """An error whose message says what is wrong, where, and how to mend it. The CLI prints it without a traceback."""

    exit_code = EXIT_RUN_FAILED


class UsageError(FugakuGptError):
    """A request cannot be carried out as it was made: nothing was started and nothing was written."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A run or sweep file, preset or ``--set`` override is not valid."""


class DataError(UsageError):
    """A corpus, index file, tokenizer or text source is missing, damaged or not what it claims to be."""


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, unreadable or not what it claims to be."""


class CallsDisagree(FugakuGptError):
    """Ranks are about to make different calls on one communicator; detected if ``node.check_collectives`` is on."""


class RunFailed(FugakuGptError):
    """A run was started and did not end well."""


class ReplicasDiffer(RunFailed):
    """Ranks hold different bits of a tensor that they must hold alike: silent corruption.

    Attributes:
        rank: the rank that holds the wrong bits; None if it is unknown.
        node: its host; empty if it is unknown.
    """

    def __init__(self, message: str, rank: Optional[int] = None, node: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.node = node


class Uncertain(FugakuGptError):
    """A scheduler did not answer clearly: there may be a job, to be looked for before another is submitted."""


# the extra of this package that installs an optional package, by the name that is imported
_EXTRAS = {
    "torch": "train",
    "mpi4py": "train",
    "tokenizers": "data",
    "matplotlib": "plot",
    "pandas": "pandas",
    "pyarrow": "parquet",
}


def missing_package(error: ModuleNotFoundError) -> Optional[UsageError]:
    """Return the error that names a missing optional package and the extra that installs it; None for other modules,
    whose absence is a defect of an installation."""
    name = (error.name or "").split(".")[0]
    if name not in _EXTRAS:
        return None
    return UsageError(
        f"this command needs the package {name}, which {sys.executable} does not have; "
        f"install it: pip install 'fugaku_gpt[{_EXTRAS[name]}]'"
    )
