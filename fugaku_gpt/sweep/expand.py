"""The rows of a sweep file → runs: resolved, filtered, named, and known by what they set.

A run is known by the digest of its settings that differ from the schema's defaults. Neither the order of keys in the
file, nor other rows, nor fields that the schema gets later, change it. The name is for people: layout, and what the
row sets, in the schema's order.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig, SettingsLayer, build_run_config, coerce_setting, valid_keys
from fugaku_gpt.config.load import preset_settings
from fugaku_gpt.config.tree import Scalar, Tree, parse_override, parse_yaml, plain_values, read_yaml_file
from fugaku_gpt.config.values import BadValue
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.records.sweep import digest_of, digest_of_config
from fugaku_gpt.sweep.expression_tokens import Value
from fugaku_gpt.sweep.file import GROUPED, RANKS, Row, SweepFile, check_keys, read_sweep
from fugaku_gpt.sweep.names import row_name, safe_name


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
        digest: of the settings that differ from their defaults.
        variant: the row's variants as the sweep names them, such as ``2.2GHz, LD_PRELOAD=libtcmalloc.so``.
    """

    name: str
    row: str
    order: int
    repeat: int
    written: Mapping[str, object]
    config: Optional[RunConfig]
    refusal: str
    digest: str
    variant: str = ""


@dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded: runs in the order in which they are to be run."""

    name: str
    runs: Tuple[Run, ...]


@dataclass(frozen=True)
class _Resolved:
    name: str
    written: Dict[str, object]
    config: Optional[RunConfig]
    refusal: str
    digest: str
    variant: str


def expand_sweep(file: Path, overrides: Sequence[str] = ()) -> Sweep:
    """The runs of a sweep file, with ``key=value`` overrides over every row.

    A row whose configuration is not valid becomes a run with a refusal, as long as there is one row that can be run.

    Raises:
        ConfigError: the file is not a sweep file, names an unknown key, or has no row that can be run.
    """
    return _expand(read_yaml_file(file), str(file), file.stem, overrides)


def expand_text(text: str, origin: str, name: str, overrides: Sequence[str] = ()) -> Sweep:
    """As :func:`expand_sweep`, of a file's text; ``name`` is the sweep's where the text gives none."""
    return _expand(parse_yaml(text, origin), origin, name, overrides)


def _expand(tree: Mapping[str, Tree], origin: str, name: str, overrides: Sequence[str]) -> Sweep:
    sweep = read_sweep(tree, origin)
    overriding = dict(parse_override(text) for text in overrides)
    check_keys(overriding)
    resolved = list(_resolve(sweep, overriding, origin))
    if not resolved:
        raise ConfigError(f"{origin}: no rows are left: where and exclude leave out every combination")
    if all(one.config is None for one in resolved):
        reasons = list(dict.fromkeys(one.refusal for one in resolved))
        raise ConfigError(f"{origin}: no row can be run\n" + "\n".join(reasons[:5]))
    return Sweep(sweep.name or name, tuple(_runs(resolved, _unique(resolved, origin), sweep)))


def _resolve(sweep: SweepFile, overriding: Mapping[str, Tree], file: str) -> Iterable[_Resolved]:
    base = preset_settings(sweep.preset, file).values if sweep.preset is not None else {}
    for row in sweep.rows:
        settings = {**sweep.defaults, **row.values}
        written = {**base, **settings, **overriding}
        config, refusal = None, ""
        try:
            config = build_run_config([SettingsLayer(file, settings), SettingsLayer("--set", overriding)], sweep.preset)
        except ConfigError as error:
            refusal = str(error)
        name = _name(sweep, row)
        if row.filtered and not _kept(sweep, config, written, name):
            continue
        digest = digest_of_config(config) if config is not None else _digest_of_written(written)
        texts = {key: plain_values(value) for key, value in written.items()}
        yield _Resolved(name, texts, config, refusal, digest, ", ".join(row.variant))


def _name(sweep: SweepFile, row: Row) -> str:
    if row.label:
        return safe_name(row.label)
    return row_name(_words({**sweep.defaults, **row.values}), _words(row.named), row.variant)


def _kept(sweep: SweepFile, config: Optional[RunConfig], written: Mapping[str, Tree], name: str) -> bool:
    def lookup(key: str) -> Value:
        return _value(key, config, written)

    if not all(expression.holds(lookup, name) for expression in sweep.where):
        return False
    return not any(expression.holds(lookup, name) for expression in sweep.exclude)


def _value(key: str, config: Optional[RunConfig], written: Mapping[str, Tree]) -> Value:
    """A setting of a row for its filters; where the row makes no valid configuration, by itself or its default."""
    if key == RANKS:
        ranks = 1
        for size in ("dp", "tp", "pp"):
            one = _value(f"layout.{size}", config, written)
            ranks *= one if isinstance(one, int) else 1
        return ranks
    section, _, leaf = key.partition(".")
    value: Any = getattr(getattr(config or _DEFAULTS, section), leaf)
    if config is None and key in written:
        try:
            value = coerce_setting(key, written[key])
        except BadValue:  # what is wrong with it is said where it is refused
            text = plain_values(written[key])
            value = text if isinstance(text, str) else str(text)
    return value  # type: ignore[no-any-return]  # a field's value: None, a bool, a number, a text or a tuple of them


_DEFAULTS = RunConfig()


def _digest_of_written(written: Mapping[str, Tree]) -> str:
    """As ``digest_of_config``, of settings that make no valid configuration."""
    changed: Dict[str, Any] = {}
    for key, value in written.items():
        section, _, leaf = key.partition(".")
        meant = _value(key, None, {key: value})
        if meant != getattr(getattr(_DEFAULTS, section), leaf):
            changed[key] = meant
    return digest_of(json.dumps(changed, sort_keys=True))


def _runs(resolved: Sequence[_Resolved], names: Sequence[str], sweep: SweepFile) -> Iterable[Run]:
    repeats = range(1, sweep.repeats + 1)
    rows = list(enumerate(zip(names, resolved)))
    # interleaved, A B A B: a slow drift of the machine touches all rows alike
    grouped = ((repeat, row) for row in rows for repeat in repeats)
    interleaved = ((repeat, row) for repeat in repeats for row in rows)
    for repeat, (order, (name, one)) in grouped if sweep.order == GROUPED else interleaved:
        yield Run(
            f"{name}-r{repeat}", name, order, repeat, one.written, one.config, one.refusal, one.digest, one.variant
        )


def _unique(rows: Sequence[_Resolved], file: str) -> List[str]:
    """Names of which no two are equal: rows that share one get a piece of their digest, whatever their order."""
    shared = {name for name, count in Counter(row.name.lower() for row in rows).items() if count > 1}
    names = [f"{row.name}-{row.digest[:6]}" if row.name.lower() in shared else row.name for row in rows]
    for name, count in Counter(name.lower() for name in names).items():
        if count > 1:
            raise ConfigError(f"{file}: {count} rows have the same settings ({name}); use repeats to run a row again")
    return names


def _words(settings: Mapping[str, Tree]) -> Dict[str, str]:
    """Settings as texts, in the schema's order, so that a name does not hang on the order of keys in a file."""
    place = _places()
    return {
        key: value.text if isinstance(value, Scalar) else str(plain_values(value))
        for key, value in sorted(settings.items(), key=lambda item: place[item[0]])
    }


@lru_cache(maxsize=1)
def _places() -> Dict[str, int]:
    return {key: place for place, key in enumerate(valid_keys())}
