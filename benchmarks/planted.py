"""Does `fugaku-gpt compare` find a slowdown that was planted? Two environments of this Python, alike but for iterations
of one that take longer by a share: after each step its ranks compute on for that share of the step's time.

    python benchmarks/planted.py --data DIR --out DIR [--share 0.05] [options of compare]

Exit code 0 where the verdict is `slower` (`same` for a share of 0) within ten pairs and the interval holds what was
planted.
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
    """Plant, compare, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.05, help="of a step's time that is added (default: 0.05)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the environments and the pairs")
    parser.add_argument("--preset", default="tiny", help="of the model (default: tiny)")
    known, options = parser.parse_known_args()
    from fugaku_gpt.cli.main import run
    from fugaku_gpt.compare.pairs import read_comparison
    from fugaku_gpt.compare.report import report_live

    sides = [environment(known.out, name, share) for name, share in (("usual", 0.0), ("slower", known.share))]
    pairs = known.out / "pairs"
    words = ["compare", *sides, "--preset", known.preset, "--pairs", str(MOST_PAIRS), "--out", str(pairs), *options]
    code = run(words)
    if code:
        return code
    report = report_live(read_comparison(pairs))
    found = report.comparison
    assert found is not None
    held = found.low <= 1 + known.share <= found.high
    wanted = "slower" if known.share else "same"
    print(
        f"\nplanted {1 + known.share:.3f}; found {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}) in {found.a} "
        f"pairs: {report.verdict}; " + json.dumps({"found": report.verdict == wanted, "interval_holds_it": held})
    )
    return 0 if report.verdict == wanted and held else 1


def environment(out: Path, name: str, share: float) -> str:
    """The file of an environment whose Python runs this file's other half."""
    from fugaku_gpt.launch.launcher import find_launcher

    folder = out.resolve() / "environments"
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / f"python-{name}"
    words = [sys.executable, str(Path(__file__).resolve()), "--as-ranks", str(share)]
    python.write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, words))} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    file = folder / f"{name}.yaml"
    path = find_launcher().path.parent
    file.write_text(f"name: {name}\npython: {json.dumps(str(python))}\npath: [{json.dumps(str(path))}]\n")
    return str(file)


def slow_rank(share: float, words: List[str]) -> None:
    """``python -m fugaku_gpt ...`` whose steps take longer by a share."""
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
    assert words[:2] == ["-m", "fugaku_gpt"], words
    sys.argv = ["fugaku-gpt", *words[2:]]
    command()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-ranks"]:
        slow_rank(float(sys.argv[2]), sys.argv[3:])
    sys.exit(main())
