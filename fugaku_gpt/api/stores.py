"""Stores of runs: folders of run directories, as tables that can be filtered and sorted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

from fugaku_gpt.api.runs import RecordedRun
from fugaku_gpt.api.settings import FilePath
from fugaku_gpt.api.tables import data_frame
from fugaku_gpt.jobs.run_table import RUN_COLUMNS, SHOWN, RunValues, chosen_runs, listed_runs, run_names
from fugaku_gpt.jobs.store import RunRecord


class Runs(Sequence[RunRecord]):
    """The runs of a store, of the sweeps in it, and, if asked for, their earlier attempts: ``fugaku-gpt runs ls``.

    Each is what it was when the store was read. A run of which something cannot be read is among them:
    see :attr:`problems`.

    Attributes:
        store: the folder.
    """

    def __init__(self, store: FilePath = "runs", *, attempts: bool = False, update: bool = False) -> None:
        """Read a store. Nothing is written, unless that is asked for.

        Args:
            attempts: whether earlier attempts are among the runs.
            update: whether the store is brought up to date first, as the command does: the index by which the next
                listing is fast, and the end of runs of which no process is left, which are ``unfinished`` else.

        Raises:
            UsageError: there is no such folder.
        """
        self.store = Path(store)
        self._records = [
            record for record in listed_runs(self.store, is_read_only=not update) if attempts or record.attempt == 0
        ]

    def _with(self, records: List[RunRecord]) -> "Runs":
        runs = object.__new__(Runs)
        runs.store, runs._records = self.store, records
        return runs

    def where(self, condition: str) -> "Runs":
        """The runs that meet a condition over columns and settings, such as ``layout.tp > 1 and status == "ok"``.

        Raises:
            ConfigError: it is no expression over these names.
        """
        return self._with(chosen_runs(self._records, condition, (), SHOWN))

    def sorted_by(self, *names: str) -> "Runs":
        """The runs sorted by columns or settings, the first decides; ``-NAME`` sorts the largest first.

        Raises:
            UsageError: a name is unknown.
        """
        return self._with(chosen_runs(self._records, None, run_names(",".join(names), "--sort", is_order=True), SHOWN))

    def rows(self, columns: Sequence[str] = SHOWN) -> List[Dict[str, Any]]:
        """One mapping for each run, of raw values by column or dotted setting; times are seconds since the epoch.

        Raises:
            UsageError: a name is unknown.
        """
        names = run_names(",".join(columns), "--columns")
        values = RunValues(self._records, names)
        return [{name: values.of(name)(record) for name in names} for record in self._records]

    def to_pandas(self, columns: Sequence[str] = SHOWN) -> Any:
        """``rows`` as a ``pandas.DataFrame``.

        Raises:
            UsageError: a name is unknown, or pandas is not installed.
        """
        return data_frame(self.rows(columns), run_names(",".join(columns), "--columns"))

    def directory(self, record: RunRecord) -> RecordedRun:
        """The run directory of one of these runs.

        Raises:
            UsageError: it was removed meanwhile.
        """
        return RecordedRun(self.store / record.run)

    @property
    def problems(self) -> Dict[str, str]:
        """The runs of which something could not be read, path below the store → what."""
        return {record.run: record.problem for record in self._records if record.problem}

    @property
    def columns(self) -> Sequence[str]:
        """The names of all columns; every setting of a run file is a name as well."""
        return RUN_COLUMNS

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self._records)

    def __repr__(self) -> str:
        damage = f", {len(self.problems)} of them damaged: see problems" if self.problems else ""
        return f"Runs({str(self.store)!r}, {len(self)} runs{damage})"
