"""Finds the model and the tokenizer that a path names: a run, a folder of checkpoints, or a checkpoint."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Sequence

from fugaku_gpt.checkpoint.hugging_face import CONFIG, INDEX, WEIGHTS
from fugaku_gpt.checkpoint.hugging_face_tokenizer import TOKENIZER
from fugaku_gpt.checkpoint.manifest import Manifest, read_manifest
from fugaku_gpt.checkpoint.recorded_model import recorded_model
from fugaku_gpt.checkpoint.retention import named_checkpoints_at, newest_valid
from fugaku_gpt.config import ModelConfig, RunConfig, load_run_config
from fugaku_gpt.config.schema import DECODER
from fugaku_gpt.data.corpus import prepared_folder, tokenizer_of_corpora
from fugaku_gpt.errors import CheckpointError, ConfigError, DataError, UsageError
from fugaku_gpt.limits import cut


class ModelSource(NamedTuple):
    """A checkpoint, and what it says of itself.

    Attributes:
        checkpoint: its folder.
        manifest: its manifest.
        notes: checkpoints that were left out, and why.
    """

    checkpoint: Path
    manifest: Manifest
    notes: List[str]


class Joining(NamedTuple):
    """Calls by which a rank joins the others.

    Attributes:
        on_joined: called once all ranks have joined MPI.
        check_node: called with the run and the ranks of this node before the model is loaded; raises a ``UsageError``
            for replicas that do not fit into the memory of the node.
    """

    on_joined: Callable[[], None] = lambda: None
    check_node: Callable[[RunConfig, Sequence[int]], None] = lambda config, ranks: None


class ReplicaLayout(NamedTuple):
    """How ranks share a model.

    Attributes:
        tp, pp: tensor- and pipeline-parallel ranks of a replica.
        dtype: the type in which they compute.
        threads: threads of each rank.
    """

    tp: int = 1
    pp: int = 1
    dtype: str = "float32"
    threads: int = 1


def find_model(path: Path, name: Optional[str] = None) -> ModelSource:
    """Find the newest valid checkpoint at a path, or the one of a name (``best``, or that of its folder).

    Raises:
        CheckpointError: there is none, or its model is no decoder.
        UsageError: there is a model of another program, which is to be imported.
    """
    _refuse_foreign(path)
    checkpoint, rejected = newest_valid(named_checkpoints_at(path, name), deep=False)
    if checkpoint is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise CheckpointError(f"{path}: none of its checkpoints is complete: {reasons}")
    manifest = read_manifest(checkpoint)
    model = manifest.config.get("model")
    kind = model.get("kind", DECODER) if isinstance(model, dict) else DECODER
    if kind != DECODER:
        raise CheckpointError(f"{checkpoint}: its model is a {cut(str(kind))} (model.kind), which predicts no tokens")
    return ModelSource(checkpoint, manifest, [f"{name} is left out: {why}" for name, why in rejected])


def _refuse_foreign(path: Path) -> None:
    """Refuse a model of another program, and say how it becomes one of ours: an import rewrites all weights, which no
    command should do anew each time.

    Raises:
        UsageError: the path is a Hugging Face folder, or a GGUF file.
    """
    is_folder = (path / CONFIG).is_file() and any((path / name).is_file() for name in (WEIGHTS, INDEX))
    if not is_folder and not (path.suffix == ".gguf" and path.is_file()):
        return
    imported = f"runs/{path.absolute().stem if not is_folder else path.absolute().name}"
    command = f"fugaku-gpt ckpt import {shlex.quote(str(path))} {shlex.quote(f'{imported}/checkpoints')}"
    kind = "a Hugging Face folder" if is_folder else "a GGUF file"
    raise UsageError(f"{path}: is {kind}; import it, and name what becomes of it, {shlex.quote(imported)}: {command}")


def model_of(source: ModelSource) -> ModelConfig:
    """Return the model that a checkpoint holds.

    Raises:
        CheckpointError: it does not say which, or that is no valid model.
    """
    return recorded_model(source.checkpoint, source.manifest)


def inference_config(source: ModelSource, layout: ReplicaLayout, replicas: int) -> RunConfig:
    """Return a run of replicas of the model, without dropout.

    Raises:
        CheckpointError: the checkpoint does not say which model it holds, or that is no valid model.
        ConfigError: the model cannot be cut like that.
    """
    model = asdict(model_of(source))
    settings = {f"model.{name}": value for name, value in model.items() if value is not None}
    settings.update({"model.dropout": 0, "model.attention_dropout": 0, "training.dtype": layout.dtype})
    settings.update({"layout.dp": replicas, "layout.tp": layout.tp, "layout.pp": layout.pp})
    settings.update({"training.global_batch": replicas, "training.micro_batch": 1})
    try:
        return load_run_config(overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()])
    except ConfigError as error:
        raise ConfigError(f"{source.checkpoint}: its model does not work in this layout:\n{error}") from None


def has_read_documents(source: ModelSource) -> bool:
    """Whether the model was trained here, on documents that follow one another."""
    return bool(_corpora_of(source))


def _corpora_of(source: ModelSource) -> List[str]:
    data = source.manifest.config.get("data")
    paths = data.get("paths") if isinstance(data, dict) else None
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


def tokenizer_at(path: Path) -> Path:
    """Return the ``tokenizer.json`` that a user names, by itself or by its folder.

    Raises:
        UsageError: there is none.
    """
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{file}: no such file; --tokenizer takes a tokenizer.json, or a folder that holds one")
    return file


def find_tokenizer(source: ModelSource, named: Optional[Path]) -> Path:
    """Return the ``tokenizer.json`` of a model: the named one (a file, or a folder that holds it), the one beside its
    weights, or that of its corpus.

    Raises:
        UsageError: there is none.
    """
    if named is not None:
        return tokenizer_at(named)
    beside = source.checkpoint / TOKENIZER
    if beside.is_file():
        return beside
    try:
        return tokenizer_of_corpora(_corpora_of(source)).path
    except DataError as error:
        raise UsageError(f"{source.checkpoint}: has no tokenizer: {error}; name one with --tokenizer FILE") from None


def tokenizer_of_corpus(path: str) -> Optional[Path]:
    """Return the ``tokenizer.json`` of a corpus; None if it is a Megatron pair, which has none.

    Raises:
        DataError: the corpus is damaged.
    """
    return tokenizer_of_corpora([path]).path if prepared_folder(path) is not None else None
