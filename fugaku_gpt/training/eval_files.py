"""The files of ``training.eval_files`` on every rank, and their losses by the model that is being trained.

Losses are those of ``fugaku-gpt eval``: each document is predicted on its own, its end included, every token once.
"""

from __future__ import annotations

import hashlib
from typing import List, Optional, Sequence

import numpy as np
import torch

from fugaku_gpt.comm import Communicator
from fugaku_gpt.config import RunConfig
from fugaku_gpt.data.scored_text import ScoredText, TextLoss, windows_of
from fugaku_gpt.layout.stages import Chunk, chunks_of
from fugaku_gpt.records.flight import VALIDATION
from fugaku_gpt.training.startup import collective_try
from fugaku_gpt.training.text_losses import batches_of, text_losses
from fugaku_gpt.training.trainer import Trainer


class EvalFiles:
    """The documents of all files, the same on every rank.

    Attributes:
        digests: SHA-256 over the tokens and bytes of each file's documents, by its name.

    Args:
        names: of the files.
        files: the documents of each.
    """

    def __init__(self, names: Sequence[str], files: Sequence[Sequence[ScoredText]]) -> None:
        self._names = tuple(names)
        self._counts = [len(texts) for texts in files]
        self._texts = [text for texts in files for text in texts]
        self.digests = {name: _digest_of(texts) for name, texts in zip(names, files)}

    def batches(self, config: RunConfig) -> int:
        """Number of batches in which all replicas together compute the losses of the files."""
        return len(batches_of(windows_of(self._texts, config.model.seq_len, config.model.seq_len), _batch_of(config)))

    def losses(self, trainer: Trainer) -> List[TextLoss]:
        """Return the loss of each file, under its name, on every rank; collective."""
        trainer.begin_evaluation()
        trainer.buffers.wait_for_all_gather()
        model, world = _ModelInTraining(trainer), trainer.grid.world
        batch = _batch_of(trainer.config)
        losses = iter(text_losses(model, self._texts, None, batch, lambda tokens: world.mark_phase(VALIDATION)))
        return [_sum_of(name, [next(losses) for _ in range(count)]) for name, count in zip(self._names, self._counts)]


def open_eval_files(config: RunConfig, world: Communicator) -> Optional[EvalFiles]:
    """Return the files of a run, which rank 0 reads and sends to all; None if it evaluates none; collective.

    Raises:
        UsageError: a file cannot be read, or its tokens are not the model's; raised on every rank.
    """
    training = config.training
    if not training.eval_files or training.eval_interval is None:
        return None
    files = collective_try(world, lambda: _read(config) if world.rank == 0 else None)
    sizes = world.broadcast_json(
        [[(len(text.ids), text.bytes) for text in texts] for texts in files] if files is not None else None
    )
    tokens = torch.zeros(sum(length for texts in sizes for length, _ in texts), dtype=torch.int32)
    if files is not None:
        tokens[:] = torch.from_numpy(np.concatenate([text.ids for texts in files for text in texts]).astype(np.int32))
    world.broadcast(tokens)
    remaining = tokens.numpy()
    shared: List[List[ScoredText]] = []
    for texts in sizes:
        shared.append([])
        for length, size in texts:
            shared[-1].append(ScoredText("", remaining[:length], 1, size))
            remaining = remaining[length:]
    return EvalFiles(training.eval_names, shared)


def _read(config: RunConfig) -> List[List[ScoredText]]:
    from fugaku_gpt.data.eval_documents import read_eval_files  # tokenizers: one rank of such a run has to read it

    return read_eval_files(config.training.eval_files, config.data.paths, config.model.vocab_size)


def _batch_of(config: RunConfig) -> int:
    return config.training.micro_batch


def _digest_of(texts: Sequence[ScoredText]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(repr((len(text.ids), text.first, text.bytes)).encode())
        digest.update(np.asarray(text.ids, dtype="<i4").tobytes())
    return digest.hexdigest()


def _sum_of(name: str, losses: Sequence[TextLoss]) -> TextLoss:
    return TextLoss(
        name,
        sum(loss.nats for loss in losses),
        sum(loss.tokens for loss in losses),
        sum(loss.bytes or 0 for loss in losses),
    )


class _ModelInTraining:
    """The model of a trainer, in its layout, as one that computes the losses of tokens."""

    def __init__(self, trainer: Trainer) -> None:
        self.config, self.grid = trainer.config, trainer.grid
        self._models = trainer.model_chunks
        self._chunks = chunks_of(trainer.config)
        self._dtype = getattr(torch, trainer.config.training.dtype)
        self._shards = self.grid.tp.size if self.config.layout.sequence_parallel else 1

    def token_losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the cross-entropy [b, s] of ``targets`` after ``tokens``, both [b, s]; None but on the last stage;
        collective over the replica."""
        length, padding = tokens.shape[1], -tokens.shape[1] % self._shards
        if padding:  # on the right, where causal attention reads nothing
            tokens, targets = (torch.nn.functional.pad(ids, (0, padding)) for ids in (tokens, targets))
        x = tokens
        for chunk in self._chunks:
            if chunk.stage != self.grid.coordinates.pp:
                continue
            x = self._models[chunk.index].hidden_states(self._input(chunk, x, tokens))
            if chunk.has_head:
                return self._models[chunk.index].token_losses(x, targets)[:, :length]
            after = self._chunks[chunk.index + 1]
            if after.stage != chunk.stage:
                self.grid.pp.start_send(x.contiguous(), after.stage).wait()
        return None

    def _input(self, chunk: Chunk, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens, what this rank's chunk before has made, or what another stage sends."""
        if chunk.has_embedding:
            return tokens
        before = self._chunks[chunk.index - 1]
        if before.stage == chunk.stage:
            return x
        shape = (tokens.shape[0], tokens.shape[1] // self._shards, self.config.model.hidden)
        received = torch.empty(shape, dtype=self._dtype)
        self.grid.pp.start_receive(received, before.stage).wait()
        return received
