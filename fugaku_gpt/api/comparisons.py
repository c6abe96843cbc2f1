"""Comparisons of two ways to run: of runs that were made before, or of jobs that are run now, in turns."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Mapping, Optional

from fugaku_gpt.api.runs import Run
from fugaku_gpt.api.settings import FilePath
from fugaku_gpt.api.stopping import WatchedLaunch, pass_on_signal
from fugaku_gpt.compare.live_comparison import LiveSettings, compare_live
from fugaku_gpt.compare.pairs import Pair, read_comparison
from fugaku_gpt.compare.recorded import compare_recorded
from fugaku_gpt.compare.report import Report, report_live, report_recorded
from fugaku_gpt.compare.shared_run import RECORDED_WARM_UP, SharedRun
from fugaku_gpt.compare.sides import RecordedSide, parse_sides
from fugaku_gpt.compare.statistics import check_tolerance
from fugaku_gpt.environments.registry import is_profile
from fugaku_gpt.errors import UsageError, missing_package

__all__ = ["LiveSettings", "Report", "compare", "earlier_comparison"]

_DEFAULT = LiveSettings()
_ITERATIONS = 20


def compare(
    a: str,
    b: str,
    *,
    run: Optional[Run] = None,
    out: Optional[FilePath] = None,
    iterations: Optional[int] = None,
    warm_up: Optional[int] = None,
    settings: LiveSettings = _DEFAULT,
) -> Report:
    """Find which of two ways to run is faster, by how much, and why, as ``fugaku-gpt compare A B`` does.

    Args:
        a, b: two run directories, folders of them, or rows of a CSV such as ``notes.csv:torch=1.7``; or two
            environments, toggles such as ``tcmalloc=true``, or ``base``, which are run now.
        run: the run that both sides change, where they are run now.
        out: folder for the jobs, where they are run now; the same call continues there.
        iterations: timed iterations in each job that is run now; default: 20.
        warm_up: iterations before these; default: 5, of recorded runs 2.
        settings: the tolerance, and for sides that are run now the number of pairs and the time limit.

    Returns:
        The verdict, its reasons and figures, and ``values``, which are those of ``--format json``.

    Raises:
        UsageError: the tolerance is out of range, a side is neither, one is recorded and the other is not, the sides do
            not do the same work, or an argument has no meaning for sides that are recorded.
        KeyboardInterrupt: it was stopped by Ctrl-C; SIGTERM reaches the program as in ``train``.
    """
    try:
        check_tolerance(settings.tolerance)
    except ValueError as error:
        raise UsageError(str(error)) from None
    sides = parse_sides(a, b, is_profile)
    if isinstance(sides[0], RecordedSide):
        _refuse_arguments_of_jobs({"run": run, "out": out, "iterations": iterations}, settings)
        first, second = sides
        before = warm_up if warm_up is not None else RECORDED_WARM_UP
        recorded = compare_recorded(first, second, before, settings.tolerance)
        return report_recorded(first.text, second.text, recorded, settings.tolerance)
    if run is None:
        raise UsageError("no run is named: give run, such as load_run(preset='tiny')")
    shared, start = (
        SharedRun(run.source, None, _ITERATIONS if iterations is None else iterations, warm_up),
        WatchedLaunch(),
    )
    try:
        folder = Path(out) if out is not None else None
        report = compare_live(shared, sides, folder, settings, _Silent(), start, start.note)
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from None
    pass_on_signal(start.stopped_by)
    return report


def earlier_comparison(out: FilePath) -> Report:
    """The report of a comparison that was run in a folder.

    Raises:
        UsageError: there is none, or a record in it is damaged.
    """
    return report_live(read_comparison(Path(out)))


def _refuse_arguments_of_jobs(arguments: Mapping[str, object], settings: LiveSettings) -> None:
    """Refuse what only jobs that are run now have.

    Raises:
        UsageError: an argument is given, or a setting other than the tolerance is not the default.
    """
    given = [name for name, value in arguments.items() if value is not None]
    given += [
        f"settings.{spec.name}"
        for spec in fields(settings)
        if spec.name != "tolerance" and getattr(settings, spec.name) != getattr(_DEFAULT, spec.name)
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)}: for sides that are run now; these were run before: leave out what is named"
        )


class _Silent:
    """Reports no progress."""

    def job_started(self, pair: str, side: str, number: int, total: int) -> None:
        """Report nothing."""

    def pair_ended(self, pair: Pair) -> None:
        """Report nothing."""
