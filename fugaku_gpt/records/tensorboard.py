"""The scalars of a run for TensorBoard: event files in ``tensorboard/`` of the run directory.

Each line of ``metrics.jsonl`` of the kinds ``iteration``, ``validation`` and ``evaluation`` becomes one event, whose
step is the iteration. Tags are the names of the line's figures in groups: ``train/loss``, ``train/lr``,
``train/grad_norm``, ``speed/tokens_per_second``, ``speed/tflops_notes``, ``memory/rss_max_bytes``, ``parallel/bubble``
and so on, ``validation/loss``, ``evaluation/NAME/loss`` and ``evaluation/NAME/bits_per_byte``. Losses have a second
step, the tokens consumed, in the folder ``by_tokens/`` with tags such as ``by_tokens/train/loss``. Values are float32;
one that is not finite is a NaN.

Each start of a run writes a new file. One that resumes begins its file by the start of a session, at which TensorBoard
drops what the run does again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

from fugaku_gpt.records.event_file import EventFile
from fugaku_gpt.records.metrics import EVALUATION, ITERATION, RESUMED, VALIDATION, MetricsWriter, last_valid_iteration

BY_TOKENS = "by_tokens"
# figures of an iteration, in the order of tables
FIGURES_BY_GROUP: Mapping[str, Tuple[str, ...]] = {
    "train": (
        "loss", "lr", "grad_norm", "loss_scale", "params_norm", "accuracy", "global_batch", "actual_seq_len",
        "consumed_samples", "consumed_tokens", "skipped_iterations",
    ),
    "speed": (
        "seconds", "tokens_per_second", "samples_per_second", "images_per_second", "tflops_notes", "tflops_exact",
        "tflops_logged",
    ),
    "memory": ("rss_max_bytes", "node_used_bytes"),
    "parallel": (
        "bubble", "bubble_max", "bubble_predicted", "bubble_ideal", "hidden_communication", "compute_max",
        "compute_min",
    ),
}  # fmt: skip
_TAGS = {name: f"{group}/{name}" for group, names in FIGURES_BY_GROUP.items() for name in names}
_LOSSES = ("/loss",)  # ends of the tags that have a second step
_NAN = float("nan")


class EventsWriter:
    """Writes the lines of a run as events.

    Args:
        directory: folder of the event files; made if it is not there.
        wall_time: of the first event, in seconds since the epoch.

    Raises:
        OSError: a file cannot be made or written; names it. So do the methods.
    """

    def __init__(self, directory: Path, wall_time: float) -> None:
        self._by_iteration = EventFile(directory, wall_time)
        self._by_tokens = EventFile(directory / BY_TOKENS, wall_time)

    def write(self, line: Mapping[str, Any], wall_time: float) -> None:
        """Write the event of a line of metrics; nothing for a line of a kind without scalars."""
        tokens: Any = line.get("consumed_tokens")
        if line.get("kind") == RESUMED:
            is_anew = last_valid_iteration(line) < 0
            self._by_iteration.start_session(last_valid_iteration(line) + 1, wall_time)
            if is_anew or tokens is not None:
                self._by_tokens.start_session(0 if is_anew else int(tokens) + 1, wall_time)
            return
        scalars = scalars_of_line(line)
        if not scalars:
            return
        self._by_iteration.write_scalars(int(line.get("iteration") or 0), wall_time, scalars)
        losses = [(f"{BY_TOKENS}/{tag}", value) for tag, value in scalars if tag.endswith(_LOSSES)]
        if losses and tokens is not None:
            self._by_tokens.write_scalars(int(tokens), wall_time, losses)

    def close(self) -> None:
        """Close the files."""
        self._by_iteration.close()
        self._by_tokens.close()


class MetricsAndEventsWriter(MetricsWriter):
    """Writes each line of metrics, and then its event."""

    def __init__(self, path: Path, directory: Path) -> None:
        super().__init__(path)
        self._events = EventsWriter(directory, time.time())

    def write(self, kind: str, values: Dict[str, Any]) -> None:
        """Write one line, and its event.

        Raises:
            OSError: one of the files cannot be written; names the file.
        """
        super().write(kind, values)
        self._events.write({"kind": kind, **values}, time.time())

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._events.close()


def scalars_of_line(line: Mapping[str, Any]) -> List[Tuple[str, float]]:
    """Tag and value of each figure of a line of metrics; none for a line of a kind without scalars."""
    return [(tag, value if _is_finite(value) else _NAN) for tag, value in _figures(line)]


def _figures(line: Mapping[str, Any]) -> Iterator[Tuple[str, Any]]:
    kind = line.get("kind")
    if kind == ITERATION:
        yield from ((_TAGS[name], value) for name, value in line.items() if name in _TAGS)
    elif kind == VALIDATION:
        yield from ((f"{VALIDATION}/{name}", line[name]) for name in ("loss", "accuracy") if name in line)
    elif kind == EVALUATION:
        prefix = f"{EVALUATION}/{line.get('name') or ''}"
        yield f"{prefix}/loss", line.get("loss")
        if line.get("bits_per_byte") is not None:  # of texts alone
            yield f"{prefix}/bits_per_byte", line["bits_per_byte"]


def _is_finite(value: Any) -> bool:
    return value is not None and value - value == 0
