"""Records the plan of a sweep in its folder: the file's text and the overrides, so that it can be resumed later."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.limits import PATH, YAML_TEXT
from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.sweep.expand import Sweep, expand_text
from fugaku_gpt.typed_json import record_of
from fugaku_gpt.versioned_json import read_versioned_json

PLAN_FILE = "sweep-plan.json"
VERSION = 1


@dataclass(frozen=True)
class SweepPlan:
    """A sweep as it was last started.

    Attributes:
        file: path of the sweep file, for messages.
        name: default name of the sweep, where the text gives none.
        text: text of the sweep file.
        overrides: ``key=value`` over every row.
        base: folder to which relative paths refer.
    """

    file: str
    name: str
    text: str
    overrides: Tuple[str, ...]
    base: str
    version: int = VERSION

    def sweep(self) -> Sweep:
        """Expands the plan into runs.

        Raises:
            ConfigError: the text is no valid sweep.
        """
        return expand_text(self.text, self.file, self.name, self.overrides, Path(self.base))


def plan_of(file: Path, overrides: Tuple[str, ...] = ()) -> SweepPlan:
    """Reads a sweep file into a plan, with the current folder as its base.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        text = read_text(file, YAML_TEXT)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None
    return SweepPlan(str(file), file.stem, text, overrides, str(Path.cwd()))


def write_plan(out: Path, plan: SweepPlan) -> None:
    """Writes the plan to the sweep's folder."""
    write_json_atomically(out / PLAN_FILE, asdict(plan))


def read_plan(out: Path) -> Optional[SweepPlan]:
    """Reads the plan of a sweep's folder; None where there is none.

    Raises:
        UsageError: the file is not of this format.
    """
    return read_versioned_json(
        out / PLAN_FILE,
        "a sweep's plan",
        (VERSION,),
        _checked_plan,
        mend="remove it, and name the sweep file again",
    )


def _checked_plan(values: Dict[str, Any]) -> SweepPlan:
    plan = record_of(SweepPlan, values)
    for name, path in (("file", plan.file), ("name", plan.name), ("base", plan.base)):
        if len(path) > PATH.value:
            raise ValueError(f"{name} has {len(path)} characters: a path has at most {PATH.value}")
    return plan
