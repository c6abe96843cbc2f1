"""Paths in a run or sweep file are relative to that file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Dict, Mapping, Optional

from fugaku_gpt.config.tree import Scalar, Tree
from fugaku_gpt.config.values import is_null_text

# settings that are paths, or lists of them; job.profile, which may also be a name, is looked up by `environments`
PATH_KEYS = (
    *("data.paths", "training.eval_files"),
    *("job.transfer", "job.transfer_dirs", "job.tarball", "job.rank_map_file", "job.template"),
)
_CORPUS_ENDS = (".idx", ".bin")  # data.paths and training.eval_files may name the prefix of such a pair


def with_paths_from(file: str, settings: Mapping[str, Tree], base: Optional[Path] = None) -> Dict[str, Tree]:
    """Return the settings of a run or sweep file with its paths as the present folder names them.

    A relative path is looked up from the folder of the file. Where nothing is there, it stays as it is, relative to the
    present folder: so it was in older versions, and so the records of their runs have it.

    Args:
        file: the file that has the settings.
        settings: dotted keys with values as written.
        base: the folder in place of the present one.
    """
    folder = Path(file).parent
    resolved: Dict[str, Tree] = dict(settings)
    if folder in (Path("."), base) or is_record(Path(file)):
        return resolved
    for key in PATH_KEYS:
        value = settings.get(key)
        if isinstance(value, Scalar):
            resolved[key] = _from(folder, value, base)
        elif isinstance(value, list):
            resolved[key] = [_from(folder, item, base) if isinstance(item, Scalar) else item for item in value]
    return resolved


def has_relative_paths(settings: Mapping[str, Tree]) -> bool:
    """Whether a path among settings as written depends on the folder from which it is looked up."""
    for key in PATH_KEYS:
        value = settings.get(key)
        items = [value] if isinstance(value, Scalar) else value if isinstance(value, list) else []
        if any(isinstance(item, Scalar) and not _is_fixed(item) for item in items):
            return True
    return False


def is_record(file: Path) -> bool:
    """True for the configuration in a run directory: its paths are as the run had them, from the present folder."""
    if file.name != "config.yaml":
        return False
    try:
        with os.scandir(file.parent) as children:
            return any(child.name.startswith(".claim.") for child in children)
    except OSError:
        return False


def _from(folder: Path, path: Scalar, base: Optional[Path]) -> Scalar:
    if _is_fixed(path):
        return path
    beside = folder / path.text
    start = base if base is not None else Path()
    is_there = any(os.path.exists(f"{start / beside}{end}") for end in ("", *_CORPUS_ENDS))
    return replace(path, text=str(beside), is_quoted=True) if is_there else path


def _is_fixed(path: Scalar) -> bool:
    return not path.text or is_null_text(path.text, path.is_quoted) or Path(path.text).is_absolute()
