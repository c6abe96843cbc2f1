"""The run directory: ``config.yaml``, ``environment.json``, ``metrics.jsonl``, ``result.json``.

``metrics.jsonl`` holds one JSON object per line, told apart by ``kind``:

* ``iteration``: iteration, consumed_samples, consumed_tokens, seconds (elapsed per
  iteration since the line before), lr, global_batch, loss,
  grad_norm, samples_per_second, tokens_per_second, tflops_notes and tflops_exact (TFLOP/s per node), rss_max_bytes
  (largest rank), node_used_bytes;
* ``validation``: iteration, loss, tokens.

``result.json`` is written once, when the run has ended, whatever its end; a run directory without it is a run that is
still going or was killed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.files import write_json_atomically, write_text_atomically

VERSION = 1

OK = "ok"
FAILED = "failed"
REFUSED = "refused"  # the configuration was not valid: no rank was started
TIMEOUT = "timeout"
OUT_OF_MEMORY = "oom"
INTERRUPTED = "interrupted"
STATUSES = (OK, FAILED, REFUSED, TIMEOUT, OUT_OF_MEMORY, INTERRUPTED)


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: one of ``STATUSES``.
        reason: one line for a person; empty where status is ok.
        started, ended: seconds since the epoch.
        iterations: iterations that were finished.
        summary: figures over the run (see :func:`fugaku_gpt.records.summary.summarise`); empty where none was measured.
    """

    status: str
    reason: str
    started: float
    ended: float
    iterations: int = 0
    summary: Dict[str, Any] = field(default_factory=dict)
    version: int = VERSION


class RunDirectory:
    """One run's folder; reading never fails on what a killed run left half-written."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def config_file(self) -> Path:
        """The run's configuration, every field written out."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def log_file(self) -> Path:
        """What the ranks printed, where their starter kept it."""
        return self.path / "log.txt"

    @property
    def flight_dir(self) -> Path:
        """The ranks' flight recorders."""
        return self.path / "flight"

    def create(self, config_yaml: str) -> None:
        """Make the folder and write the configuration.

        Raises:
            UsageError: the folder already holds a finished or started run, or cannot be made.
        """
        if self.metrics_file.exists() or (self.path / "result.json").exists():
            raise UsageError(f"{self.path}: already holds a run; choose another --out, or remove it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.config_file, config_yaml)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written: {error.strerror}; choose another --out") from None

    def discard(self) -> None:
        """Take back :meth:`create`, and the log, for a run that was refused before it had begun."""
        for path in (self.config_file, self.log_file):
            if path.exists():
                path.unlink()
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def write_environment(self, environment: Dict[str, Any]) -> None:
        """What is really running: builds, threads, affinity, MPI, toggles."""
        write_json_atomically(self.path / "environment.json", {"version": VERSION, **environment})

    def write_result(self, result: Result) -> None:
        """How the run ended."""
        write_json_atomically(self.path / "result.json", asdict(result))

    def environment(self) -> Optional[Dict[str, Any]]:
        """What :meth:`write_environment` wrote, or None."""
        return self._read_json("environment.json")

    def result(self) -> Optional[Result]:
        """How the run ended, or None if it has not (or not by its own hand)."""
        values = self._read_json("result.json")
        if values is None:
            return None
        if values.get("version") != VERSION or values.get("status") not in STATUSES:
            raise UsageError(f"{self.path / 'result.json'}: not a result of version {VERSION} of this format")
        known = {name: values[name] for name in Result.__dataclass_fields__ if name in values}
        return Result(**known)

    def metrics(self, kind: str) -> List[Dict[str, Any]]:
        """The lines of one kind, in order; a last line cut short by a kill is left out."""
        return [line for line in self._metric_lines() if line.get("kind") == kind]

    def _metric_lines(self) -> Iterator[Dict[str, Any]]:
        if not self.metrics_file.exists():
            return
        with open(self.metrics_file, encoding="utf-8") as stream:
            for text in stream:
                try:
                    line = json.loads(text)
                except ValueError:
                    if text.endswith("\n"):  # only the last line can be cut short: this one is damaged
                        raise UsageError(f"{self.metrics_file}: not JSON lines: {text.strip()[:60]!r}") from None
                    return
                yield line

    def _read_json(self, name: str) -> Optional[Dict[str, Any]]:
        path = self.path / name
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise UsageError(f"{path}: not JSON; remove it to have the run counted as not finished") from None
        if not isinstance(values, dict):
            raise UsageError(f"{path}: expected a JSON object")
        return values


class MetricsWriter:
    """Appends JSON lines, each flushed whole, so that a kill costs at most the line being written."""

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115  # open for the whole run

    def write(self, kind: str, values: Dict[str, Any]) -> None:
        """One line. A number that JSON cannot hold (nan, inf) is written as null."""
        finite = {
            key: None if isinstance(value, float) and value - value != 0 else value for key, value in values.items()
        }
        self._stream.write(json.dumps({"kind": kind, **finite}, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """No more lines."""
        self._stream.close()
