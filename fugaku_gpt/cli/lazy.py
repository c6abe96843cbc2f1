"""A group of commands whose modules are imported when they are used, so that ``--help`` stays fast."""

from __future__ import annotations

import importlib
from typing import Any, List, Mapping, Optional

import click


class LazyGroup(click.Group):
    """A group whose commands are named as ``module:attribute`` and imported on first use."""

    def __init__(self, *args: Any, commands_at: Optional[Mapping[str, str]] = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._import_paths = dict(commands_at or {})

    def list_commands(self, ctx: click.Context) -> List[str]:
        return sorted(self._import_paths)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        if cmd_name not in self._import_paths:
            return None
        module, _, name = self._import_paths[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command
