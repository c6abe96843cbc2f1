"""The uses of a model on every rank: prompts and batches are distributed over replicas, and results gathered."""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import asdict
from typing import Callable, Dict, List, NamedTuple, Optional, Protocol, Sequence

import numpy as np
import torch

from fugaku_gpt.comm import Communicator, ProcessGrid
from fugaku_gpt.data.scored_text import ScoredText, TextLoss, TokenIds
from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.continuation import Continuation, GenerationLimits, Speed
from fugaku_gpt.inference.generation import Generator
from fugaku_gpt.inference.model_source import Joining, ModelSource, ReplicaLayout
from fugaku_gpt.inference.ranks import on_every_rank
from fugaku_gpt.inference.replica import ModelReplica, not_finite
from fugaku_gpt.inference.sampling import Sampling
from fugaku_gpt.inference.text import TextTokenizer
from fugaku_gpt.training.startup import collective_try
from fugaku_gpt.training.text_losses import text_losses

_BATCHES_OF_ROUND = 4  # of several replicas


class Listener(NamedTuple):
    """Calls on rank 0 while texts grow.

    Attributes:
        on_text: called with each piece of the text of a single prompt.
        on_end: called with each text that has ended, in the order of the prompts.
    """

    on_text: Callable[[str], None] = lambda text: None
    on_end: Callable[[Continuation], None] = lambda text: None


def generate_on_every_rank(
    source: ModelSource,
    layout: ReplicaLayout,
    prompts: Sequence[List[int]],
    tokenizer: TextTokenizer,
    sampling: Sampling,
    limits: GenerationLimits,
    listener: Listener,
    joining: Joining,
) -> Optional[Speed]:
    """Join the ranks of this job, and generate the texts of all prompts, each on one replica; collective.

    Args:
        prompts: token ids of each.
        joining: what each rank does as it joins.

    Returns:
        On rank 0 the speed of all replicas together; None elsewhere.

    Raises:
        UsageError: the model cannot be loaded in this layout, or there are more replicas than prompts; raised on
            every rank.
        RunFailed: a logit of any replica is not finite; raised on every rank.
    """

    def check(world: Communicator, replicas: int) -> None:
        _check_equal(world, "prompts", prompts)  # first: ranks that have other ones must not go different ways
        if replicas > len(prompts):
            raise UsageError(
                f"{replicas} replicas for {len(prompts)} prompts: start fewer ranks, or share the model: --tp, --pp"
            )

    def use(replica: ModelReplica) -> Optional[Speed]:
        generator = Generator(replica, tokenizer.decode_after, sampling, limits)
        _generate(replica.grid, generator, prompts, limits.slots, listener)
        return _speed_of_all(replica.grid, generator.speed)

    return on_every_rank(source, layout, use, check, joining)


def _check_equal(world: Communicator, name: str, sequences: Sequence[TokenIds]) -> None:
    """Raise a ``UsageError`` on every rank if ranks have different tokens, as where a file differs between nodes."""
    digest = 0
    for ids in sequences:
        digest = zlib.crc32(np.asarray([len(ids), *ids], dtype="<i8").tobytes(), digest)
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
    *,
    joining: Joining,
) -> List[TextLoss]:
    """Join the ranks of this job, and return the loss of each text, on every rank; collective. Other arguments and
    errors: see :func:`fugaku_gpt.training.text_losses.text_losses`.

    Args:
        joining: what each rank does as it joins.

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
        joining,
    )


def _generate(
    grid: ProcessGrid, generator: Generator, prompts: Sequence[List[int]], slots: int, listener: Listener
) -> None:
    """Generate all texts; collective. A replica that is alone reports each as it ends. Several do a part of the prompts
    each, and report together, so that they wait for each other once in ``_BATCHES_OF_ROUND`` batches."""
    ordered, replicas = _InOrder(listener.on_end), grid.dp.size
    size = len(prompts) if replicas == 1 else _BATCHES_OF_ROUND * slots * replicas
    is_first, is_first_of_replica = grid.world.rank == 0, grid.coordinates.tp == 0 and grid.coordinates.pp == 0

    def on_text(_prompt: int, piece: str) -> None:
        listener.on_text(piece)

    reports = ordered.add if is_first and replicas == 1 else _ignore
    for begin in range(0, len(prompts), size):
        numbers = range(begin, min(begin + size, len(prompts)))
        own = {number: prompts[number] for number in numbers if number % replicas == grid.coordinates.dp}
        # a replica whose logits are not finite must not leave the others waiting
        texts = collective_try(grid.world, functools.partial(generator.run, own, on_text, reports))
        if replicas > 1:
            values = [asdict(text) for text in texts.values()] if is_first_of_replica else []
            for report in grid.world.gather_json(values) or []:
                for value in report:
                    ordered.add(Continuation(**value))


def _ignore(text: Continuation) -> None:
    pass


class _InOrder:
    """Passes texts on in the order of their prompts; one that ends before another waits for it."""

    def __init__(self, on_end: Callable[[Continuation], None]) -> None:
        self._on_end = on_end
        self._early: Dict[int, Continuation] = {}
        self._next = 0

    def add(self, text: Continuation) -> None:
        """Take a text, and pass on what is complete from the first one on."""
        self._early[text.prompt] = text
        while self._next in self._early:
            self._on_end(self._early.pop(self._next))
            self._next += 1


def _speed_of_all(grid: ProcessGrid, speed: Speed) -> Optional[Speed]:
    """The speed of all replicas together, on rank 0; collective."""
    is_first_of_replica = grid.coordinates.tp == 0 and grid.coordinates.pp == 0
    gathered = grid.world.gather_json(asdict(speed) if is_first_of_replica else None)
    return Speed.together([Speed(**value) for value in gathered if value is not None]) if gathered is not None else None


class Speaker(Protocol):
    """The user of a conversation, on rank 0."""

    def next_prompt(self) -> Optional[List[int]]:
        """Return the token ids of the conversation with the user's next message; None if it is over."""

    def is_interrupted(self) -> bool:
        """Whether the user wants no more of the answer."""

    def hear(self, piece: str) -> None:
        """Take the next piece of the answer."""

    def end_answer(self, answer: Continuation) -> None:
        """Take the answer, which is complete."""


def converse_on_every_rank(
    source: ModelSource,
    layout: ReplicaLayout,
    speaker: Optional[Speaker],
    tokenizer: TextTokenizer,
    sampling: Sampling,
    limits: GenerationLimits,
    joining: Joining,
) -> Optional[Speed]:
    """Join the ranks of this job, which share one replica, and answer the messages of a user; collective.

    Args:
        speaker: the user; None on other ranks than the first.
        joining: what each rank does as it joins.

    Returns:
        On rank 0 the speed; None elsewhere.

    Raises:
        UsageError: the model cannot be loaded in this layout, or there are several replicas; raised on every rank.
    """

    def check(world: Communicator, replicas: int) -> None:
        if replicas > 1:
            raise UsageError(f"{replicas} replicas for one conversation: start fewer ranks, or more --tp or --pp")

    def use(replica: ModelReplica) -> Optional[Speed]:
        generator = Generator(replica, tokenizer.decode_after, sampling, limits)
        _converse(replica.grid.world, generator, speaker)
        return _speed_of_all(replica.grid, generator.speed)

    return on_every_rank(source, layout, use, check, joining)


def _converse(world: Communicator, generator: Generator, speaker: Optional[Speaker]) -> None:
    flag = torch.zeros(1, dtype=torch.int64)

    def is_interrupted() -> bool:
        flag[0] = int(speaker is not None and speaker.is_interrupted())
        world.broadcast(flag)
        return bool(flag[0])

    def print_piece(_turn: int, piece: str) -> None:
        if speaker is not None:
            speaker.hear(piece)

    turn = 0
    while True:
        prompt = world.broadcast_json(collective_try(world, speaker.next_prompt if speaker is not None else _nothing))
        if prompt is None:
            return
        answers = generator.run({turn: prompt}, print_piece, is_interrupted=is_interrupted)
        if speaker is not None:
            speaker.end_answer(answers[turn])
        turn += 1


def _nothing() -> Optional[List[int]]:
    return None
