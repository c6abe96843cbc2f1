"""Joins the ranks of a command that uses a model, has them agree, and loads each rank's part."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Callable, TypeVar

from fugaku_gpt.checkpoint.manifest import MANIFEST, manifest_text, parse_manifest
from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import EXIT_RUN_FAILED, FugakuGptError, UsageError
from fugaku_gpt.harmless import harmless
from fugaku_gpt.inference.model_source import Joining, ModelSource, ReplicaLayout, inference_config
from fugaku_gpt.inference.replica import ModelReplica
from fugaku_gpt.training.memory_guard import processes_of_node
from fugaku_gpt.training.startup import (
    agree_on_kernels,
    check_precision,
    collective_try,
    mmap_large_allocations,
    prepare_process,
)

T = TypeVar("T")


def on_every_rank(
    source: ModelSource,
    layout: ReplicaLayout,
    use: Callable[[ModelReplica], T],
    check: Callable[[Communicator, int], None],
    joining: Joining,
) -> T:
    """Join the ranks of this job, load the model, and call ``use`` with this rank's part; collective.

    Ranks beyond those of one replica make further replicas. All use the checkpoint that the first rank has chosen, as a
    run may write another meanwhile. A rank that fails alone ends all others.

    Args:
        check: called with all ranks and the number of replicas before the model is loaded; what it raises, it raises on
            every rank.
        joining: what each rank does as it joins.

    Raises:
        FugakuGptError: the ranks cannot share the model like that, it cannot be loaded, or ``use`` or ``check`` has
            raised it; raised on every rank.
    """
    world = open_world(threads=layout.threads)
    joining.on_joined()
    prepare_process(layout.threads)
    try:
        replicas, rest = divmod(world.size, layout.tp * layout.pp)
        if rest:
            raise UsageError(f"{world.size} ranks are no multiple of --tp {layout.tp} * --pp {layout.pp}")
        check(world, replicas)
        source = _of_first_rank(world, source)
        config = inference_config(source, layout, replicas)
        ranks = list(processes_of_node(world))
        collective_try(world, lambda: joining.check_node(config, ranks))
        return use(_loaded_replica(world, source, config))
    except FugakuGptError:
        raise
    except BaseException as error:
        if world.size == 1:
            raise
        print(harmless(f"fugaku-gpt: rank {world.rank}:\n{traceback.format_exc()}"), file=sys.stderr, flush=True)
        world.abort(EXIT_RUN_FAILED)
        raise error


def _of_first_rank(world: Communicator, source: ModelSource) -> ModelSource:
    """Return the first rank's choice of a checkpoint."""
    path, text = world.broadcast_json([str(source.checkpoint), manifest_text(source.manifest).decode("ascii")])
    return ModelSource(Path(path), parse_manifest(text.encode("ascii"), Path(path) / MANIFEST), source.notes)


def _loaded_replica(world: Communicator, source: ModelSource, config: RunConfig) -> ModelReplica:
    collective_try(world, lambda: check_precision(config))
    agree_on_kernels(config, world)
    with mmap_large_allocations():
        replica = ModelReplica(config, ProcessGrid(world, config.layout))
        collective_try(world, lambda: replica.load(source))
    return replica
