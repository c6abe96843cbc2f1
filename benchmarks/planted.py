"""Tests whether `fugaku-gpt compare` finds a planted slowdown. It compares two environments of this Python that differ
in one thing: after each step the ranks of the second keep computing for a share of the step's time.

    python benchmarks/planted.py --data DIR --out DIR [--share 0.05] [options of compare]

The exit code is 0 if the verdict is `slower` (`same` for a share of 0) within ten pairs and the interval contains the
planted ratio.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any, List

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in [str(ROOT)] if path not in sys.path]
MOST_PAIRS = 10


def main() -> int:
    """Plants the slowdown, compares, and checks the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.05, help="Added share of a step's time (default: 0.05).")
    parser.add_argument("--out", type=Path, required=True, help="Folder for the environments and the pairs.")
    parser.add_argument("--preset", default="tiny", help="Preset of the model (default: tiny).")
    options, compare_options = parser.parse_known_args()
    from fugaku_gpt.cli.main import run
    from fugaku_gpt.compare.pairs import read_comparison
    from fugaku_gpt.compare.report import report_live

    sides = [environment(options.out, name, share) for name, share in (("usual", 0.0), ("slower", options.share))]
    pairs = options.out / "pairs"
    argv = [
        "compare",
        *sides,
        "--preset",
        options.preset,
        "--pairs",
        str(MOST_PAIRS),
        "--out",
        str(pairs),
        *compare_options,
    ]
    code = run(argv)
    if code:
        return code
    report = report_live(read_comparison(pairs))
    comparison = report.comparison
    assert comparison is not None
    interval_holds = comparison.low <= 1 + options.share <= comparison.high
    expected_verdict = "slower" if options.share else "same"
    print(
        f"\nplanted {1 + options.share:.3f}; found {comparison.ratio:.3f} "
        f"({comparison.low:.3f} to {comparison.high:.3f}) in {comparison.a} pairs: {report.verdict}; "
        + json.dumps({"found": report.verdict == expected_verdict, "interval_holds_it": interval_holds})
    )
    return 0 if report.verdict == expected_verdict and interval_holds else 1


def environment(out: Path, name: str, share: float) -> str:
    """Writes the profile of an environment whose Python runs :func:`slow_rank`; returns its path."""
    from fugaku_gpt.launch.launcher import find_launcher

    folder = out.resolve() / "environments"
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / f"python-{name}"
    argv = [sys.executable, str(Path(__file__).resolve()), "--as-ranks", str(share)]
    python.write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, argv))} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    file = folder / f"{name}.yaml"
    path = find_launcher().path.parent
    file.write_text(f"name: {name}\npython: {json.dumps(str(python))}\npath: [{json.dumps(str(path))}]\n")
    return str(file)


def slow_rank(share: float, arguments: List[str]) -> None:
    """Runs ``python -m fugaku_gpt ...`` with steps that take longer by a share."""
    from fugaku_gpt.cli.main import main as command
    from fugaku_gpt.training.trainer import Trainer

    step = Trainer.step

    def longer(trainer: Trainer) -> Any:
        before = time.perf_counter()
        done = step(trainer)
        end = time.perf_counter() + share * (time.perf_counter() - before)
        while time.perf_counter() < end:
            pass
        return done

    if share:
        Trainer.step = longer  # type: ignore[method-assign]
    assert arguments[:2] == ["-m", "fugaku_gpt"], arguments
    sys.argv = ["fugaku-gpt", *arguments[2:]]
    command()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-ranks"]:
        slow_rank(float(sys.argv[2]), sys.argv[3:])
    sys.exit(main())
