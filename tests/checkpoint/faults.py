"""A program that makes a save of a checkpoint fail at each file system call, in each way, and prints JSON.

The argument is a folder, which gets an old checkpoint. A child process saves a new one as a trainer does (clean up,
require room, write, commit, retain one), and dies or sees an error at its n-th call, for every n. Afterwards every
visible checkpoint must be valid, the newest must be the old or the new one, the record of the best must name a visible
one, and the next save must succeed and leave nothing behind.

Ways: ``kill`` (kill -9 before the call), ``torn`` (kill -9 after half of a write), ``full`` (ENOSPC at this and every
later call that needs room), ``broken`` (EIO at this and every later call), ``once`` (EIO at this call alone), ``short``
(half of a write is taken, as POSIX allows: the save must succeed). The kernel outlives the processes here, so waiting
for the disk is counted but not done.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.directory import clean_leftovers, list_checkpoints, read_best, require_room
from fugaku_gpt.checkpoint.reader import open_checkpoint
from fugaku_gpt.checkpoint.retention import (
    LOSSES,
    checkpoints_at,
    newest_valid,
    remove_old_checkpoints,
    verify_checkpoint,
)
from fugaku_gpt.errors import CheckpointError
from tests.support.checkpoints import Arrays, cut_flat, save, some_arrays

CALLS = (
    "make_folder", "create", "open_to_read", "write_at", "read_at", "sync", "close", "rename", "sync_folder",
    "remove_file", "remove_folder", "names_in", "exists", "is_folder", "size_of", "free_bytes", "read_file",
)  # fmt: skip
NEED_ROOM = ("make_folder", "create", "write_at", "sync", "rename", "sync_folder")
WAYS = ("kill", "torn", "full", "broken", "once", "short")
SHAPES = {"a.weight": (3, 4), "a.bias": (5,)}
OLD, NEW, NEXT = (some_arrays(seed, SHAPES, kinds=("weights", "first_moment")) for seed in range(3))
LEFT = ["best.json", "latest.json", "step-00000030"]
SAVED, SAW_ERROR, UNEXPECTED = 0, 3, 99  # exit codes of a child


class Faults:
    """Counts the calls of this process, and lets the n-th fail."""

    def __init__(self, way: str = "", nth: int = 0) -> None:
        self.way, self.nth = way, nth
        self.log: List[str] = []
        for name in CALLS:
            setattr(file_system, name, self._wrapped(name, getattr(file_system, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.log.append(name)
            is_nth, is_nth_or_later = len(self.log) == self.nth, len(self.log) >= self.nth
            if is_nth and self.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if is_nth and self.way in ("torn", "short"):
                descriptor, content, offset = arguments
                taken = real(descriptor, memoryview(content)[: max(1, len(content) // 2)], offset)
                if self.way == "torn":
                    os.kill(os.getpid(), signal.SIGKILL)
                return taken
            if self.way == "full" and is_nth_or_later and name in NEED_ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.way == "broken" and is_nth_or_later or self.way == "once" and is_nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments)

        return call


def save_as_a_trainer_does(directory: Path, iteration: int, arrays: Arrays) -> None:
    """Save a checkpoint with the steps that a trainer takes before and after it."""
    clean_leftovers(directory)
    require_room(directory, 1000)
    save(directory, iteration, arrays, cut_flat(arrays, 2), state={LOSSES: {"validation": 1 / iteration}})
    remove_old_checkpoints(directory, 1, keep_best="validation")


def in_child(work: Callable[[], int]) -> int:
    """Do the work in a child process; return its exit code, or minus the signal that killed it."""
    process = os.fork()
    if process == 0:
        code = UNEXPECTED
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    status = os.waitpid(process, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def save_with_a_fault(directory: Path, way: str, nth: int) -> int:
    """Save the new checkpoint; return ``SAVED`` or ``SAW_ERROR`` if the process survives."""
    Faults(way, nth)
    try:
        save_as_a_trainer_does(directory, 20, NEW)
    except (OSError, CheckpointError):
        return SAW_ERROR
    return SAVED


def calls_of_a_save(directory: Path, log: Path) -> int:
    """Save the new checkpoint without a fault, and write the names of its file system calls to a file."""
    counted = Faults()
    save_as_a_trainer_does(directory, 20, NEW)
    log.write_text(json.dumps(counted.log))
    return SAVED


def is_equal(checkpoint: Optional[Path], arrays: Arrays) -> bool:
    """True if a checkpoint holds these arrays."""
    if checkpoint is None:
        return False
    with open_checkpoint(checkpoint) as reader:
        return all(np.array_equal(reader.tensor(*key.split("/")), array) for key, array in arrays.items())


def judge(directory: Path, way: str, code: int) -> List[str]:
    """List the problems after a fault."""
    wrong = []
    torn = [info.path.name for info in list_checkpoints(directory) if verify_checkpoint(info.path)]
    if torn:
        wrong.append(f"visible and not whole: {torn}")
    newest = newest_valid(checkpoints_at(directory)).path
    is_new = is_equal(newest, NEW)
    if not is_new and not is_equal(newest, OLD):
        wrong.append(f"neither the old nor the new: {newest}")
    best = read_best(directory)
    if best is None or not (directory / best.name).is_dir():
        wrong.append(f"the record of the best names {best}, which is not there")
    if code == SAVED and not is_new or way == "short" and code != SAVED:
        wrong.append(f"the new one is not there, though the writer says {code}")
    if code not in (SAVED, SAW_ERROR, -signal.SIGKILL):
        wrong.append(f"exit code {code}")
    save_as_a_trainer_does(directory, 30, NEXT)
    left = sorted(path.name for path in directory.iterdir())
    if not is_equal(newest_valid(checkpoints_at(directory)).path, NEXT) or left != LEFT:
        wrong.append(f"after the next save: {left}")
    return wrong


def skip_sync(target: Any) -> None:
    """Do nothing, in place of the two calls that wait for the disk."""


def main(folder: Path) -> None:
    """Let every call fail in every way."""
    file_system.sync = file_system.sync_folder = skip_sync
    old, case, log_file = folder / "old", folder / "case", folder / "calls.json"
    save_as_a_trainer_does(old, 10, OLD)
    shutil.copytree(old, case)
    in_child(lambda: calls_of_a_save(case, log_file))
    log: List[str] = json.loads(log_file.read_text())
    ends: Dict[str, Dict[int, int]] = {way: Counter() for way in WAYS}
    wrong = []
    for way, (nth, name) in product(WAYS, enumerate(log, 1)):
        if way in ("torn", "short") and name != "write_at":
            continue
        shutil.rmtree(case)
        shutil.copytree(old, case)
        code = in_child(partial(save_with_a_fault, case, way, nth))
        ends[way][code] += 1
        wrong += [f"{way} at call {nth}, {name}: {problem}" for problem in judge(case, way, code)]
    print(json.dumps({"calls": Counter(log), "ends": ends, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
