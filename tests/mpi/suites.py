"""The suites of tests that one start of eight ranks runs, one after the other, each on its first ranks."""

from __future__ import annotations

# ranks, and what they run of this folder; "" is all of it
SUITES = {8: "", 4: "", 2: "", 1: ""}
LONG_SUITES = {8: "", 6: "test_soak.py", 4: "", 3: "test_soak.py", 2: ""}  # of these, tests that are marked `long`
LEAVING = "=== ranks leave"  # the line between the last suite and the end of all ranks


def heading(ranks: int) -> str:
    """Returns the line before the output of a suite."""
    return f"=== suite of {ranks} ranks"
