"""The table of measurements on real machines that the repository holds."""

from __future__ import annotations

from pathlib import Path

MEASUREMENTS = Path(__file__).resolve().parents[2] / "benchmarks" / "reference" / "measurements.csv"
