"""The metrics of runs as event files of TensorBoard, made after the fact from ``metrics.jsonl``.

Tags and values are those of :mod:`fugaku_gpt.records.tensorboard`. Lines of metrics do not state when they were
written, so the time of an event is the run's start plus the seconds of its iterations so far, without what lay between:
start-up, validations, checkpoints, and the time until a run was resumed.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import List, Mapping

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.event_file import is_event_file
from fugaku_gpt.records.files import naming_file
from fugaku_gpt.records.metrics import ITERATION, RESUMED, read_valid_lines
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.records.tensorboard import EventsWriter


def write_event_folders(runs: Mapping[Path, str], out: Path) -> List[Path]:
    """Write the events of each run into a folder of its name below ``out``, which is complete or absent; returns these
    folders.

    Raises:
        UsageError: one of them is there already, or cannot be written; or a file of metrics cannot be read.
    """
    folders = {run: out / name for run, name in runs.items()}
    for folder in folders.values():
        if folder.is_dir() and any(is_event_file(path.name) for path in folder.iterdir()):
            raise UsageError(f"{folder}: holds event files already; choose another -o, or remove them")
        if folder.exists():
            raise UsageError(f"{folder}: is there already; choose another -o, or remove it")
    for run, folder in folders.items():
        try:
            _write_folder(RunDirectory(run), folder)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return list(folders.values())


def _write_folder(run: RunDirectory, folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    with naming_file(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_events(run, temporary)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _write_events(run: RunDirectory, folder: Path) -> None:
    result = run.result()
    wall_time = result.started if result is not None else _time_of(run.config_file, run.metrics_file)
    writer = EventsWriter(folder, wall_time)
    previous = 0
    for line in read_valid_lines(run.metrics_file):
        if line.get("kind") == ITERATION:
            iterations, previous = max(1, line["iteration"] - previous), line["iteration"]
            wall_time += iterations * float(line.get("seconds") or 0.0)
        if line.get("kind") != RESUMED:  # what it supersedes is not among the lines
            writer.write(line, wall_time)
    writer.close()


def _time_of(*files: Path) -> float:
    """When the first of these files that is there was written, in seconds since the epoch; 0 if none is."""
    return next((path.stat().st_mtime for path in files if path.exists()), 0.0)
