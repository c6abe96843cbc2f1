"""Make each call to the file system of a command fail, and list those whose end is wrong.

python -m tests.disk_faults.run train
python -m tests.disk_faults.run job --workers 8          # most of its time is waiting
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List, Tuple

from tests.disk_faults.calls import ERRORS, Call, compile_shim, run_under_shim, seen_calls
from tests.disk_faults.scenarios import SCENARIOS
from tests.support.corpus import write_byte_corpus


class Trials:
    """Runs of one scenario in a folder, each with another fault."""

    def __init__(self, scenario: str, folder: Path) -> None:
        self._scenario = SCENARIOS[scenario]
        self._root = folder / "root"
        self._log = folder / "calls.txt"
        self._shim = compile_shim(folder)
        self._inputs = folder / "inputs"
        self._inputs.mkdir()
        write_byte_corpus(self._inputs / "bytes")

    def calls(self) -> List[Call]:
        """The calls of a run in which none fails."""
        self._clear()
        ended = run_under_shim(self._shim, self._root, self._commands(), log=self._log)
        assert ended.is_ok, ended.output
        return seen_calls(self._log)

    def problems(self, call: Call, error: int) -> Tuple[List[str], str]:
        """List the problems of a run in which this call fails; also returns its output."""
        self._clear()
        ended = run_under_shim(self._shim, self._root, self._commands(), fault=call.fault(error), log=self._log)
        if not self._has_struck(call):
            return ["the call was not made this time"], ended.output
        return self._scenario.problems(self._root, call, os.strerror(error), ended), ended.output

    def _has_struck(self, call: Call) -> bool:
        return any(
            (seen.role, seen.name, seen.path) == (call.role, call.name, call.path) and seen.nth >= call.nth
            for seen in seen_calls(self._log)
        )

    def _commands(self) -> List[List[str]]:
        return self._scenario.command_lines(self._root, self._inputs)

    def _clear(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir()
        if self._log.exists():
            self._log.unlink()


def main() -> int:
    """Run the trials of one scenario; returns 1 if any has a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--trials", type=int, help="Number of faults that are drawn; default: each.")
    parser.add_argument("--workers", type=int, default=1, help="Runs at the same time, each in a folder of its own.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="Print the calls, and make none fail.")
    parser.add_argument("--only", default="", help="Only calls whose text contains this.")
    parser.add_argument("--verbose", action="store_true", help="Print the output of runs with problems.")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        folders = [Path(name).resolve() / str(number) for number in range(options.workers)]
        for folder in folders:
            folder.mkdir()
        every_trials = [Trials(options.scenario, folder) for folder in folders]
        calls = every_trials[0].calls()
        if options.list:
            print("\n".join(f"{call.role} {call.name} {call.path} {call.nth}" for call in calls))
            return 0
        faults = [(call, error) for call in calls for error in ERRORS[call.name] if options.only in call.fault(error)]
        if options.trials is not None:
            faults = random.Random(options.seed).sample(faults, min(options.trials, len(faults)))
        idle: "queue.Queue[Trials]" = queue.Queue()
        for trials in every_trials:
            idle.put(trials)

        def trial(fault: Tuple[Call, int]) -> Tuple[List[str], str]:
            trials = idle.get()
            try:
                return trials.problems(*fault)
            finally:
                idle.put(trials)

        bad = absent = 0
        executor = stack.enter_context(ThreadPoolExecutor(options.workers))
        for (call, error), (problems, output) in zip(faults, executor.map(trial, faults)):
            if problems == ["the call was not made this time"]:
                absent += 1
            elif problems:
                bad += 1
            if problems:
                print(f"{call.fault(error)}: {'; '.join(problems)}", flush=True)
                if options.verbose:
                    print("".join(f"    {line}\n" for line in output.splitlines()[-12:]), flush=True)
        print(f"{options.scenario}: {len(calls)} calls, {len(faults)} faults, {absent} not struck, {bad} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
