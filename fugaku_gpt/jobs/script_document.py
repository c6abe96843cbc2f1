"""A job script as data: what `job parse` prints, with the settings that a script of fugaku_gpt was made from."""

from __future__ import annotations

from typing import Any, Dict

from fugaku_gpt.config import changed_settings
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.jobs.render import settings_of
from fugaku_gpt.pjm.canonical import script_as_json
from fugaku_gpt.pjm.script import PjmScript


def script_document(script: PjmScript) -> Dict[str, Any]:
    """A script as values of JSON: those of :func:`fugaku_gpt.pjm.canonical.script_as_json`, and in ``settings`` those
    that it was made from, or in ``settings_problem`` why they cannot be read; other scripts have neither."""
    return {**script_as_json(script), **_settings(script)}


def _settings(script: PjmScript) -> Dict[str, Any]:
    try:
        run = settings_of("\n".join(script.lines))
    except ConfigError as error:  # edited by hand
        return {"settings_problem": str(error)}
    return {"settings": changed_settings(run)} if run is not None else {}
