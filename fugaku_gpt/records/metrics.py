"""The metrics of a run: ``metrics.jsonl`` holds one JSON object per line, distinguished by ``kind``:

* ``iteration``: iteration, consumed_samples (including those skipped by ``training.skip_samples``), consumed_tokens,
  seconds (elapsed per iteration since the line before), lr, global_batch, loss, grad_norm (these four of this
  iteration), samples_per_second, tokens_per_second, tflops_notes and tflops_exact (TFLOP/s per node; these four over
  all iterations since the line before, each with its own batch), rss_max_bytes (largest rank), node_used_bytes;
  and, if applicable: actual_seq_len (tokens of each sample, while they grow, or cells of each grid of this iteration),
  loss_scale (float16), images_per_second and accuracy (share of grids whose class had the largest logit; both over all
  iterations since the line before), buckets (side of a bucket → iterations, loss and accuracy since the line before),
  skipped_iterations (number so far of iterations without an optimiser step), bubble and bubble_max (idle over busy time
  in the pipeline: mean and maximum over the stages), bubble_predicted (the mean by the schedule and the work of each
  stage), bubble_ideal (by the schedule, if all stages were equal), hidden_communication (share of the replicas' sums
  and gathers that overlaps with computation, in the group of replicas where it is least), compute_max and compute_min
  (seconds per iteration for which the slowest and the fastest rank have computed, without waiting for other ranks), and
  where: compute_max_rank, compute_max_node, compute_min_rank, compute_min_node;
* ``left_out``: iteration, why (``not finite``, ``overflow`` or ``spike``), loss, grad_norm, samples (those that have no
  lasting effect because of it, such as "400-495"), returned_to (the iteration whose weights were restored after a
  spike);
* ``validation``: iteration, loss, tokens, consumed_tokens (by the training so far); of grids also accuracy, and
  buckets (side → images, distinct_images, loss and accuracy);
* ``evaluation``: iteration, name (of the file of ``training.eval_files``), loss, tokens, bits_per_byte,
  consumed_tokens;
* ``checkpoint``: iteration, and name, bytes, snapshot_seconds (for which training has waited) and write_seconds, or,
  if it could not be written, error;
* ``resumed``: iteration, checkpoint, consumed_tokens: the run continues from there. Earlier lines of later iterations
  are superseded, and readers leave them out; if checkpoint is null, the run has begun anew, and all earlier lines are
  superseded.

Files of older versions have no consumed_tokens but in lines of iterations.

If a writer was killed in the middle of a line and another continued the file, a line of kind ``cut`` follows the
piece, and readers leave both out.
"""

from __future__ import annotations

import json
import os
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any, Deque, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.input_files import lines_of_file, open_file
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import METRICS_LINE, cut
from fugaku_gpt.records.files import naming_file
from fugaku_gpt.typed_json import is_number

ITERATION, VALIDATION, EVALUATION, RESUMED, CUT = "iteration", "validation", "evaluation", "resumed", "cut"
LEFT_OUT, CHECKPOINT = "left_out", "checkpoint"
_TAIL_BYTES = 8192
_LONGEST_LINE = 64 * 1024  # bytes


class MetricsWriter:
    """Appends JSON lines and flushes each, so that a kill costs at most the line being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        prefix = _line_prefix(path)
        self._stream = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115  # open for the whole run
        self._append(prefix)

    def write(self, kind: str, values: Dict[str, Any]) -> None:
        """Write one line. A number that JSON cannot represent (nan, inf) is written as null.

        Raises:
            OSError: it cannot be written; names the file.
        """
        self._append(json.dumps({"kind": kind, **_representable(values)}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _append(self, text: str) -> None:
        with naming_file(self._path):
            self._stream.write(text)
            self._stream.flush()


def _representable(value: Any) -> Any:
    """A value with None in place of each number that JSON cannot represent, at any depth of its dictionaries."""
    if isinstance(value, dict):
        return {key: _representable(of_key) for key, of_key in value.items()}
    return None if isinstance(value, float) and value - value != 0 else value


def read_lines(metrics: Path) -> Iterator[Dict[str, Any]]:
    """Read the lines of a metrics file in order, without one that a kill has cut short; none if there is no file.

    Raises:
        UsageError: it cannot be read, or a line is damaged.
    """
    try:
        damaged = ""
        for number, text in enumerate(lines_of_file(metrics, METRICS_LINE), 1):
            line = _parse_object(text)
            if damaged and (line is None or line.get("kind") != CUT):
                raise UsageError(f"{metrics}:{number - 1}: not JSON lines: {damaged.strip()[:60]!r}")
            damaged = ""
            if line is not None and line.get("kind") != CUT:
                yield _checked_line(line, f"{metrics}:{number}")
            elif line is None:  # the last line may be half-written; any other is followed by a line of kind `cut`
                damaged = text
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{metrics}: cannot be read: {error.strerror}") from None


def read_sound_lines(metrics: Path) -> Tuple[List[Dict[str, Any]], int]:
    """Read the sound lines of a metrics file, and count those that are damaged; the last line does not count as such: a
    kill cuts it.

    Raises:
        UsageError: the file cannot be read.
    """
    lines: List[Dict[str, Any]] = []
    damaged, is_last_damaged = 0, False
    try:
        for text in lines_of_file(metrics, METRICS_LINE):
            damaged += is_last_damaged
            line = sound_line(text)
            is_last_damaged = line is None
            if line is not None and line.get("kind") != CUT:
                lines.append(line)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UsageError(f"{metrics}: cannot be read: {error.strerror}") from None
    return lines, damaged


def sound_line(text: str) -> Optional[Dict[str, Any]]:
    """The line of a text, of any kind; None if it is damaged."""
    line = _parse_object(text)
    try:
        if line is not None:
            json.dumps(line, allow_nan=False)
            return _checked_line(line, "")
    except (UsageError, ValueError):
        pass
    return None


def last_line(metrics: Path, kind: str) -> Optional[Dict[str, Any]]:
    """Find the newest line of a kind among the last lines of a metrics file, which may be in use by a writer."""
    try:
        with open_file(metrics) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            texts = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:  # the ranks have not created it yet
        return None
    limit: Optional[int] = None  # lines written before the run was resumed count up to this iteration
    for text in reversed(texts):  # the first may be incomplete, as reading began in its middle
        parsed = _parse_object(text)
        if parsed is None:
            continue
        try:
            line = _checked_line(parsed, "")
        except UsageError:  # damaged; whoever reads all lines reports it
            continue
        if line.get("kind") == kind and (limit is None or (line.get("iteration") or 0) <= limit):
            return line
        if line.get("kind") == RESUMED:
            limit = last_valid_iteration(line) if limit is None else min(limit, last_valid_iteration(line))
    return None


def without_superseded(lines: Iterable[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Filter out lines of iterations that were done again after the run was resumed."""
    valid_lines: List[Dict[str, Any]] = []
    for line in lines:
        if line.get("kind") == RESUMED:
            limit = last_valid_iteration(line)
            valid_lines = [earlier for earlier in valid_lines if (earlier.get("iteration") or 0) <= limit]
        valid_lines.append(line)
    return valid_lines


def read_valid_lines(metrics: Path) -> Iterator[Dict[str, Any]]:
    """Read the lines that :func:`without_superseded` leaves of a metrics file, one at a time: the memory does not grow
    with the file, which is read twice. Lines that are appended meanwhile are left for a later call.

    Raises:
        UsageError: it cannot be read, or a line is damaged.
    """
    resumptions: Deque[Tuple[int, int]] = deque()  # (number of the line, last valid iteration), both ascending
    count = 0
    for number, line in enumerate(read_lines(metrics)):
        count = number + 1
        if line.get("kind") == RESUMED:
            limit = last_valid_iteration(line)
            while resumptions and resumptions[-1][1] >= limit:  # this one supersedes all that they do
                resumptions.pop()
            resumptions.append((number, limit))
    for number, line in enumerate(islice(read_lines(metrics), count)):
        while resumptions and resumptions[0][0] <= number:
            resumptions.popleft()
        if not resumptions or (line.get("iteration") or 0) <= resumptions[0][1]:
            yield line


def last_valid_iteration(resumed: Mapping[str, Any]) -> int:
    """The last iteration whose lines before this ``resumed`` line are valid."""
    return int(resumed["iteration"]) if resumed.get("checkpoint") is not None else -1


def _parse_object(text: str) -> Optional[Dict[str, Any]]:
    try:
        line = parse_json(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _line_prefix(path: Path) -> str:
    """Text to write before the next line: nothing, an end of line, or a ``cut`` line if the last one was cut short."""
    try:
        with open(path, "rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - _LONGEST_LINE))
            tail = stream.read()
    except FileNotFoundError:
        return ""
    last = tail.rstrip(b"\n").rpartition(b"\n")[2]
    prefix = "" if not tail or tail.endswith(b"\n") else "\n"
    return prefix if not last or _parse_object(last.decode("utf-8", "replace")) else f'{prefix}{{"kind": "{CUT}"}}\n'


_FIGURES = frozenset([
    "consumed_samples", "consumed_tokens", "seconds", "lr", "global_batch", "loss", "grad_norm", "samples_per_second",
    "tokens_per_second", "tflops_notes", "tflops_exact", "tflops_logged", "rss_max_bytes", "node_used_bytes",
    "actual_seq_len", "loss_scale", "skipped_iterations", "bubble", "bubble_max", "bubble_predicted", "bubble_ideal",
    "hidden_communication", "compute_max", "compute_min", "tokens", "params_norm", "bits_per_byte",
    "images_per_second", "accuracy",
])  # fmt: skip


def _checked_line(line: Dict[str, Any], location: str) -> Dict[str, Any]:
    """Return a line of metrics whose figures are numbers, or null where they were not finite.

    Raises:
        UsageError: one is not; or an iteration has no number.
    """
    kind = line.get("kind")
    if kind not in (ITERATION, VALIDATION, EVALUATION, RESUMED):
        return line
    iteration = line.get("iteration", 0 if kind == VALIDATION else None)
    if not isinstance(iteration, int) or not is_number(iteration) or iteration < 0:
        raise UsageError(f"{location}: iteration {cut(repr(iteration))}: not the number of an iteration")
    for name, value in line.items():
        if name == "name" and not isinstance(value, str):
            raise UsageError(f"{location}: name {cut(repr(value))}: not a text")
        if name in _FIGURES and value is not None and not is_number(value):
            raise UsageError(f"{location}: {cut(name)} {cut(repr(value))}: not a number")
    return line
