"""A picture of ranks over time, as SVG: for each row a bar of its phases, in which waiting is left pale, and below it a
thin bar of its communications. A bubble is a pale stretch without a dark one; communication below a dark stretch is
hidden by computing.

Time is cut into columns, each of which shows what took most of it, so that the size of the picture does not depend on
the length of the trace; the exact times are in the trace events. Colors are those of Okabe and Ito, which people tell
apart who confuse red and green.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Dict, List, Sequence, Tuple
from xml.sax.saxutils import escape

import numpy as np

from fugaku_gpt.errors import UsageError
from fugaku_gpt.harmless import harmless
from fugaku_gpt.limits import GANTT_ROWS
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.report.timeline import (
    BACKWARD,
    BEGINNING,
    CHECKPOINT,
    FORWARD,
    GATHER,
    LOG,
    MESSAGE_IN,
    MESSAGE_OUT,
    OPTIMISER,
    OTHER,
    SUM,
    SUMS,
    VALIDATION,
    WAITING,
    WEIGHTS,
    Row,
    Span,
    Timeline,
)

SUFFIX = ".svg"
_COLORS = {
    FORWARD: "#0072b2",
    BACKWARD: "#e69f00",
    WEIGHTS: "#f0e442",
    SUMS: "#cc79a7",
    OPTIMISER: "#009e73",
    CHECKPOINT: "#d55e00",
    VALIDATION: "#56b4e9",
    LOG: "#8c8c8c",
    BEGINNING: "#5c5c5c",
    OTHER: "#333333",
    WAITING: "#e8e8e8",
}
_COMMUNICATION_COLORS = {
    SUM: "#cc79a7",
    GATHER: "#7b3294",
    MESSAGE_OUT: "#111111",
    MESSAGE_IN: "#7f7f7f",
    OTHER: "#333333",
}
_COLUMNS = 1000  # of time, a unit of the picture each
_LEFT, _RIGHT, _TOP, _BOTTOM = 235, 130, 88, 46
_TALLEST, _SHORTEST = 26.0, 4.0  # rows
_HEIGHT = 1600.0  # of all rows, where they can be so small
_TICKS = 10


def write_gantt(timeline: Timeline, path: Path) -> None:
    """Write the picture of a timeline.

    Raises:
        UsageError: it has too many rows, or the file cannot be written.
    """
    text = gantt(timeline)
    try:
        write_text_atomically(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def gantt(timeline: Timeline) -> str:
    """The picture of a timeline.

    Raises:
        UsageError: it has too many rows.
    """
    rows = timeline.rows
    if len(rows) > GANTT_ROWS.value:
        raise UsageError(
            f"{len(rows)} rows: more than {GANTT_ROWS}, the limit of {GANTT_ROWS.of}; choose some of them with --ranks"
        )
    height = max(_SHORTEST, min(_TALLEST, _HEIGHT / max(1, len(rows))))
    total = _TOP + height * len(rows) + _BOTTOM
    width = _LEFT + _COLUMNS + _RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title description" viewBox="0 0 {width} '
        f'{total:g}" font-family="sans-serif" font-size="11">',
        f'<title id="title">{_text(_title(timeline))}</title>',
        f'<desc id="description">{_text(_description(timeline))}</desc>',
        f'<rect width="{width}" height="{total:g}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="15">{_text(_title(timeline))}</text>',
        *_legend(timeline),
        f'<text x="{_LEFT + _COLUMNS + 10}" y="{_TOP - 6}">waiting</text>',
        *_iteration_marks(timeline, height),
    ]
    for number, row in enumerate(rows):
        lines += _row(row, _TOP + number * height, height, timeline.end)
    lines += _axis(timeline, _TOP + height * len(rows))
    return "\n".join((*lines, "</svg>", ""))


def _title(timeline: Timeline) -> str:
    return "; ".join((timeline.title, *timeline.notes))


def _description(timeline: Timeline) -> str:
    shares = [_waiting_share(row) for row in timeline.rows]
    if not shares:
        return "no rows"
    least, most = min(shares), max(shares)
    return (
        f"{len(shares)} rows over {_time_text(timeline.end, timeline)}; each waits for {least:.0%} to {most:.0%} of "
        "its time. Upper bars: phases; pale: waiting. Lower bars: communications under way."
    )


def _waiting_share(row: Row) -> float:
    seconds = row.seconds_by_kind()
    total = sum(seconds.values())
    return seconds[WAITING] / total if total else 0.0


def _legend(timeline: Timeline) -> List[str]:
    """The kinds that occur, in a line for phases and one for communications."""
    phases = {span.kind for row in timeline.rows for span in row.phases}
    communications = {span.kind for row in timeline.rows for span in row.communications}
    waiting = {WAITING} if any(row.waits for row in timeline.rows) else set()
    lines = []
    for y, head, colors, kinds in (
        (40, "phases:", _COLORS, phases | waiting),
        (58, "communications:", _COMMUNICATION_COLORS, communications),
    ):
        if not kinds:
            continue
        lines.append(f'<text x="12" y="{y}">{head}</text>')
        x = 125
        for kind, color in colors.items():
            if kind in kinds:
                lines.append(f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{color}" stroke="#999999"/>')
                lines.append(f'<text x="{x + 16}" y="{y}">{kind}</text>')
                x += 30 + 7 * len(kind)
    return lines


def _iteration_marks(timeline: Timeline, height: float) -> List[str]:
    """A line through all rows where each iteration of the first row begins."""
    lines, scale = [], _COLUMNS / timeline.end if timeline.end else 0.0
    iterations = timeline.rows[0].iterations if timeline.rows else ()
    for span in iterations:
        x = _LEFT + span.start * scale
        lines.append(f'<path stroke="#333333" d="M{x:.1f} {_TOP - 16}V{_TOP + height * len(timeline.rows):.1f}"/>')
        if span.seconds * scale > 70:
            lines.append(f'<text x="{x + 3:.1f}" y="{_TOP - 6}">{_text(span.label)}</text>')
    return lines


def _row(row: Row, top: float, height: float, end: float) -> List[str]:
    phase_height = height * 0.62
    lines = []
    if height >= 9:
        lines.append(f'<text x="12" y="{top + height * 0.55:.1f}">{_text(_short(row.name))}</text>')
        lines.append(
            f'<text x="{_LEFT + _COLUMNS + 10}" y="{top + height * 0.55:.1f}">{_waiting_share(row):.1%}</text>'
        )
    lines.append(f"<g><title>{_text(row.name)}: waiting {_waiting_share(row):.1%}</title>")
    lines += _bar(_with_waits(row), _COLORS, end, top, phase_height)
    lines += _bar(row.communications, _COMMUNICATION_COLORS, end, top + phase_height, height * 0.2)
    lines.append("</g>")
    return lines


def _with_waits(row: Row) -> List[Span]:
    """Phases, with waits as phases of their own that take the place of what they lie in."""
    pieces: List[Span] = []
    waits, index = row.waits, 0
    for phase in row.phases:
        start = phase.start
        while index < len(waits) and waits[index].start < phase.end:
            wait = waits[index]
            if wait.start > start:
                pieces.append(phase._replace(start=start, end=wait.start))
            pieces.append(wait._replace(start=max(start, wait.start), end=min(wait.end, phase.end)))
            start = max(start, min(wait.end, phase.end))
            if wait.end > phase.end:
                break
            index += 1
        if phase.end > start:
            pieces.append(phase._replace(start=start))
    return pieces


def _bar(spans: Sequence[Span], colors: Dict[str, str], end: float, top: float, height: float) -> List[str]:
    """A bar as one path for each color."""
    paths: Dict[str, List[str]] = {}
    for kind, first, stop in columns(spans, list(colors), end):
        width = stop - first
        paths.setdefault(colors[kind], []).append(f"M{_LEFT + first} {top:.1f}h{width}v{height:.1f}h{-width}z")
    return [f'<path fill="{color}" d="{"".join(pieces)}"/>' for color, pieces in paths.items()]


def columns(spans: Sequence[Span], kinds: Sequence[str], end: float) -> List[Tuple[str, int, int]]:
    """The kind that takes most of each column of time, as (kind, first column, column after the last) of neighbors of
    one kind; columns less than half of which are taken are left out."""
    seconds = np.zeros((len(kinds), _COLUMNS + 1))
    scale = _COLUMNS / end if end > 0 else 0.0
    index_of = {kind: index for index, kind in enumerate(kinds)}
    for span in spans:
        first, last = span.start * scale, min(span.end * scale, float(_COLUMNS))
        begin, stop = int(first), int(last)
        of_kind = seconds[index_of[span.kind]]
        if begin == stop:
            of_kind[begin] += last - first
            continue
        of_kind[begin] += begin + 1 - first
        of_kind[begin + 1 : stop] += 1.0
        of_kind[stop] += last - stop
    taken = seconds[:, :_COLUMNS]
    most = np.where(taken.sum(axis=0) >= 0.5, taken.argmax(axis=0), -1)
    bounds = [0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), _COLUMNS]
    return [(kinds[int(most[a])], a, b) for a, b in zip(bounds, bounds[1:]) if most[a] >= 0]


def _axis(timeline: Timeline, y: float) -> List[str]:
    lines = [f'<path stroke="#333333" d="M{_LEFT} {y:.1f}h{_COLUMNS}"/>']
    for seconds in _ticks(timeline.end):
        x, label = _LEFT + _COLUMNS * seconds / timeline.end, _time_text(seconds, timeline, is_bare=True)
        lines.append(f'<path stroke="#333333" d="M{x:.1f} {y:.1f}v5"/>')
        lines.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{label}</text>')
    unit = timeline.unit or ("ms" if timeline.end < 10 else "s")
    lines.append(f'<text x="{_LEFT + _COLUMNS / 2}" y="{y + 36:.1f}" text-anchor="middle">time in {_text(unit)}</text>')
    return lines


def _ticks(end: float) -> List[float]:
    """Multiples of a round number of seconds, about a tenth of the time."""
    if end <= 0:
        return []
    power = 10.0 ** math.floor(math.log10(end / _TICKS))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if end / (factor * power) <= _TICKS)
    return [number * step for number in range(int(end / step + 1e-9) + 1)]


def _time_text(seconds: float, timeline: Timeline, is_bare: bool = False) -> str:
    if timeline.unit:
        return f"{seconds:.6g}" + ("" if is_bare else f" {timeline.unit}")
    is_short = timeline.end < 10
    return f"{seconds * 1e3 if is_short else seconds:.6g}" + ("" if is_bare else " ms" if is_short else " s")


def _short(name: str) -> str:
    return name if len(name) <= 36 else f"{name[:35]}…"


def _text(text: str) -> str:
    return escape(harmless(text))
