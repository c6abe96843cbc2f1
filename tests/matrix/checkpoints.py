"""Checkpoints of one build in another: training resumes from each in every build along the golden curve.

    PYTHON -m tests.mpi.start 2 -m tests.matrix.checkpoints write runs/from-1.7          # of every case
    PYTHON -m tests.mpi.start 2 -m tests.matrix.checkpoints read runs/from-1.7 ...       # a line of JSON for each
    PYTHON -m tests.mpi.start 2 -m tests.matrix.checkpoints write tests/golden/checkpoints/torch-1.7.1 small

The last line writes the checkpoint from which a test of a single build resumes: the repository has one of a few KB of
each build.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

import torch

from fugaku_gpt import compat
from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.manifest import Manifest, read_manifest
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.comm import Communicator, open_world
from fugaku_gpt.training.checkpoint import CheckpointSaver
from fugaku_gpt.training.resume import load_checkpoint
from fugaku_gpt.training.startup import agree_on_kernels
from tests.matrix.cases import CASES, READ_BY, SAVED, SAVED_BY
from tests.matrix.curves import FOLDER, distances, draw, part, read_golden, too_far, trainer_for, trainer_of

FIXTURES_FOLDER = FOLDER / "checkpoints"


@dataclass(frozen=True)
class Resumed:
    """The distances of a resumed run from the curve that was not interrupted.

    Attributes:
        distances: see :func:`~tests.matrix.curves.distances`.
        problem: the reason why it is not the same run, or "".
    """

    distances: Dict[str, float]
    problem: str = ""


def write(world: Optional[Communicator], folder: Path, name: str, layout: str) -> None:
    """Train a case in a layout up to iteration ``SAVED``, and write a checkpoint to FOLDER/NAME. Collective."""
    trainer = trainer_for(name, layout, "checkpoint.ranks_per_file=1", world=world)
    draw(trainer, SAVED)
    folder.mkdir(parents=True, exist_ok=True)
    CheckpointSaver(trainer, folder / name, build=compat.build_facts()).save({}, wait=True)


def resume(
    world: Optional[Communicator], path: Path, name: str, layout: str, manifest: Optional[Manifest] = None
) -> Resumed:
    """Resume from a checkpoint in a layout, as a run does, to the end of the golden curve. Collective.

    Args:
        manifest: facts that replace those of the checkpoint.
    """
    case, manifest = CASES[name], manifest or read_manifest(path)
    config = case.config(layout)
    agree_on_kernels(config, world or Communicator.alone(), manifest.state["kernels"])
    trainer = trainer_of(config, world)
    problem = load_checkpoint(trainer, path, manifest)
    if problem is not None:
        return Resumed({}, problem)
    golden_curve = read_golden(name).curve
    from_golden = distances(draw(trainer), part(golden_curve, SAVED, len(golden_curve.losses)))
    over = too_far(from_golden, case)
    return Resumed(from_golden, f"too far from the curve of tests/golden/{name}.json: {over}" if over else "")


def only_checkpoint(folder: Path) -> Path:
    """The path of the single checkpoint that :func:`write` has left in a folder."""
    (info,) = list_checkpoints(folder)
    return info.path


def main(arguments: Optional[List[str]] = None) -> int:
    """Writes or reads checkpoints; returns 1 if training does not resume from one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write")
    writer.add_argument("folder", type=Path)
    writer.add_argument("names", nargs="*", metavar="NAME", help=f"Cases of {', '.join(CASES)}; default: all.")
    reader = commands.add_parser("read")
    reader.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    world = open_world()
    if options.command == "write":
        for name in options.names or CASES:
            write(world, options.folder, name, SAVED_BY)
        return 0
    failed = False
    for folder in options.folders:
        for name in CASES:
            path = only_checkpoint(folder / name)
            damage = [str(problem) for problem in verify_checkpoint(path)] if world.rank == 0 else []
            for layout in READ_BY:
                resumed = resume(world, path, name, layout)
                problems = [*damage, *([resumed.problem] if resumed.problem else [])]
                failed |= bool(problems)
                if world.rank == 0:
                    line = {
                        "from": folder.name,
                        "case": name,
                        "layout": layout,
                        **resumed.distances,
                        "problems": problems,
                    }
                    print(json.dumps(line), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
