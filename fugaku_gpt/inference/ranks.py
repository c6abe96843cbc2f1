"""Joins the ranks of a command that uses a model, has them agree, and loads each rank's part."""

from __future__ import annotations

import sys
import traceback
from typing import Callable, TypeVar

from fugaku_gpt.comm import Communicator, ProcessGrid, open_world
from fugaku_gpt.errors import EXIT_RUN_FAILED, UsageError
from fugaku_gpt.harmless import harmless
from fugaku_gpt.inference.model_source import ModelSource, ReplicaLayout, inference_config
from fugaku_gpt.inference.replica import ModelReplica
from fugaku_gpt.training.startup import (
    agree_on_kernels,
    check_precision,
    collective_try,
    mmap_large_allocations,
    prepare_process,
)

T = TypeVar("T")


def on_every_rank(source: ModelSource, layout: ReplicaLayout, use: Callable[[ModelReplica], T]) -> T:
    """Join the ranks of this job, load the model, and call ``use`` with this rank's part; collective.

    Ranks beyond those of one replica make further replicas. A rank that fails alone ends all others.

    Raises:
        UsageError: the ranks cannot share the model like that, or it cannot be loaded; raised on every rank.
    """
    world = open_world(threads=layout.threads)
    prepare_process(layout.threads)
    try:
        return use(_loaded_replica(world, source, layout))
    except UsageError:  # raised on every rank
        raise
    except BaseException as error:
        if world.size == 1:
            raise
        print(harmless(f"fugaku-gpt: rank {world.rank}:\n{traceback.format_exc()}"), file=sys.stderr, flush=True)
        world.abort(EXIT_RUN_FAILED)
        raise error


def _loaded_replica(world: Communicator, source: ModelSource, layout: ReplicaLayout) -> ModelReplica:
    replicas, rest = divmod(world.size, layout.tp * layout.pp)
    if rest:
        raise UsageError(f"{world.size} ranks are no multiple of --tp {layout.tp} * --pp {layout.pp}")
    config = inference_config(source, layout, replicas)
    collective_try(world, lambda: check_precision(config))
    agree_on_kernels(config, world)
    with mmap_large_allocations():
        replica = ModelReplica(config, ProcessGrid(world, config.layout))
        collective_try(world, lambda: replica.load(source))
    return replica
