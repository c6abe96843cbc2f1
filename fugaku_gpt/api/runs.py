"""Runs: loading one from its files, training it on this machine, and reading a run directory."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from fugaku_gpt.api.settings import FilePath, Settings, setting_texts
from fugaku_gpt.api.stopping import pass_on_signal
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.data.corpus_settings import with_corpus_settings
from fugaku_gpt.errors import EXIT_OK, EXIT_RESUME, DataError, RunFailed, UsageError, missing_package
from fugaku_gpt.formulas.parameters import run_name
from fugaku_gpt.launch.local_run import is_complete, train_on_this_machine
from fugaku_gpt.launch.run_to_train import refuse_inside_launch, run_to_train
from fugaku_gpt.planner.trainer.memory_check import local_node_limits, refuse_too_large
from fugaku_gpt.records.metrics import read_lines, without_superseded
from fugaku_gpt.records.run import NONE, REFUSED, Result, RunDirectory

__all__ = ["RecordedRun", "Result", "Run", "load_run", "train"]


@dataclass(frozen=True)
class Run:
    """A run that is to be made, as ``load_run`` returns it: what its file was when it was loaded, and no later changes.

    Attributes:
        source: the run file with its settings, the preset and the settings that it comes from.
        config: the whole configuration, with the vocabulary and the validation of its corpora where it states none.
        notes: what was chosen for it, one line each.
    """

    source: RunSource
    config: RunConfig
    notes: Tuple[str, ...] = ()

    def with_settings(self, settings: Settings) -> "Run":
        """The same run with further settings, which win over its own.

        Raises:
            ConfigError: a setting is unknown, its value is not valid, or the settings do not fit together.
        """
        return _loaded(replace(self.source, settings=(*self.source.settings, *setting_texts(settings))))


def load_run(file: Optional[FilePath] = None, *, preset: Optional[str] = None, settings: Settings = ()) -> Run:
    """Load a run from a run file, a preset and settings, each of which may be left out. The file is read once, here.

    Args:
        file: a run file; or a run directory, for the run that was made there.
        preset: name of the preset to start from.
        settings: settings over both: a mapping such as ``{"training.lr": 1e-4}``, or texts such as
            ``["training.lr=1e-4"]``.

    Raises:
        ConfigError: the file, the preset or a setting is not valid; one line for each mistake, with the valid values.
    """
    path = Path(file) if file is not None else None
    if path is not None and path.is_dir():
        path = path / "config.yaml"
    return _loaded(RunSource(path, preset, setting_texts(settings)).as_read())


def _loaded(source: RunSource) -> Run:
    config = source.load()
    notes: List[str] = []
    with contextlib.suppress(DataError):  # whoever reads the corpus reports it
        config, notes = with_corpus_settings(source, config)
    return Run(source, config, tuple(notes))


class RecordedRun:
    """A run directory: what a run or its job has left behind, read anew at each access.

    Attributes:
        path: its folder.
    """

    def __init__(self, path: FilePath) -> None:
        """Name a run directory.

        Raises:
            UsageError: the folder is none.
        """
        self.path = Path(path)
        self._directory = RunDirectory(self.path)
        if not self._directory.config_file.exists():
            raise UsageError(f"{self.path}: not a run directory: it has no config.yaml")

    def __repr__(self) -> str:
        return f"RecordedRun({str(self.path)!r})"

    @property
    def config(self) -> RunConfig:
        """The run's configuration.

        Raises:
            ConfigError: its file is not valid.
        """
        return load_run_config(self._directory.config_file)

    @property
    def result(self) -> Optional[Result]:
        """How the run ended; None if it has not, or was killed.

        Raises:
            UsageError: the file is damaged.
        """
        return self._directory.result()

    @property
    def environment(self) -> Optional[Dict[str, Any]]:
        """The environment, as its ranks have recorded it; None if they have not begun.

        Raises:
            UsageError: the file is damaged.
        """
        return self._directory.environment()

    @property
    def log_file(self) -> Path:
        """The file of the ranks' output, if their launcher has stored it."""
        return self._directory.log_file

    def metrics(self, kind: str = "iteration") -> List[Dict[str, Any]]:
        """The lines of ``metrics.jsonl`` of one kind, without those that a resumed run has done again.

        Args:
            kind: ``iteration`` for the logged iterations, ``validation`` for validations; see the record formats.

        Raises:
            UsageError: a line is damaged.
        """
        lines = without_superseded(read_lines(self._directory.metrics_file))
        return [line for line in lines if line.get("kind") == kind]


def train(
    run: Run,
    out: Optional[FilePath] = None,
    *,
    ranks: Optional[int] = None,
    resume: str = NONE,
    force_data: bool = False,
    on_line: Optional[Callable[[str], None]] = None,
) -> RecordedRun:
    """Train a run on this machine, and wait for its end, as ``fugaku-gpt train --ranks`` does.

    The ranks are processes that ``mpirun`` starts. Ctrl-C and SIGTERM stop them after their iteration, with a
    checkpoint, if the main thread of the program waits here: it alone sees signals. When they have ended, the program
    gets the signal itself: KeyboardInterrupt at Ctrl-C, and at SIGTERM its end, or a call of its handler. SIGUSR1 stops
    the run alone.

    Args:
        out: run directory; default: ``runs/NAME-TIME``.
        ranks: number of ranks, which are data parallel unless the run sets ``layout.dp``; default: those of its layout.
        resume: ``auto`` to continue in ``out``, or the path of a checkpoint or run.
        force_data: whether to resume even if the corpus is not that of the checkpoint.
        on_line: called with each line that the ranks print.

    Returns:
        The run's directory. The run has ended well, or, where its result is resumable, has stopped with a checkpoint.

    Raises:
        UsageError: it was refused: nothing has been written.
        RunFailed: it failed; the directory has its log and its result.
        KeyboardInterrupt: it was stopped by Ctrl-C; ``resume="auto"`` continues.
    """
    named = Path(out) if out is not None else None
    config = run_to_train(run.source, (), named, ranks, resume).config
    refuse_inside_launch(config.layout.ranks)
    directory = named if named is not None else Path("runs") / f"{run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    if is_complete(directory, config, resume):
        return RecordedRun(directory)

    def check() -> None:
        refuse_too_large(config, local_node_limits(), range(config.layout.ranks))

    try:
        ended = train_on_this_machine(config, directory, check, resume, force_data, on_line)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        raise missing or error from None
    pass_on_signal(ended.outcome.stopped_by)
    ended.raise_if_ended()
    if ended.problem:
        raise RunFailed(ended.problem)
    if ended.result.status == REFUSED:
        raise UsageError(ended.result.reason)
    if ended.code not in (EXIT_OK, EXIT_RESUME):
        raise RunFailed(f"{directory}: {ended.result.status}: {ended.result.reason}")
    return RecordedRun(directory)
