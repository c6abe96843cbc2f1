"""Expands the rows of a sweep file into runs: resolves, filters and names them.

A run is identified by the digest of its settings that differ from the schema's defaults. Neither the order of keys in
the file, nor other rows, nor fields that are added to the schema later, change it. The name is for people: layout, and
the row's settings in the schema's order.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import MEASURED_ONLY, RunConfig, SettingsLayer, build_run_config, coerce_setting, valid_keys
from fugaku_gpt.config.expression_tokens import Value
from fugaku_gpt.config.load import preset_settings
from fugaku_gpt.config.paths import with_paths_from
from fugaku_gpt.config.tree import Scalar, Tree, parse_override, parse_yaml, plain_values, read_yaml_file
from fugaku_gpt.config.values import BadValue
from fugaku_gpt.data.vocabulary import VOCABULARY_KEY, vocabulary_of_corpora
from fugaku_gpt.errors import ConfigError, DataError
from fugaku_gpt.records.sweep import ACCEPTED_FINDINGS, digest_of, digest_of_config
from fugaku_gpt.sweep.file import GROUPED, RANKS, SweepFile, SweepRow, check_keys, read_sweep
from fugaku_gpt.sweep.names import row_name, safe_name


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: name of the run directory; unique in the sweep, safe as a file name.
        row: name of the configuration, equal for all repeats.
        order: number of the row, from 0.
        repeat: number of the repeat, from 1.
        written_settings: every setting as it was written (preset, defaults, row, overrides), dotted key → text or list
            of texts.
        config: the resolved configuration; None where it is not valid.
        refusal: why the configuration is not valid; empty where it is valid.
        digest: digest of the settings that differ from their defaults.
        variant: the names of the row's variants, such as ``2.2GHz, LD_PRELOAD=libtcmalloc.so``.
        notes: what the run was given that its row does not state.
    """

    name: str
    row: str
    order: int
    repeat: int
    written_settings: Mapping[str, object]
    config: Optional[RunConfig]
    refusal: str
    digest: str
    variant: str = ""
    notes: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """An expanded sweep: its runs, in the order in which they are to be run."""

    name: str
    runs: Tuple[Run, ...]


@dataclass(frozen=True)
class _ResolvedRow:
    name: str
    written_settings: Dict[str, object]
    config: Optional[RunConfig]
    refusal: str
    digest: str
    variant: str
    notes: Tuple[str, ...]


def expand_sweep(file: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Expands a sweep file, with ``key=value`` overrides over every row.

    A row whose configuration is not valid becomes a run with a refusal, as long as there is one row that can be run.

    Raises:
        ConfigError: the file is not a sweep file, names an unknown key, or has no row that can be run.
    """
    return _expand(read_yaml_file(file), str(file), file.stem, overrides)


def expand_text(text: str, origin: str, name: str, overrides: Sequence[str] = (), base: Optional[Path] = None) -> Sweep:
    """Expands the text of a sweep file, as :func:`expand_sweep`.

    Args:
        origin: path of the file.
        name: default name of the sweep.
        base: folder to which relative paths refer, that of the file among them; default: the present folder.
    """
    return _expand(parse_yaml(text, origin), origin, name, overrides, base)


def run_of_row(
    sweep: SweepFile, row: SweepRow, overrides: Mapping[str, Tree], origin: str, order: int, preset: Mapping[str, Tree]
) -> Run:
    """Resolves one row of a sweep file into its first run; its filters and the names of other rows are not regarded.

    Args:
        overrides: settings over the row.
        origin: path of the file.
        order: number of the row.
        preset: the settings of the file's preset.

    Raises:
        ConfigError: a key is unknown.
    """
    written = {**preset, **sweep.defaults, **row.values, **overrides}
    resolved = _resolve_row(sweep, row, written, overrides, origin, None)
    return _run_of(resolved, resolved.name, order, 1)


def _expand(
    tree: Mapping[str, Tree], origin: str, name: str, overrides: Sequence[str], base: Optional[Path] = None
) -> Sweep:
    sweep = read_sweep(tree, origin)
    override_settings = dict(parse_override(text) for text in overrides)
    check_keys(override_settings)
    resolved = list(_resolve(sweep, override_settings, origin, base))
    if not resolved:
        raise ConfigError(f"{origin}: no rows are left: where and exclude leave out every combination")
    if all(row.config is None for row in resolved):
        reasons = list(dict.fromkeys(row.refusal for row in resolved))
        raise ConfigError(f"{origin}: no row can be run\n" + "\n".join(reasons[:5]))
    return Sweep(sweep.name or name, tuple(_ordered_runs(resolved, _unique_names(resolved, origin), sweep)))


def _resolve(
    sweep: SweepFile, override_settings: Mapping[str, Tree], file: str, base_folder: Optional[Path]
) -> Iterable[_ResolvedRow]:
    base = preset_settings(sweep.preset, file).values if sweep.preset is not None else {}
    for row in sweep.rows:
        written = {**base, **sweep.defaults, **row.values, **override_settings}
        resolved = _resolve_row(sweep, row, written, override_settings, file, base_folder)
        if not row.is_filtered or _passes_filters(sweep, resolved.config, written, resolved.name):
            yield resolved


def _resolve_row(
    sweep: SweepFile,
    row: SweepRow,
    written: Mapping[str, Tree],
    override_settings: Mapping[str, Tree],
    file: str,
    base_folder: Optional[Path],
) -> _ResolvedRow:
    """Resolves one row; ``written`` has all its settings, with those of the preset and the overrides."""
    settings = with_paths_from(file, {**sweep.defaults, **row.values}, base_folder)
    config, refusal, digest = None, "", ""
    notes: Tuple[str, ...] = ()
    layers = [MEASURED_ONLY, SettingsLayer(file, settings), SettingsLayer("--set", override_settings)]
    try:
        config = build_run_config(layers, sweep.preset)
        # what the row states: a corpus that is not there yet, or is made anew, makes no other run of it
        digest = digest_of_config(config)
        config, notes = _with_vocabulary(config, layers, sweep.preset, base_folder)
    except ConfigError as error:
        config, refusal = None, str(error)
    texts = {key: plain_values(value) for key, value in written.items()}
    name, variant = _name_of_row(sweep, row), ", ".join(row.variant)
    return _ResolvedRow(name, texts, config, refusal, digest or _digest_of_written(written), variant, notes)


def _with_vocabulary(
    config: RunConfig, layers: Sequence[SettingsLayer], preset: Optional[str], base: Optional[Path]
) -> Tuple[RunConfig, Tuple[str, ...]]:
    """The run with the vocabulary of its corpora where no layer states one, as ``train`` has it, and a note on it."""
    written = {key for layer in layers for key in layer.values} | ({"preset"} if preset is not None else set())
    try:
        vocabulary = vocabulary_of_corpora(config, written, base)
    except DataError:  # the ranks report it, or the submission
        return config, ()
    if vocabulary is None:
        return config, ()
    layer = SettingsLayer(vocabulary.origin, dict([parse_override(f"{VOCABULARY_KEY}={vocabulary.size}")]))
    return build_run_config([*layers, layer], preset), (vocabulary.note,)


def _name_of_row(sweep: SweepFile, row: SweepRow) -> str:
    if row.label:
        return safe_name(row.label)
    return row_name(_setting_texts({**sweep.defaults, **row.values}), _setting_texts(row.naming_settings), row.variant)


def _passes_filters(sweep: SweepFile, config: Optional[RunConfig], written: Mapping[str, Tree], name: str) -> bool:
    def lookup(key: str) -> Value:
        return _setting_value(key, config, written)

    if not all(expression.holds(lookup, name) for expression in sweep.where):
        return False
    return not any(expression.holds(lookup, name) for expression in sweep.exclude)


def _setting_value(key: str, config: Optional[RunConfig], written: Mapping[str, Tree]) -> Value:
    """A setting of a row for its filters; without a valid configuration, the written value or the default."""
    if key == RANKS:
        ranks = 1
        for size in ("dp", "tp", "pp"):
            size_value = _setting_value(f"layout.{size}", config, written)
            ranks *= size_value if isinstance(size_value, int) else 1
        return ranks
    section, _, leaf = key.partition(".")
    value: Any = getattr(getattr(config or _DEFAULTS, section), leaf)
    if config is None and key in written:
        try:
            value = coerce_setting(key, written[key])
        except BadValue:  # the error is reported with the refusal of the row
            text = plain_values(written[key])
            value = text if isinstance(text, str) else str(text)
    return value  # type: ignore[no-any-return]  # None, a bool, a number, a text or a tuple of them


_DEFAULTS = RunConfig()


def _digest_of_written(written: Mapping[str, Tree]) -> str:
    """Digest of settings that are no valid configuration, computed as by ``digest_of_config``."""
    changed: Dict[str, Any] = {}
    for key, value in written.items():
        section, _, leaf = key.partition(".")
        setting = _setting_value(key, None, {key: value})
        if setting != getattr(getattr(_DEFAULTS, section), leaf) and key != ACCEPTED_FINDINGS:
            changed[key] = setting
    return digest_of(json.dumps(changed, sort_keys=True))


def _ordered_runs(resolved: Sequence[_ResolvedRow], names: Sequence[str], sweep: SweepFile) -> Iterable[Run]:
    repeats = range(1, sweep.repeats + 1)
    rows = list(enumerate(zip(names, resolved)))
    # interleaved, A B A B: a slow drift of the machine affects all rows alike
    grouped = ((repeat, row) for row in rows for repeat in repeats)
    interleaved = ((repeat, row) for repeat in repeats for row in rows)
    for repeat, (order, (name, row)) in grouped if sweep.order == GROUPED else interleaved:
        yield _run_of(row, name, order, repeat)


def _run_of(row: _ResolvedRow, name: str, order: int, repeat: int) -> Run:
    return Run(
        f"{name}-r{repeat}",
        name,
        order,
        repeat,
        row.written_settings,
        row.config,
        row.refusal,
        row.digest,
        row.variant,
        row.notes,
    )


def _unique_names(rows: Sequence[_ResolvedRow], file: str) -> List[str]:
    """Unique names of the rows: rows that share a name get the beginning of their digest, whatever their order."""
    shared = {name for name, count in Counter(row.name.lower() for row in rows).items() if count > 1}
    names = [f"{row.name}-{row.digest[:6]}" if row.name.lower() in shared else row.name for row in rows]
    for name, count in Counter(name.lower() for name in names).items():
        if count > 1:
            raise ConfigError(f"{file}: {count} rows have the same settings ({name}); use repeats to run a row again")
    return names


def _setting_texts(settings: Mapping[str, Tree]) -> Dict[str, str]:
    """Settings as texts in the schema's order, so that names do not depend on the order of keys in a file."""
    position_of_key = _schema_positions()
    return {
        key: value.text if isinstance(value, Scalar) else str(plain_values(value))
        for key, value in sorted(settings.items(), key=lambda item: position_of_key[item[0]])
    }


@lru_cache(maxsize=1)
def _schema_positions() -> Dict[str, int]:
    return {key: position for position, key in enumerate(valid_keys())}
