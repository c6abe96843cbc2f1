"""Reads a sweep file into rows, as they are written; nothing is resolved here.

::

    name: demo                  # default: the file's name
    preset: tiny                # as in a run file
    defaults:                   # settings of every row, as a tree or as dotted keys
      training.iterations: 60
    matrix:                     # every combination of these is a row; the last key changes fastest
      layout.dp: [1, 2]
      node.tcmalloc: [false, true]
    zip:                        # lists of equal length that advance together; multiplied with the matrix
      job.nodes: [1, 2, 4]
      training.global_batch: [8, 16, 32]
    variants:                   # named settings, one at a time, multiplied with all of the above
      base: {}
      2.2GHz: {node.freq_mhz: 2200}
    where: layout.dp * layout.tp <= 8          # combinations for which this is false are left out
    exclude:                                   # as are those that have all of these values, or meet an expression
      - {layout.dp: 1, node.tcmalloc: true}
      - layout.dp == 2 and node.freq_mhz == 2200
    include:                    # more rows after the combinations: `defaults` and these settings alone
      - {label: tensor-parallel, layout.tp: 2}
    repeats: 3                  # number of runs of each row
    order: interleaved          # every row once, then every row again; grouped: a row's repeats together

``zip`` and ``variants`` may be lists of such mappings: each is an axis of its own. ``where`` may be a list of
expressions, all of which must hold. Filters apply to the combinations, with their defaults, and never to an included
row. Without matrix, zip and variants, the included rows are all rows; without those too, the defaults are the only row.
"""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import preset_names, valid_keys
from fugaku_gpt.config.expression import Expression, parse_expression
from fugaku_gpt.config.tree import Scalar, Tree, flatten, location_of, quoted
from fugaku_gpt.config.values import BadValue, parse_bool, parse_duration, parse_int
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.limits import SWEEP_RUNS

KEYS = (
    "name", "preset", "defaults", "matrix", "zip", "variants", "where", "exclude", "include", "repeats", "order",
)  # fmt: skip
INTERLEAVED, GROUPED = "interleaved", "grouped"
RANKS = "layout.ranks"  # dp * tp * pp: a name in expressions besides the settings


@dataclass(frozen=True)
class SweepRow:
    """One row of a sweep file, as written.

    Attributes:
        values: its own settings over the defaults.
        naming_settings: the part of ``values`` that appears in its name, beside label and variant.
        label: label of an included row; None where it has none.
        variant: names of its variants, without those that set nothing.
        is_filtered: True if the filters apply to it.
    """

    values: Dict[str, Tree]
    naming_settings: Dict[str, Tree]
    label: Optional[str] = None
    variant: Tuple[str, ...] = ()
    is_filtered: bool = True


@dataclass(frozen=True)
class SweepFile:
    """A sweep file, read and checked as far as it can be without resolving its rows."""

    name: str
    preset: Optional[str]
    defaults: Dict[str, Tree]
    rows: List[SweepRow]
    where: List[Expression]
    exclude: List[Expression]
    repeats: int
    order: str


# (settings, the part of them that names the row, name of the variant)
_Choice = Tuple[Dict[str, Tree], Dict[str, Tree], str]


def read_sweep(tree: Mapping[str, Tree], file: str) -> SweepFile:
    """Reads the sweep that a file's mapping describes; ``file`` names the file in messages.

    Raises:
        ConfigError: it is not a sweep file, has an unknown key, or makes more than ``SWEEP_RUNS``.
    """
    for key, value in tree.items():
        if key not in KEYS:
            close_keys = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {close_keys[0]}?" if close_keys else f"valid: {', '.join(KEYS)}"
            raise ConfigError(f"{location_of(value, file)}: {key}: unknown key of a sweep file; {hint}")
    preset = _text(tree, "preset", file)
    if preset is not None and preset not in preset_names():
        location = location_of(tree["preset"], file)
        raise ConfigError(f"{location}: preset: {preset!r} is not a preset; valid: {', '.join(preset_names())}")
    order = _text(tree, "order", file) or INTERLEAVED
    if order not in (INTERLEAVED, GROUPED):
        raise ConfigError(f"{location_of(tree['order'], file)}: order: {order!r}; valid: {INTERLEAVED}, {GROUPED}")
    defaults = _settings(tree.get("defaults", {}), "defaults", file)
    axes = [*_matrix_axes(tree, file), *_zip_axes(tree, file), *_variant_axes(tree, file)]
    excluded = [item for item in _items(tree, "exclude", file) if not isinstance(item, Scalar)]
    rows = _combinations(axes, defaults, excluded, file) if axes or "include" not in tree else []
    rows += _included_rows(tree, file)
    repeats = _repeats(tree, file)
    if len(rows) * repeats > SWEEP_RUNS.value:
        raise ConfigError(f"{file}: {len(rows)} rows * {repeats} repeats; at most {SWEEP_RUNS} make one sweep")
    return SweepFile(
        _text(tree, "name", file) or "",
        preset,
        defaults,
        rows,
        _expressions(tree, "where", file),
        _expressions(tree, "exclude", file),
        repeats,
        order,
    )


def check_keys(settings: Mapping[str, Tree]) -> None:
    """Refuses keys that are no settings of a run.

    Raises:
        ConfigError: a key is unknown; the message gives its location and the closest valid key.
    """
    valid = valid_keys()
    for key, value in settings.items():
        if key not in valid:
            close_keys = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
            close_keys = close_keys or [name for name in valid if name.rpartition(".")[2] == key.rpartition(".")[2]]
            hint = (
                f"did you mean {close_keys[0]}?"
                if close_keys
                else "valid keys are those of a run file, such as layout.dp"
            )
            raise ConfigError(f"{location_of(value, key)}: {key}: unknown key (value {quoted(value)}); {hint}")


def _matrix_axes(tree: Mapping[str, Tree], file: str) -> List[List[_Choice]]:
    axes: List[List[_Choice]] = []
    for key, values in _settings(tree.get("matrix", {}), "matrix", file).items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{location_of(values, file)}: matrix: {key}: expected a list of values, such as [1, 2]")
        axes.append([({key: value}, {key: value}, "") for value in values])
    return axes


def _zip_axes(tree: Mapping[str, Tree], file: str) -> List[List[_Choice]]:
    axes: List[List[_Choice]] = []
    for group in _groups(tree, "zip", file):
        columns = _settings(group, "zip", file)
        lengths = {}
        for key, values in columns.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"{location_of(values, file)}: zip: {key}: expected a list of values, such as [1, 2]")
            lengths[key] = len(values)
        if len(set(lengths.values())) > 1:
            lengths_text = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            raise ConfigError(
                f"{location_of(group, file)}: zip: lists advance together and need one length; {lengths_text}"
            )
        lists = [values for values in columns.values() if isinstance(values, list)]
        steps = [dict(zip(columns, step)) for step in zip(*lists)]
        axes += [[(step, step, "") for step in steps]] if steps else []
    return axes


def _variant_axes(tree: Mapping[str, Tree], file: str) -> List[List[_Choice]]:
    axes: List[List[_Choice]] = []
    for group in _groups(tree, "variants", file):
        if not isinstance(group, dict):
            raise ConfigError(f"{location_of(group, file)}: variants: expected names with their settings")
        axis: List[_Choice] = []
        for name, settings in group.items():
            values = _settings(settings, f"variants: {name}", file)
            axis.append((values, {}, name if values else ""))
        axes += [axis] if axis else []
    return axes


def _combinations(
    axes: Sequence[Sequence[_Choice]], defaults: Mapping[str, Tree], excluded: Sequence[Tree], file: str
) -> List[SweepRow]:
    size = 1
    for axis in axes:
        size *= len(axis)
    if size > SWEEP_RUNS.value:
        raise ConfigError(f"{file}: {size} combinations; at most {SWEEP_RUNS} make one sweep")
    owners: Dict[str, int] = {}
    for number, axis in enumerate(axes):
        for key in {key: None for values, _, _ in axis for key in values}:
            if owners.setdefault(key, number) != number:
                raise ConfigError(f"{file}: {key}: stands in two of matrix, zip and variants; one would hide the other")
    exclusions = [_settings(item, "exclude", file) for item in excluded]
    for exclusion in exclusions:
        for key, value in exclusion.items():
            if key not in owners and key not in defaults:
                valid = ", ".join([*owners, *defaults]) or "nothing"
                location = location_of(value, file)
                raise ConfigError(f"{location}: exclude: {key}: is in neither matrix nor defaults; valid: {valid}")
    rows = []
    for combination in itertools.product(*axes):
        values: Dict[str, Tree] = {}
        naming_settings: Dict[str, Tree] = {}
        for choice_settings, choice_naming, _ in combination:
            values.update(choice_settings)
            naming_settings.update(choice_naming)
        settings = {**defaults, **values}
        if not any(
            all(key in settings and _is_same_value(settings[key], exclusion[key]) for key in exclusion)
            for exclusion in exclusions
        ):
            rows.append(SweepRow(values, naming_settings, None, tuple(name for _, _, name in combination if name)))
    if not rows:
        raise ConfigError(f"{file}: no rows are left: exclude leaves out every combination")
    return rows


def _included_rows(tree: Mapping[str, Tree], file: str) -> List[SweepRow]:
    rows = []
    for item in _items(tree, "include", file):
        if not isinstance(item, dict):
            raise ConfigError(f"{location_of(item, file)}: include: expected a list of mappings of settings")
        label = _text(item, "label", file)
        values = _settings({key: value for key, value in item.items() if key != "label"}, "include", file)
        rows.append(SweepRow(values, values, label, (), is_filtered=False))
    return rows


def _expressions(tree: Mapping[str, Tree], key: str, file: str) -> List[Expression]:
    names = [*valid_keys(), RANKS]
    texts = [item for item in _items(tree, key, file) if isinstance(item, Scalar)]
    if key == "where" and len(texts) < len(_items(tree, key, file)):
        raise ConfigError(f"{location_of(tree[key], file)}: where: expected an expression, such as layout.dp <= 8")
    return [parse_expression(item.text, f"{item.location}: {key}", names) for item in texts]


def _settings(tree: Tree, section: str, file: str) -> Dict[str, Tree]:
    if isinstance(tree, Scalar) and tree.text == "" and not tree.is_quoted:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{location_of(tree, file)}: {section}: expected settings, such as layout.dp: 2")
    settings = dict(flatten(tree))
    check_keys(settings)
    return settings


def _groups(tree: Mapping[str, Tree], key: str, file: str) -> List[Tree]:
    """The mappings under a key that holds a mapping or a list of mappings."""
    value = tree.get(key, [])
    return [value] if isinstance(value, dict) else _items(tree, key, file)


def _items(tree: Mapping[str, Tree], key: str, file: str) -> List[Tree]:
    items = tree.get(key, [])
    if isinstance(items, list):
        return items
    if isinstance(items, Scalar) and items.text == "" and not items.is_quoted:
        return []
    if isinstance(items, Scalar) and key in ("where", "exclude"):
        return [items]
    raise ConfigError(f"{location_of(items, file)}: {key}: expected a list, each item a mapping of settings")


def _text(tree: Mapping[str, Tree], key: str, file: str) -> Optional[str]:
    value = tree.get(key)
    if value is not None and not isinstance(value, Scalar):
        raise ConfigError(f"{location_of(value, file)}: {key}: expected one text")
    return value.text if value is not None else None


def _repeats(tree: Mapping[str, Tree], file: str) -> int:
    text = _text(tree, "repeats", file)
    try:
        repeats = parse_int(text) if text is not None else 1
    except BadValue:
        repeats = 0
    if repeats < 1:
        raise ConfigError(
            f"{location_of(tree['repeats'], file)}: repeats: {quoted(tree['repeats'])}: "
            "expected a whole number, at least 1"
        )
    return repeats


def _is_same_value(first: Tree, second: Tree) -> bool:
    """True if two values mean the same, such as 2 and 2.0, yes and true, or 1:00:00 and 3600."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(_is_same_value(left, right) for left, right in zip(first, second))
    if isinstance(first, Scalar) and isinstance(second, Scalar):
        return _parsed_value(first.text) == _parsed_value(second.text)
    return False


def _parsed_value(text: str) -> object:
    for parse in (parse_duration, parse_bool):
        try:
            return (parse.__name__, parse(text))
        except BadValue:
            continue
    return text
