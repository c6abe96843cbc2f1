"""Where the configuration of a run comes from: a run file, a preset and overrides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Set, Tuple

from fugaku_gpt.config.load import load_run_config, written_keys
from fugaku_gpt.config.schema import RunConfig


@dataclass(frozen=True)
class RunSource:
    """Where a run's configuration comes from.

    Attributes:
        run_file: a run file, or None.
        preset: name of the preset to start from, or None.
        settings: ``key=value`` overrides, the last one wins.
    """

    run_file: Optional[Path]
    preset: Optional[str]
    settings: Tuple[str, ...]

    def load(self, *overrides: str, check: bool = True) -> RunConfig:
        """Load the run.

        Args:
            overrides: further ``key=value`` texts, which win over ``settings``.
            check: whether the settings must fit together.

        Raises:
            ConfigError: the file, the preset or an override is not valid.
        """
        return load_run_config(self.run_file, self.preset, [*self.settings, *overrides], check=check)

    def written_keys(self) -> Set[str]:
        """The dotted keys that the run file and the overrides set, and ``preset`` where a preset is named."""
        return written_keys(self.run_file, self.settings) | ({"preset"} if self.preset is not None else set())
