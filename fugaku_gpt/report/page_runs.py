"""Runs as the run page shows them: their curves, the facts about them, and the settings in which they differ."""

from __future__ import annotations

import base64
import socket
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.differences import differing_settings
from fugaku_gpt.errors import UsageError
from fugaku_gpt.harmless import harmless
from fugaku_gpt.jobs.store import UNFINISHED, RunRecord, read_record
from fugaku_gpt.limits import GANTT_BYTES, cut
from fugaku_gpt.records.claim import is_holder_alive, newest_claim
from fugaku_gpt.records.metrics import CHECKPOINT
from fugaku_gpt.records.run import CLAIM, RunDirectory
from fugaku_gpt.records.trace import traced_ranks
from fugaku_gpt.report.collect import accounts_of_run, energy_figures, find_runs, name_runs
from fugaku_gpt.report.imported import is_imported
from fugaku_gpt.report.page_figures import MOST_EVALUATIONS, Curve, curves_of, stragglers
from fugaku_gpt.report.run_follower import RunFollower
from fugaku_gpt.report.run_series import RunSeries

RUNNING = "running"
MOST_RUNS_FOLLOWED = 1000
_DEFAULTS = RunConfig()
_IN_FACTS = {"job.nodes", "layout.dp", "layout.tp", "layout.pp", "model.name"}
_MOST_EVENTS, _EVENT_CHARACTERS = 50, 120  # of a run
_GANTT_RANKS = (64, 16, 4)  # in a picture, until it is small enough
_GIB = 2**30
_LOOK_SECONDS = 1.0
_SECONDS_OF_RUN = 0.02  # a look at a run asks a file server about its files
_FACT_FILES = ("config.yaml", "result.json", "job.jsonl", "environment.json", "accounting.json", "exit", "trace")


class PageRun:
    """A run that the page shows, read from its folder as it grows.

    Attributes:
        path: the run directory.
        name: its name on the page.
        series: the metrics read so far.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.series = RunSeries()
        self._follower = RunFollower(path)
        self._record: Optional[RunRecord] = None
        self._states: Tuple[Optional[Tuple[int, int]], ...] = ()
        self._status_read = ""

    def poll(self) -> bool:
        """Read what was appended, up to the follower's limit; returns whether the file has more."""
        for line in self._follower.poll():
            self.series.add(line)
        return self._follower.has_more

    def read_facts(self) -> bool:
        """Read the small files of the run; returns False if its folder is gone."""
        self._record = read_record(self.path, ".")
        self._status_read = self.status
        return self._record is not None

    def have_facts_changed(self) -> bool:
        """Whether the small files of the run, its traces, or its status have changed since this was asked."""
        states = tuple(map(_state, (self.path, *(self.path / name for name in _FACT_FILES))))
        is_changed = states != self._states or (self._record is not None and self.status != self._status_read)
        self._states = states
        return is_changed

    def forget_metrics(self) -> None:
        """Free the memory of the metrics, once their curves have been taken."""
        self.series = RunSeries()

    @property
    def record(self) -> RunRecord:
        """The summary of the run's small files, as they were read last."""
        return self._record or RunRecord("", "")

    @property
    def status(self) -> str:
        """How the run ended, or the state of its job; if neither is known, ``running`` while a process on this machine
        trains it, else ``unfinished``."""
        is_running = self.record.status == UNFINISHED and is_running_locally(self.path)
        return RUNNING if is_running else self.record.status

    @property
    def problems(self) -> List[str]:
        """Why something of the run could not be read; each on one line."""
        problems = [text for text in (self.record.problem, self._follower.problem) if text]
        if self._follower.damaged:
            problems.append(f"{self._follower.damaged} damaged lines in metrics.jsonl are left out")
        return problems

    @property
    def settings(self) -> Dict[str, Any]:
        """The settings that differ from their defaults, by dotted key, as they were read last."""
        return self._record.settings if self._record is not None else {}

    def head(self) -> Dict[str, Any]:
        """Everything that the page says of the run but its curves, its picture and how it differs from others."""
        record = self.record
        events = [event for event in self.series.events if event.kind != CHECKPOINT or event.text.startswith("not")]
        return {
            "name": harmless(self.name),
            "status": harmless(cut(self.status)),
            "reason": harmless(cut(record.reason)),
            "problems": [harmless(cut(problem)) for problem in self.problems],
            "facts": [[name, harmless(cut(text))] for name, text in self._facts(record) if text],
            "events": [
                [iteration, harmless(text[:_EVENT_CHARACTERS])] for iteration, _, text in events[-_MOST_EVENTS:]
            ],
            "stragglers": stragglers(self.series),
        }

    def curves(self, is_update: bool = False) -> Dict[str, Curve]:
        """The curves of the run (see :func:`fugaku_gpt.report.page_figures.curves_of`)."""
        return curves_of(self.series, is_update)

    def _facts(self, record: RunRecord) -> Iterator[Tuple[str, str]]:
        lines, validation = self.series.iterations, self.series.validation
        nodes, dp, tp, pp = (
            record.settings.get(key, getattr(getattr(_DEFAULTS, key.split(".")[0]), key.split(".")[1]))
            for key in ("job.nodes", "layout.dp", "layout.tp", "layout.pp")
        )

        def figure(name: str, form: str, newest: Optional[float], factor: float = 1.0) -> str:
            value = record.figures.get(name, newest)
            return form.format(value * factor) if isinstance(value, (int, float)) else ""

        yield "model", record.size
        yield "nodes", str(nodes)
        yield "dp × tp × pp", f"{dp} × {tp} × {pp}"
        yield "iterations", str(max(record.iterations, int(lines.newest("iteration") or 0)))
        yield "loss", figure("last_loss", "{:.4f}", lines.newest("loss"))
        yield "validation loss", figure("last_validation_loss", "{:.4f}", validation.newest("loss"))
        yield "s/it", figure("seconds_per_iteration", "{:.4g}", lines.newest("seconds"))
        yield "tokens/s", figure("tokens_per_second", "{:,.0f}", lines.newest("tokens_per_second"))
        yield "TFLOP/s per node", figure("tflops_notes", "{:.4g}", lines.newest("tflops_notes"))
        yield "GiB per node", figure("node_used_bytes", "{:.1f}", lines.newest("node_used_bytes"), 1 / _GIB)
        files = len(self.series.evaluations)
        yield "evaluated files drawn", f"{MOST_EVALUATIONS} of {files}" if files > MOST_EVALUATIONS else ""
        yield from self._energy(record)
        yield "job", record.job
        if record.started is not None:
            yield "started", time.strftime("%Y-%m-%d %H:%M", time.gmtime(record.started)) + " UTC"

    def _energy(self, record: RunRecord) -> Iterator[Tuple[str, str]]:
        """Power and energy from the accounts of the run's jobs, if they have any."""
        try:
            accounts = accounts_of_run(self.path)
        except (UsageError, OSError) as error:
            yield "energy", str(error)
            return
        seconds = record.figures.get("seconds_per_iteration")
        rate = record.figures.get("tokens_per_second")
        nodes = record.settings.get("job.nodes", _DEFAULTS.job.nodes)
        energy = energy_figures(accounts, seconds, nodes, round(seconds * rate) if seconds and rate else 0)
        for title, name, form in (
            ("W per node", "watts_per_node", "{:.1f}"),
            ("J/it", "joules_per_iteration", "{:.4g}"),
            ("J/token", "joules_per_token", "{:.4g}"),
        ):
            if energy.get(name) is not None:
                yield title, form.format(energy[name])
        yield "energy", str(energy.get("energy_basis") or "")


def is_running_locally(path: Path) -> bool:
    """Whether the process that has claimed a run directory lives on this machine."""
    try:
        _, holder = newest_claim(path, CLAIM)
    except (OSError, UsageError):
        return False
    return holder is not None and holder.host == socket.gethostname() and is_holder_alive(holder)


def seconds_between_looks(runs: int) -> float:
    """The seconds to wait between two looks at this number of runs."""
    return max(_LOOK_SECONDS, runs * _SECONDS_OF_RUN)


def _state(path: Path) -> Optional[Tuple[int, int]]:
    """The time of change and the size of a file or folder; None if there is none, or if it cannot be asked."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class GanttPicture(NamedTuple):
    """The picture of a run's trace.

    Attributes:
        image: data URL of the SVG; empty if there is none.
        text: what it shows, or why it is left out.
    """

    image: str
    text: str


def gantt_picture(path: Path, is_shown: bool = True) -> Optional[GanttPicture]:
    """The picture of a run's trace, of as many ranks as are shown in its limit; None if nothing was traced.

    Args:
        is_shown: False if there are too many pictures already, which stands in its place.
    """
    from fugaku_gpt.report.gantt import gantt
    from fugaku_gpt.report.timeline import timeline_of_run

    folder = RunDirectory(path).trace_dir
    more = f"`fugaku-gpt report trace {path} -o trace.svg` draws it."
    try:
        ranks = traced_ranks(folder)
        if not ranks:
            return None
        if not is_shown:
            return GanttPicture("", harmless(f"There are pictures of other traces already; {more}"))
        for most in _GANTT_RANKS:
            picture = gantt(timeline_of_run(folder, ranks[:most])).encode("utf-8")
            if len(picture) <= GANTT_BYTES.value:
                shown = "all traced ranks" if most >= len(ranks) else f"the first {most} of {len(ranks)} traced ranks"
                text = (
                    f"Each row is a rank, {shown}: phases over time, and below them its communication. Pale: waiting."
                )
                return GanttPicture("data:image/svg+xml;base64," + base64.b64encode(picture).decode("ascii"), text)
    except UsageError as error:
        return GanttPicture("", harmless(cut(str(error))))
    return GanttPicture("", harmless(f"The picture of the trace is larger than {GANTT_BYTES}; {more}"))


def differences(runs: Sequence[PageRun]) -> List[List[List[str]]]:
    """For each run the [name, text] of each setting in which the runs differ, as tables and ``runs ls`` name them."""
    named = differing_settings([run.settings for run in runs], _IN_FACTS)
    pairs = [[text.partition("=") for text in texts] for texts in named]
    return [[[harmless(cut(name)), harmless(cut(value))] for name, _, value in of_run] for of_run in pairs]


def named_runs(paths: Sequence[Path], on_error: Callable[[UsageError], None]) -> Dict[Path, str]:
    """The runs in folders, each with its path below the folder that holds all of them as its name.

    Args:
        paths: run directories, and folders of them.
        on_error: called with the error of a folder that holds no run, whose other folders are read all the same.
    """
    folders: List[Path] = []
    for path in paths:
        try:
            folders += find_runs([path])
        except UsageError as error:
            on_error(error)
    if not folders:
        return {}
    # an imported log has no metrics
    return name_runs([path for path in dict.fromkeys(folders) if not is_imported(path)], paths)
