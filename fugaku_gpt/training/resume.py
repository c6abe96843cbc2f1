"""Resumes from a checkpoint: chooses it, checks that it fits this run, and loads it into this run's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.manifest import MANIFEST, Manifest, manifest_text, parse_manifest, read_manifest
from fugaku_gpt.checkpoint.reader import Checkpoint
from fugaku_gpt.checkpoint.retention import checkpoints_at, newest_valid
from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import RunConfig, config_values
from fugaku_gpt.config.schema import MEGATRON_ORDER
from fugaku_gpt.errors import CheckpointError, RunFailed, UsageError
from fugaku_gpt.layout.flat import flat_layout_of
from fugaku_gpt.layout.shards import local_regions, logical_shapes
from fugaku_gpt.records.flight import START_UP
from fugaku_gpt.records.run import AUTO, NONE, RunDirectory, resumes_in_same_folder
from fugaku_gpt.training.startup import collective_try
from fugaku_gpt.training.state import KINDS, Storage
from fugaku_gpt.training.trainer import Trainer

# fields of the model section that decide which tensors exist, and what they mean
_SHAPE_KEYS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "seq_len", "vocab_size", "embedding_layernorm",
    "norm", "qk_norm", "positions", "mlp", "biases", "tied_embeddings", "kind", "classes",
)  # fmt: skip
_REPORTED_SECTIONS = ("model", "layout", "training", "data")  # sections whose changes are reported
_BUILD_KEYS = ("torch", "blas", "instruction_set", "threads")


@dataclass(frozen=True)
class ResumePlan:
    """The checkpoints from which a run can resume, the same on every rank.

    Attributes:
        candidates: checkpoints, best first; the later ones are used if the data of those before is damaged. Empty if
            the run starts from its beginning.
        manifest: manifest of the first candidate.
        in_same_directory: the run continues in its own run directory.
        is_finished: the run has done all its iterations, so there is nothing to do.
        messages: lines for the log.
    """

    candidates: Tuple[Path, ...] = ()
    manifest: Optional[Manifest] = None
    in_same_directory: bool = False
    is_finished: bool = False
    messages: Tuple[str, ...] = ()

    @property
    def kernels(self) -> Mapping[str, Any]:
        """The result of :func:`~fugaku_gpt.training.startup.kernels_in_use` when the checkpoint was saved."""
        kernels: Mapping[str, Any] = self.manifest.state.get("kernels", {}) if self.manifest is not None else {}
        return kernels


def find_checkpoint(
    config: RunConfig, out: Path, resume: str, has_fingerprint: Callable[[str], bool], force_data: bool
) -> ResumePlan:
    """Find the checkpoints from which the run can resume; for rank 0.

    Args:
        out: the run directory.
        resume: ``none``, ``auto``, the folder of a checkpoint, or the folder of a run with checkpoints.
        has_fingerprint: whether a recorded fingerprint is that of the training samples.
        force_data: resume although the samples differ.

    Raises:
        UsageError: the requested checkpoint does not exist, is damaged, or does not fit this run.
    """
    if resume == NONE:
        return ResumePlan()
    directory = RunDirectory(out)
    in_same_directory = resumes_in_same_folder(directory, resume)
    if in_same_directory and directory.has_finished(config.training.iterations):
        return ResumePlan(in_same_directory=True, is_finished=True)
    if resume == AUTO:
        paths = [info.path for info in list_checkpoints(directory.checkpoints_dir)]
        if not paths:
            return ResumePlan(in_same_directory=True)
    else:
        paths = checkpoints_at(Path(resume))
    candidates, messages = _valid_checkpoints(paths)
    manifest = read_manifest(candidates[0])
    messages += _check_config(config, candidates[0], manifest, has_fingerprint, force_data)
    return ResumePlan(tuple(candidates), manifest, in_same_directory, False, tuple(messages))


def broadcast_plan(plan: Optional[ResumePlan], world: Communicator) -> ResumePlan:
    """Return rank 0's plan on every rank; collective."""
    values = None
    if plan is not None:
        values = {
            "candidates": [str(path) for path in plan.candidates],
            "manifest": manifest_text(plan.manifest).decode("ascii") if plan.manifest is not None else None,
            "flags": [plan.in_same_directory, plan.is_finished],
            "messages": list(plan.messages),
        }
    values = world.broadcast_json(values)
    candidates = tuple(Path(path) for path in values["candidates"])
    text = values["manifest"]
    manifest = parse_manifest(text.encode("ascii"), candidates[0] / MANIFEST) if text is not None else None
    in_same_directory, is_finished = values["flags"]
    return ResumePlan(candidates, manifest, in_same_directory, is_finished, tuple(values["messages"]))


def resume_from(trainer: Trainer, plan: ResumePlan) -> Tuple[Path, Manifest, List[str]]:
    """Load the best candidate whose data is undamaged; collective. Each rank reads and checks only what it needs.

    Returns:
        the checkpoint, its manifest, and why better ones were rejected.

    Raises:
        RunFailed: no candidate can be loaded; raised on every rank.
    """
    rejected: List[str] = []
    world, manifest = trainer.grid.world, plan.manifest
    for path in plan.candidates:
        if manifest is None:
            manifest = broadcast_plan(_candidate_plan(path) if world.rank == 0 else None, world).manifest
        problem = "its manifest cannot be read" if manifest is None else load_checkpoint(trainer, path, manifest)
        if problem is None and manifest is not None:
            return path, manifest, rejected
        rejected.append(f"checkpoint {path.name} was rejected: {problem}")
        manifest = None
    raise RunFailed("; ".join(rejected) + "; begin anew with another --out")


def load_checkpoint(trainer: Trainer, path: Path, manifest: Manifest) -> Optional[str]:
    """Load the state of a checkpoint, whatever layout has written it; collective.

    Returns:
        None, or why it cannot be loaded, the same on every rank. The trainer must then not be used before another,
        successful load.
    """
    config, coordinates = trainer.config, trainer.grid.coordinates
    layout = flat_layout_of(config, coordinates.pp)
    state = {
        "iteration": manifest.iteration,
        "consumed_samples": manifest.consumed_samples,
        "consumed_tokens": manifest.consumed_tokens,
        **manifest.state,
    }

    def read(checkpoint: Checkpoint, storage: Storage) -> None:
        flat = storage.values.detach()
        for region in local_regions(layout, config.layout.tp, coordinates.tp, storage.first, storage.stop):
            trainer.grid.world.mark_phase(START_UP)  # loading makes progress, however slowly
            values = flat[region.first - storage.first : region.stop - storage.first]
            if storage.kind in KINDS[1:] and not checkpoint.has_tensor(storage.kind, region.name):
                values.zero_()  # weights from elsewhere
                continue
            checkpoint.read_region(
                storage.kind, region.name, region.region, values.numpy().reshape(region.region.shape)
            )

    def load_tensors() -> None:
        world = trainer.grid.world
        with Checkpoint(path, manifest, start_fraction=(world.rank + 0.5) / world.size) as checkpoint:
            trainer.load_tensors(state, lambda storage: read(checkpoint, storage))

    try:
        collective_try(trainer.grid.world, load_tensors)
    except UsageError as error:
        return str(error)
    trainer.finish_loading(state)
    return None


def _valid_checkpoints(paths: Sequence[Path]) -> Tuple[List[Path], List[str]]:
    """Return (checkpoints from the newest valid one on, messages on rejected ones). Valid means that manifest, lengths
    and headers are sound."""
    newest, rejected = newest_valid(paths, deep=False)  # each rank checks the data that it reads
    messages = [f"checkpoint {name} was rejected: {why}" for name, why in rejected]
    if newest is None:
        raise UsageError("\n".join(["no checkpoint is whole; to begin anew, choose another --out", *messages]))
    return list(paths[paths.index(newest) :]), messages


def _candidate_plan(path: Path) -> ResumePlan:
    """Return a plan of this candidate only, without a manifest if it cannot be read."""
    try:
        return ResumePlan((path,), read_manifest(path))
    except CheckpointError:
        return ResumePlan((path,))


def _check_config(
    config: RunConfig, path: Path, manifest: Manifest, has_fingerprint: Callable[[str], bool], force_data: bool
) -> List[str]:
    """Check a checkpoint against the run's config; returns messages on what has changed since it was saved.

    Raises:
        UsageError: something has changed that must not change.
    """
    saved, current = manifest.config, config_values(config)
    current_shape = _shape_values(current["model"])
    differences = {
        key: value
        for key, value in _shape_values(saved.get("model", {})).items()
        if value != current_shape.get(key, value)
    }
    if differences:
        listed = "; ".join(
            f"model.{key}: {current_shape[key]}, but {value} there" for key, value in differences.items()
        )
        raise UsageError(f"{path}: is of another model: {listed}")
    shapes = logical_shapes(config.model)
    surplus = sorted(set(manifest.tensors) - set(shapes))
    if surplus:
        raise UsageError(f"{path}: is of another model: it holds {surplus[0]}, which this one has not")
    for name, shape in shapes.items():
        tensor = manifest.tensors.get(name)
        if tensor is None or tensor.shape != shape or KINDS[0] not in tensor.kinds:
            raise UsageError(f"{path}: is of another model: it holds no weights {name} of shape {list(shape)}")
    messages = []
    changed = [
        f"{section}.{key} {saved[section][key]} -> {value}"
        for section in _REPORTED_SECTIONS
        for key, value in current[section].items()
        if section in saved and key in saved[section] and saved[section][key] != value
    ]
    if changed:
        messages.append("changed since the checkpoint: " + ", ".join(changed))
    messages += _check_data(config, path, manifest, has_fingerprint, force_data)
    return messages


def _check_data(
    config: RunConfig, path: Path, manifest: Manifest, has_fingerprint: Callable[[str], bool], force_data: bool
) -> List[str]:
    if not manifest.data_fingerprint:  # weights from elsewhere
        return []
    seed = manifest.config.get("training", {}).get("seed", config.training.seed)
    problem = ""
    if not has_fingerprint(manifest.data_fingerprint):
        settings = "the corpus, data.weights, data.split, data.order or data.document_mask with its fields"
        if config.data.order == MEGATRON_ORDER:
            settings += ", or the number of samples that the order is made for (data.order_samples)"
        if config.model.is_grid_classifier:
            settings = "the set of grids, their split, buckets or augmentation (data.*), or training.global_batch"
        problem = f"{settings} is not that of the checkpoint"
    elif seed != config.training.seed:
        problem = f"training.seed {config.training.seed} gives another order of samples than the checkpoint's {seed}"
    if not problem:
        return []
    consequence = f"{problem}: its {manifest.consumed_samples} consumed samples would not be those that are skipped now"
    if not force_data:
        raise UsageError(f"{path}: {consequence}; to resume all the same: --force-data")
    return [f"{consequence}; resuming all the same"]


def _shape_values(model: Mapping[str, Any]) -> Dict[str, Any]:
    """The values of a recorded model; what an older version has not recorded was as it is by default. Where positions
    are rotated, no weight depends on the sequence length."""
    if not model:
        return {}
    values = {**config_values(RunConfig())["model"], **model}
    derived = {
        "kv_heads": values["heads"], "head_dim": values["hidden"] // values["heads"], "ffn_hidden": 4 * values["hidden"]
    }  # fmt: skip
    values.update({key: value for key, value in derived.items() if values[key] is None})
    keys = [key for key in _SHAPE_KEYS if key != "seq_len" or values["positions"] == "learned"]
    return {key: values[key] for key in keys}


def build_record(environment: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the parts of an ``environment.json`` that a run's numerical results depend on."""
    build = environment["build"]
    return {
        **{key: build[key] for key in _BUILD_KEYS if key in build},
        "threads": environment["ranks"][0]["threads"],
        "mpi": environment["mpi"]["library"],
        "fugaku_gpt": environment["fugaku_gpt"],
        "git_commit": environment["git_commit"],
    }


def build_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Sequence[str]:
    """Return the differences in the build that make a resumed run round differently than the saved one."""
    return [
        f"{key} {saved[key]} -> {current[key]}"
        for key in _BUILD_KEYS
        if key in saved and saved[key] != current.get(key)
    ]
