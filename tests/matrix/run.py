"""Runs parts of the test suite on every PyTorch build installed here, and checkpoints of each build in each.

    python -m tests.matrix.run tests/model tests/test_mpi.py checkpoints      # `make test-matrix` names all parts
    python -m tests.matrix.run checkpoints --builds torch-1.7 torch-2.13
    python -m tests.matrix.run ... --resume                                   # parts that were run are not run again

It prints a table of the results. A build is a profile of ``env/`` by its name, or the path of one. Logs and results
stay in runs/matrix.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from fugaku_gpt.config.profile import Profile
from fugaku_gpt.environments.registry import profile_files, require_created, resolve
from fugaku_gpt.errors import UsageError
from fugaku_gpt.launch.launcher import profile_variables
from tests.matrix.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = "checkpoints"
_LINES_OF_A_FAILURE = 40


@dataclass(frozen=True)
class Result:
    """Counts of one part of the suite on one build.

    Attributes:
        on_ranks: how many of the tests that start ranks passed on how many ranks.
    """

    passed: int
    failed: int
    skipped: int
    seconds: float
    on_ranks: str = ""

    def __str__(self) -> str:
        return f"{self.passed}/{self.failed}/{self.skipped} {self.seconds:.0f} s"


def installed_builds(names: List[str]) -> Dict[str, Profile]:
    """The builds that are installed; the others are reported as skipped."""
    builds = {}
    for name in names:
        profile = resolve(name)
        try:
            require_created(profile)
            builds[profile.name] = profile
        except UsageError as error:
            print(f"=== SKIPPED: {profile.name}: {error} ===", flush=True)
    return builds


def run_tests(profile: Profile, path: str, folder: Path) -> Result:
    """Runs a part of the suite by one build's pytest."""
    report = folder / f"{Path(path).stem}.xml"
    arguments = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "junit_logging=system-out",
        f"--junitxml={report}",
    ]
    code, seconds = _start(profile, [*arguments, path], report.with_suffix(".log"))
    if not report.exists():
        print(f"{profile.name}: {path}: pytest ended with {code} and left no report", flush=True)
        return Result(0, 1, 0, seconds)
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = [int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")]
    ranks = re.findall(r"^(\d+) ranks: .*?(\d+) passed", report.read_text(), re.MULTILINE)
    failed = max(counts[1] + counts[2], int(code != 0))
    return Result(
        counts[0] - counts[1] - counts[2] - counts[3],
        failed,
        counts[3],
        seconds,
        ", ".join(f"{passed} on {count}" for count, passed in ranks),
    )


def run_checkpoints(builds: Dict[str, Profile], out: Path) -> Dict[str, Result]:
    """Writes checkpoints with each build and reads them with each; returns results by the build that reads."""
    ranks = ["-W", "ignore", "-m", "tests.mpi.start", "2", "-W", "ignore", "-m", "tests.matrix.checkpoints"]
    written: List[Path] = []
    results: Dict[str, Result] = {}
    wrote: Dict[str, Tuple[int, float]] = {}
    for name, profile in builds.items():
        folder = out / CHECKPOINTS / name
        shutil.rmtree(folder, ignore_errors=True)
        wrote[name] = _start(profile, [*ranks, "write", str(folder)], out / name / "checkpoints-written.log")
        if wrote[name][0] == 0:
            written.append(folder)
    for name, profile in builds.items():
        log = out / name / "checkpoints.log"
        code, seconds = _start(profile, [*ranks, "read", *map(str, written)], log)
        lines = read_lines(log)
        failed = sum(bool(line["problems"]) for line in lines)
        bad = max(failed, int(code != 0)) + int(wrote[name][0] != 0)
        results[name] = Result(len(lines) - failed, bad, 0, seconds + wrote[name][1])
    return results


def read_lines(log: Path) -> List[Dict[str, Any]]:
    """The lines that :mod:`tests.matrix.checkpoints` printed, one for each checkpoint."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"from"')]


def _start(profile: Profile, arguments: List[str], log: Path) -> Tuple[int, float]:
    """Exit code and seconds of a build's Python with these arguments; the end of a failure's output is printed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **profile_variables(profile), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with open(log, "wb") as stream:
        done = subprocess.run(
            [profile.python, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join([f"--- {profile.name}: the end of {log}:", *lines[-_LINES_OF_A_FAILURE:]]), flush=True)
    return done.returncode, time.monotonic() - began


def _keep(file: Path, result: Result) -> None:
    file.write_text(json.dumps(asdict(result)))
    print(f"{file.parent.name}: {file.stem}: {result}", flush=True)


def table(results: Dict[str, Dict[str, Result]]) -> List[str]:
    """Lines of a table of parts and builds; ``results`` are by build and part."""
    part_names = list(dict.fromkeys(part for of_build in results.values() for part in of_build))
    rows = [["passed/failed/skipped", *results]]
    for part in part_names:
        rows.append([part, *(str(of_build[part]) for of_build in results.values())])
    totals = [
        [
            sum(getattr(result, field) for result in of_build.values())
            for field in ("passed", "failed", "skipped", "seconds")
        ]
        for of_build in results.values()
    ]
    rows.append(["all", *(str(Result(*sums)) for sums in totals)])
    return _in_columns(rows)


def pairs_table(results: Dict[str, List[Dict[str, Any]]]) -> List[str]:
    """Lines of a table of checkpoints by the build that wrote (row) and the build that read (column): how many resume,
    and the largest distance from the uninterrupted curve relative to the case's tolerance."""
    writers = list(dict.fromkeys(line["from"] for lines in results.values() for line in lines))
    rows = [["checkpoints of", *(f"in {name}" for name in results)]]
    for writer in writers:
        row = [writer]
        for lines in results.values():
            from_writer = [line for line in lines if line["from"] == writer]
            shares = [
                line[quantity] / CASES[line["case"]].tolerance[quantity]
                for line in from_writer
                for quantity in ("loss", "norm")
                if quantity in line
            ]
            good = sum(not line["problems"] for line in from_writer)
            row.append(f"{good} of {len(from_writer)} resume, {max(shares, default=0.0):.2f} of the tolerance")
        rows.append(row)
    return _in_columns(rows)


def _in_columns(rows: List[List[str]]) -> List[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the requested parts; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="PART", help=f"Path for pytest, or {CHECKPOINTS}.")
    parser.add_argument("--builds", nargs="+", metavar="BUILD", help="Default: the profiles env/torch-*.yaml.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "matrix")
    parser.add_argument("--resume", action="store_true", help="Keep earlier results that are in --out.")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()
    try:
        builds = installed_builds(options.builds or [name for name in profile_files() if name.startswith("torch-")])
    except UsageError as error:
        parser.error(str(error))
    if not options.resume:
        shutil.rmtree(out, ignore_errors=True)
    results: Dict[str, Dict[str, Result]] = {name: {} for name in builds}
    for part in options.parts:
        files = {name: out / name / f"{Path(part).stem}.json" for name in builds}
        missing = [name for name in builds if not files[name].exists()]
        if part == CHECKPOINTS:
            for name, result in (run_checkpoints(builds, out) if missing else {}).items():
                _keep(files[name], result)
        else:
            for name in missing:
                _keep(files[name], run_tests(builds[name], part, out / name))
        for name in builds:
            results[name][part] = Result(**json.loads(files[name].read_text()))
    print("\n".join(["", *table(results)]))
    for name, of_build in results.items():
        for part, result in of_build.items():
            if result.on_ranks:
                print(f"{name}: {part}: tests passed by number of ranks: {result.on_ranks}")
    if CHECKPOINTS in options.parts:
        print("\n".join(["", *pairs_table({name: read_lines(out / name / f"{CHECKPOINTS}.log") for name in builds})]))
    return 1 if any(result.failed for of_build in results.values() for result in of_build.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
