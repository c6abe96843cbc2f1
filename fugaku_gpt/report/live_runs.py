"""Runs whose changes are sent to the readers of a live page.

One thread calls :meth:`LiveRuns.poll`, and only it touches the runs; a reader has a queue of messages, of bounded
length, in the form of server-sent events. Its first messages are all runs as they are; the others are what has changed.
"""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.harmless import harmless
from fugaku_gpt.jobs.store import UNFINISHED
from fugaku_gpt.launch.lost_run import conclude_lost_runs
from fugaku_gpt.report.page_runs import MOST_RUNS_FOLLOWED, PageRun, differences, gantt_picture, named_runs
from fugaku_gpt.report.run_page import MOST_POINTS, json_for_script, points_in_room, room_for

_QUEUE = 4096  # messages: a reader that falls further behind is dropped, and connects again
_MOST_PICTURES = 20
_DISCOVERY = 5  # looks at known runs for one that searches the folders for others


class Reader:
    """A reader of the page.

    Attributes:
        messages: bytes of server-sent events; None is the end.
        is_dropped: whether it was too far behind, and gets nothing more.
        has_left: set when it has taken its last message.
    """

    def __init__(self) -> None:
        self.messages: "queue.Queue[Optional[bytes]]" = queue.Queue(_QUEUE)
        self.is_dropped = False
        self.has_left = threading.Event()


class _Watched(NamedTuple):
    """A run with its id on the page."""

    id: str
    run: PageRun


class LiveRuns:
    """The runs in folders, which may appear, grow, end, be resumed and be removed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Watch run directories, and folders of them, in which there need not be a run yet.

        Raises:
            UsageError: a folder does not exist.
        """
        for path in paths:
            if not path.is_dir():
                raise UsageError(f"{path}: no such folder; give a run directory, or a folder of run directories")
        self._paths = list(paths)
        self._watched: Dict[Path, _Watched] = {}
        self._ids: Dict[Path, str] = {}
        self._gantt: Dict[Path, Any] = {}
        self._differs: Dict[str, Any] = {}
        self._note = ""
        self._looks = 0
        self._lock = threading.Lock()
        self._joining: List[Reader] = []
        self._readers: List[Reader] = []
        self._is_over = False

    def __len__(self) -> int:
        return len(self._watched)

    def join(self) -> Reader:
        """Add a reader, whose first messages come with the next call of :meth:`poll`."""
        reader = Reader()
        with self._lock:
            if self._is_over:
                reader.messages.put(None)
            else:
                self._joining.append(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """Remove a reader."""
        reader.has_left.set()
        with self._lock:
            self._joining = [other for other in self._joining if other is not reader]
            self._readers = [other for other in self._readers if other is not reader]

    def end(self, seconds: float = 1.0) -> None:
        """Send all readers the end, and wait until they have taken it, for these seconds at most."""
        with self._lock:
            self._is_over = True
            readers = [*self._readers, *self._joining]
            self._readers, self._joining = [], []
        for reader in readers:
            _put(reader, _message("end", None))
            _put(reader, None)
        deadline = time.monotonic() + seconds
        for reader in readers:
            reader.has_left.wait(max(0.0, deadline - time.monotonic()))

    def poll(self) -> None:
        """Look at all runs once, and send what has changed."""
        messages: List[bytes] = []
        if self._looks % _DISCOVERY == 0 or not self._watched:
            messages += self._discover()
        self._looks += 1
        is_settings_changed = bool(messages)
        for path, watched in list(self._watched.items()):
            if self._is_over:
                return
            run = watched.run
            while run.poll() and not self._is_over:
                pass
            is_head_changed = run.have_facts_changed()
            if is_head_changed:
                if not run.read_facts():
                    messages.append(self._remove(path))
                    continue
                is_settings_changed = True
                others = sum(bool(picture["image"]) for other, picture in self._gantt.items() if other != path)
                is_shown = others < _MOST_PICTURES
                picture = gantt_picture(path, is_shown)
                if picture is not None:
                    self._gantt[path] = picture._asdict()
            if is_head_changed or run.series.is_changed:
                changed = run.curves(is_update=True)
                curves = {key: curve.thinned(MOST_POINTS).values_for_json() for key, curve in changed.items()}
                head = run.head()
                if is_head_changed:  # a page keeps the picture that it has: it is as long as thousands of points
                    head["gantt"] = self._gantt.get(path)
                messages.append(_message("update", {"id": watched.id, "curves": curves, "head": head}))
                run.series.mark()
        if is_settings_changed:
            runs = [watched.run for watched in self._watched.values()]
            differs = dict(zip((watched.id for watched in self._watched.values()), differences(runs)))
            if differs != self._differs:
                self._differs = differs
                messages.append(_message("differences", differs))
        self._send(messages)

    def _discover(self) -> List[bytes]:
        """Look for runs that have appeared or are gone."""
        messages: List[bytes] = []
        try:
            every_run = list(named_runs(self._paths, lambda _: None).items())
            most = MOST_RUNS_FOLLOWED
            note = f"{most:,} of {len(every_run):,} runs are followed." if len(every_run) > most else ""
        except OSError as error:  # a folder that is just being removed, or that may not be read
            every_run = [(path, watched.run.name) for path, watched in self._watched.items()]
            note = harmless(f"Other runs cannot be looked for: {error.filename}: {error.strerror}.")
        named = dict(every_run[:MOST_RUNS_FOLLOWED])
        if note != self._note:
            self._note = note
            messages.append(_message("notes", [note] if note else []))
        messages += [self._remove(path) for path in list(self._watched) if path not in named]
        for path, name in named.items():
            if path not in self._watched:
                id_of_run = self._ids.setdefault(path, f"run-{len(self._ids)}")
                self._watched[path] = _Watched(id_of_run, PageRun(path, name))
                messages.append(_message("run", self._empty(path)))
        conclude_lost_runs(path for path, watched in self._watched.items() if watched.run.record.status == UNFINISHED)
        return messages

    def _remove(self, path: Path) -> bytes:
        self._gantt.pop(path, None)
        return _message("remove", self._watched.pop(path).id)

    def _empty(self, path: Path) -> Dict[str, Any]:
        """A run before its first update."""
        watched = self._watched[path]
        return {"id": watched.id, **watched.run.head(), "differs": [], "curves": {}, "gantt": None}

    def _send(self, messages: Sequence[bytes]) -> None:
        with self._lock:
            joining, self._joining = self._joining, []
            readers = list(self._readers)
            self._readers += joining
        for reader in readers:
            for message in messages:
                _put(reader, message)
        if joining:
            everything = self._everything()
            for reader in joining:
                for message in everything:
                    _put(reader, message)

    def _everything(self) -> List[bytes]:
        """The messages for a reader that has seen nothing, with curves thinned to the size of a page."""
        curves = {path: watched.run.curves() for path, watched in self._watched.items()}
        most = points_in_room(room_for(len(curves)), sum(map(len, curves.values())))
        messages = [_message("begin", [watched.id for watched in self._watched.values()])]
        is_thinned = False
        for path, watched in self._watched.items():
            is_thinned |= any(len(curve.at) > most for curve in curves[path].values())
            run = {
                **self._empty(path),
                "differs": self._differs.get(watched.id, []),
                "curves": {key: curve.thinned(most).values_for_json() for key, curve in curves[path].items()},
                "gantt": self._gantt.get(path),
            }
            messages.append(_message("run", run))
        thinned = (
            f"Points from before this page was opened are thinned, by lowest and highest value, to {most} of a curve."
        )
        notes = [note for note in (self._note, thinned if is_thinned else "") if note]
        return [*messages, _message("notes", notes)]


def _message(event: str, value: Any) -> bytes:
    return f"event: {event}\ndata: {json_for_script(value)}\n\n".encode()


def _put(reader: Reader, message: Optional[bytes]) -> None:
    """Add a message; a reader that is too far behind is dropped, and gets nothing more."""
    if reader.is_dropped:
        return
    try:
        reader.messages.put_nowait(message)
    except queue.Full:
        reader.is_dropped = True
