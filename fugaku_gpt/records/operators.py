"""``operators.json`` of a run directory: where an iteration's time goes, by class of operators.

Written by runs with ``training.profile_operators``. The classes are disjoint and sum to the iteration:

* ``matrix product``: products of two matrices, in layers and for the logits;
* ``batched product``: products of attention, batched over heads; with compiled kernels all of attention;
* ``softmax``: softmax of attention, with the scaling, masking and dropout around it; with compiled kernels nothing;
* ``LayerNorm``, ``GELU``: forward and backward, and forward again if the backward pass recomputes them; in another
  model than a GPT-2 RMSNorm and SwiGLU;
* ``cross-entropy``: the loss without the matrix products that make logits and their gradients;
* ``optimiser``: clearing the gradients, their norm, AdamW;
* ``cast``: copies from one number type to another;
* ``communication``: time in MPI calls, waiting for other ranks included, and so idling in a pipeline too;
* ``other operators``: all else that PyTorch computes (embedding, residual sums, sums of biases, copies, views), and
  masks of dropout;
* ``Python overhead``: time that none of these covers: Python, autograd's engine, reading samples, and most of what the
  profiler costs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from fugaku_gpt.records.files import write_json_atomically
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 1
OPERATORS_FILE = "operators.json"

MATMUL, BATCHED_MATMUL, SOFTMAX, LAYER_NORM, GELU = (
    "matrix product",
    "batched product",
    "softmax",
    "LayerNorm",
    "GELU",
)
CROSS_ENTROPY, OPTIMISER, CAST, COMMUNICATION = "cross-entropy", "optimiser", "cast", "communication"
OTHER, PYTHON = "other operators", "Python overhead"
CLASSES = (
    MATMUL,
    BATCHED_MATMUL,
    SOFTMAX,
    LAYER_NORM,
    GELU,
    CROSS_ENTROPY,
    OPTIMISER,
    CAST,
    COMMUNICATION,
    OTHER,
    PYTHON,
)


@dataclass(frozen=True)
class Operators:
    """Where the time of an iteration goes: means over iterations and ranks, in seconds.

    Attributes:
        iterations: number of profiled iterations.
        seconds_per_iteration: mean over the profiled iterations, from their first begin to their last end.
        ranks: number of ranks of the run.
        classes: seconds of each of ``CLASSES``, in their order; they sum to ``seconds_per_iteration``.
        unprofiled_seconds: seconds per iteration, over as many iterations right before, without the profiler.
    """

    iterations: int
    seconds_per_iteration: float
    ranks: int
    classes: Mapping[str, float]
    unprofiled_seconds: float

    @property
    def slowdown(self) -> float:
        """Ratio of the time of a profiled iteration to that of an unprofiled one."""
        return self.seconds_per_iteration / self.unprofiled_seconds


def write_operators(directory: Path, operators: Operators) -> None:
    """Write the record into a run directory, replacing that of an earlier start."""
    write_json_atomically(directory / OPERATORS_FILE, {"version": VERSION, **asdict(operators)})


def read_operators(directory: Path) -> Optional[Operators]:
    """Read the record of a run directory; None if the run was not profiled, or not yet.

    Raises:
        UsageError: the file cannot be read, or is not what :func:`write_operators` writes.
    """
    return read_versioned_json(
        Path(directory) / OPERATORS_FILE, "a record of operators", (VERSION,), _operators_of, mend="remove it"
    )


def _operators_of(values: Mapping[str, Any]) -> Operators:
    """Build the record from the values of a file of this version.

    Raises:
        ValueError: the values are not those that :func:`write_operators` writes.
    """
    if not _is_consistent(values):
        raise ValueError(f"it needs the seconds of {len(CLASSES)} classes whose sum is seconds_per_iteration")
    return Operators(
        int(values["iterations"]),
        float(values["seconds_per_iteration"]),
        int(values["ranks"]),
        {name: float(values["classes"][name]) for name in CLASSES},
        float(values["unprofiled_seconds"]),
    )


def _is_consistent(values: Mapping[str, Any]) -> bool:
    """True if all classes are there, all numbers are valid, and the classes sum to the iteration."""
    classes = values.get("classes")
    if not isinstance(classes, dict) or set(classes) != set(CLASSES):
        return False
    times: Dict[str, Any] = {**classes, **{key: values.get(key) for key in ("iterations", "ranks", *_POSITIVE)}}
    if not all(_is_number(value) for value in times.values()) or not all(times[key] > 0 for key in _POSITIVE):
        return False
    return math.isclose(sum(classes.values()), values["seconds_per_iteration"], rel_tol=1e-6)


_POSITIVE = ("seconds_per_iteration", "unprofiled_seconds")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
