"""Makes readable names of rows that are safe as file names, such as ``dp2-tp2-mbs4-tcmalloc``."""

from __future__ import annotations

import re
from typing import Mapping, Sequence

from fugaku_gpt.config.schema import NODE_KNOBS

MAX_LENGTH = 100
_SHORT_NAMES = {
    "layout.pp": "pp",
    "training.micro_batch": "mbs",
    "training.global_batch": "gbs",
    "node.ranks_per_node": "ppn",
    "node.threads_per_rank": "threads",
    "job.nodes": "nodes",
    "model.name": "",
    "training.dtype": "",
}
_KNOBS = {knob.key: knob for knob in NODE_KNOBS}
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off", "null", "~", "none", "")


def row_name(all_settings: Mapping[str, str], settings: Mapping[str, str], variant: Sequence[str] = ()) -> str:
    """The name of a row, from its layout and from the settings that distinguish it.

    Args:
        all_settings: dotted key → text, including defaults.
        settings: settings of this row alone.
        variant: names of its variants, which represent their settings.
    """
    components = [f"dp{all_settings.get('layout.dp', '1')}", f"tp{all_settings.get('layout.tp', '1')}"]
    components += [
        _name_component(key, value) for key, value in settings.items() if key not in ("layout.dp", "layout.tp")
    ]
    return safe_name("-".join(component for component in [*components, *variant] if component))


def safe_name(text: str) -> str:
    """Converts a text to a file name: only letters, digits and ``. _ + -``, at most ``MAX_LENGTH`` characters."""
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("._-")
    return safe[:MAX_LENGTH] or "row"


def job_name_of(name: str) -> str:
    """Converts a run's name for batch systems: a letter, then letters, digits and ``. _ -``, at most 63 in all."""
    safe = name.replace("+", "_")
    return (safe if safe[:1].isalpha() else f"run-{safe}")[:63]


def _name_component(key: str, value: str) -> str:
    leaf = key.rpartition(".")[2]
    if value.lower() in _TRUE:
        return leaf
    if value.lower() in _FALSE:
        return ""
    if key in _KNOBS:
        return _KNOBS[key].format_for_row_name(value)
    return _SHORT_NAMES.get(key, leaf) + value
