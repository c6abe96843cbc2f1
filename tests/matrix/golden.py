"""Measures how far this build is from the golden curves, on one rank; with ``--write`` it writes them anew.

    python -m tests.matrix.golden                    # distances of all curves; 1 where one is too far
    python -m tests.matrix.golden --write float64    # tests/golden/float64.json from this build

A change of the computation of a training changes curves, and should: then they are written again, in the same commit,
with the newest build, and the other builds are compared with them (``make test-matrix``).
"""

from __future__ import annotations

import argparse
import sys
from typing import List, Optional

import torch

from tests.matrix.cases import CASES
from tests.matrix.curves import FOLDER, distances, draw, golden_text, made_by, read_golden, too_far, trainer_for


def main(arguments: Optional[List[str]] = None) -> int:
    """Compares or writes the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Cases of {', '.join(CASES)}; default: all.")
    parser.add_argument("--write", action="store_true", help="Write the files anew.")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    far = False
    for name in options.names or CASES:
        if name not in CASES:
            parser.error(f"{name}: valid: {', '.join(CASES)}")
        curve = draw(trainer_for(name))
        summary = ""
        if (FOLDER / f"{name}.json").exists():
            from_golden = distances(curve, read_golden(name).curve)
            over = too_far(from_golden, CASES[name])
            far |= bool(over) and not options.write
            summary = ", ".join(f"{quantity} {distance:.1e}" for quantity, distance in from_golden.items())
            summary = f"from what is kept: {summary}{': TOO FAR' if over else ''}"
        if options.write:
            (FOLDER / f"{name}.json").write_text(golden_text(name, curve, made_by(name)))
            summary = f"written; {summary or 'was not there'}"
        print(f"{name}: loss {curve.losses[0]:.6f} to {curve.losses[-1]:.6f}; {summary or 'not kept'}")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
