"""Parses the two sides of a comparison, as they are written on the command line.

A side is one of

* an environment, a name of ``env/`` or a file of that form: ``torch-1.7``;
* toggles, ``key=value`` with any key of a run file or its last part, several joined by commas:
  ``node.tcmalloc=true``, ``threads=1,dtype=bfloat16``, ``ranks=4``;
* both: ``torch-2.13,tcmalloc=true``;
* neither, the run as it is: ``base`` or ``-``;
* recorded runs: a run directory, a folder of them, or a CSV with the columns of
  ``benchmarks/reference/measurements.csv``; conditions after a colon select runs or rows of the last two:
  ``runs/sweep:node.tcmalloc=true``, ``notes.csv:torch=1.7,nodes<=64``.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from fugaku_gpt.config import RunConfig, load_run_config, written_keys
from fugaku_gpt.config.load import SettingsLayer, valid_keys
from fugaku_gpt.config.schema import NODE_KNOBS
from fugaku_gpt.data.vocabulary import VOCABULARY_KEY, vocabulary_of_corpora
from fugaku_gpt.errors import ConfigError, DataError, UsageError
from fugaku_gpt.planner.tables.rows import ConfigRow, finite_number, torch_series

BASE_NAMES = ("base", "-")
RANKS = "ranks"  # number of ranks of the run: more or fewer replicas
_KEYS_OF_SHORT_NAMES = {
    "threads": "node.threads_per_rank",
    **{knob.alias: knob.key for knob in NODE_KNOBS if knob.alias},
}
_COLUMNS_OF_NAMES = {  # → field of a row
    "pytorch": "torch",
    "zero_stage": "zero",
    "retention_state": "retention",
    "freq": "freq_ghz",
}
_NONE_TEXTS = ("none", "null", "default")
_FLAG_TEXTS = {
    "yes": "true",
    "on": "true",
    "1": "true",
    "no": "false",
    "off": "false",
    "0": "false",
}  # as YAML has them
_CONDITION = re.compile(r"\s*([\w.-]+)\s*(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_SEPARATOR = re.compile(r",(?=\s*[A-Za-z_][\w.]*\s*(?:<=|>=|!=|=|<|>))")


@dataclass(frozen=True)
class LiveSide:
    """A side that is to be run.

    Attributes:
        text: the side as it was written.
        environment: name or file of the PyTorch build; empty for the Python that runs this program.
        settings: ``key=value`` changes of the run with complete keys, and ``ranks=N``.
    """

    text: str
    environment: str = ""
    settings: Tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The side as it was written, an environment's file reduced to its name, since reports leave this machine."""
        if not self.environment.endswith((".yaml", ".yml")):
            return self.text
        return self.text.replace(self.environment, Path(self.environment).stem, 1)


@dataclass(frozen=True)
class Condition:
    """One condition on recorded rows, such as ``nodes<=64``."""

    key: str
    relation: str
    value: str

    def is_met_by(self, value: object) -> bool:
        """True if a value meets the condition; numbers are compared by size, all other values as texts."""
        texts = [str(operand).strip().lower() for operand in (value, self.value)]
        if isinstance(value, bool):
            texts[1] = _FLAG_TEXTS.get(texts[1], texts[1])
        left, right = ("" if text in _NONE_TEXTS else text for text in texts)
        if self.relation in ("=", "!="):
            left_number, right_number = finite_number(left), finite_number(right)
            # the builds 1.10 and 1.1 differ, although the numbers are equal
            is_equal = (
                left == right
                if self.key == "torch" or None in (left_number, right_number)
                else left_number == right_number
            )
            return is_equal == (self.relation == "=")
        left_number, right_number = finite_number(left), finite_number(right)
        if left_number is None or right_number is None:
            return False
        is_below, is_above = left_number < right_number, left_number > right_number
        return {"<": is_below, ">": is_above, "<=": not is_above, ">=": not is_below}[self.relation]


@dataclass(frozen=True)
class RecordedSide:
    """A side of recorded runs."""

    text: str
    path: Path
    conditions: Tuple[Condition, ...] = ()

    @property
    def is_table(self) -> bool:
        """True for rows of a CSV, False for run directories."""
        return self.path.suffix == ".csv"


Side = Union[LiveSide, RecordedSide]


def parse_side(text: str, is_environment: Callable[[str], bool]) -> Side:
    """Parses one side.

    Args:
        is_environment: returns True for the name of an environment.

    Raises:
        UsageError: the text is not a side.
    """
    text = text.strip()
    if text in BASE_NAMES:
        return LiveSide(text)
    head, colon, rest = text.partition(":")
    if not is_environment(head) and head and (head.endswith(".csv") or Path(head).is_dir()):
        return _parse_recorded(text, Path(head), rest if colon else "")
    environment, settings = "", []
    for number, item in enumerate(_SEPARATOR.split(text)):
        setting = _CONDITION.fullmatch(item)
        if setting and setting[2] == "=":
            settings.append(f"{full_key(setting[1], text)}={setting[3].strip()}")
        elif number == 0 and is_environment(item.strip()):
            environment = item.strip()
        else:
            raise UsageError(
                f"{text}: {item.strip() or 'an empty word'!r} is no environment, no key=value and no folder of runs; "
                "valid: a name of `fugaku-gpt env list` or a file like those of env/, toggles such as "
                "node.tcmalloc=true,threads=1, both joined by a comma, base, a run directory, a folder of runs, or "
                "FILE.csv:column=value"
            )
    return LiveSide(text, environment, tuple(settings))


def parse_sides(
    a: str, b: str, is_environment: Callable[[str], bool]
) -> Union[Tuple[RecordedSide, RecordedSide], Tuple[LiveSide, LiveSide]]:
    """Parse both sides of a comparison, which are both recorded, or both to be run.

    Raises:
        UsageError: as :func:`parse_side`, or one is recorded and the other is not.
    """
    first, second = parse_side(a, is_environment), parse_side(b, is_environment)
    if isinstance(first, RecordedSide) and isinstance(second, RecordedSide):
        return first, second
    if isinstance(first, LiveSide) and isinstance(second, LiveSide):
        return first, second
    raise UsageError(
        f"{first.text} and {second.text}: one is recorded and one would be run now; valid: both recorded, or both to "
        "be run"
    )


def full_key(name: str, location: str) -> str:
    """The dotted key of a toggle's name, which may be the key, a short form, or a unique last component of a key.

    Raises:
        UsageError: there is no such key, or there are several.
    """
    keys = valid_keys()
    if name in keys or name == RANKS:
        return name
    if name in _KEYS_OF_SHORT_NAMES:
        return _KEYS_OF_SHORT_NAMES[name]
    matching_keys = [key for key in keys if key.partition(".")[2] == name]
    if len(matching_keys) == 1:
        return matching_keys[0]
    if matching_keys:
        raise UsageError(f"{location}: {name}: of which section? valid: {', '.join(matching_keys)}")
    close_names = difflib.get_close_matches(
        name, [*keys, *_KEYS_OF_SHORT_NAMES, *(key.partition(".")[2] for key in keys)], n=1
    )
    hint = f"did you mean {close_names[0]}?" if close_names else "valid: the keys of a run file, such as node.tcmalloc"
    raise UsageError(f"{location}: {name}: no such setting; {hint}")


def config_of(
    side: LiveSide,
    file: Union[Path, SettingsLayer, None],
    preset: Optional[str],
    overrides: Sequence[str],
    ranks: Optional[int] = None,
) -> RunConfig:
    """Loads the run of a side: the base run with the side's settings over it, and the vocabulary of its corpora where
    neither states one.

    Args:
        ranks: number of ranks where the side does not set it; default: as in the layout.

    Raises:
        ConfigError: the result is not a valid run.
    """
    settings = [text for text in side.settings if not text.startswith(f"{RANKS}=")]
    ranks_text = next((text.partition("=")[2] for text in side.settings if text.startswith(f"{RANKS}=")), None)
    all_overrides = [*overrides, *settings]
    if ranks_text is not None:
        if not ranks_text.isdecimal() or int(ranks_text) < 1:
            raise ConfigError(f"{side.text}: ranks={ranks_text}: must be a whole number, at least 1")
        ranks = int(ranks_text)
    if ranks is not None:
        layout = load_run_config(file, preset, all_overrides, check=False).layout
        ranks_per_replica = layout.tp * layout.pp
        if ranks % ranks_per_replica:
            raise ConfigError(
                f"{side.text}: {ranks} ranks cannot be divided by layout.tp {layout.tp} * layout.pp {layout.pp}"
            )
        all_overrides.append(f"layout.dp={ranks // ranks_per_replica}")
    config = load_run_config(file, preset, all_overrides, is_only_measured=True)
    if config.model.is_grid_classifier and len(config.data.buckets) > 1:
        raise ConfigError(
            f"data.buckets: {list(config.data.buckets)}: a job's time is the median of its iterations, and those of "
            "several sizes have no common one; valid: one bucket, such as [16] with model.seq_len=256"
        )
    written = written_keys(file, all_overrides) | ({"preset"} if preset is not None else set())
    with contextlib.suppress(DataError):  # the ranks report it
        vocabulary = vocabulary_of_corpora(config, written)
        if vocabulary is not None:  # as with `train`
            all_overrides.append(f"{VOCABULARY_KEY}={vocabulary.size}")
            return load_run_config(file, preset, all_overrides, is_only_measured=True)
    return config


def work_per_iteration(config: RunConfig) -> Dict[str, object]:
    """Settings that determine the work of an iteration: model, sequence length, batch."""
    names = ("layers", "hidden", "heads", "ffn_hidden", "seq_len", "vocab_size")
    more = ("norm", "qk_norm", "positions", "mlp", "biases", "tied_embeddings")
    of_grids = ("kind", "classes") if config.model.is_grid_classifier else ()
    work: Dict[str, object] = {f"model.{name}": getattr(config.model, name) for name in (*names, *more, *of_grids)}
    work.update({"model.kv_heads": config.model.kv_head_count, "model.head_dim": config.model.head_size})
    work["training.global_batch"] = config.training.global_batch
    if config.model.is_grid_classifier:
        work["data.buckets"] = list(config.data.buckets)
    return work


def refuse_unequal_work(a: Mapping[str, object], b: Mapping[str, object]) -> None:
    """Refuses sides whose iterations differ in work, given by :func:`work_per_iteration` or by a row's columns.

    Raises:
        UsageError: model, batch or sequence length differ.
    """
    differences = [f"{key}: {a[key]} and {b[key]}" for key in a if a[key] != b[key]]
    if differences:
        raise UsageError(
            f"A and B do not do the same work in an iteration ({'; '.join(differences)}): seconds per iteration would "
            "not be comparable; give both the same model and global batch"
        )


def _parse_recorded(text: str, path: Path, conditions: str) -> RecordedSide:
    is_table = path.suffix == ".csv"
    if is_table and not path.is_file():
        raise UsageError(f"{path}: no such file")
    parsed: List[Condition] = []
    for item in _SEPARATOR.split(conditions) if conditions.strip() else []:
        condition = _CONDITION.fullmatch(item)
        if condition is None:
            raise UsageError(f"{text}: {item.strip()!r}: expected a condition such as torch=1.7 or nodes<=64")
        key = _column_of(condition[1], text) if is_table else full_key(condition[1], text)
        value = condition[3].strip()
        parsed.append(Condition(key, condition[2], torch_series(value) if key == "torch" else value))
    return RecordedSide(text, path, tuple(parsed))


def _column_of(name: str, location: str) -> str:
    columns = [spec.name for spec in fields(ConfigRow)]
    column = _COLUMNS_OF_NAMES.get(name, name)
    if column not in columns:
        close_names = difflib.get_close_matches(name, [*columns, *_COLUMNS_OF_NAMES], n=1)
        hint = f"did you mean {close_names[0]}?" if close_names else f"valid: {', '.join(columns)}"
        raise UsageError(f"{location}: {name}: no such column; {hint}")
    return column
