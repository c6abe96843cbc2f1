"""Where the configuration of a run comes from: a run file, a preset and overrides."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Set, Tuple, Union

from fugaku_gpt.config.load import SettingsLayer, load_run_config, read_run_file, written_keys
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

    def as_read(self) -> RunSource:
        """The same source with the settings that the run file has now, whatever becomes of the file.

        Raises:
            ConfigError: the file cannot be read.
        """
        layer = read_run_file(self.run_file) if self.run_file is not None else None
        return _ReadSource(self.run_file, self.preset, self.settings, layer)

    @property
    def file(self) -> Union[Path, SettingsLayer, None]:
        """The run file as :func:`fugaku_gpt.config.load.load_run_config` takes it."""
        return self.run_file

    def load(self, *overrides: str, check: bool = True) -> RunConfig:
        """Load the run.

        Args:
            overrides: further ``key=value`` texts, which win over ``settings``.
            check: whether the settings must fit together.

        Raises:
            ConfigError: the file, the preset or an override is not valid.
        """
        return load_run_config(self.file, self.preset, [*self.settings, *overrides], check=check)

    def written_keys(self) -> Set[str]:
        """The dotted keys that the run file and the overrides set, and ``preset`` where a preset is named."""
        return written_keys(self.file, self.settings) | ({"preset"} if self.preset is not None else set())


@dataclass(frozen=True)
class _ReadSource(RunSource):
    """A source whose run file was read once."""

    layer: Optional[SettingsLayer] = field(default=None, compare=False, repr=False)

    @property
    def file(self) -> Union[Path, SettingsLayer, None]:
        return self.layer
