"""Test of the notes' conclusions against their rows."""

from __future__ import annotations

import csv
import io

import pytest

from benchmarks import notes


@pytest.mark.slow
def test_conclusions_are_checked_against_the_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["notes.py", "--format", "csv"])
    assert notes.main() == 0
    rows = {row["conclusion"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    clock = rows["2.2 GHz is faster than 2.0 GHz"]
    assert (clock["configurations"], clock["verdict"], clock["holds"]) == ("4", "faster", "yes")
    assert clock["B/A"] == "0.861"
    builds = rows["PyTorch 1.10 is faster than 1.7"]
    assert (builds["verdict"], builds["holds"]) == ("undecided", "cannot be decided")
    assert builds["smallest and largest"] == "0.613 to 2.131"
    # one run each has no interval
    assert rows["four ranks on a node are faster than one"]["95 % interval"] == ""
    assert rows["tcmalloc is faster (PyTorch 1.10, up to 64 nodes)"]["holds"] == "yes"
