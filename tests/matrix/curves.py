"""One training as a curve, and the files of ``tests/golden`` that keep one for all builds and layouts."""

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
    """What some iterations did.

    Attributes:
        norms: of the gradient, before clipping; None where it was not finite.
        left_out: why a step was not done, or "".
        validation: its loss after the training's last iteration; None if that is not among them.
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
    """On all ranks of a world or, without one, on this rank alone; on the text of ``tests/golden``."""
    return trained.trainer_of(world, config, samples_of(config, "train"), samples_of(config, "valid"))


def trainer_for(name: str, layout: str = "", *more: str, world: Optional[Communicator] = None) -> Trainer:
    """Of a case in a layout, with more ``key=value``: :func:`trainer_of`, once it is agreed on what is computed in
    float32."""
    config, chosen = CASES[name].config(layout, *more), CASES[name].in_float32
    dtype = getattr(torch, config.training.dtype)
    RANK_CONSENSUS.in_float32.pop(dtype, None)
    if chosen is not None:
        compat.choose_float32_operations(sorted({*chosen, *compat.operations_without_kernel(dtype)}), dtype)
    return trainer_of(config, world)


def samples_of(config: RunConfig, split: str) -> SampleSource:
    """The package's own samples of the text, whose documents are its lines."""
    return open_samples(replace(config, data=replace(config.data, paths=(_corpus(),))), split)


@functools.lru_cache(maxsize=None)
def _corpus() -> str:
    folder = tempfile.TemporaryDirectory(prefix="golden-")
    _KEPT.append(folder)
    return str(write_letters(Path(folder.name) / "text", TEXT))


_KEPT: List["tempfile.TemporaryDirectory[str]"] = []  # until the process ends


def draw(trainer: Trainer, iterations: Optional[int] = None) -> Curve:
    """Train to the last iteration, or for so many. Collective."""
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


def distances(ours: Curve, kept: Curve) -> Dict[str, float]:
    """Largest relative distances of two curves of the same iterations; infinite where it is another number of them, or
    other ones were left out."""
    if (len(ours.losses), ours.left_out) != (len(kept.losses), kept.left_out):
        return {"loss": math.inf, "norm": math.inf}
    return {
        "loss": max(_apart(a, b) for a, b in zip([*ours.losses, ours.validation], [*kept.losses, kept.validation])),
        "norm": max(_apart(a, b) for a, b in zip(ours.norms, kept.norms)),
    }


def _apart(ours: Optional[float], kept: Optional[float]) -> float:
    if ours is None or kept is None:
        return 0.0 if ours is kept else math.inf
    distance = abs(ours / kept - 1.0)
    return math.inf if math.isnan(distance) else distance


def too_far(found: Dict[str, float], case: Case) -> Dict[str, float]:
    """Those of :func:`distances` that are larger than the case allows."""
    return {name: distance for name, distance in found.items() if distance > case.tolerance[name]}


def read_golden(name: str) -> Golden:
    """What is kept of a case."""
    text = (FOLDER / f"{name}.json").read_text()
    values = json.loads(text)
    return Golden(text, values["settings"], Curve(**values["curve"]), values["made_by"])


def made_by(name: str) -> Dict[str, Any]:
    """What makes a file now: the command, and the build."""
    build = compat.build_facts()
    return {
        "command": f"{COMMAND} {name}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        **{key: build[key] for key in ("torch", "blas", "instruction_set")},
        "in_float32": kernels_in_use(CASES[name].config())["in_float32"],
    }


def golden_text(name: str, curve: Curve, made: Dict[str, Any]) -> str:
    """The file of a case. JSON's decimal numbers give back the very same float64s."""
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
    """Those that are not the defaults, as JSON gives them back."""
    settings: Dict[str, Any] = json.loads(json.dumps(changed_settings(config)))
    return settings


def names() -> Tuple[str, ...]:
    """Of the files that are there."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
