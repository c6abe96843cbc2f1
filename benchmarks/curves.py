"""Draws the loss curve of one small model on real text in eight layouts, and measures how far each is from one rank's.

    .venv/bin/python benchmarks/curves.py                    # 100 steps each; the table, and docs/images/curves.svg
    .venv/bin/python benchmarks/curves.py --dtype float64 --picture runs/curves.svg
    .venv/bin/python benchmarks/curves.py --model llama      # docs/images/curves-llama.svg
    .venv/bin/python benchmarks/curves.py --model llama-untied --one-bit --bound 1e-2 --picture runs/curves.svg

The text is the source code of Python's standard library, byte by byte. Every layout starts from the same weights, sees
the same samples and drops the same activations, so its curve is that of one rank up to rounding. The exit code is 1 if
a loss differs from that of one rank at the same step by more than the bound for the precision.

``--one-bit`` adds a curve of one rank that starts with the last bit of a single weight changed. It shows how far the
training itself carries a rounding, whatever the layout: layouts that are no farther than it are right.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.plotting import PALETTE

if TYPE_CHECKING:
    from fugaku_gpt.training.trainer import Trainer

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "images"
MODEL = (
    "model.layers=4",
    "model.hidden=64",
    "model.heads=4",
    "model.seq_len=64",
    "model.vocab_size=256",
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "training.global_batch=16",
    "training.micro_batch=2",
    "training.lr=2e-3",
    "training.min_lr=2e-4",
    "training.warmup_iterations=10",
    "training.bucket_mib=0.1",
)
_LLAMA = (
    "model.norm=rmsnorm",
    "model.positions=rope",
    "model.mlp=swiglu",
    "model.kv_heads=2",
    "model.ffn_hidden=168",
    "model.biases=none",
)
# Model → settings on top of these. Without output weights to train it, an embedding keeps its small initial size, and
# the gradients that reach it through the first norm are large: at this learning rate, roundings grow (--one-bit).
MODELS: Dict[str, Tuple[str, ...]] = {
    "gpt2": (),
    "llama": _LLAMA,
    "llama-untied": (*_LLAMA, "model.tied_embeddings=false"),
}
ONE_BIT = "one rank, one bit"
CHANGED_WEIGHT = ("blocks.0.mlp.down.weight", 5)  # tensor and position of the weight of this curve
SINGLE_RANK = "one rank"
LAYOUTS: Dict[str, str] = {
    "dp2 zero1": "dp=2 zero=1",
    "tp2 sp selective": "tp=2 sequence_parallel=true recompute=selective",
    "pp2 interleaved": "pp=2 schedule=interleaved chunks=2",
    "dp2 tp2 sp zero1 full": "dp=2 tp=2 sequence_parallel=true zero=1 recompute=full",
    "tp2 pp2 gpipe full": "tp=2 pp=2 schedule=gpipe recompute=full",
    "pp4 1f1b selective": "pp=4 recompute=selective",
    "dp2 tp2 pp2 sp zero1 selective": "dp=2 tp=2 pp=2 sequence_parallel=true zero=1 recompute=selective",
    "dp2 tp2 pp2 interleaved zero1 full": "dp=2 tp=2 pp=2 schedule=interleaved chunks=2 zero=1 recompute=full",
}
BOUNDS = {"float32": 5e-5, "float64": 1e-10}  # of a loss that falls from 5.5 to 3.5; float32 was seen at 6e-6


class LibraryBytes:
    """Numbered samples of bytes, consecutive in the standard library's sources."""

    def __init__(self, seq_len: int, limit: int = 2**20) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b""
        for file in sorted(folder.glob("*.py")):
            text += file.read_bytes()
            if len(text) > limit:
                break
        self._tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        self._seq_len = seq_len

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Token ids [count, seq_len + 1] of the samples from ``first`` on; the text starts over at its end."""
        room = len(self._tokens) - self._seq_len - 1
        starts = [(number * self._seq_len) % room for number in range(first, first + count)]
        return np.stack([self._tokens[start : start + self._seq_len + 1] for start in starts])


def settings_of(layout: str, dtype: str, steps: int, model: str = "gpt2") -> List[str]:
    """The ``key=value`` overrides of a layout such as ``dp=2 recompute=full``."""
    sections = [
        f"training.{setting}" if setting.startswith("recompute") else f"layout.{setting}" for setting in layout.split()
    ]
    return [*MODEL, *MODELS[model], f"training.dtype={dtype}", f"training.iterations={steps}", *sections]


def losses(config: RunConfig, one_bit: bool = False) -> List[float]:
    """The loss of every step, on these ranks; ``one_bit`` changes the last bit of a weight first, on one rank.
    Collective."""
    from ranks import open_patient_world

    from fugaku_gpt.comm import ProcessGrid
    from fugaku_gpt.training.startup import prepare_process
    from fugaku_gpt.training.trainer import Trainer

    prepare_process(1)
    trainer = Trainer(
        config,
        ProcessGrid(open_patient_world(), config.layout, kv_copies=config.kv_copies),
        LibraryBytes(config.model.seq_len),
    )
    if one_bit:
        change_one_bit(trainer)
    return [trainer.step().loss for _ in range(config.training.iterations)]


def change_one_bit(trainer: "Trainer") -> None:
    """Replaces one weight of a trainer on one rank by the next larger number of its type."""
    import torch

    name, position = CHANGED_WEIGHT
    start = next(placement.start for placement in trainer.buffers.placements if placement.spec.name == name)
    weight = trainer.buffers.parameters[start + position]
    weight.copy_(torch.nextafter(weight, torch.full_like(weight, math.inf)))


def run(name: str, layout: str, dtype: str, steps: int, model: str = "gpt2") -> List[float]:
    """The loss of every step of a layout, on ranks that are started for it; :data:`ONE_BIT` is a name of its own."""
    from ranks import run_ranks

    settings = settings_of(layout, dtype, steps, model)
    config = load_run_config(overrides=settings)
    started = time.perf_counter()
    options = ["--one-bit"] if name == ONE_BIT else []
    lines = run_ranks(config.layout.ranks, __file__, [*options, "--rank", *settings])
    print(f"{name}: {config.layout.ranks} ranks, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    curve: List[float] = next(json.loads(line) for line in lines if line.startswith("["))
    return curve


def farthest(curve: Sequence[float], reference: Sequence[float]) -> Tuple[float, int]:
    """The largest distance at any step, and the number of that step, counted from 1."""
    distances = [abs(ours - theirs) for ours, theirs in zip(curve, reference)]
    distances = [math.inf if math.isnan(distance) else distance for distance in distances]
    largest = max(distances)
    return largest, distances.index(largest) + 1


def table(curves: Dict[str, List[float]]) -> List[str]:
    """A line for each curve; the first curve is the reference."""
    reference = next(iter(curves.values()))
    lines = [f"{'layout':36}{'first loss':>12}{'last loss':>12}{'distance':>12}{'at step':>9}"]
    for name, curve in curves.items():
        distance, step = farthest(curve, reference)
        lines.append(f"{name:36}{curve[0]:12.6f}{curve[-1]:12.6f}{distance:12.1e}{step:9}")
    return lines


def draw(curves: Dict[str, List[float]], bound: float, file: Path) -> None:
    """Draws all curves, and below them their distances from the first one."""
    import matplotlib

    matplotlib.use("svg")
    # the same text for the same figures, whoever draws it
    matplotlib.rcParams.update({"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    colors = (*PALETTE, "black")
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=[3, 2])
    reference = next(iter(curves.values()))
    steps = range(1, len(reference) + 1)
    lines = []
    for number, (name, curve) in enumerate(curves.items()):
        style = {"color": "black" if number == 0 else colors[number - 1], "label": name}
        # equal curves hide each other: each has its own dashes, the reference is a broad pale line behind
        if number == 0:
            lines += above.plot(steps, curve, linewidth=5, alpha=0.25, **style)
        else:
            above.plot(steps, curve, linewidth=2, linestyle=(3 * number, (3, 21)), **style)
            lines += below.plot(steps, [abs(a - b) or math.nan for a, b in zip(curve, reference)], linewidth=1, **style)
    below.axhline(bound, color="black", linestyle=":", linewidth=1)
    below.annotate("bound", (1, bound / 1.15), va="top")
    above.set(ylabel="loss of a token, in nats", title="One training in layouts of 1 to 8 ranks")
    above.legend(handles=lines, fontsize=8)
    below.set(yscale="log", xlabel="step", ylabel="distance from one rank, in nats")
    figure.tight_layout()
    figure.savefig(str(file), format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs, prints and draws; returns 1 if a curve is too far away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", choices=sorted(BOUNDS), default="float32")
    parser.add_argument("--bound", type=float, help=f"Largest distance that passes; default: {BOUNDS}.")
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), help="Layouts to run; default: all.")
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt2", help="Kind of the model; default: gpt2.")
    parser.add_argument("--one-bit", action="store_true", help="Add one rank that starts with another bit of a weight.")
    parser.add_argument("--picture", type=Path, help="File of the picture; default: in docs/images.")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    launched = launched_rank()
    if launched is not None:
        curve = losses(load_run_config(overrides=options.rank), options.one_bit)
        if launched.rank == 0:
            print(json.dumps(curve), flush=True)
        return 0
    try:
        import matplotlib  # noqa: F401  # the runs take minutes: this is checked first
    except ImportError:
        raise SystemExit("the picture needs matplotlib: pip install -e '.[plot]'") from None
    bound = BOUNDS[options.dtype] if options.bound is None else options.bound
    picture = options.picture or PICTURES / ("curves.svg" if options.model == "gpt2" else f"curves-{options.model}.svg")
    one_bit = {ONE_BIT: ""} if options.one_bit else {}
    layouts = {SINGLE_RANK: "", **one_bit, **{name: LAYOUTS[name] for name in options.only or LAYOUTS}}
    curves = {name: run(name, text, options.dtype, options.steps, options.model) for name, text in layouts.items()}
    print("\n".join(table(curves)))
    os.makedirs(picture.parent, exist_ok=True)
    draw(curves, bound, picture)
    worst = max((farthest(curve, curves[SINGLE_RANK])[0], name) for name, curve in curves.items())
    far = worst[0] > bound
    print(f"{options.dtype}, {options.steps} steps: largest distance {worst[0]:.1e} ({worst[1]}), bound {bound:.0e}"
          f"{': TOO FAR' if far else ''}")  # fmt: skip
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
