"""Shows which conclusions of the notes their own rows support: each is a comparison of recorded runs.

    python benchmarks/notes.py [--format table|md|csv|json]

`B/A` is over all configurations that both sides have, with one ratio for each. A conclusion holds if the verdict says
so; it is undecided if the rows cannot distinguish it from the usual differences between two runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in [str(ROOT)] if path not in sys.path]
TABLE = ROOT / "benchmarks" / "reference" / "measurements.csv"
FUGAKU = "hardware=A64FX Fugaku"


class Conclusion(NamedTuple):
    """A statement of the notes with conditions on their rows; it holds if the verdict is ``holds``."""

    statement: str
    a: str
    b: str
    holds: str = "faster"


CONCLUSIONS = (
    Conclusion("PyTorch 1.10 is faster than 1.7", "torch=1.7", "torch=1.10"),
    Conclusion("PyTorch 1.13 is faster than 1.10", "torch=1.10", "torch=1.13"),
    Conclusion("four ranks on a node are faster than one", f"{FUGAKU},ranks_per_node=1", f"{FUGAKU},ranks_per_node=4"),
    Conclusion("2.2 GHz is faster than 2.0 GHz", f"{FUGAKU},freq=2.0", f"{FUGAKU},freq=2.2"),
    Conclusion("retention off is faster", f"{FUGAKU},retention=default", f"{FUGAKU},retention=0"),
    Conclusion("tcmalloc is faster (PyTorch 1.7)", "torch=1.7,tcmalloc=false", "torch=1.7,tcmalloc=true"),
    Conclusion("tcmalloc is faster (PyTorch 1.10)", "torch=1.10,tcmalloc=false", "torch=1.10,tcmalloc=true"),
    Conclusion(
        "tcmalloc is faster (PyTorch 1.10, up to 64 nodes)",
        "torch=1.10,tcmalloc=false,nodes<=64",
        "torch=1.10,tcmalloc=true,nodes<=64",
    ),
    Conclusion(
        "2.2 GHz, tcmalloc and retention off together are faster (one node, four ranks)",
        "torch=1.7,nodes=1,ranks_per_node=4,freq=2.0,tcmalloc=false,retention=default",
        "torch=1.7,nodes=1,ranks_per_node=4,freq=2.2,tcmalloc=true,retention=0",
    ),
)
COLUMNS = ("conclusion", "configurations", "runs", "B/A", "95 % interval", "smallest and largest", "verdict", "holds")


def main() -> int:
    """Prints the table."""
    from fugaku_gpt.cli.options import FORMATS
    from fugaku_gpt.cli.output import render_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, default="table")
    form = parser.parse_args().format
    print(render_rows(COLUMNS, [row_of(conclusion) for conclusion in CONCLUSIONS], form), end="")
    return 0


def row_of(conclusion: Conclusion) -> Dict[str, Any]:
    """Compares the rows of a conclusion; returns its row of the table."""
    from fugaku_gpt.compare.recorded import compare_recorded
    from fugaku_gpt.compare.sides import RecordedSide, parse_side

    sides: List[RecordedSide] = []
    for conditions in (conclusion.a, conclusion.b):
        side = parse_side(f"{TABLE}:{conditions}", lambda _: False)
        assert isinstance(side, RecordedSide)
        sides.append(side)
    report = compare_recorded(sides[0], sides[1], 0, 0.02)
    blocks, overall = report.blocks, report.comparison
    if overall is None:
        return {
            "conclusion": conclusion.statement,
            "configurations": 0,
            "verdict": "none in common",
            "holds": "cannot be decided",
        }
    ratios = [block.ratio for block in blocks]
    against = {"faster": "slower", "slower": "faster"}.get(conclusion.holds)
    holds = {conclusion.holds: "yes", against: "no", "same": "no"}.get(overall.verdict, "cannot be decided")
    return {
        "conclusion": conclusion.statement,
        "configurations": len(blocks),
        "runs": f"{sum(len(block.a) for block in blocks)} and {sum(len(block.b) for block in blocks)}",
        "B/A": f"{overall.ratio:.3f}",
        "95 % interval": f"{overall.low:.3f} to {overall.high:.3f}" if overall.low else None,
        "smallest and largest": f"{min(ratios):.3f} to {max(ratios):.3f}",
        "verdict": overall.verdict,
        "holds": holds,
    }


if __name__ == "__main__":
    sys.exit(main())
