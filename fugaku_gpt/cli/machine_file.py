"""Machine files that ``plan probe`` and ``plan fit`` write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fugaku_gpt.errors import UsageError

if TYPE_CHECKING:
    from fugaku_gpt.machine.constants import Machine


def check_machine_file(out: Path) -> None:
    """Refuse a path to which no machine file can be written, or that cannot be read as one, before work is done for it.

    Raises:
        UsageError: its name does not end in .yaml, or its folder is missing.
    """
    if out.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--out {out}: a machine file's name ends in .yaml")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}; make it first")


def write_machine(machine: "Machine", out: Path) -> None:
    """Write a machine's file.

    Raises:
        UsageError: it cannot be written.
    """
    from fugaku_gpt.machine.constants import machine_yaml
    from fugaku_gpt.records.files import write_text_atomically

    try:
        write_text_atomically(out, machine_yaml(machine))
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error.strerror}") from None
