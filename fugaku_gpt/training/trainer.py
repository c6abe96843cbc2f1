"""One training run as an object: model, buffers, optimiser, data, and the step that uses them all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Protocol, Tuple

import numpy as np
import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import BACKGROUND, Communicator, ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES
from fugaku_gpt.layout.batch import SkippedSamples, first_sample, global_batch, sequence_length
from fugaku_gpt.layout.flat import is_sharded, shards_of
from fugaku_gpt.layout.schedules import schedule
from fugaku_gpt.layout.stages import chunks_of, stage_tensors
from fugaku_gpt.model import build_stage, named_parameters, recompute_of
from fugaku_gpt.parallel.buffers import FlatBuffers, MasterWeights, counted_in_norm, nbytes
from fugaku_gpt.parallel.gradient_path import GradientReducer
from fugaku_gpt.parallel.parameter_gather import ParameterGather
from fugaku_gpt.parallel.pipeline import Pipeline
from fugaku_gpt.records.flight import FINISHED, FORWARD, OPTIMISER, SUMS, VALIDATION
from fugaku_gpt.training.health import DONE, SPIKE, Health, StateCopy, squares_of
from fugaku_gpt.training.loss_scale import LossScale
from fugaku_gpt.training.optimizer import build_optimizer
from fugaku_gpt.training.schedule import learning_rate
from fugaku_gpt.training.startup import agree_on_kernels, pages_of_its_own
from fugaku_gpt.training.state import Storage, kinds_of, storages_of


class Samples(Protocol):
    """Where samples come from: numbered from 0 without end, the same for every rank."""

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Samples [first, first + count) as [count, seq_len + 1] token ids."""


class Remaining:
    """The samples that are not left out, numbered anew without gaps."""

    def __init__(self, samples: Samples, left_out: SkippedSamples) -> None:
        self._samples = samples
        self._left_out = left_out

    def batch(self, first: int, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """As of ``Samples``."""
        start = self._left_out.number(first)
        if self._left_out.number(first + count - 1) == start + count - 1:
            return self._samples.batch(start, count)
        numbers = [self._left_out.number(used) for used in range(first, first + count)]
        return np.concatenate([self._samples.batch(number, 1) for number in numbers])


@dataclass(frozen=True)
class Step:
    """What one iteration did, equal on every rank.

    Attributes:
        loss: mean per token.
        grad_norm: of the mean gradient, before clipping.
        lr: learning rate.
        samples, seq_len: the batch: so many samples of so many tokens.
        left_out: why the step was not done (``not finite``, ``overflow``, ``spike``), or "".
        lost_samples: those that have no lasting effect because of that, as ``training.skip_samples`` names them.
        returned_to: the iteration after which weights were what they are now, where a spike made the run return.
        loss_scale: what a micro-batch's mean loss was multiplied by for its gradients; 1 but for float16.
        stop: some rank wants the run to stop after this iteration.
        written, not_written: ranks that have brought the checkpoint on its way as far as it goes without the others, or
            could not.
    """

    loss: float
    grad_norm: float
    lr: float
    samples: int
    seq_len: int
    left_out: str = DONE
    lost_samples: str = ""
    returned_to: Optional[int] = None
    loss_scale: float = 1.0
    stop: bool = False
    written: int = field(default=0, compare=False)
    not_written: int = field(default=0, compare=False)


class _Sums(NamedTuple):
    """Sums over all ranks, in the order in which they are sent."""

    losses: float
    squares: float
    bad_ranks: float
    stop: float
    written: float
    not_written: float


class Trainer:
    """Trains on ``train`` over the ranks of ``grid``; ``valid`` is what :meth:`validate` measures.

    Attributes:
        iteration: iterations done, those included whose step was left out.
        consumed_samples: samples that are behind, those included that ``training.skip_samples`` names; the only state
            of the data.
        consumed_tokens: tokens of the samples that were used.
        pipeline_seconds, waited_seconds: in the pipeline over all iterations, and what of it was waiting for other
            stages.
        computed_seconds: in all iterations, without waiting for other ranks.
        stop_wanted: asked once in each iteration, on every rank: whether the run is to stop after it.
        saving: the same: whether this rank's part of the checkpoint on its way is (written, given up).
    """

    def __init__(self, config: RunConfig, grid: ProcessGrid, train: Samples, valid: Optional[Samples] = None) -> None:
        agree_on_kernels(config, grid.world)  # whoever trains, by whatever way it came here
        if grid.world.size > 1:
            progress = config.training.progress_ms
            ops.set_progress_callback(BACKGROUND.poll if progress else None, progress / 1e3)
        self.config = config
        self.grid = grid
        self.iteration = 0
        self.consumed_samples = 0
        self.consumed_tokens = 0
        self.pipeline_seconds = 0.0
        self.waited_seconds = 0.0
        self.computed_seconds = 0.0
        self.stop_wanted: Callable[[], bool] = lambda: False
        self.saving: Callable[[], Tuple[bool, bool]] = lambda: (False, False)
        self.health = Health(config.training)
        self.loss_scale = LossScale(config.training)
        self._left_out = SkippedSamples(config.training.skip_samples)
        self._train = Remaining(train, self._left_out)
        self._valid = valid
        layout, training, model = config.layout, config.training, config.model
        chunks = chunks_of(config)
        mine = [chunk for chunk in chunks if chunk.stage == grid.coordinates.pp]
        with pages_of_its_own():
            self.pieces = dict(
                zip([chunk.index for chunk in mine], build_stage(config, grid.tp, mine, recompute_of(config, chunks)))
            )
            pieces = list(self.pieces.values())
            sharded = is_sharded(config)
            self.buffers = FlatBuffers(
                named_parameters(pieces),
                stage_tensors(model, grid.tp.size, chunks, grid.coordinates.pp),
                shards_of(config),
                int(training.bucket_mib * 2**20),
                grid.tp.size,
            )
            owned = self.buffers.layout.owned(grid.replicas.rank if sharded else 0, grid.dp.size if sharded else 1)
            self.masters = MasterWeights(self.buffers, owned) if training.dtype in SIXTEEN_BIT_DTYPES else None
            self._param_ranges = list(self.buffers.param_ranges(owned, counted_in_norm(grid, sharded), self.masters))
            self._optimizer = build_optimizer(self._param_ranges, training)
            sum_dtype = getattr(torch, training.gradient_dtype) if training.gradient_dtype is not None else None
            at_once = training.buckets_at_once
            self.reducer = GradientReducer(
                self.buffers, self.pieces, grid, sharded, layout.sequence_parallel, sum_dtype, at_once
            )
            self._gather = (
                ParameterGather(self.buffers, pieces, grid.replicas, self.reducer.overlap) if sharded else None
            )
            self._copy = StateCopy(self._param_ranges, self._optimizer)
        self._last_chunk = chunks[-1].index
        self._pipelines: Dict[Tuple[int, int], Pipeline] = {}
        self.pipeline = self._pipeline(training.global_batch, model.seq_len)

    def step(self) -> Step:
        """One iteration over one global batch.

        Raises:
            RunFailed: loss or gradient is not finite, and ``training.non_finite`` or its limit says that the run stops;
                on every rank alike, and the parameters are left as they were.
        """
        training = self.config.training
        self.grid.world.mark_phase(FORWARD, self.iteration + 1, -1)
        start, waited = time.perf_counter(), Communicator.waited_seconds
        samples = global_batch(self.config, self.consumed_samples)
        seq_len = sequence_length(self.config, self.iteration)
        used = self._left_out.count_used(self.consumed_samples)
        loss_scale = self.loss_scale.value
        scale = self.loss_scale.gradient_scale(training.micro_batch * seq_len)
        for piece in self.pieces.values():
            piece.train()
            piece.gradient_scale = scale
        self.reducer.begin()
        self.pipeline = self._pipeline(samples, seq_len)
        began = time.perf_counter()
        total = self._losses(self._train, used, seq_len)
        self.pipeline_seconds += time.perf_counter() - began
        self.waited_seconds += self.pipeline.waited_seconds
        self.grid.world.mark_phase(SUMS, micro_batch=-1)
        self.reducer.finish()
        sums = self._agree(total)
        tokens, bad_ranks = samples * seq_len, int(sums.bad_ranks)
        loss, norm = sums.losses / tokens, math.sqrt(sums.squares) / tokens / scale
        self.grid.world.mark_phase(OPTIMISER)
        overflow = self.loss_scale.is_overflow(loss, bad_ranks)
        verdict = self.health.judge(self.iteration + 1, loss, norm, bad_ranks, overflow)
        self.loss_scale.update(overflow)
        lr = learning_rate(training, self.iteration)
        if verdict == DONE:
            clip = training.clip_grad / norm if training.clip_grad and norm > training.clip_grad else 1.0
            # gradients are scaled sums over all tokens of the global batch: one pass divides, clips and steps
            self._optimizer.step(lr, tokens * scale / clip)
        elif verdict == SPIKE:
            self.buffers.wait_for_all_gather()
            self._copy.go_back()
        rounded = verdict == DONE and self._optimizer.rounds
        if verdict in (DONE, SPIKE) and self.masters is not None and not rounded:
            self.masters.round()
        if verdict in (DONE, SPIKE) and self._gather is not None:
            self._gather.start()
        lost_from = self._copy.consumed if verdict == SPIKE else self._left_out.number(used)
        self.iteration += 1
        self.consumed_samples = self._left_out.number(used + samples - 1) + 1
        self.consumed_tokens += tokens
        self._keep_copy(verdict)
        lost = f"{lost_from}-{self.consumed_samples - 1}" if verdict != DONE else ""
        returned_to = self._copy.iteration if verdict == SPIKE else None
        agreed = bool(sums.stop), int(sums.written), int(sums.not_written)
        self.computed_seconds += (time.perf_counter() - start) - (Communicator.waited_seconds - waited)
        return Step(loss, norm, lr, samples, seq_len, verdict, lost, returned_to, loss_scale, *agreed)

    def state(self) -> Dict[str, Any]:
        """All of the state that is no tensor, for JSON; the same on every rank."""
        copy = self._copy
        kept = {"iteration": copy.iteration, "consumed": copy.consumed, "steps": copy.steps} if copy.iteration else None
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "optimizer_steps": self._optimizer.steps,
            "health": self.health.state(),
            "loss_scale": self.loss_scale.state(),
            "copy": kept,
        }

    @property
    def state_kinds(self) -> Tuple[str, ...]:
        """The kinds of state tensors that there are now, on every rank alike."""
        return kinds_of(self._copy)

    def storages(self) -> List[Storage]:
        """The tensors of the state that this rank owns. Parameters that are on their way from other replicas are none
        of them."""
        return list(storages_of(self._param_ranges, self._optimizer, self._copy))

    def fill(self, state: Mapping[str, Any], read: Callable[[Storage], None]) -> None:
        """Have other tensors: the first half of loading, in which ranks do not wait for each other.

        Args:
            state: as :meth:`state` gave it, or parts of it: what is missing is as in a run that has not begun.
            read: fills a tensor of the state.
        """
        self.buffers.wait_for_all_gather()
        kept = state.get("copy") if self.config.training.rollback_every is not None else None
        self._copy.iteration = 0
        if kept is not None:
            self._copy.keep(kept["iteration"], kept["consumed"])
            self._copy.steps = kept["steps"]
        for storage in self.storages():
            read(storage)

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the second half of loading, once every rank has filled its tensors; collective."""
        if self.masters is not None:
            self.masters.round()
        if self._gather is not None:
            self._gather.start()
            self._gather.finish()
        self.iteration, self.consumed_samples, self.consumed_tokens, self._optimizer.steps = (
            int(state.get(key, 0)) for key in ("iteration", "consumed_samples", "consumed_tokens", "optimizer_steps")
        )
        if "health" in state:
            self.health.load(state["health"])
        self.loss_scale.load(state.get("loss_scale", {}))
        if self.health.may_return and not self._copy.iteration:  # the run before kept no copies
            self._copy.keep(self.iteration, self.consumed_samples)
            self.health.kept(DONE)

    @property
    def copy_bytes(self) -> int:
        """Memory of the copy to which a loss spike returns, on this rank; 0 while there is none."""
        return self._copy.bytes

    def held_bytes(self) -> Dict[str, int]:
        """Memory of what lasts from step to step on this rank, by what it is for; asks nobody, from any thread."""
        parameters, gradients = self.buffers.bytes
        masters = nbytes(self.masters.values) if self.masters is not None else 0
        return {
            "weights": parameters + masters,
            "gradients": gradients,
            "optimiser": nbytes(*(moment for moments in self._optimizer.moments for moment in moments)),
            "copy for loss spikes": self.copy_bytes,
            "communication buffers": self.reducer.bytes,
        }

    def _keep_copy(self, verdict: str) -> None:
        """Keep a copy where one is due; before the first step there is nothing worth it, and after a return it is what
        is there."""
        stepped = self.iteration > self.health.left_out
        if verdict != SPIKE and stepped and self.health.copy_is_due(self.iteration):
            self.buffers.wait_for_all_gather()
            self._copy.keep(self.iteration, self.consumed_samples)
            self.health.kept(verdict)

    def _pipeline(self, samples: int, seq_len: int) -> Pipeline:
        """The pipeline of a global batch of so many samples of so many tokens; made once for each size."""
        layout, training = self.config.layout, self.config.training
        micro_batches = samples // (training.micro_batch * layout.dp)
        size = (micro_batches, seq_len)
        if size not in self._pipelines:
            self._pipelines[size] = Pipeline(
                schedule(layout.schedule, self.grid.coordinates.pp, layout.pp, micro_batches, layout.chunks),
                self.grid.pp,
                self._last_chunk,
                (
                    training.micro_batch,
                    seq_len // (layout.tp if layout.sequence_parallel else 1),
                    self.config.model.hidden,
                ),
                getattr(torch, training.dtype),
            )
        return self._pipelines[size]

    def finish(self) -> None:
        """Wait for what the last step has left on its way: the parameters of other replicas."""
        if self._gather is not None:
            self._gather.finish()
        self.grid.world.mark_phase(FINISHED)

    def validate(self) -> float:
        """Mean loss per token over the first ``training.eval_batches`` global batches of the validation split."""
        if self._valid is None:
            raise ValueError("this trainer was built without validation samples")
        self.grid.world.mark_phase(VALIDATION, micro_batch=-1)
        for piece in self.pieces.values():
            piece.eval()
        batches, samples = self.config.training.eval_batches, self.config.training.global_batch
        seq_len = self.config.model.seq_len
        self.pipeline = self._pipeline(samples, seq_len)
        total = 0.0
        with torch.no_grad():
            for batch in range(batches):
                total += self._losses(self._valid, batch * samples, seq_len)
        whole = torch.tensor([total], dtype=torch.float64)
        self.grid.dp.all_reduce(whole)
        self.grid.pp.all_reduce(whole)
        return float(whole) / (batches * samples * seq_len)

    def _losses(self, samples: Samples, used: int, seq_len: int) -> float:
        """The sum of this replica's tokens' losses over one global batch, on the last stage; 0 elsewhere. With
        gradients enabled they are left in the buffers.

        Args:
            used: samples that earlier batches have used.
            seq_len: tokens of each sample that are used.
        """
        total, micro_size = 0.0, self.config.training.micro_batch

        def forward(micro_batch: int, chunk: int, x: Optional[torch.Tensor]) -> torch.Tensor:
            nonlocal total
            piece = self.pieces[chunk]
            first = first_sample(self.config, used, micro_batch, self.grid.coordinates.dp)
            ends = piece.chunk.has_embedding or piece.chunk.has_head  # tokens are wanted there only
            tokens = torch.from_numpy(samples.batch(first, micro_size)[:, : seq_len + 1]) if ends else None
            y: torch.Tensor = piece(
                tokens[:, :-1] if x is None and tokens is not None else x,
                tokens[:, 1:] if tokens is not None else None,
                first,
            )
            if piece.chunk.has_head:
                total += float(y.detach())
            return y

        self.pipeline.run(forward, self.reducer)
        return total

    def _agree(self, total: float) -> _Sums:
        """What all ranks must know of this iteration, from one sum over all of them, so equal on every rank.

        Args:
            total: sum of this replica's losses, on the last stage.
        """
        squares, finite = squares_of(self._param_ranges)
        written, not_written = self.saving()
        mine = _Sums(
            losses=total if self.grid.coordinates.tp == 0 else 0.0,
            squares=squares,
            bad_ranks=0.0 if finite and math.isfinite(total) else 1.0,
            stop=float(self.stop_wanted()),
            written=float(written),
            not_written=float(not_written),
        )
        sums = torch.tensor(mine, dtype=torch.float64)
        self.grid.world.all_reduce(sums)
        return _Sums(*sums.tolist())
