"""Validation of a run that does not state whether it has any: where its corpora have a part for it."""

from __future__ import annotations

from typing import List, Tuple

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.source import RunSource
from fugaku_gpt.errors import DataError

_KEY = "training.eval_interval"


def validation_of_run(source: RunSource, config: RunConfig) -> Tuple[List[str], str]:
    """The override that validates a run at its start and its end, and a note about it; ([], "") if the run states it.

    The override is missing, and the note says why, where a corpus has no validation part.
    """
    if _KEY in source.written_keys():
        return [], ""
    is_of_grids = config.model.is_grid_classifier
    if is_of_grids and not config.data.split[1]:
        return [], "no validation: data.split has no share for it"
    if not config.data.paths and not is_of_grids:
        return [], ""
    from fugaku_gpt.data.grid_samples import open_grid_samples
    from fugaku_gpt.data.sample_checks import NoSamples
    from fugaku_gpt.data.samples import open_samples, surely_has_samples

    try:
        if is_of_grids:
            open_grid_samples(config, "valid")
        elif not surely_has_samples(config, "valid"):  # each rank of a launch asks: a large index is not read for it
            open_samples(config, "valid")
    except NoSamples as error:
        return [], f"no validation: {error}"
    except DataError:  # the ranks report it
        return [], ""
    return _at_start_and_end(config)


def _at_start_and_end(config: RunConfig) -> Tuple[List[str], str]:
    iterations = config.training.iterations
    note = f"{_KEY} is {iterations}: validation at the start and the end; --set {_KEY}=null: none"
    return [f"{_KEY}={iterations}"], note
