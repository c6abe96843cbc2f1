"""A page of runs that needs nothing but a browser: data, script and style stand in it, and it may load nothing.

Curves are drawn by uPlot, whose files are in ``page/`` with their licence, version and hashes. The page's own script
puts every text of a run in place as text, never as markup, and its Content-Security-Policy allows the scripts and
styles with these hashes and no others.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from fugaku_gpt import __version__
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import PAGE_BYTES
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.report.page_figures import EVALUATION_PREFIX, FIGURES, Curve
from fugaku_gpt.report.page_runs import PageRun, differences, gantt_picture, named_runs

ASSETS = Path(__file__).with_name("page")
TEMPLATE = Path(__file__).with_name("run_page.html.j2")
SCRIPTS, STYLES = ("uPlot.iife.min.js", "run_page.js"), ("uPlot.min.css", "run_page.css")
BUDGET_RUNS = 20  # up to this number, the page is no longer than its limit
MOST_POINTS, _LEAST_POINTS = 4000, 100  # of a curve
_MOST_POINTS_OF_MANY = 1500  # where there are more runs than BUDGET_RUNS
_POINT_BYTES = 10  # "5,0.123456,", at a first guess
_GANTT_SHARE = 0.4  # of the page, for the pictures of all traces
_RESERVED = 200_000  # bytes for scripts, styles and texts


class WrittenPage(NamedTuple):
    """A page that was written.

    Attributes:
        runs: number of its runs.
        size: its bytes.
        points: points that a curve has at most, if some are thinned; else 0.
        notes: what was left out.
    """

    runs: int
    size: int
    points: int
    notes: Tuple[str, ...]


def write_run_page(folders: Sequence[Path], path: Path) -> WrittenPage:
    """Write the page of the runs in folders: run directories, or folders of them.

    Raises:
        UsageError: a folder holds no run, none of them has metrics of its own, or the file cannot be written.
    """
    errors: List[UsageError] = []
    named = named_runs(folders, errors.append)
    if errors:
        raise errors[0]
    if not named:
        raise UsageError(f"{folders[0]}: holds only imported logs, which have no curves; `report table` has their rows")
    data, points, notes = page_data(named)
    text = render_page(data)
    try:
        write_text_atomically(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return WrittenPage(len(named), len(text.encode("utf-8")), points, notes)


def page_data(named: Dict[Path, str]) -> Tuple[Dict[str, Any], int, Tuple[str, ...]]:
    """The data of a page that is written once; the points that a curve has at most, 0 if none is thinned; and notes on
    what is left out."""
    runs: List[PageRun] = []
    heads: List[Dict[str, Any]] = []
    curves: List[Dict[str, Curve]] = []
    longest, at_first = 0, MOST_POINTS if len(named) <= BUDGET_RUNS else _MOST_POINTS_OF_MANY
    for path, name in named.items():
        run = PageRun(path, name)
        while run.poll():
            pass
        if not run.read_facts():  # removed in the meantime
            continue
        of_run = run.curves()
        longest = max([longest, *(len(curve.at) for curve in of_run.values())])
        curves.append({key: curve.thinned(at_first) for key, curve in of_run.items()})
        heads.append(run.head())
        run.forget_metrics()
        runs.append(run)
    room = room_for(len(runs))
    pictures, notes = _pictures(runs, int(room * _GANTT_SHARE))
    room -= sum(len(json.dumps(picture)) for picture in pictures) + sum(map(_size, heads))
    most, fitted = _fitted(curves, int(room), at_first)
    points = most if longest > most else 0
    shown = [
        {"id": f"run-{number}", **head, "differs": differs, "curves": of_run, "gantt": picture}
        for number, (head, differs, of_run, picture) in enumerate(zip(heads, differences(runs), fitted, pictures))
    ]
    thinned = (
        f"Curves of more than {points} points are thinned: of each piece of {max(1, points // 2 - 1)} equal pieces of "
        "the iterations the lowest and the highest value remain."
    )
    data = {**page_frame(), "runs": shown, "notes": [*notes, *([thinned] if points else [])]}
    return data, points, notes


def _fitted(curves: Sequence[Dict[str, Curve]], room: int, most: int) -> Tuple[int, List[Dict[str, Any]]]:
    """The largest number of points of a curve, up to ``most``, with which all curves fit into some bytes, about; and
    these curves. Some points always remain."""

    def thinned(points: int) -> List[Dict[str, Any]]:
        return [{key: curve.thinned(points).values_for_json() for key, curve in of_run.items()} for of_run in curves]

    points = points_in_room(room, sum(map(len, curves)), most)
    fitted = thinned(points)
    size = sum(map(_size, fitted))
    if (
        size < 0.9 * room
        and points < most
        and any(len(curve.at) > points for each in curves for curve in each.values())
    ):
        points = min(most, int(0.98 * points * room / size))
        fitted = thinned(points)
        size = sum(map(_size, fitted))
    while size > room and points > _LEAST_POINTS:
        points = max(_LEAST_POINTS, int(0.98 * points * room / size))
        fitted = thinned(points)
        size = sum(map(_size, fitted))
    return points, fitted


def room_for(runs: int) -> float:
    """The bytes of a page for what it has of its runs."""
    return PAGE_BYTES.value * (1 + max(0, runs - BUDGET_RUNS) / 100) - _RESERVED


def points_in_room(room: float, curves: int, most: int = MOST_POINTS) -> int:
    """The points that each of this number of curves may have in some bytes, at a first guess; some always remain."""
    return max(_LEAST_POINTS, min(most, int(room / (_POINT_BYTES * max(1, curves)))))


def page_frame() -> Dict[str, Any]:
    """The data of a page that depends on no run."""
    return {
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "figures": [
            {"key": figure.key, "title": figure.title, "unit": figure.unit, "isSetting": figure.is_setting}
            for figure in FIGURES
        ],
        "evaluationPrefix": EVALUATION_PREFIX,
        "live": False,
        "runs": [],
        "notes": [],
    }


def _pictures(runs: Sequence[PageRun], room: int) -> Tuple[List[Any], Tuple[str, ...]]:
    """The picture of the trace of each run, or None, as long as there is room; and a note on those without."""
    pictures: List[Any] = []
    without: List[str] = []
    for run in runs:
        picture = gantt_picture(run.path)
        if picture is not None and len(picture.image) > room:
            picture = None
            without.append(run.name)
        room -= len(picture.image) if picture is not None else 0
        pictures.append(picture._asdict() if picture is not None else None)
    note = f"No room for pictures of the traces of {', '.join(without[:10])}{' and others' if without[10:] else ''}."
    return pictures, ((note,) if without else ())


def _size(value: Any) -> int:
    """The bytes of a value in the page."""
    return len(_json(value))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def json_for_script(value: Any) -> str:
    """A value as JSON of ASCII within a script element, which no text in it can end."""
    return _json(value).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def render_page(data: Dict[str, Any]) -> str:
    """The page with these data (see :func:`page_data`)."""
    from jinja2 import Environment, StrictUndefined  # here: `watch --help` needs it not

    scripts, styles = _assets()
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        policy=policy_of(bool(data["live"])),
        scripts=scripts,
        styles=styles,
        data=json_for_script(data),
    )


def policy_of(is_live: bool) -> str:
    """The Content-Security-Policy of the page: scripts and styles are those in it, by their hashes, pictures are within
    it, and a live page may ask its server."""
    scripts, styles = _assets()
    sources = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": " ".join(map(_hash, styles)),
        "img-src": "data:",
        "connect-src": "'self'" if is_live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {source}" for name, source in sources.items())


def _assets() -> Tuple[List[str], List[str]]:
    """The scripts and the styles of the page, in order."""
    return [_asset(name) for name in SCRIPTS], [_asset(name) for name in STYLES]


@lru_cache(maxsize=None)
def _asset(name: str) -> str:
    text = (ASSETS / name).read_text(encoding="utf-8")
    if "</s" in text.lower():  # it would end its element
        raise ValueError(f"{name}: has </s in it")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
