"""Has products of layers measured in another process, for ``env kernels`` and ``doctor node``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from fugaku_gpt.kernels.check import TIMEOUT_SECONDS, run_in_child
from fugaku_gpt.kernels.product_verdicts import ProductVerdict, Stamp, parse_verdict

_PROGRAM = """
import json
from fugaku_gpt.ops.product_timing import measure_missing
answer(json.dumps(measure_missing(**json.loads(sys.argv[1]))))
"""


@dataclass(frozen=True)
class MeasuredProducts:
    """The verdicts in force for this Python's PyTorch on this processor.

    Attributes:
        file: the file that they are in, unless it could not be written; None if they could not be measured.
        verdicts: one for each number type and number of threads, in that order; empty if they could not be measured.
        stamp: what they depend on; None if they could not be measured.
        measured_anew: why some were measured now, in one line; empty if all were in the file.
        problem: why there are none, or why they could not be written, in one line; without verdicts PyTorch's products
            are used.
    """

    file: Optional[Path] = None
    verdicts: Tuple[ProductVerdict, ...] = ()
    stamp: Optional[Stamp] = None
    measured_anew: str = ""
    problem: str = ""


def measure_products(
    threads: Optional[Sequence[int]] = None, *, again: bool = False, timeout: float = TIMEOUT_SECONDS
) -> MeasuredProducts:
    """Return the verdicts of this environment; those that are missing, or were measured with something else, are
    measured by a process of its own first, which takes a few seconds, and written beside the library.

    Args:
        threads: numbers of threads; default: 1, the cores of a memory node that this process may use, and all of them.
        again: measure all of them again.
        timeout: seconds after which the process is killed.
    """
    request = {"threads": None if threads is None else list(threads), "again": again}
    problem, answer = run_in_child(_PROGRAM, [json.dumps(request)], "measurements of products", timeout)
    if problem:
        return MeasuredProducts(problem=problem)
    return _measured(json.loads(answer))


def _measured(values: Dict[str, Any]) -> MeasuredProducts:
    return MeasuredProducts(
        Path(values["file"]),
        tuple(parse_verdict(verdict) for verdict in values["verdicts"]),
        Stamp(**values["stamp"]),
        values["measured_anew"],
        values["problem"],
    )
