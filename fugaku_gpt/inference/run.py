"""The uses of a model on every rank: prompts and batches are distributed over replicas, and results gathered."""

from __future__ import annotations

import math
import zlib
from dataclasses import asdict
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.comm import Communicator
from fugaku_gpt.data.scored_text import ScoredText, TextLoss, TokenIds
from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.continuation import Continuation, GenerationLimits, Speed
from fugaku_gpt.inference.generation import Generator
from fugaku_gpt.inference.model_source import ModelSource, ReplicaLayout
from fugaku_gpt.inference.ranks import on_every_rank
from fugaku_gpt.inference.replica import ModelReplica, not_finite
from fugaku_gpt.inference.sampling import Sampling
from fugaku_gpt.inference.text import TextTokenizer
from fugaku_gpt.training.startup import collective_try
from fugaku_gpt.training.text_losses import text_losses


def generate_on_every_rank(
    source: ModelSource,
    layout: ReplicaLayout,
    prompts: Sequence[List[int]],
    tokenizer: TextTokenizer,
    sampling: Sampling,
    limits: GenerationLimits,
    on_text: Optional[Callable[[str], None]] = None,
    on_joined: Callable[[], None] = lambda: None,
) -> Optional[Tuple[Dict[int, Continuation], Speed]]:
    """Join the ranks of this job, and generate the texts of all prompts, each on one replica; collective.

    Args:
        prompts: token ids of each.
        on_text: called with each piece of the text of a single prompt.
        on_joined: called once all ranks have joined MPI.

    Returns:
        On rank 0 the texts by number of the prompt, and the speed of all replicas together; None elsewhere.

    Raises:
        UsageError: the model cannot be loaded in this layout, or there are more replicas than prompts; raised on
            every rank.
        RunFailed: a logit of any replica is not finite; raised on every rank.
    """

    def check(world: Communicator, replicas: int) -> None:
        if replicas > len(prompts):
            raise UsageError(
                f"{replicas} replicas for {len(prompts)} prompts: start fewer ranks, or share the model: --tp, --pp"
            )
        _check_equal(world, "prompts", prompts)

    return on_every_rank(
        source,
        layout,
        lambda replica: _generate(replica, prompts, tokenizer, sampling, limits, on_text),
        check,
        on_joined,
    )


def _check_equal(world: Communicator, name: str, sequences: Sequence[TokenIds]) -> None:
    """Raise a ``UsageError`` on every rank if ranks have different tokens, as where a file differs between nodes."""
    digest = 0
    for ids in sequences:
        digest = zlib.crc32(np.asarray(ids, dtype="<i8").tobytes(), digest)
    digests = world.gather_json(digest)
    ranks = [rank for rank, other in enumerate(digests or []) if other != digest]
    ranks = world.broadcast_json(ranks)
    if ranks:
        raise UsageError(f"rank {ranks[0]} has other {name} than rank 0: does its node have other files?")


def losses_on_every_rank(
    source: ModelSource,
    layout: ReplicaLayout,
    texts: Sequence[ScoredText],
    stride: Optional[int] = None,
    batch: int = 8,
    on_done: Callable[[int], None] = lambda tokens: None,
    on_joined: Callable[[], None] = lambda: None,
) -> List[TextLoss]:
    """Join the ranks of this job, and return the loss of each text, on every rank; collective. Other arguments and
    errors: see :func:`fugaku_gpt.training.text_losses.text_losses`.

    Args:
        on_joined: called once all ranks have joined MPI.

    Raises:
        RunFailed: a loss is not finite; raised on every rank.
    """

    def compute(replica: ModelReplica) -> List[TextLoss]:
        losses = text_losses(replica, texts, stride, batch, on_done)
        if not all(math.isfinite(loss.nats) for loss in losses):
            raise not_finite("a loss", layout.dtype)
        return losses

    return on_every_rank(
        source,
        layout,
        compute,
        lambda world, replicas: _check_equal(world, "texts", [text.ids for text in texts]),
        on_joined,
    )


def _generate(
    replica: ModelReplica,
    prompts: Sequence[List[int]],
    tokenizer: TextTokenizer,
    sampling: Sampling,
    limits: GenerationLimits,
    on_text: Optional[Callable[[str], None]],
) -> Optional[Tuple[Dict[int, Continuation], Speed]]:
    grid = replica.grid
    own = {number: ids for number, ids in enumerate(prompts) if number % grid.dp.size == grid.coordinates.dp}
    generator = Generator(replica, tokenizer.decode_after, sampling, limits)

    def print_piece(_prompt: int, text: str) -> None:
        if on_text is not None:
            on_text(text)

    # a replica whose logits are not finite must not leave the others waiting
    texts = collective_try(grid.world, lambda: generator.run(own, print_piece))
    is_first_of_replica = grid.coordinates.tp == 0 and grid.coordinates.pp == 0
    gathered = grid.world.gather_json(
        [[asdict(text) for text in texts.values()], asdict(generator.speed)] if is_first_of_replica else None
    )
    if gathered is None:
        return None
    replicas = [value for value in gathered if value is not None]
    results = {text["prompt"]: Continuation(**text) for texts_of_replica, _ in replicas for text in texts_of_replica}
    return {number: results[number] for number in sorted(results)}, Speed.together([Speed(**s) for _, s in replicas])
