"""Writes the files that ranks leave in a run directory."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import Result, RunDirectory


def write_run(
    directory: RunDirectory,
    environment: Mapping[str, Any],
    iterations: Sequence[Mapping[str, Any]],
    result: Optional[Result],
    validations: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the environment, the lines of metrics and the result; none, as after a kill, if it is None."""
    directory.write_environment(dict(environment))
    metrics = MetricsWriter(directory.metrics_file)
    for kind, lines in (("iteration", iterations), ("validation", validations)):
        for line in lines:
            metrics.write(kind, dict(line))
    metrics.close()
    if result is not None:
        directory.write_result(result)
