"""Tries the tests: changes operators and constants of the package one by one, and counts whether a test notices.

``python -m tests.mutants --mutants 150 --seed 7``. The modules are those of the rooms of plain data, which need neither
PyTorch nor ranks; they take turns. The changes are made in a copy of the repository, and the tests that are run are the
quick ones that run the changed line, the nearest and smallest first: which ones does not depend on the machine. Time
only ends what never ends. ``equivalents.yaml`` lists changes that make no difference, each with its reason.
Exit code 3 where less than 90 % of the others are noticed, or an entry of that list matches no line any more; 1 where
the tests fail without a change.
"""

from __future__ import annotations

import argparse
import difflib
import random
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Dict, List, Sequence

from tests.mutants.equivalents import Equivalents
from tests.mutants.line_map import LineMap, read_or_make
from tests.mutants.rooms import all_tests, modules
from tests.mutants.source import Mutant, random_mutants
from tests.mutants.trial import SURVIVED, TIMED_OUT, chosen_tests, copy_repository, run_tests, try_mutant

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT, UNTESTED = "equivalent", "run by no test"
SHARE = 0.9  # of the mutants that are not equivalent


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Try mutants, print those that no test notices and a table, and return the exit code."""
    options = _parser().parse_args(arguments)
    equivalents = Equivalents(options.equivalents)
    sample = sampled(root, modules(root, options.only), options.mutants, options.seed)
    if not sample:
        print(f"--only {' '.join(options.only)}: no module of this name can be changed; see tests/mutants/rooms.py")
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder, copy = Path(name), Path(name) / "copy"
        copy_repository(root, copy)
        lines = read_or_make(copy, folder, options.tests or all_tests(copy), options.map or folder / "map.json")
        for test in lines.failed:
            print(f"fails without a mutant, and is left out: {test}")
        if not _passes_without_mutant(copy, folder, sample, lines, options.tests_each):
            print("the tests fail in a copy of the repository without a mutant; see `make quick`")
            return 1
        results: Dict[Mutant, str] = {}
        for mutant in sample:
            tests = lines.tests_of(copy, mutant.file, mutant.line)
            chosen = chosen_tests(tests, options.tests_each)
            if mutant.key in equivalents:
                results[mutant] = EQUIVALENT
            elif not chosen:
                results[mutant] = UNTESTED
            else:
                results[mutant] = try_mutant(copy, folder, mutant, chosen, lines)
            print(
                f"{len(results)}/{len(sample)} {mutant.file}:{mutant.line} {mutant.operator}: {results[mutant]}",
                flush=True,
            )
            if results[mutant] in (SURVIVED, UNTESTED):
                print(f"  {len(chosen)} of {len(tests)} tests\n{difference(copy, mutant)}", flush=True)
    print(table(results))
    stale = equivalents.stale(root)
    for entry in stale:
        print(f"{options.equivalents}: no such mutant any more: {entry}")
    share = noticed_share(results)
    print(f"seed {options.seed}: {share:.1%} noticed of those that are not equivalent")
    return 3 if share < SHARE or stale else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--mutants", type=int, default=100, help="Number of changes (100).")
    parser.add_argument("--seed", type=int, default=7, help="Seed of the choice of changes (7).")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="Change only modules whose path contains this, such as planner/search."
    )
    parser.add_argument("--tests", nargs="+", help="Paths of the tests to choose from (all but those of house rules).")
    parser.add_argument(
        "--tests-each", type=int, default=1000, help="Tests that are run for each change, at most (1000)."
    )
    parser.add_argument("--map", type=Path, help="File for the map of tests and lines, which takes minutes to make.")
    parser.add_argument("--equivalents", type=Path, default=Path(__file__).with_name("equivalents.yaml"))
    return parser


def sampled(root: Path, files: Sequence[str], count: int, seed: int) -> List[Mutant]:
    """Choose mutants by a seed: modules take turns, in random order."""
    order = list(files)
    random.Random(seed).shuffle(order)
    streams = {file: random_mutants(root, file, seed) for file in order}
    sample: List[Mutant] = []
    while streams and len(sample) < count:
        for file in list(streams):
            chosen = list(islice(streams[file], 1))
            sample += chosen
            if not chosen:
                del streams[file]
            if len(sample) == count:
                break
    return sample


def _passes_without_mutant(copy: Path, folder: Path, sample: Sequence[Mutant], lines: LineMap, count: int) -> bool:
    """True if the tests of the first mutant that has any pass on the package as it is."""
    for mutant in sample:
        chosen = chosen_tests(lines.tests_of(copy, mutant.file, mutant.line), count)
        if chosen:
            return run_tests(copy, folder, chosen, sum(lines.seconds[test] for test in chosen)) == SURVIVED
    return True


def difference(root: Path, mutant: Mutant) -> str:
    """The change as a unified difference without context."""
    before = (root / mutant.file).read_text(encoding="utf-8").split("\n")
    lines = difflib.unified_diff(before, mutant.text.split("\n"), n=0, lineterm="")
    return "\n".join(f"  {line}" for line in list(lines)[2:])


def noticed_share(results: Dict[Mutant, str]) -> float:
    """Share of mutants that are noticed, or never end, of those that are not equivalent; 1 of none."""
    changes = [result for result in results.values() if result != EQUIVALENT]
    return 1.0 - sum(result in (SURVIVED, UNTESTED) for result in changes) / len(changes) if changes else 1.0


def table(results: Dict[Mutant, str]) -> str:
    """One line for each module and one for all: how many changes were noticed, and how many were not."""
    rows = [f"{'module':<50} noticed survived equivalent timed out"]
    for file in [*sorted({mutant.file for mutant in results}), ""]:
        own = [result for mutant, result in results.items() if file in ("", mutant.file)]
        survived = sum(result in (SURVIVED, UNTESTED) for result in own)
        equivalent, timed_out = own.count(EQUIVALENT), own.count(TIMED_OUT)
        noticed = len(own) - survived - equivalent - timed_out
        rows.append(f"{file or 'all':<50} {noticed:7} {survived:8} {equivalent:10} {timed_out:9}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
