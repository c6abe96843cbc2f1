"""Folders that ``save_to_disk`` of Hugging Face's library datasets has written: which of their files have the rows.

A dataset is a folder with ``state.json``, which lists its Arrow files in order, and ``dataset_info.json``. Files of a
cache may lie beside them. Several splits are folders below one that has ``dataset_dict.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Collection, List, Optional

from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import RECORD

SUFFIX = ".arrow"
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def files_of_dataset(folder: Path, names: Collection[str]) -> Optional[List[str]]:
    """Return the names of the Arrow files of a saved dataset, in order; None if a folder is none.

    Args:
        names: the names of the files in the folder.

    Raises:
        DataError: its list of files cannot be read, names files that are not there, or selects some of their rows.
    """
    if _STATE not in names or _INFO not in names:
        return None
    state = _read_object(folder / _STATE)
    if any(state.get(key) for key in ("_indices_files", "_indices_data_files")):
        raise DataError(
            f"{folder}: a dataset whose rows are a selection from its files; save it again after flatten_indices()"
        )
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        raise DataError(f"{folder / _STATE}: has no list _data_files; save the dataset again with save_to_disk")
    files = []
    for entry in entries:
        file = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(file, str) or file not in names:
            raise DataError(f"{folder / _STATE}: names the file {file!r}, which is not in the folder; copy it again")
        files.append(file)
    return files


def split_of_dataset(folder: Path, folders: Collection[str], names: Collection[str]) -> Optional[str]:
    """Return the name of the only split of a saved dataset; None if a folder has no splits.

    Args:
        folders: the names of the folders in the folder.
        names: the names of the files in the folder.

    Raises:
        DataError: its list of splits cannot be read, or names what is no folder in this one; or it has several splits,
            of which some are hardly to train on.
    """
    if _SPLITS not in names:
        return None
    splits = _read_object(folder / _SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(split, str) for split in splits):
        raise DataError(f"{folder / _SPLITS}: has no list of splits; save the dataset again with save_to_disk")
    for split in splits:
        if split in ("", ".", "..") or "/" in split or not split.isprintable():
            raise DataError(
                f"{folder / _SPLITS}: {split!r} is no name of a split; valid: names of folders beside this file; save "
                "the dataset again with save_to_disk"
            )
    if len(splits) > 1:
        raise DataError(
            f"{folder}: a dataset with the splits {', '.join(splits)}; name those that are to be read, "
            f"such as {folder / splits[0]}"
        )
    if splits[0] not in folders:
        raise DataError(f"{folder / _SPLITS}: names the split {splits[0]!r}, which is not in the folder; copy it again")
    return str(splits[0])


def _read_object(path: Path) -> Any:
    try:
        values = parse_json(read_bytes(path, RECORD))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}; save the dataset again with save_to_disk") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: not a JSON object; save the dataset again with save_to_disk")
    return values
