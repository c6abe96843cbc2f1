"""A sweep file → its runs.

::

    name: demo                  # default: the file's name
    preset: tiny                # as in a run file
    defaults:                   # settings of every run, as a tree or as dotted keys
      training.iterations: 60
    matrix:                     # every combination of these is a row; the last key changes fastest
      layout.dp: [1, 2]
      node.tcmalloc: [false, true]
    exclude:                    # combinations that have all of these values are left out
      - {layout.dp: 1, node.tcmalloc: true}
    include:                    # more rows after those of the matrix: `defaults` and these settings, no matrix values
      - {label: tensor-parallel, layout.tp: 2}
    repeats: 3                  # each row is run so often: every row once, then every row again

``exclude`` looks at the combinations of the matrix over the defaults; an included row is never excluded. Without a
matrix, the included rows are all rows; without both, the defaults are the one row.
"""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig, Settings, build_run_config, dump_run_config, preset_names, valid_keys
from fugaku_gpt.config.load import preset_settings
from fugaku_gpt.config.tree import Scalar, Tree, flatten, parse_override, plain, read_yaml_file, where
from fugaku_gpt.config.values import BadValue, parse_bool, parse_duration, parse_int
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.records.sweep import digest_of
from fugaku_gpt.sweep.names import row_name, safe_name

KEYS = ("name", "preset", "defaults", "matrix", "include", "exclude", "repeats")
MAX_RUNS = 10_000


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: of the run directory; unique in the sweep, safe as a file name.
        row: name of the configuration, equal for all repeats.
        order: of the row, from 0.
        repeat: from 1.
        written: every setting as it was written (preset, defaults, row, overrides), dotted key → text or list of texts.
        config: the resolved configuration; None where it is not valid.
        refusal: why it is not valid; empty where it is.
        digest: of the resolved configuration, or of the settings where there is none.
    """

    name: str
    row: str
    order: int
    repeat: int
    written: Mapping[str, object]
    config: Optional[RunConfig]
    refusal: str
    digest: str


@dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded: runs in the order in which they are to be run."""

    name: str
    runs: Tuple[Run, ...]


@dataclass(frozen=True)
class _Row:
    values: Dict[str, Tree]
    label: Optional[str]


@dataclass(frozen=True)
class _Resolved:
    name: str
    written: Dict[str, object]
    config: Optional[RunConfig]
    refusal: str
    digest: str


def expand_sweep(file: Path, overrides: Sequence[str] = ()) -> Sweep:
    """The runs of a sweep file, with ``key=value`` overrides over every row.

    A row whose configuration is not valid becomes a run with a refusal, as long as there is one row that can be run.

    Raises:
        ConfigError: the file is not a sweep file, names an unknown key, or has no row that can be run.
    """
    tree = read_yaml_file(file)
    for key, value in tree.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(KEYS)}"
            raise ConfigError(f"{where(value, str(file))}: {key}: unknown key of a sweep file; {hint}")
    preset = _text(tree, "preset", str(file))
    if preset is not None and preset not in preset_names():
        at = where(tree["preset"], str(file))
        raise ConfigError(f"{at}: preset: {preset!r} is not a preset; valid: {', '.join(preset_names())}")
    defaults = _settings(tree.get("defaults", {}), "defaults", str(file))
    overriding = dict(parse_override(text) for text in overrides)
    _check_keys(overriding)
    rows = _rows(tree, defaults, str(file))
    return Sweep(
        _text(tree, "name", str(file)) or file.stem,
        tuple(_runs(rows, defaults, overriding, preset, _repeats(tree, str(file)), str(file))),
    )


def _rows(tree: Mapping[str, Tree], defaults: Mapping[str, Tree], file: str) -> List[_Row]:
    matrix = _settings(tree.get("matrix", {}), "matrix", file)
    axes: List[List[Tree]] = []
    size = 1
    for key, values in matrix.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where(values, file)}: matrix: {key}: expected a list of values, such as [1, 2]")
        axes.append(values)
        size *= len(values)
    if size > MAX_RUNS:
        raise ConfigError(f"{file}: matrix: {size} combinations; at most {MAX_RUNS} runs make one sweep")
    excluded = [_settings(item, "exclude", file) for item in _items(tree, "exclude", file)]
    for values_out in excluded:
        for key, value in values_out.items():
            if key not in matrix and key not in defaults:
                known = ", ".join([*matrix, *defaults]) or "nothing"
                at = where(value, file)
                raise ConfigError(f"{at}: exclude: {key}: is in neither matrix nor defaults; valid: {known}")
    rows = []
    if matrix or "include" not in tree:
        for combination in itertools.product(*axes):
            values = dict(zip(matrix, combination))
            present = {**defaults, **values}
            if not any(all(_same(present[key], value) for key, value in out.items()) for out in excluded):
                rows.append(_Row(values, None))
    for item in _items(tree, "include", file):
        if not isinstance(item, dict):
            raise ConfigError(f"{where(item, file)}: include: expected a list of mappings of settings")
        label = _text(item, "label", file)
        rows.append(_Row(_settings({k: v for k, v in item.items() if k != "label"}, "include", file), label))
    if not rows:
        raise ConfigError(f"{file}: no rows are left: exclude leaves out every combination of matrix")
    return rows


def _runs(
    rows: Sequence[_Row],
    defaults: Mapping[str, Tree],
    overriding: Mapping[str, Tree],
    preset: Optional[str],
    repeats: int,
    file: str,
) -> Iterable[Run]:
    if len(rows) * repeats > MAX_RUNS:
        raise ConfigError(f"{file}: {len(rows)} rows * {repeats} repeats; at most {MAX_RUNS} runs make one sweep")
    base = preset_settings(preset, file).values if preset is not None else {}
    resolved: List[_Resolved] = []
    for row in rows:
        config, refusal = None, ""
        written = {key: plain(value) for key, value in {**base, **defaults, **row.values, **overriding}.items()}
        digest = digest_of(repr(sorted((key, str(value)) for key, value in written.items())))
        try:
            layers = [Settings(file, {**defaults, **row.values}), Settings("--set", overriding)]
            config = build_run_config(layers, preset)
            digest = digest_of(dump_run_config(config))
        except ConfigError as error:
            refusal = str(error)
        name = safe_name(row.label) if row.label else row_name(_words({**defaults, **row.values}), _words(row.values))
        resolved.append(_Resolved(name, written, config, refusal, digest))
    if all(one.config is None for one in resolved):
        reasons = list(dict.fromkeys(one.refusal for one in resolved))
        raise ConfigError(f"{file}: no row can be run\n" + "\n".join(reasons[:5]))
    names = _unique(resolved, file)
    # A B A B, not A A B B: a slow drift of the machine then touches all rows alike
    for repeat in range(1, repeats + 1):
        for order, (name, one) in enumerate(zip(names, resolved)):
            yield Run(f"{name}-r{repeat}", name, order, repeat, one.written, one.config, one.refusal, one.digest)


def _unique(rows: Sequence[_Resolved], file: str) -> List[str]:
    """Names of which no two are equal: rows that share one get a piece of their digest, whatever their order."""
    shared = {name for name, count in Counter(row.name.lower() for row in rows).items() if count > 1}
    names = [f"{row.name}-{row.digest[:6]}" if row.name.lower() in shared else row.name for row in rows]
    for name, count in Counter(name.lower() for name in names).items():
        if count > 1:
            raise ConfigError(f"{file}: {count} rows have the same settings ({name}); use repeats to run a row again")
    return names


def _settings(tree: Tree, section: str, file: str) -> Dict[str, Tree]:
    if isinstance(tree, Scalar) and tree.text == "" and not tree.quoted:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where(tree, file)}: {section}: expected settings, such as layout.dp: 2")
    settings = dict(flatten(tree))
    _check_keys(settings)
    return settings


def _check_keys(settings: Mapping[str, Tree]) -> None:
    known = valid_keys()
    for key, value in settings.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            near = near or [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
            hint = f"did you mean {near[0]}?" if near else "valid keys are those of a run file, such as layout.dp"
            raise ConfigError(f"{where(value, key)}: {key}: unknown key (value {plain(value)!r}); {hint}")


def _items(tree: Mapping[str, Tree], key: str, file: str) -> List[Tree]:
    items = tree.get(key, [])
    if isinstance(items, list):
        return items
    if isinstance(items, Scalar) and items.text == "" and not items.quoted:
        return []
    raise ConfigError(f"{where(items, file)}: {key}: expected a list, each item a mapping of settings")


def _text(tree: Mapping[str, Tree], key: str, file: str) -> Optional[str]:
    value = tree.get(key)
    if value is not None and not isinstance(value, Scalar):
        raise ConfigError(f"{where(value, file)}: {key}: expected one text")
    return value.text if value is not None else None


def _repeats(tree: Mapping[str, Tree], file: str) -> int:
    text = _text(tree, "repeats", file)
    try:
        repeats = parse_int(text) if text is not None else 1
    except BadValue:
        repeats = 0
    if repeats < 1:
        raise ConfigError(f"{where(tree['repeats'], file)}: repeats: {text!r}: expected a whole number, at least 1")
    return repeats


def _same(one: Tree, other: Tree) -> bool:
    """Whether two values mean the same: 2 and 2.0, yes and true, 1:00:00 and 3600."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_same(left, right) for left, right in zip(one, other))
    if isinstance(one, Scalar) and isinstance(other, Scalar):
        return _meaning(one.text) == _meaning(other.text)
    return False


def _meaning(text: str) -> object:
    for parse in (parse_duration, parse_bool):
        try:
            return (parse.__name__, parse(text))
        except BadValue:
            continue
    return text


def _words(settings: Mapping[str, Tree]) -> Dict[str, str]:
    return {key: value.text if isinstance(value, Scalar) else str(plain(value)) for key, value in settings.items()}
