"""One replica of a model over tensor- and pipeline-parallel ranks, used after training: forward passes alone."""

from __future__ import annotations

from typing import Callable, List, Optional

import numpy as np
import torch

from fugaku_gpt.checkpoint.reader import Checkpoint
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.compat.probes import WIDE_DTYPES
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES
from fugaku_gpt.errors import CheckpointError, RunFailed
from fugaku_gpt.inference.model_source import ModelSource
from fugaku_gpt.layout.regions import Region
from fugaku_gpt.layout.shards import logical_shapes, tensor_region
from fugaku_gpt.layout.stages import chunk_tensors, chunks_of
from fugaku_gpt.model import build_stage, named_parameters
from fugaku_gpt.model.kv_cache import KeyValueCache, NewTokens

_NOT_FINITE = -1
# Chooses the next token of each of b sequences from their logits [b, V] in float64.
ChooseTokens = Callable[["np.ndarray[tuple[int, int], np.dtype[np.float64]]"], List[int]]


def not_finite(what: str, dtype: str) -> RunFailed:
    """Return the error for a number of the model that is not finite."""
    advice = "; try --dtype float32" if dtype in SIXTEEN_BIT_DTYPES else ""
    return RunFailed(f"{what} is not finite in {dtype}{advice}")


class ModelReplica:
    """This rank's part of the model: the layers of its stage, and of these its tensor-parallel slices.

    Attributes:
        config: the run that describes model and layout.
        grid: the ranks.
    """

    def __init__(self, config: RunConfig, grid: ProcessGrid) -> None:
        """Build the part; its weights are undefined until :meth:`load`."""
        self.config, self.grid = config, grid
        (self._chunk,) = [chunk for chunk in chunks_of(config) if chunk.stage == grid.coordinates.pp]
        (self._model,) = build_stage(config, grid.tp, [self._chunk], initialise=False)
        self._model.eval()
        self._dtype = getattr(torch, config.training.dtype)

    def load(self, source: ModelSource) -> None:
        """Read this rank's weights.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model.
        """
        surplus = sorted(set(source.manifest.tensors) - set(logical_shapes(self.config.model)))
        if surplus:
            raise CheckpointError(f"{source.checkpoint}: holds {surplus[0]}, which the model that it records has not")
        tp, rank = self.grid.tp.size, self.grid.coordinates.tp
        parameters = named_parameters([self._model])
        with Checkpoint(source.checkpoint, source.manifest) as checkpoint:
            for spec in chunk_tensors(self.config.model, tp, self._chunk):
                _read_tensor(checkpoint, spec.name, tensor_region(spec, tp, rank), parameters[spec.name].detach())

    def make_cache(self, slots: int, capacity: int) -> KeyValueCache:
        """Return an empty cache for ``slots`` sequences of up to ``capacity`` tokens."""
        tp = self.grid.tp.size
        return KeyValueCache(self._chunk.layers, self.config.model, tp, slots, capacity, self._dtype)

    def next_tokens(
        self, tokens: torch.Tensor, cache: KeyValueCache, new: NewTokens, choose: ChooseTokens
    ) -> List[int]:
        """Read the next tokens [b, t] of b sequences, and return the token that follows each; collective over the
        replica, on every rank of which the result is the same.

        Raises:
            RunFailed: a logit is not finite; raised on every rank of the replica.
        """
        x = self._hidden_states(tokens, cache, new)
        chosen = torch.full((len(tokens),), _NOT_FINITE, dtype=torch.int64)
        if self._chunk.has_head:
            logits = self._model.last_logits(x, new.last).double().numpy()
            if np.isfinite(logits).all():
                chosen[:] = torch.tensor(choose(logits))
        # ranks with another processor or another NumPy must not go different ways
        self.grid.tp.broadcast(chosen)
        self.grid.pp.broadcast(chosen, root=self.grid.pp.size - 1)
        if _NOT_FINITE in chosen:
            raise not_finite("a logit", self.config.training.dtype)
        return [int(token) for token in chosen]

    def token_losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the cross-entropy [b, s] of ``targets`` after ``tokens``, both [b, s]; None but on the last stage;
        collective over the replica."""
        x = self._hidden_states(tokens)
        return self._model.token_losses(x, targets) if self._chunk.has_head else None

    def _hidden_states(
        self, tokens: torch.Tensor, cache: Optional[KeyValueCache] = None, new: Optional[NewTokens] = None
    ) -> torch.Tensor:
        """Return what this stage makes of tokens [b, t]; it is passed on to the next stage."""
        stage, stages = self.grid.coordinates.pp, self.grid.pp.size
        x = tokens
        if not self._chunk.has_embedding:
            x = torch.empty((*tokens.shape, self.config.model.hidden), dtype=self._dtype)
            self.grid.pp.start_receive(x, stage - 1).wait()
        x = self._model.hidden_states(x, cache=cache, new=new)
        if stage + 1 < stages:
            self.grid.pp.start_send(x.contiguous(), stage + 1).wait()
        return x


def _read_tensor(checkpoint: Checkpoint, name: str, region: Region, parameter: torch.Tensor) -> None:
    """Read a rank's part of a tensor into a parameter, whose further rows are padding. In 16 bits it is read in float32
    and then rounded, in memory that is free again before the next tensor's is taken."""
    parameter.zero_()
    if region.size == 0:  # padding of the vocabulary alone
        return
    rows = parameter[: region.shape[0]]
    if parameter.dtype in WIDE_DTYPES:
        checkpoint.read_region("weights", name, region, rows.numpy())
        return
    wide = torch.empty(region.shape, dtype=torch.float32)
    checkpoint.read_region("weights", name, region, wide.numpy())
    rows.copy_(wide)
