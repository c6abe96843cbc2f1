"""What ``plan probe`` has measured of a machine: the section ``probed`` of its machine file.

Every figure is a median, with the spread of its logarithm. ``ranks`` is how many ranks measured it at once: they share
the machine's memory bandwidth, and its cores where they have more threads than there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Tuple, Type, TypeVar

from fugaku_gpt.layout.operations import ALL_REDUCE

VERSION = 1
LINEAR, INPUT, WEIGHT = "linear", "input", "weight"  # a layer's product, and those of its two gradients
SCORES, VALUES, KEYS = "scores", "values", "keys"  # attention's: [q, d][d, k], [q, k][k, d], [k, q][q, d] added up
PRODUCTS = (LINEAR, INPUT, WEIGHT, SCORES, VALUES, KEYS)
# all of attention by compiled kernels, of builds that have them: [s, d][d, s] of each head
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
COMPILED = (ATTENTION, ATTENTION_BACKWARD)
PASSES = (
    "add",
    "copy",
    "layer_norm",
    "layer_norm_backward",
    "gelu_erf",
    "gelu_erf_backward",
    "gelu_tanh",
    "gelu_tanh_backward",
    "softmax",
    "softmax_backward",
    "sum_of_rows",
    "loss",
    "dropout",
    "flags",
    "layer",
    "layer_backward",
)
NARROW_ALL_REDUCE = f"{ALL_REDUCE} bfloat16"  # other messages are as fast in any type
OF_STEPS = ("zero", "squares", "optimiser", "round")  # over parameters, whatever the type of computing


@dataclass(frozen=True)
class Product:
    """A product of ``batch`` pairs of matrices [rows, inner] and [inner, columns].

    Attributes:
        kind: one of :data:`PRODUCTS` or :data:`COMPILED`.
        dtype: trained in; what this build computes in float32 is measured with its casts.
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
        """A multiply and an add count as two; of compiled attention, which leaves out half of all scores, those of the
        forward pass's two products."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Pass:
    """An operation over so many elements; of ``layer`` one layer of the trainer, nearly without work, and its
    tokens."""

    name: str
    dtype: str
    ranks: int
    elements: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Message:
    """A communication of groups of ``group`` ranks, all ``ranks`` at once.

    Attributes:
        operation: of ``layout/operations.py``, or :data:`NARROW_ALL_REDUCE`.
        bytes: of the whole tensor, gathered or not yet scattered.
    """

    operation: str
    ranks: int
    group: int
    bytes: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Step:
    """Steps of the trainer itself in a small run: how far what is counted from the rest is off.

    Attributes:
        name: of the run.
        settings: of the run, as ``--set`` takes them.
    """

    name: str
    settings: Tuple[str, ...]
    seconds: float
    spread: float


@dataclass(frozen=True)
class Probed:
    """All of it.

    Attributes:
        cores: usable.
        threads: of a rank, by how many ranks were there.
        facts: of processor and build, for the reader.
        bandwidth: bytes/s of all ranks, by operation and their number, such as ``copy 2``.
    """

    cores: int
    threads: Mapping[int, int]
    facts: Mapping[str, str] = field(default_factory=dict)
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    products: Tuple[Product, ...] = ()
    passes: Tuple[Pass, ...] = ()
    messages: Tuple[Message, ...] = ()
    steps: Tuple[Step, ...] = ()

    def and_also(self, other: "Probed") -> "Probed":
        """Measurements of two numbers of ranks as one."""
        return Probed(
            self.cores,
            {**self.threads, **other.threads},
            {**self.facts, **other.facts},
            {**self.bandwidth, **other.bandwidth},
            self.products + other.products,
            self.passes + other.passes,
            self.messages + other.messages,
            self.steps + other.steps,
        )


_Row = TypeVar("_Row", Product, Pass, Message, Step)
_TABLES: Dict[str, "Type[Any]"] = {"products": Product, "passes": Pass, "messages": Message, "steps": Step}


def probed_data(probed: Probed) -> Dict[str, Any]:
    """For a file of YAML or JSON: tables as a line of names and a list of values for each row."""
    data: Dict[str, Any] = {
        "version": VERSION,
        "cores": probed.cores,
        "threads": {int(ranks): int(threads) for ranks, threads in probed.threads.items()},
        "facts": dict(probed.facts),
        "bandwidth": {name: _short(rate) for name, rate in probed.bandwidth.items()},
    }
    for table, kind in _TABLES.items():
        names = list(kind.__dataclass_fields__)
        rows: List[List[Any]] = []
        for row in getattr(probed, table):
            values = [getattr(row, name) for name in names]
            rows.append([_short(one) if isinstance(one, float) else one for one in values])
        data[table] = {"columns": names, "rows": [[list(v) if isinstance(v, tuple) else v for v in r] for r in rows]}
    return data


def probed_of(data: Mapping[str, Any]) -> Probed:
    """The inverse of :func:`probed_data`.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    if data["version"] != VERSION:
        raise ValueError(f"probed.version {data['version']}: this version reads {VERSION}")
    probed = Probed(
        cores=int(data["cores"]),
        threads={int(ranks): int(threads) for ranks, threads in data["threads"].items()},
        facts={str(key): str(value) for key, value in data["facts"].items()},
        bandwidth={str(key): float(value) for key, value in data["bandwidth"].items()},
        products=_rows(Product, data["products"]),
        passes=_rows(Pass, data["passes"]),
        messages=_rows(Message, data["messages"]),
        steps=_rows(Step, data["steps"]),
    )
    unknown = {one.ranks for table in (probed.products, probed.passes, probed.messages) for one in table}
    unknown -= set(probed.threads)
    if unknown or min([probed.cores, *probed.threads.values()]) < 1:
        raise ValueError("probed.cores and probed.threads must be above 0, and threads there for all numbers of ranks")
    return probed


def _rows(kind: "Type[_Row]", table: Mapping[str, Any]) -> Tuple[_Row, ...]:
    types = {name: str(one.type) for name, one in kind.__dataclass_fields__.items()}
    readers: Dict[str, Any] = {"str": str, "int": int, "float": float, "Tuple[str, ...]": _words}
    if list(table["columns"]) != list(types):
        raise ValueError(f"columns {table['columns']}: must be {list(types)}")
    found = []
    for row in table["rows"]:
        values = [readers[of](value) for of, value in zip(types.values(), row)]
        if len(row) != len(types):
            raise ValueError(f"row {row}: must have {len(types)} values")
        one = kind(*values)
        if not one.seconds > 0:
            raise ValueError(f"row {row}: seconds must be above 0")
        found.append(one)
    return tuple(found)


def _words(values: Any) -> Tuple[str, ...]:
    return tuple(str(one) for one in values)


def _short(number: float) -> float:
    return float(f"{number:.4g}")
