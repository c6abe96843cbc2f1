"""A small set of generated ARC tasks, whose grids have sizes and colors of their own, and a classifier of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

from fugaku_gpt.config import RunConfig, load_run_config

TASKS = 12
SETTINGS = (
    "model.kind=grid_classifier",
    "data.kind=arc",
    "data.buckets=[4,7]",
    "data.split=[60,40,0]",
    "data.rotations=true",
    "data.reflections=true",
    "data.permute_colors=true",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.seq_len=49",
    "model.vocab_size=10",
    "model.vocab_multiple=3",  # padding of colors and of classes differs from layout to layout
    f"model.classes={TASKS}",
    "model.tied_embeddings=false",
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "training.global_batch=8",
    "training.micro_batch=1",
    "training.lr=1e-3",
    "training.clip_grad=0.5",
    "training.bucket_mib=0.01",
    "training.eval_batches=3",
)
# every field by which `arc-small` differs from `arc-nano`
LIKE_LLAMA = (
    "model.norm=rmsnorm",
    "model.mlp=swiglu",
    "model.positions=rope",
    "model.kv_heads=2",
    "model.biases=none",
)


def arc_tasks(tasks: int = TASKS, pairs: int = 3, largest: int = 7) -> Dict[str, Dict[str, List[Dict[str, Any]]]]:
    """Tasks of random grids in ARC's form: each with two colors of its own, and sides from 1 to ``largest``."""
    random = np.random.RandomState(7)

    def grid(task: int) -> List[List[int]]:
        height, width = random.randint(1, largest + 1, size=2)
        colors = np.array([0, 1 + task % 9, 1 + task // 9])
        return [[int(color) for color in row] for row in colors[random.randint(0, 3, size=(height, width))]]

    return {
        f"task{task:02}": {
            part: [{"input": grid(task), "output": grid(task)} for _ in range(count)]
            for part, count in (("train", pairs), ("test", 1))
        }
        for task in range(tasks)
    }


def write_tasks(path: Path, **options: int) -> Path:
    """Write :func:`arc_tasks` as a file; returns its path."""
    path.write_text(json.dumps(arc_tasks(**options)), encoding="utf-8")
    return path


def grid_config(path: Path, *overrides: str) -> RunConfig:
    """The tiny classifier of a file's grids with ``key=value`` overrides."""
    settings: Sequence[str] = (*SETTINGS, f"data.paths=[{path}]", *overrides)
    return load_run_config(overrides=settings)
