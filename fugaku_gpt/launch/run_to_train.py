"""The run that a user wants to train, from its files and overrides to a configuration that ranks can start with."""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.data.corpus_settings import with_corpus_settings
from fugaku_gpt.errors import UsageError
from fugaku_gpt.machine.rank import launched_rank
from fugaku_gpt.records.run import AUTO, NONE


class RunToTrain(NamedTuple):
    """A run's configuration, and what was chosen for it.

    Attributes:
        notes: the vocabulary and the validation that it has of its corpora.
        replicas_note: the number of replicas that its ranks make; empty where the run states it.
    """

    config: RunConfig
    notes: Tuple[str, ...]
    replicas_note: str = ""


def run_to_train(
    source: RunSource,
    overrides: Sequence[str] = (),
    out: Optional[Path] = None,
    ranks: Optional[int] = None,
    resume: str = NONE,
) -> RunToTrain:
    """Load a run that is to be trained.

    Args:
        overrides: ``key=value`` texts over the source.
        out: the run directory, if it is named.
        ranks: number of ranks to start; None where they are there, or are those of the layout. They are data parallel
            unless the run sets ``layout.dp``.
        resume: ``none``, ``auto``, or the path of a checkpoint or run.

    Raises:
        UsageError: the run is not valid, its layout has another number of ranks, or ``auto`` has no directory.
        DataError: a corpus is damaged.
    """
    chosen, replicas_note = list(overrides), ""
    if ranks is not None and "layout.dp" not in source.written_keys():
        replicas, replicas_note = _data_parallel(source.load(*chosen, check=False), ranks)
        chosen += replicas
    config = source.load(*chosen)
    resume_from = out if resume == AUTO else Path(resume) if resume != NONE else None
    config, notes = with_corpus_settings(source, config, chosen, resume_from)
    if ranks is not None and ranks != config.layout.ranks:
        raise UsageError(_wrong_ranks_message(config, ranks))
    if resume == AUTO and out is None:
        raise UsageError("--resume auto: needs --out, the run directory to resume in")
    return RunToTrain(config, tuple(notes), replicas_note)


def refuse_inside_launch(ranks: int) -> None:
    """Refuse to start ranks on a rank of a launch, as each would start ranks of its own; a launch of one may.

    Raises:
        UsageError: a launcher has started this process as one of several.
    """
    launched = launched_rank()
    if launched is None or launched.ranks == 1:
        return
    count = f"{launched.ranks} ranks" if launched.ranks is not None else "this rank"
    variables = " and ".join(launched.variables)
    raise UsageError(
        f"--ranks {ranks}: a launcher has started {count}, by {variables}; leave --ranks out under it, or unset these"
    )


def _data_parallel(config: RunConfig, ranks: int) -> Tuple[List[str], str]:
    """The override that makes data-parallel replicas of the ranks that a run leaves over, and a note about it."""
    layout = config.layout
    replicas, rest = divmod(ranks, layout.tp * layout.pp)
    if rest or replicas in (0, layout.dp):
        return [], ""
    return [f"layout.dp={replicas}"], f"{ranks} ranks, and layout.dp is not set: layout.dp={replicas}"


def _wrong_ranks_message(config: RunConfig, ranks: int) -> str:
    layout = config.layout
    return (
        f"layout.dp {layout.dp} * layout.tp {layout.tp} * layout.pp {layout.pp} = {layout.ranks} ranks, "
        f"but there are {ranks}; "
        f"valid: {layout.ranks} ranks, or --set layout.dp=... and layout.tp=... that make {ranks}"
    )
