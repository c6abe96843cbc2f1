"""The plan of a search for the largest batches: settings of a run file, combined with a matrix; each trial is a run.

A trial runs a few iterations of one micro-batch size. Its global batch is ``layout.dp`` times the micro-batch times the
number of micro-batches, so that a larger batch is more memory and not more accumulation. Batches and sequences that
grow in the first iterations have their full size at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig, coerce_setting
from fugaku_gpt.config.load import preset_settings
from fugaku_gpt.config.tree import Scalar, Tree, flatten, parse_override, plain_values, read_yaml_file
from fugaku_gpt.config.values import BadValue
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.planner.trainer.memory_check import NodeLimits
from fugaku_gpt.records.sweep import digest_of
from fugaku_gpt.sweep.edge_search import candidate_batches
from fugaku_gpt.sweep.expand import Run, run_of_row
from fugaku_gpt.sweep.file import SweepFile, SweepRow, check_keys, read_sweep
from fugaku_gpt.sweep.names import MAX_LENGTH, row_name

MICRO_BATCH = "training.micro_batch"
OUT_OF_MEMORY_ONLY = "oom"
_SET_BY_SEARCH = {
    MICRO_BATCH: "--most",
    "training.global_batch": "--micro-batches",
    "training.iterations": "--iterations",
    "training.log_interval": "",
}
_RAMPS = (
    "ramp_start", "ramp_increment", "ramp_samples", "seq_ramp_start", "seq_ramp_increment", "seq_ramp_iterations",
)  # fmt: skip
_NAME_LENGTH = MAX_LENGTH - 20  # a digest and the micro-batch follow
_DEFAULTS = RunConfig()


@dataclass(frozen=True)
class FrontierOptions:
    """How the search is made.

    Attributes:
        most: largest micro-batch that is tried.
        iterations: number of iterations of each trial.
        micro_batches: micro-batches of each replica per iteration; None: as many as pipeline stages.
        is_exact: every micro-batch is a candidate (see :func:`fugaku_gpt.sweep.edge_search.candidate_batches`).
    """

    most: int = 1024
    iterations: int = 5
    micro_batches: Optional[int] = None
    is_exact: bool = False


@dataclass(frozen=True)
class FrontierRow:
    """One combination of the matrix.

    Attributes:
        name: name of the combination, for directories; unique in the plan.
        order: number of the combination, from 0.
        row: its settings.
        settings: every setting as it was written (preset, run file, matrix, overrides), dotted key → value.
    """

    name: str
    order: int
    row: SweepRow
    settings: Mapping[str, Tree]

    def value(self, key: str) -> Any:
        """The value of a setting; the default where it is not written, or not valid."""
        section, _, leaf = key.partition(".")
        try:
            return coerce_setting(key, self.settings[key])
        except (KeyError, BadValue):  # of one that is not valid, the refusal of the row tells
            return getattr(getattr(_DEFAULTS, section), leaf)

    def is_of_form(self, key: str) -> bool:
        """Whether the field of a setting accepts its value."""
        try:
            coerce_setting(key, self.settings[key])
        except KeyError:  # the default
            return True
        except BadValue:
            return False
        return True

    def text(self, key: str) -> str:
        """A setting as it was written."""
        return _text(self.settings[key])

    def matrix_texts(self) -> Dict[str, str]:
        """The settings that distinguish it, dotted key → text."""
        return {key: _text(value) for key, value in self.row.naming_settings.items()}


@dataclass(frozen=True)
class FrontierPlan:
    """A search: its combinations, and how each trial is made.

    Attributes:
        name: name of the sweep that the trials belong to.
        origin: path of the run file, for messages.
        sweep: the run file and the matrix, as a sweep.
        overrides: settings over all combinations.
        rows: the combinations.
    """

    name: str
    origin: str
    sweep: SweepFile
    overrides: Mapping[str, Tree]
    rows: Tuple[FrontierRow, ...]
    options: FrontierOptions

    @property
    def batches(self) -> List[int]:
        """The candidates for the micro-batch, ascending."""
        return candidate_batches(self.options.most, self.options.is_exact)

    def run_name(self, row: FrontierRow, batch: int) -> str:
        """The name of the directory of a trial."""
        return f"{row.name}-mbs{batch}-r1"

    def run(self, row: FrontierRow, batch: int) -> Run:
        """The run of a trial."""
        micro_batches = self.options.micro_batches or row.value("layout.pp")
        numbers = {
            MICRO_BATCH: batch,
            "training.global_batch": batch * row.value("layout.dp") * micro_batches,
            "training.iterations": self.options.iterations,
            "training.log_interval": 1,
        }
        texts = {key: str(number) for key, number in numbers.items()}
        texts.update({f"training.{key}": "null" for key in _RAMPS if f"training.{key}" in row.settings})
        texts["node.memory_check"] = "false"  # it would refuse what is to be tried
        overrides = {**self.overrides, **{key: Scalar(text, False, self.origin) for key, text in texts.items()}}
        labelled = replace(row.row, label=f"{row.name}-mbs{batch}")
        preset = _preset(self.sweep, self.origin)
        run = run_of_row(self.sweep, labelled, overrides, self.origin, row.order, preset)
        return replace(run, name=self.run_name(row, batch))

    def planned_index(self, row: FrontierRow, limits: NodeLimits) -> int:
        """Index of the largest candidate that is valid and fits by the planner's estimate; -1 if none does."""
        batches = self.batches
        low, high = -1, len(batches)
        while high - low > 1:
            middle = (low + high) // 2
            if is_planned_to_fit(self.run(row, batches[middle]).config, limits):
                low = middle
            else:
                high = middle
        return low


def is_planned_to_fit(config: Optional[RunConfig], limits: NodeLimits) -> bool:
    """True if a run is valid and its memory, as planned, is within this machine's and ``node.memory_limit``."""
    if config is None:
        return False
    local_config = on_this_machine(config)
    limit = limits.smallest_limit(local_config)
    try:
        return limit is None or limits.run_memory(local_config).bytes_of_node <= limit[0]
    except UsageError:  # nothing fits training.recompute_budget_mib
        return False


def on_this_machine(config: RunConfig) -> RunConfig:
    """A run as it is tried: with all ranks on this machine, to which the memory of a job's nodes does not apply."""
    job = replace(config.job, node_memory="", nodes=1)
    return replace(config, job=job, node=replace(config.node, ranks_per_node=config.layout.ranks))


def frontier_plan(
    run_file: Optional[Path],
    preset: Optional[str],
    settings: Sequence[str],
    matrix: Sequence[str],
    options: FrontierOptions,
) -> FrontierPlan:
    """Reads a run file and the texts of the command line into a plan.

    Args:
        preset: name of the preset; None: that of the run file.
        settings: ``key=value`` over all combinations.
        matrix: ``key=value,value``; every combination of them is searched.

    Raises:
        ConfigError: a file or a text is not valid, or names a setting that the search itself sets.
        UsageError: the memory guard, which ends trials that grow too large, is off.
    """
    origin = str(run_file) if run_file is not None else "--preset"
    tree: Dict[str, Tree] = dict(flatten(read_yaml_file(run_file))) if run_file is not None else {}
    written_preset = tree.pop("preset", None)
    overrides = dict(parse_override(text) for text in settings)
    axes = _matrix(matrix, overrides)
    check_keys(overrides)
    sweep_tree: Dict[str, Tree] = {"defaults": tree, "matrix": axes}
    if preset is not None:
        sweep_tree["preset"] = Scalar(preset, False, "--preset")
    elif written_preset is not None:
        sweep_tree["preset"] = written_preset
    for key in (*axes, *overrides):
        if key in _SET_BY_SEARCH:
            option = _SET_BY_SEARCH[key]
            raise ConfigError(f"{key}: the search sets it itself" + (f"; see {option}" if option else ""))
    sweep = read_sweep(sweep_tree, origin)
    rows = _rows(sweep, overrides, origin)
    for row in rows:
        if not row.value("node.memory_guard"):
            raise UsageError(
                "node.memory_guard: false: the search needs it to end trials before the kernel kills ranks"
            )
    name = run_file.stem if run_file is not None else sweep.preset or "frontier"
    return FrontierPlan(name, origin, sweep, overrides, tuple(rows), options)


def _matrix(texts: Sequence[str], overrides: Mapping[str, Tree]) -> Dict[str, Tree]:
    axes: Dict[str, Tree] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise ConfigError(f"--matrix {text}: expected FIELD=V1,V2, such as training.dtype=float32,bfloat16")
        key, listed = parse_override(f"{key}={values}" if values.lstrip().startswith("[") else f"{key}=[{values}]")
        if key in axes or key in overrides:
            rival = "another --matrix" if key in axes else "--set"
            raise ConfigError(f"--matrix {text}: {key} is in {rival}, too; one would hide the other")
        items = listed if isinstance(listed, list) else [listed]
        located = [replace(item, location=f"--matrix {text}") if isinstance(item, Scalar) else item for item in items]
        _refuse_equal_values(text, key, located)
        axes[key] = located
    return axes


def _refuse_equal_values(text: str, key: str, items: Sequence[Tree]) -> None:
    """Refuses an axis with a value that is there twice, in whatever form.

    Raises:
        ConfigError: two values are equal; both would be searched in the same directories.
    """
    earlier: Dict[object, str] = {}
    for item in items:
        try:
            value = repr(coerce_setting(key, item))
        except (BadValue, KeyError):  # refused later, by its own message
            value = repr(_text(item))
        if value in earlier:
            raise ConfigError(f"--matrix {text}: {earlier[value]} and {_text(item)} are the same value; leave out one")
        earlier[value] = _text(item)


def _rows(sweep: SweepFile, overrides: Mapping[str, Tree], origin: str) -> List[FrontierRow]:
    base = _preset(sweep, origin)
    rows: List[FrontierRow] = []
    for order, row in enumerate(sweep.rows):
        settings = {**base, **sweep.defaults, **row.values, **overrides}
        texts = {key: _text(value) for key, value in settings.items()}
        own = {key: _text(value) for key, value in row.naming_settings.items()}
        rows.append(FrontierRow(row_name(texts, own)[:_NAME_LENGTH], order, row, settings))
    names = [row.name.lower() for row in rows]
    return [
        row
        if names.count(row.name.lower()) == 1
        else replace(row, name=f"{row.name}-{digest_of(json.dumps(row.matrix_texts(), sort_keys=True))[:6]}")
        for row in rows
    ]


def _preset(sweep: SweepFile, origin: str) -> Mapping[str, Tree]:
    return preset_settings(sweep.preset, origin).values if sweep.preset is not None else {}


def _text(value: Tree) -> str:
    return value.text if isinstance(value, Scalar) else str(plain_values(value))
