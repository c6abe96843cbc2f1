"""Going on from a checkpoint: which one, whether it is this run's, and into this run's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.manifest import MANIFEST, Manifest, manifest_text, parse_manifest, read_manifest
from fugaku_gpt.checkpoint.reader import Checkpoint
from fugaku_gpt.checkpoint.retention import checkpoints_at, newest_valid
from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import RunConfig, config_values
from fugaku_gpt.errors import CheckpointError, RunFailed, UsageError
from fugaku_gpt.layout.flat import flat_layout_of
from fugaku_gpt.layout.shards import local_regions, logical_shapes
from fugaku_gpt.records.flight import START_UP
from fugaku_gpt.records.run import AUTO, NONE, RunDirectory, resumes_in_same_folder
from fugaku_gpt.training.startup import together
from fugaku_gpt.training.state import KINDS, Storage
from fugaku_gpt.training.trainer import Trainer

# of model: what decides which tensors there are, and what they mean
_SHAPE = ("layers", "hidden", "heads", "ffn_hidden", "seq_len", "vocab_size", "embedding_layernorm")
_TOLD = ("model", "layout", "training", "data")  # sections whose changes are said
_BUILD = ("torch", "blas", "instruction_set", "threads")


@dataclass(frozen=True)
class Found:
    """What a run can go on from, the same on every rank.

    Attributes:
        candidates: checkpoints, best first; those after the first are taken where the data of those before is damaged.
            Empty: the run begins.
        manifest: of the first.
        takes_over: the run goes on in the run directory that it was in.
        finished: that run has done all its iterations: there is nothing to do.
        said: what the reader of the log should know.
    """

    candidates: Tuple[Path, ...] = ()
    manifest: Optional[Manifest] = None
    takes_over: bool = False
    finished: bool = False
    said: Tuple[str, ...] = ()

    @property
    def kernels(self) -> Mapping[str, Any]:
        """What :func:`~fugaku_gpt.training.startup.kernels_in_use` said when it was saved."""
        kernels: Mapping[str, Any] = self.manifest.state.get("kernels", {}) if self.manifest is not None else {}
        return kernels


def look(config: RunConfig, out: Path, wanted: str, fingerprint: str, force_data: bool) -> Found:
    """What there is to go on from; for rank 0.

    Args:
        out: the run directory.
        wanted: ``none``, ``auto``, or a checkpoint's folder, or that of a run with checkpoints.
        fingerprint: of the training samples.
        force_data: go on although the samples are others.

    Raises:
        UsageError: there is nothing of what is wanted, all of it is damaged, or it does not fit this run.
    """
    if wanted == NONE:
        return Found()
    directory = RunDirectory(out)
    if wanted == AUTO:
        if directory.has_finished(config.training.iterations):
            return Found(takes_over=True, finished=True)
        paths = [info.path for info in list_checkpoints(directory.checkpoints_dir)]
        if not paths:
            return Found(takes_over=True)
    else:
        paths = checkpoints_at(Path(wanted))
    candidates, said = _whole_ones(paths)
    manifest = read_manifest(candidates[0])
    said += _fits(config, candidates[0], manifest, fingerprint, force_data)
    return Found(tuple(candidates), manifest, resumes_in_same_folder(directory, wanted), False, tuple(said))


def share(found: Optional[Found], world: Communicator) -> Found:
    """Rank 0's finding, on every rank; collective."""
    values = None
    if found is not None:
        values = {
            "candidates": [str(path) for path in found.candidates],
            "manifest": manifest_text(found.manifest).decode("ascii") if found.manifest is not None else None,
            "flags": [found.takes_over, found.finished],
            "said": list(found.said),
        }
    values = world.broadcast_json(values)
    candidates = tuple(Path(path) for path in values["candidates"])
    text = values["manifest"]
    manifest = parse_manifest(text.encode("ascii"), candidates[0] / MANIFEST) if text is not None else None
    takes_over, finished = values["flags"]
    return Found(candidates, manifest, takes_over, finished, tuple(values["said"]))


def go_on(trainer: Trainer, found: Found) -> Tuple[Path, Manifest, List[str]]:
    """Load the best candidate whose data is whole; collective. Each rank reads what it needs, and checks that.

    Returns:
        the checkpoint, its manifest, and why better ones were rejected.

    Raises:
        RunFailed: on every rank alike: there is none.
    """
    rejected: List[str] = []
    world, manifest = trainer.grid.world, found.manifest
    for path in found.candidates:
        if manifest is None:
            manifest = share(_again(path) if world.rank == 0 else None, world).manifest
        problem = "its manifest cannot be read" if manifest is None else load(trainer, path, manifest)
        if problem is None and manifest is not None:
            return path, manifest, rejected
        rejected.append(f"checkpoint {path.name} was rejected: {problem}")
        manifest = None
    raise RunFailed("; ".join(rejected) + "; begin anew with another --out")


def load(trainer: Trainer, path: Path, manifest: Manifest) -> Optional[str]:
    """Have the state of a checkpoint, whatever layout has written it; collective.

    Returns:
        why it cannot be had, on every rank alike: the trainer is then not to be used before another load.
    """
    config, place = trainer.config, trainer.grid.coordinates
    laid = flat_layout_of(config, place.pp)
    state = {
        "iteration": manifest.iteration,
        "consumed_samples": manifest.consumed_samples,
        "consumed_tokens": manifest.consumed_tokens,
        **manifest.state,
    }

    def read(checkpoint: Checkpoint, storage: Storage) -> None:
        flat = storage.values.detach()
        for part in local_regions(laid, config.layout.tp, place.tp, storage.first, storage.stop):
            trainer.grid.world.mark_phase(START_UP)  # it goes on, however slowly
            here = flat[part.first - storage.first : part.stop - storage.first]
            if storage.kind in KINDS[1:] and not checkpoint.has_tensor(storage.kind, part.name):
                here.zero_()  # weights from elsewhere
                continue
            checkpoint.read_region(storage.kind, part.name, part.region, here.numpy().reshape(part.region.shape))

    def fill() -> None:
        world = trainer.grid.world
        with Checkpoint(path, manifest, start_fraction=(world.rank + 0.5) / world.size) as checkpoint:
            trainer.fill(state, lambda storage: read(checkpoint, storage))

    try:
        together(trainer.grid.world, fill)
    except UsageError as error:
        return str(error)
    trainer.go_on(state)
    return None


def _whole_ones(paths: Sequence[Path]) -> Tuple[List[Path], List[str]]:
    """(checkpoints from the best one on whose manifest, lengths and headers are sound, why better ones are not)."""
    best, rejected = newest_valid(paths, deep=False)  # data is checked by whoever reads it
    said = [f"checkpoint {name} was rejected: {why}" for name, why in rejected]
    if best is None:
        raise UsageError("\n".join(["no checkpoint is whole; to begin anew, choose another --out", *said]))
    return list(paths[paths.index(best) :]), said


def _again(path: Path) -> Found:
    """Another candidate, as far as it can be read."""
    try:
        return Found((path,), read_manifest(path))
    except CheckpointError:
        return Found((path,))


def _fits(config: RunConfig, path: Path, manifest: Manifest, fingerprint: str, force_data: bool) -> List[str]:
    """What has changed since a checkpoint was saved.

    Raises:
        UsageError: something that may not.
    """
    then, now = manifest.config, config_values(config)
    shape = _shape(now["model"])
    others = {key: value for key, value in _shape(then.get("model", {})).items() if value != shape[key]}
    if others:
        list_of = "; ".join(f"model.{key}: {shape[key]}, but {value} there" for key, value in others.items())
        raise UsageError(f"{path}: is of another model: {list_of}")
    for name, wanted in logical_shapes(config.model).items():
        tensor = manifest.tensors.get(name)
        if tensor is None or tensor.shape != wanted or KINDS[0] not in tensor.kinds:
            raise UsageError(f"{path}: is of another model: it holds no weights {name} of shape {list(wanted)}")
    said = []
    changed = [
        f"{section}.{key} {then[section][key]} -> {value}"
        for section in _TOLD
        for key, value in now[section].items()
        if section in then and key in then[section] and then[section][key] != value
    ]
    if changed:
        said.append("changed since the checkpoint: " + ", ".join(changed))
    said += _data_of(config, path, manifest, fingerprint, force_data)
    return said


def _data_of(config: RunConfig, path: Path, manifest: Manifest, fingerprint: str, force_data: bool) -> List[str]:
    if not manifest.data_fingerprint:  # weights from elsewhere
        return []
    seed = manifest.config.get("training", {}).get("seed", config.training.seed)
    problem = ""
    if manifest.data_fingerprint != fingerprint:
        problem = "the corpus, data.weights or data.split is not that of the checkpoint"
    elif seed != config.training.seed:
        problem = f"training.seed {config.training.seed} gives another order of samples than the checkpoint's {seed}"
    if not problem:
        return []
    meaning = f"{problem}: its {manifest.consumed_samples} consumed samples would not be those that are left out now"
    if not force_data:
        raise UsageError(f"{path}: {meaning}; to go on all the same: --force-data")
    return [f"{meaning}; going on all the same"]


def _shape(model: Mapping[str, Any]) -> Dict[str, Any]:
    values = {key: model[key] for key in _SHAPE if key in model}
    if "ffn_hidden" in values and values["ffn_hidden"] is None:
        values["ffn_hidden"] = 4 * model["hidden"]
    return values


def build_of(environment: Mapping[str, Any]) -> Dict[str, Any]:
    """What of a run's environment its numbers depend on, from what ``environment.json`` holds."""
    build = environment["build"]
    return {
        **{key: build[key] for key in _BUILD if key in build},
        "threads": environment["ranks"][0]["threads"],
        "mpi": environment["mpi"]["library"],
        "fugaku_gpt": environment["fugaku_gpt"],
        "git_commit": environment["git_commit"],
    }


def other_build(then: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    """What makes a run that goes on round otherwise than the one that was saved."""
    return [f"{key} {then[key]} -> {now[key]}" for key in _BUILD if key in then and then[key] != now.get(key)]
