"""A folder that looks as if `data prepare` had made it, for jobs that are submitted and never train."""

from __future__ import annotations

from pathlib import Path

PREPARED = Path(__file__).parent / "prepared"
