"""The run directory: ``config.yaml``, ``environment.json``, ``metrics.jsonl``, ``result.json``.

``metrics.jsonl`` has the lines of :mod:`fugaku_gpt.records.metrics`.

``result.json`` is written once, when the run has ended, for whatever reason; a run directory without it is a run that
is still running or was killed. When a run is resumed, its last result becomes ``result.<number>.json``.
``operators.json`` holds where an iteration's time goes, if requested (:mod:`fugaku_gpt.records.operators`).
``.claim.<number>`` names the process that writes here (see :mod:`fugaku_gpt.records.claim`).
"""

from __future__ import annotations

import re
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from fugaku_gpt.checkpoint import CHECKPOINTS
from fugaku_gpt.errors import CheckpointError, UsageError
from fugaku_gpt.harmless import harmless
from fugaku_gpt.input_files import read_text, resolved
from fugaku_gpt.limits import YAML_TEXT, cut
from fugaku_gpt.records.claim import AlreadyClaimed, claim_folder, current_process, release_claim
from fugaku_gpt.records.files import (
    create_json_atomically,
    write_json_atomically,
    write_text_atomically,
)
from fugaku_gpt.records.metrics import last_line, read_lines, without_superseded
from fugaku_gpt.typed_json import check_times, is_number, record_of, value_of
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 1
CLAIM = ".claim"
AUTO, NONE = "auto", "none"  # values of --resume that are not paths

OK = "ok"
FAILED = "failed"
REFUSED = "refused"  # the configuration was not valid: no rank was started
TIMEOUT = "timeout"
OUT_OF_MEMORY = "oom"
INTERRUPTED = "interrupted"
HUNG = "hung"  # no rank made progress any more, and the ranks have ended themselves
LOST = "lost"  # its job, or all of its processes, are gone, and there is no record of how it ended
STATUSES = (OK, FAILED, REFUSED, TIMEOUT, OUT_OF_MEMORY, INTERRUPTED, HUNG, LOST)


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: one of ``STATUSES``.
        reason: one line for a person; empty where status is ok, unless a process was killed after that.
        started, ended: seconds since the epoch.
        iterations: number of finished iterations.
        summary: figures over the run (see :func:`fugaku_gpt.records.summary.summarise`); empty if nothing was measured.
        judged: whether the result was inferred from the job's end, since the ranks have left none; a result by a rank
            replaces it.
        rank, node: rank whose failure has ended the other ranks, and its host; None and empty if there is no single
            one, or if it is unknown.
        exception: type and first line of its error, or the signal that killed it.
        last_checkpoint: name of the newest checkpoint at the end; empty if there was none.
    """

    status: str
    reason: str
    started: float
    ended: float
    iterations: int = 0
    summary: Dict[str, Any] = field(default_factory=dict)
    judged: bool = False
    rank: Optional[int] = None
    node: str = ""
    exception: str = ""
    last_checkpoint: str = ""
    version: int = VERSION

    @property
    def is_resumable(self) -> bool:
        """True if the ranks have stopped early with a complete checkpoint, and have recorded so."""
        return self.status == INTERRUPTED and self.reason.startswith(STOPPED)

    @property
    def signal(self) -> Optional[int]:
        """Number of the signal that killed the rank; None if no signal is recorded."""
        number = re.match(r"signal (\d+) ", self.exception)
        return int(number[1]) if number else None


# prefix of the reason of a run that has stopped with a complete checkpoint; job scripts search for it too
STOPPED = "stopped: "
# time for which a rank that has recorded a failure lets rank 0 report it too, before all ranks are ended
SUMMARY_SECONDS = 0.75


def failure_lines(result: Result) -> List[str]:
    """Describe a failure in two lines of a log: the reason, and the checkpoint from which the run can be resumed. They
    are printed by ranks as well: what the reason quotes cannot steer a terminal."""
    where = f"on {result.node}, " if result.node else ""
    checkpoint = result.last_checkpoint or "none"
    lines = (
        f"fugaku-gpt: {result.reason}",
        f"  {where}last iteration {result.iterations}, last checkpoint: {checkpoint}",
    )
    return list(map(harmless, lines))


@dataclass(frozen=True)
class _Created:
    """Files that :meth:`RunDirectory.create` has made, and those that it has replaced."""

    holder: str
    folder: bool
    files_before: Set[Path]
    config: Optional[str] = None  # previous configuration, if a run is resumed
    archived_result: Optional[Path] = None


class RunDirectory:
    """One run's folder; reading tolerates lines that a killed run has left half-written."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._made: Optional[_Created] = None

    @property
    def config_file(self) -> Path:
        """File of the run's configuration, with every field."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """File of the run's metrics, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def log_file(self) -> Path:
        """File of the ranks' output, if their launcher has stored it."""
        return self.path / "log.txt"

    @property
    def flight_dir(self) -> Path:
        """Folder of the ranks' flight recorders."""
        return self.path / "flight"

    @property
    def trace_dir(self) -> Path:
        """Folder of the ranks' traces (see :mod:`fugaku_gpt.records.trace`)."""
        return self.path / "trace"

    @property
    def events_dir(self) -> Path:
        """Folder of the run's event files (see :mod:`fugaku_gpt.records.tensorboard`)."""
        return self.path / "tensorboard"

    @property
    def order_dir(self) -> Path:
        """Folder of the orders that all ranks map, of samples in Megatron's order and of the documents of large corpora
        (see :mod:`fugaku_gpt.data.index_files`)."""
        return self.path / "order"

    @property
    def stacks_dir(self) -> Path:
        """Folder in which ranks that hang leave their Python stacks, ``rank-NNNNNN.txt``, and the diagnosis."""
        return self.path / "stacks"

    @property
    def checkpoints_dir(self) -> Path:
        """Folder of the run's checkpoints (see :mod:`fugaku_gpt.checkpoint.directory`)."""
        return self.path / CHECKPOINTS

    def last_iteration(self) -> int:
        """The newest iteration that has a line of metrics; 0 if there is none."""
        line = last_line(self.metrics_file, "iteration")
        return int(line["iteration"]) if line is not None else 0

    def last_checkpoint(self) -> str:
        """Name of the checkpoint that was written last; empty if there is none.

        This is the one that the tracker names; if the tracker is missing, because its writer was killed, or if that
        checkpoint was removed, it is the newest by name.
        """
        from fugaku_gpt.checkpoint.directory import (  # here: readers of results do without NumPy
            list_checkpoints,
            tracked_checkpoint,
        )

        tracked = tracked_checkpoint(self.checkpoints_dir)
        if tracked is not None:
            return tracked.name
        try:
            return next((info.path.name for info in list_checkpoints(self.checkpoints_dir)), "")
        except CheckpointError:  # the folder cannot be read
            return ""

    def create(self, config_yaml: str, holder: Optional[str] = None, *, resume: bool = False) -> None:
        """Make the folder, claim it, and write the configuration; if several processes do so at once, one succeeds.

        A folder that was prepared for a job, or left by a run that was killed before its first line, can be used.

        Args:
            holder: name shared by processes that belong together: the launcher creates the directory, and so does
                rank 0.
            resume: continue in the folder of a run that has ended or was killed, if there is one.

        Raises:
            UsageError: the folder already holds a finished or started run, another process is about to write there, or
                it cannot be made.
        """
        if not resume:
            self._refuse_a_run()
        holder = holder if holder is not None else uuid.uuid4().hex
        try:
            is_new_folder = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            files_before = {path for path in (self.config_file, self.log_file) if path.exists()}
            before = self.result() if resume else None
            claim_folder(self.path, CLAIM, current_process(holder), ended=before.ended if before is not None else None)
            config = read_text(self.config_file, YAML_TEXT) if resume and self.config_file in files_before else None
            self._made = _Created(
                holder, is_new_folder, files_before, config, self._archive_result() if resume else None
            )
            if not resume:
                self._refuse_a_run()  # of a process that had the claim until this moment
            write_text_atomically(self.config_file, config_yaml)
        except AlreadyClaimed as taken:
            raise UsageError(
                f"{self.path}: {taken} is {'writing' if resume else 'starting'} a run there; choose another --out, or, "
                f"if that process is gone, remove {taken.file}"
            ) from None
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written: {error.strerror}; choose another --out") from None
        except UnicodeDecodeError:
            raise UsageError(f"{self.config_file}: not UTF-8 text; choose another --out") from None

    def remove_flight_records(self) -> None:
        """Remove the flight records and stacks of an earlier start's ranks before the ranks of this one begin: there
        may be fewer ranks this time, and leftover files would be taken for theirs.

        Raises:
            UsageError: a file cannot be removed.
        """
        try:
            for path in (*self.flight_dir.glob("*/rank-*.flight"), *self.stacks_dir.glob("rank-*.txt")):
                path.unlink()
        except OSError as error:
            raise UsageError(f"{error.filename}: cannot be removed: {error.strerror}") from None

    def discard(self) -> None:
        """Remove the files that this object's :meth:`create` has made, and the log, of a run that was refused before it
        had begun. Files that were there before stay, and so does everything if another process has the folder."""
        made, self._made = self._made, None
        if made is None or not release_claim(self.path, CLAIM, made.holder):
            return
        for path in (self.config_file, self.log_file):
            if path not in made.files_before and path.exists():
                path.unlink()
        if made.config is not None:
            write_text_atomically(self.config_file, made.config)
        if made.archived_result is not None:
            made.archived_result.rename(self.path / "result.json")
        if made.folder and not any(self.path.iterdir()):
            self.path.rmdir()

    def _refuse_a_run(self) -> None:
        if self.metrics_file.exists() or (self.path / "result.json").exists():
            raise UsageError(
                f"{self.path}: already holds a run; choose another --out, continue it (--resume auto), or remove it"
            )

    def _archive_result(self) -> Optional[Path]:
        """Rename the result of the run's last end, if there is one; returns its new path."""
        result = self.path / "result.json"
        if not result.exists():
            return None
        numbers = [path.name.split(".")[1] for path in self.path.glob("result.*.json")]
        number = 1 + max((int(text) for text in numbers if text.isdecimal()), default=0)
        archived = self.path / f"result.{number}.json"
        result.rename(archived)
        return archived

    def has_finished(self, iterations: int) -> bool:
        """True if the run has ended well after at least this number of iterations."""
        result = self.result()
        return result is not None and result.status == OK and result.iterations >= iterations

    def write_environment(self, environment: Dict[str, Any]) -> None:
        """Record the environment as it is: builds, threads, affinity, MPI, toggles."""
        write_json_atomically(self.path / "environment.json", {"version": VERSION, **environment})

    def write_result(self, result: Result, *, replace: bool = True) -> bool:
        """Record how the run ended. Returns whether the result was written.

        Args:
            replace: False for ranks: the first failure is the cause, and later failures of other ranks follow from it.
                The launcher replaces the result, since it knows the output of the ranks and how they ended.

        Raises:
            OSError: it cannot be written, or the present one cannot be read.
        """
        path = self.path / "result.json"
        if replace:
            if not self._has_recorded(result):
                write_json_atomically(path, asdict(result))
            return True
        if create_json_atomically(path, asdict(result)):
            return True
        present = self.result()
        if present is None or present.judged:  # concluded by another process, which knew less than a rank
            write_json_atomically(path, asdict(result))
            return True
        return False

    def _has_recorded(self, result: Result) -> bool:
        try:
            return self.result() == result
        except UsageError as error:
            if isinstance(error.__cause__, OSError):  # it may hold what is true, and is not replaced by a guess
                cause = error.__cause__
                raise OSError(cause.errno, cause.strerror, str(self.path / "result.json")) from None
            return False  # damaged: it is replaced

    def environment_stamp(self) -> Tuple[int, int]:
        """Return what changes when the ranks of another start record their environment, after all of them have joined
        MPI; it does not depend on the clock of a file server. (0, 0): there is no record."""
        try:
            status = (self.path / "environment.json").stat()
        except OSError:
            return 0, 0
        return status.st_ino, status.st_mtime_ns

    def environment(self) -> Optional[Dict[str, Any]]:
        """Read the record of :meth:`write_environment`, or None if there is none.

        Raises:
            UsageError: the file is not of this format.
        """
        return read_versioned_json(
            self.path / "environment.json",
            "a record of a run's environment",
            (VERSION,),
            _environment_of,
            mend="remove it",
            is_missing_if_empty=True,
        )

    def result(self) -> Optional[Result]:
        """Read how the run ended; None if it has not, or was killed.

        Raises:
            UsageError: the file is not of this format.
        """
        return read_versioned_json(
            self.path / "result.json",
            "the result of a run",
            (VERSION,),
            _result_of,
            mend="remove it to have the run counted as not finished",
            is_missing_if_empty=True,
        )

    def metrics(self, kind: str) -> List[Dict[str, Any]]:
        """Read the lines of one kind, in order, without a last line that a kill has cut short, and without lines of
        iterations that were done again after the run was resumed."""
        return [line for line in without_superseded(read_lines(self.metrics_file)) if line.get("kind") == kind]


def resumes_in_same_folder(directory: RunDirectory, resume_from: str) -> bool:
    """True if a run that resumes from ``auto``, ``none`` or a path does so in the folder that it had before.

    Raises:
        UsageError: it does, and the folder has newer checkpoints, which would later be taken for this run's.
    """
    if resume_from in (AUTO, NONE):
        return resume_from == AUTO
    path, own = resolved(Path(resume_from)), resolved(directory.checkpoints_dir)
    if path in (own, resolved(directory.path)):
        return True
    if path.parent != own:
        return False
    from fugaku_gpt.checkpoint.directory import list_checkpoints  # here: readers of results do without NumPy

    newer = [info.path.name for info in list_checkpoints(own)]
    newer = newer[: newer.index(path.name)] if path.name in newer else newer
    if newer:
        raise UsageError(
            f"{directory.path}: holds a newer checkpoint, {newer[0]}; resume from {path.name} in another --out, or "
            "remove the newer ones first"
        )
    return True


def _environment_of(values: Mapping[str, Any]) -> Dict[str, Any]:
    """The values of an environment; those that readers look into are objects, or lists of objects.

    Raises:
        ValueError: one of these is not.
    """
    for name in ("toggles", "ranks"):
        value_of(Optional[Tuple[Dict[str, Any], ...]], values.get(name), name)
    for name in ("build", "mpi", "precision"):
        value_of(Optional[Dict[str, Any]], values.get(name), name)
    for name, kind in (("memory_limit_bytes", float), ("processor", str), ("system", str)):
        value_of(Optional[kind], values.get(name), name)
    for rank in values.get("ranks") or ():
        value_of(Optional[Tuple[int, ...]], rank.get("affinity"), "affinity of a rank")
        value_of(Optional[int], rank.get("threads"), "threads of a rank")
    return dict(values)


def _result_of(values: Mapping[str, Any]) -> Result:
    """Build the result from the values of a file of this version; fields that only later versions have are ignored.

    Raises:
        ValueError: the status is none of ``STATUSES``, or a value is not of its type.
    """
    if values["status"] not in STATUSES:
        raise ValueError(f"its status is {values['status']!r}; valid: {', '.join(STATUSES)}")
    result = record_of(Result, values)
    check_times(started=result.started, ended=result.ended)
    for name, figure in result.summary.items():
        if figure is not None and not is_number(figure):
            raise ValueError(f"summary.{name} is {cut(repr(figure))}, not a number")
    return result
