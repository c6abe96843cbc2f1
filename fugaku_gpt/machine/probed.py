"""Measurements of a machine by ``plan probe``: the section ``probed`` of its machine file.

Every figure is a median, with the spread of its logarithm. ``ranks`` is the number of ranks that measured it at once:
they share the machine's memory bandwidth, and its cores if they have more threads than there are cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Tuple, Type, TypeVar

from fugaku_gpt.layout.operations import ALL_REDUCE

VERSION = 1
LINEAR, INPUT, WEIGHT = "linear", "input", "weight"  # a layer's product, and the products of its two gradients
SCORES, VALUES, KEYS = (
    "scores",
    "values",
    "keys",
)  # attention's products: [q, d][d, k], [q, k][k, d], accumulated [k, q][q, d]
PRODUCTS = (LINEAR, INPUT, WEIGHT, SCORES, VALUES, KEYS)
# attention as one operation by compiled kernels, if the build has them: [s, d][d, s] for each head
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
COMPILED_ATTENTION = (ATTENTION, ATTENTION_BACKWARD)
PASSES = (
    "add",
    "copy",
    "layer_norm",
    "layer_norm_backward",
    "gelu_erf",
    "gelu_erf_backward",
    "gelu_tanh",
    "gelu_tanh_backward",
    "rms_norm",
    "rms_norm_backward",
    "swiglu",
    "swiglu_backward",
    "rotary",
    "rotary_backward",
    "softmax",
    "softmax_backward",
    "sum_of_rows",
    "loss",
    "dropout",
    "flags",
    "layer",
    "layer_backward",
)
# similar passes, whose times stand for those that older probes have not measured
STAND_INS: Mapping[str, str] = {
    "rms_norm": "layer_norm",
    "rms_norm_backward": "layer_norm_backward",
    "swiglu": "gelu_erf",
    "swiglu_backward": "gelu_erf_backward",
    "rotary": "copy",
    "rotary_backward": "copy",
}
NARROW_ALL_REDUCE = f"{ALL_REDUCE} bfloat16"  # other messages take the same time in any type
OPTIMISER_PASSES = ("zero", "squares", "optimiser", "round")  # over parameters, in float32 for any training type


@dataclass(frozen=True)
class ProductTiming:
    """A product of ``batch`` pairs of matrices [rows, inner] and [inner, columns].

    Attributes:
        kind: one of :data:`PRODUCTS` or :data:`COMPILED`.
        dtype: training type; if the build computes it in float32, the measurement includes the casts.
    """

    kind: str
    dtype: str
    ranks: int
    batch: int
    rows: int
    inner: int
    columns: int
    seconds: float
    spread: float

    @property
    def flops(self) -> float:
        """FLOPs, where a multiplication and an addition count as two.

        Compiled attention, which skips half of all scores, counts as the two products of the forward pass.
        """
        return 2.0 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class PassTiming:
    """An operation over a number of elements.

    The pass ``layer`` is one layer of the trainer with next to no work; its elements are tokens.
    """

    name: str
    dtype: str
    ranks: int
    elements: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class MessageTiming:
    """A communication in groups of ``group`` ranks, by all ``ranks`` at once.

    Attributes:
        operation: name in ``layout/operations.py``, or :data:`NARROW_ALL_REDUCE`.
        bytes: size of the full tensor, after gathering or before scattering.
    """

    operation: str
    ranks: int
    group: int
    bytes: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class StepTiming:
    """Steps of the trainer in a small run, which show the error of the predictions from the other measurements.

    Attributes:
        name: name of the run.
        settings: settings of the run in the form of ``--set``.
    """

    name: str
    settings: Tuple[str, ...]
    seconds: float
    spread: float


@dataclass(frozen=True)
class ProbeResults:
    """All measurements of a machine.

    Attributes:
        cores: number of usable cores.
        threads: threads of a rank, by the number of ranks.
        facts: facts about processor and build, for the reader.
        bandwidth: bytes/s of all ranks together, by operation and number of ranks, such as ``copy 2``.
    """

    cores: int
    threads: Mapping[int, int]
    facts: Mapping[str, str] = field(default_factory=dict)
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    products: Tuple[ProductTiming, ...] = ()
    passes: Tuple[PassTiming, ...] = ()
    messages: Tuple[MessageTiming, ...] = ()
    steps: Tuple[StepTiming, ...] = ()

    def merged_with(self, other: "ProbeResults") -> "ProbeResults":
        """Merges the measurements with two numbers of ranks."""
        return ProbeResults(
            self.cores,
            {**self.threads, **other.threads},
            {**self.facts, **other.facts},
            {**self.bandwidth, **other.bandwidth},
            self.products + other.products,
            self.passes + other.passes,
            self.messages + other.messages,
            self.steps + other.steps,
        )


_Timing = TypeVar("_Timing", ProductTiming, PassTiming, MessageTiming, StepTiming)
_TABLES: Dict[str, "Type[Any]"] = {
    "products": ProductTiming,
    "passes": PassTiming,
    "messages": MessageTiming,
    "steps": StepTiming,
}


def probe_to_data(probed: ProbeResults) -> Dict[str, Any]:
    """The results as data for YAML or JSON: each table has a list of column names and a list of values for each row."""
    data: Dict[str, Any] = {
        "version": VERSION,
        "cores": probed.cores,
        "threads": {int(ranks): int(threads) for ranks, threads in probed.threads.items()},
        "facts": dict(probed.facts),
        "bandwidth": {name: round_digits(rate) for name, rate in probed.bandwidth.items()},
    }
    for table, kind in _TABLES.items():
        names = list(kind.__dataclass_fields__)
        rows: List[List[Any]] = []
        for row in getattr(probed, table):
            values = [getattr(row, name) for name in names]
            rows.append([round_digits(value) if isinstance(value, float) else value for value in values])
        data[table] = {"columns": names, "rows": [[list(v) if isinstance(v, tuple) else v for v in r] for r in rows]}
    return data


def probe_from_data(data: Mapping[str, Any]) -> ProbeResults:
    """The inverse of :func:`probe_to_data`.

    Raises:
        ValueError, KeyError, TypeError: the data are not valid.
    """
    if data["version"] != VERSION:
        raise ValueError(f"probed.version {data['version']}: this version reads {VERSION}")
    probed = ProbeResults(
        cores=int(data["cores"]),
        threads={int(ranks): int(threads) for ranks, threads in data["threads"].items()},
        facts={str(key): str(value) for key, value in data["facts"].items()},
        bandwidth={str(key): float(value) for key, value in data["bandwidth"].items()},
        products=_rows(ProductTiming, data["products"]),
        passes=_rows(PassTiming, data["passes"]),
        messages=_rows(MessageTiming, data["messages"]),
        steps=_rows(StepTiming, data["steps"]),
    )
    unknown = {timing.ranks for table in (probed.products, probed.passes, probed.messages) for timing in table}
    unknown -= set(probed.threads)
    if unknown or min([probed.cores, *probed.threads.values()]) < 1:
        raise ValueError("probed.cores and probed.threads must be above 0, and threads given for all numbers of ranks")
    return probed


def _rows(kind: "Type[_Timing]", table: Mapping[str, Any]) -> Tuple[_Timing, ...]:
    types = {name: str(spec.type) for name, spec in kind.__dataclass_fields__.items()}
    readers: Dict[str, Any] = {"str": str, "int": int, "float": float, "Tuple[str, ...]": _strings}
    if list(table["columns"]) != list(types):
        raise ValueError(f"columns {table['columns']}: must be {list(types)}")
    timings = []
    for row in table["rows"]:
        values = [readers[of](value) for of, value in zip(types.values(), row)]
        if len(row) != len(types):
            raise ValueError(f"row {row}: must have {len(types)} values")
        timing = kind(*values)
        if not timing.seconds > 0:
            raise ValueError(f"row {row}: seconds must be above 0")
        timings.append(timing)
    return tuple(timings)


def _strings(values: Any) -> Tuple[str, ...]:
    return tuple(str(value) for value in values)


def round_digits(number: float, digits: int = 4) -> float:
    """Round to a number of significant digits."""
    return float(f"{number:.{digits}g}")
