"""A training as a curve, and the files of ``tests/golden`` with a curve for all builds and layouts."""

from __future__ import annotations

import functools
import json
import math
import platform
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch

from fugaku_gpt import compat
from fugaku_gpt.comm import Communicator
from fugaku_gpt.compat.kernel_choices import RANK_CONSENSUS
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.load import changed_settings
from fugaku_gpt.data.samples import SampleSource, open_samples
from fugaku_gpt.training.startup import kernels_in_use
from fugaku_gpt.training.trainer import Trainer
from tests.matrix.cases import CASES, Case
from tests.mpi import trained
from tests.support.corpus import write_letters

FOLDER = Path(__file__).resolve().parent.parent / "golden"
TEXT = FOLDER / "text.txt"
COMMAND = "python -m tests.matrix.golden --write"


@dataclass(frozen=True)
class Curve:
    """Losses and gradient norms of some iterations.

    Attributes:
        norms: norms of the gradient before clipping; None where it was not finite.
        left_out: the reason why a step was skipped, or "".
        validation: validation loss after the training's last iteration; None if that is not among them.
    """

    losses: List[float]
    norms: List[Optional[float]]
    left_out: List[str]
    validation: Optional[float]


@dataclass(frozen=True)
class Golden:
    """A file of ``tests/golden``: the curve that one build drew on one rank."""

    text: str
    settings: Dict[str, Any]
    curve: Curve
    made_by: Dict[str, Any]


def trainer_of(config: RunConfig, world: Optional[Communicator] = None) -> Trainer:
    """A trainer on all ranks of a world (None: on this rank alone), on the text of ``tests/golden``."""
    return trained.trainer_of(world, config, samples_of(config, "train"), samples_of(config, "valid"))


def trainer_for(name: str, layout: str = "", *more: str, world: Optional[Communicator] = None) -> Trainer:
    """A trainer of a case in a layout, with further ``key=value`` settings, after the choice of the operations that are
    computed in float32."""
    config, chosen = CASES[name].config(layout, *more), CASES[name].in_float32
    dtype = getattr(torch, config.training.dtype)
    RANK_CONSENSUS.in_float32.pop(dtype, None)
    if chosen is not None:
        compat.choose_float32_operations(sorted({*chosen, *compat.operations_without_kernel(dtype)}), dtype)
    return trainer_of(config, world)


def samples_of(config: RunConfig, split: str) -> SampleSource:
    """The package's samples of the text; each line is a document."""
    return open_samples(replace(config, data=replace(config.data, paths=(_corpus(),))), split)


@functools.lru_cache(maxsize=None)
def _corpus() -> str:
    folder = tempfile.TemporaryDirectory(prefix="golden-")
    _OPEN_FOLDERS.append(folder)
    return str(write_letters(Path(folder.name) / "text", TEXT))


_OPEN_FOLDERS: List["tempfile.TemporaryDirectory[str]"] = []  # until the process ends


def draw(trainer: Trainer, iterations: Optional[int] = None) -> Curve:
    """Train to the last iteration, or for ``iterations``. Collective."""
    last = trainer.config.training.iterations
    steps = [trainer.step() for _ in range(last - trainer.iteration if iterations is None else iterations)]
    norms = [step.grad_norm if math.isfinite(step.grad_norm) else None for step in steps]
    validation = trainer.validate() if trainer.iteration == last else None
    trainer.finish()
    return Curve([step.loss for step in steps], norms, [step.skip_reason for step in steps], validation)


def part(curve: Curve, first: int, stop: int) -> Curve:
    """Iterations [first, stop) of a curve, counted from 0."""
    cut = slice(first, stop)
    last = stop == len(curve.losses)
    return Curve(curve.losses[cut], curve.norms[cut], curve.left_out[cut], curve.validation if last else None)


def distances(ours: Curve, golden: Curve) -> Dict[str, float]:
    """Largest relative distances of two curves of the same iterations; infinite if their numbers of iterations or their
    skipped steps differ."""
    if (len(ours.losses), ours.left_out) != (len(golden.losses), golden.left_out):
        return {"loss": math.inf, "norm": math.inf}
    return {
        "loss": max(
            _relative_distance(a, b)
            for a, b in zip([*ours.losses, ours.validation], [*golden.losses, golden.validation])
        ),
        "norm": max(_relative_distance(a, b) for a, b in zip(ours.norms, golden.norms)),
    }


def _relative_distance(ours: Optional[float], golden: Optional[float]) -> float:
    if ours is None or golden is None:
        return 0.0 if ours is golden else math.inf
    distance = abs(ours / golden - 1.0)
    return math.inf if math.isnan(distance) else distance


def too_far(largest_distances: Dict[str, float], case: Case) -> Dict[str, float]:
    """The items of :func:`distances` that are larger than the case's tolerance."""
    return {name: distance for name, distance in largest_distances.items() if distance > case.tolerance[name]}


def read_golden(name: str) -> Golden:
    """The golden file of a case."""
    text = (FOLDER / f"{name}.json").read_text()
    values = json.loads(text)
    return Golden(text, values["settings"], Curve(**values["curve"]), values["made_by"])


def made_by(name: str) -> Dict[str, Any]:
    """The command and the build that write a golden file now."""
    build = compat.build_facts()
    return {
        "command": f"{COMMAND} {name}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        **{key: build[key] for key in ("torch", "blas", "instruction_set")},
        "in_float32": kernels_in_use(CASES[name].config())["in_float32"],
    }


def golden_text(name: str, curve: Curve, made: Dict[str, Any]) -> str:
    """The golden file's text of a case. JSON's decimal numbers are read back as the very same float64s."""
    case = CASES[name]
    values = {
        "about": case.about,
        "settings": settings_of(case.config()),
        "tolerance": case.tolerance,
        "reason": case.reason,
        "curve": asdict(curve),
        "made_by": made,
    }
    return json.dumps(values, indent=1) + "\n"


def settings_of(config: RunConfig) -> Dict[str, Any]:
    """The settings that differ from the defaults, as JSON reads them back."""
    settings: Dict[str, Any] = json.loads(json.dumps(changed_settings(config)))
    return settings


def names() -> Tuple[str, ...]:
    """The names of the golden files."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
