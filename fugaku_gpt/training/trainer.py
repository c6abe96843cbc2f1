"""One training run as an object: model, buffers, optimiser, data, and the step that uses them all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch

from fugaku_gpt import ops
from fugaku_gpt.comm import BACKGROUND, Communicator, ProcessGrid
from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.schema import SIXTEEN_BIT_DTYPES
from fugaku_gpt.layout.batch import SkippedSamples, global_batch
from fugaku_gpt.layout.communications import norm_elements
from fugaku_gpt.layout.flat import is_sharded, shards_of
from fugaku_gpt.layout.replica_checks import is_checksum_step
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
from fugaku_gpt.training.replica_check import ReplicaCheck
from fugaku_gpt.training.schedule import learning_rate
from fugaku_gpt.training.startup import agree_on_kernels, mmap_large_allocations
from fugaku_gpt.training.state import Storage, kinds_of, storages_of
from fugaku_gpt.training.workload import TRAIN, VALID, Source, workload_of


@dataclass(frozen=True)
class Step:
    """The result of one iteration, equal on every rank.

    Attributes:
        loss: mean per token, or per grid.
        grad_norm: norm of the mean gradient, before clipping.
        lr: learning rate.
        samples, seq_len: number of samples in the batch, and of tokens in each.
        skip_reason: why the step was skipped (``not finite``, ``overflow``, ``spike``); "" if it was done.
        lost_samples: samples that have no lasting effect because of that, in the notation of ``training.skip_samples``.
        returned_to: the iteration to whose weights the run returned after a spike.
        loss_scale: factor of a micro-batch's mean loss for its gradients; 1 except for float16.
        stop: some rank wants the run to stop after this iteration.
        written, not_written: number of ranks that have finished the current phase of saving a checkpoint, and of those
            that failed in it. These are status flags of ``training/checkpoint.py``, piggy-backed on the all-reduce for
            loss and norm, so that saving adds no communication to a step.
        correct: number of grids whose class had the largest logit; 0 for tokens.
    """

    loss: float
    grad_norm: float
    lr: float
    samples: int
    seq_len: int
    skip_reason: str = DONE
    lost_samples: str = ""
    returned_to: Optional[int] = None
    loss_scale: float = 1.0
    stop: bool = False
    written: int = field(default=0, compare=False)
    not_written: int = field(default=0, compare=False)
    correct: int = 0


class SizeFigures(NamedTuple):
    """The sums of a validation over its samples of one size.

    Attributes:
        seq_len, samples: length of each, in tokens or cells with padding, and their number.
        losses: sum of their losses.
        correct: number of grids whose class had the largest logit; 0 for tokens.
        distinct: number of different grids among the samples; 0 for tokens.
    """

    seq_len: int
    samples: int
    losses: float
    correct: float = 0.0
    distinct: int = 0


class _StepSums(NamedTuple):
    """The numbers of the one all-reduce over all ranks that ends a step, in the order in which they are sent.

    Loss, squares of the gradient and the number of ranks with non-finite values decide about the step. The wish to stop
    and the status of a checkpoint (``written``, ``not_written``) have nothing to do with the gradient; they are
    piggy-backed, since a few more numbers in the same message cost nothing. ``counted`` is sent where something is
    counted: grids whose class had the largest logit, or tokens that had a target.
    """

    losses: float
    squares: float
    bad_ranks: float
    stop: float
    written: float
    not_written: float
    counted: float = 0.0


class Trainer:
    """Trains on ``train`` over the ranks of ``grid``; ``valid`` is what :meth:`validate` measures.

    Attributes:
        validated: the sums of the last validation, by the size of its samples.
        iteration: number of iterations done, including those whose step was skipped.
        consumed_samples: number of samples consumed, including those that ``training.skip_samples`` skips; the only
            state of the data.
        consumed_tokens: number of tokens in the samples that were used.
        pipeline_seconds, waited_seconds: seconds spent in the pipeline over all iterations, and those of them spent
            waiting for other stages.
        computed_seconds: seconds of all iterations without waiting for other ranks.
        model_chunks: the model's chunks on this rank, by number.
        should_stop: called once per iteration on every rank; True if the run is to stop after it.
        save_status: called once per iteration on every rank; whether this rank has (finished, failed in) the current
            phase of saving a checkpoint.
    """

    def __init__(self, config: RunConfig, grid: ProcessGrid, train: Source, valid: Optional[Source] = None) -> None:
        agree_on_kernels(config, grid.world)  # tests and probes create trainers without the start-up of a run
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
        self.should_stop: Callable[[], bool] = lambda: False
        self.save_status: Callable[[], Tuple[bool, bool]] = lambda: (False, False)
        self.health = Health(config.training)
        self.loss_scale = LossScale(config.training)
        self.validated: List[SizeFigures] = []
        self._skipped_samples = SkippedSamples(config.training.skip_samples)
        self._workload = workload_of(config, grid.coordinates.dp, self._skipped_samples, train, valid)
        layout, training, model = config.layout, config.training, config.model
        chunks = chunks_of(config)
        local_chunks = [chunk for chunk in chunks if chunk.stage == grid.coordinates.pp]
        with mmap_large_allocations():
            self.model_chunks = dict(
                zip(
                    [chunk.index for chunk in local_chunks],
                    build_stage(config, grid.tp, local_chunks, recompute_of(config, chunks)),
                )
            )
            local_models = list(self.model_chunks.values())
            sharded = is_sharded(config)
            self.buffers = FlatBuffers(
                named_parameters(local_models),
                stage_tensors(model, grid.tp.size, chunks, grid.coordinates.pp),
                shards_of(config),
                int(training.bucket_mib * 2**20),
                grid.tp.size,
            )
            owned = self.buffers.layout.owned(grid.replicas.rank if sharded else 0, grid.dp.size if sharded else 1)
            self.masters = MasterWeights(self.buffers, owned) if training.dtype in SIXTEEN_BIT_DTYPES else None
            compares = training.checksum_interval is not None and grid.world.size > 1
            counts = counted_in_norm(grid, sharded)
            self._param_ranges = list(
                self.buffers.param_ranges(owned, counts, self.masters, compares and grid.tp.size > 1)
            )
            self._replica_check = ReplicaCheck(self.buffers, grid, layout, config.kv_copies) if compares else None
            self._optimizer = build_optimizer(self._param_ranges, training)
            sum_dtype = getattr(torch, training.gradient_dtype) if training.gradient_dtype is not None else None
            buckets_at_once = training.buckets_at_once
            self.reducer = GradientReducer(
                self.buffers, self.model_chunks, grid, sharded, layout.sequence_parallel, sum_dtype, buckets_at_once
            )
            self._gather = (
                ParameterGather(self.buffers, local_models, grid.replicas, self.reducer.overlap) if sharded else None
            )
            self._copy = StateCopy(self._param_ranges, self._optimizer)
        self._last_chunk = chunks[-1].index
        self._pipelines: Dict[Tuple[int, int], Pipeline] = {}
        self.pipeline = self._pipeline(training.global_batch, model.seq_len)

    def step(self) -> Step:
        """One iteration over one global batch.

        Raises:
            RunFailed: loss or gradient is not finite, and ``training.non_finite`` or its limit says that the run stops;
                raised on every rank, and the parameters are unchanged.
            ReplicasDiffer: ranks differ in weights that they must hold alike; raised on every rank, before the update.
        """
        training = self.config.training
        self.grid.world.mark_phase(FORWARD, self.iteration + 1, -1)
        start, waited = time.perf_counter(), Communicator.waited_seconds
        samples = global_batch(self.config, self.consumed_samples)
        used = self._skipped_samples.count_used(self.consumed_samples)
        seq_len = self._workload.sequence_length(self.iteration, used)
        loss_scale = self.loss_scale.value
        scale = self.loss_scale.gradient_scale(self._workload.terms(training.micro_batch, seq_len))
        for model_chunk in self.model_chunks.values():
            model_chunk.train()
            model_chunk.gradient_scale = scale
        self.reducer.begin()
        self.pipeline = self._pipeline(samples, seq_len)
        began = time.perf_counter()
        total = self._losses(TRAIN, used, seq_len)
        self.pipeline_seconds += time.perf_counter() - began
        self.waited_seconds += self.pipeline.waited_seconds
        self.grid.world.mark_phase(SUMS, micro_batch=-1)
        self.reducer.finish()
        sums = self._sum_over_ranks(total)
        if self._replica_check is not None and is_checksum_step(training.checksum_interval, self.iteration + 1):
            self._replica_check.check(self.iteration + 1)
        terms = self._terms(sums.counted, self._workload.terms(samples, seq_len))
        bad_ranks = int(sums.bad_ranks)
        loss, norm = sums.losses / terms, math.sqrt(sums.squares) / terms / scale
        self.grid.world.mark_phase(OPTIMISER)
        overflow = self.loss_scale.is_overflow(loss, bad_ranks)
        verdict = self.health.judge(self.iteration + 1, loss, norm, bad_ranks, overflow)
        self.loss_scale.update(overflow)
        lr = learning_rate(training, self.iteration)
        if verdict == DONE:
            clip = training.clip_grad / norm if training.clip_grad and norm > training.clip_grad else 1.0
            # gradients are scaled sums over all tokens of the global batch; one pass divides, clips and steps
            self._optimizer.step(lr, terms * scale / clip)
        elif verdict == SPIKE:
            self.buffers.wait_for_all_gather()
            self._copy.restore()
        rounded = verdict == DONE and self._optimizer.rounds_parameters
        if verdict in (DONE, SPIKE) and self.masters is not None and not rounded:
            self.masters.round()
        if verdict in (DONE, SPIKE) and self._gather is not None:
            self._gather.start()
        lost_from = self._copy.consumed if verdict == SPIKE else self._skipped_samples.number(used)
        self.iteration += 1
        self.consumed_samples = self._skipped_samples.number(used + samples - 1) + 1
        self.consumed_tokens += samples * seq_len
        self._save_copy(verdict)
        lost = f"{lost_from}-{self.consumed_samples - 1}" if verdict != DONE else ""
        returned_to = self._copy.iteration if verdict == SPIKE else None
        agreed = bool(sums.stop), int(sums.written), int(sums.not_written)
        self.computed_seconds += (time.perf_counter() - start) - (Communicator.waited_seconds - waited)
        correct = int(sums.counted) if self.config.model.is_grid_classifier else 0
        return Step(loss, norm, lr, samples, seq_len, verdict, lost, returned_to, loss_scale, *agreed, correct)

    def state(self) -> Dict[str, Any]:
        """Return the state that is not in tensors, for JSON; the same on every rank."""
        copy = self._copy
        copy_state = (
            {"iteration": copy.iteration, "consumed": copy.consumed, "steps": copy.steps} if copy.iteration else None
        )
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "optimizer_steps": self._optimizer.steps,
            "health": self.health.state(),
            "loss_scale": self.loss_scale.state(),
            "copy": copy_state,
        }

    @property
    def state_kinds(self) -> Tuple[str, ...]:
        """The kinds of state tensors that exist, the same on every rank."""
        return kinds_of(self._copy)

    def storages(self) -> List[Storage]:
        """Return the state tensors that this rank owns. Parameters that are still arriving from other replicas are not
        among them."""
        return list(storages_of(self._param_ranges, self._optimizer, self._copy))

    def load_tensors(self, state: Mapping[str, Any], read: Callable[[Storage], None]) -> None:
        """Load, phase 1: fill this rank's tensors, without communication.

        Args:
            state: the result of :meth:`state`, or a subset of it; a missing value is that of a run that has not begun.
            read: fills a tensor of the state.
        """
        self.buffers.wait_for_all_gather()
        copy_state = state.get("copy") if self.config.training.rollback_every is not None else None
        self._copy.iteration = 0
        if copy_state is not None:
            self._copy.save(copy_state["iteration"], copy_state["consumed"])
            self._copy.steps = copy_state["steps"]
        for storage in self.storages():
            read(storage)

    def finish_loading(self, state: Mapping[str, Any]) -> None:
        """Load, phase 2: continue from the loaded state, after every rank has filled its tensors; collective."""
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
        if self.health.can_roll_back and not self._copy.iteration:  # the earlier run saved no copies
            self._copy.save(self.iteration, self.consumed_samples)
            self.health.copy_saved(DONE)

    @property
    def copy_bytes(self) -> int:
        """Bytes of this rank's copy to which a loss spike returns; 0 while there is none."""
        return self._copy.bytes

    def memory_by_category(self) -> Dict[str, int]:
        """Return the bytes of this rank's long-lived memory by category; local, callable from any thread."""
        parameters, gradients = self.buffers.bytes
        masters = nbytes(self.masters.values) if self.masters is not None else 0
        return {
            "weights": parameters + masters,
            "gradients": gradients,
            "optimiser": nbytes(*(moment for moments in self._optimizer.moments for moment in moments)),
            "copy for loss spikes": self.copy_bytes,
            "communication buffers": self.reducer.bytes,
        }

    def _save_copy(self, verdict: str) -> None:
        """Copy the state if that is due. Before the first step there is nothing worth copying, and after a return the
        copy equals the state."""
        stepped = self.iteration > self.health.skipped_steps
        if verdict != SPIKE and stepped and self.health.copy_is_due(self.iteration):
            self.buffers.wait_for_all_gather()
            self._copy.save(self.iteration, self.consumed_samples)
            self.health.copy_saved(verdict)

    def _pipeline(self, samples: int, seq_len: int) -> Pipeline:
        """Return the pipeline of a global batch of this size; it is created once for each size."""
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
        """Wait for the parameters that other replicas have sent after the last step."""
        if self._gather is not None:
            self._gather.finish()
        self.grid.world.mark_phase(FINISHED)

    @property
    def has_validation(self) -> bool:
        """Whether there are samples for :meth:`validate`."""
        return self._workload.has(VALID)

    def begin_evaluation(self) -> None:
        """Prepare for forward passes that are no part of a step; the next step ends this."""
        self.grid.world.mark_phase(VALIDATION, micro_batch=-1)
        for model_chunk in self.model_chunks.values():
            model_chunk.eval()

    def validate(self) -> float:
        """Return the mean loss per token or grid over the first ``training.eval_batches`` global batches of the
        validation split."""
        if not self._workload.has(VALID):
            raise ValueError("this trainer was built without validation samples")
        self.begin_evaluation()
        batches, samples = self.config.training.eval_batches, self.config.training.global_batch
        lengths = [self._workload.validation_length(batch * samples) for batch in range(batches)]
        distinct = sorted(set(lengths))
        sums = torch.zeros(2 if self._counts else 1, len(distinct), dtype=torch.float64)
        with torch.no_grad():
            for batch, seq_len in enumerate(lengths):
                self.pipeline = self._pipeline(samples, seq_len)
                sums[0, distinct.index(seq_len)] += self._losses(VALID, batch * samples, seq_len)
                if self._counts:
                    sums[1, distinct.index(seq_len)] += self._take_counted()
        self.grid.dp.all_reduce(sums)
        self.grid.pp.all_reduce(sums)
        self.validated = []
        for seq_len, column in zip(distinct, sums.t().tolist()):
            count = lengths.count(seq_len) * samples
            figures = SizeFigures(seq_len, count, *column[: 2 if self.config.model.is_grid_classifier else 1])
            self.validated.append(figures._replace(distinct=self._workload.distinct(seq_len, count)))
        terms = sum(self._workload.terms(samples, seq_len) for seq_len in lengths)
        return float(sums[0].sum()) / self._terms(float(sums[-1].sum()), terms)

    def _losses(self, split: str, used: int, seq_len: int) -> float:
        """Return the sum of the losses of this replica's tokens over one global batch, on the last stage; 0 on other
        stages. With gradients enabled, the gradients are in the buffers afterwards.

        Args:
            split: ``TRAIN`` or ``VALID``.
            used: number of samples that earlier batches have used.
            seq_len: number of tokens of each sample that are used.
        """
        total = 0.0

        def forward(micro_batch: int, chunk: int, x: Optional[torch.Tensor]) -> torch.Tensor:
            nonlocal total
            model_chunk = self.model_chunks[chunk]
            y = self._workload.forward(model_chunk, x, split, (used, micro_batch), seq_len)
            if model_chunk.chunk.has_head:
                total += float(y.detach())
            return y

        self.pipeline.run(forward, self.reducer)
        return total

    @property
    def _counts(self) -> bool:
        """Whether something is counted beside the losses; see :class:`_StepSums`."""
        return self.config.model.is_grid_classifier or self.config.data.counts_targets

    def _terms(self, counted: float, most: int) -> int:
        """Return the number of losses of which the mean is taken: those that ranks have counted, or ``most`` where all
        tokens, or grids, have one. It is 1 at least, since no target of a batch might count."""
        return max(1, int(counted)) if self.config.data.counts_targets else most

    def _take_counted(self) -> int:
        """Return what this replica has counted since the last call, on the last stage: tokens that had a target, or
        grids that were classified right."""
        if not self.config.model.is_grid_classifier:
            return self._workload.take_targets()
        last = self.model_chunks.get(self._last_chunk)
        return last.correct.take() if last is not None and last.correct is not None else 0

    def _sum_over_ranks(self, total: float) -> _StepSums:
        """Return the sums over all ranks that end this iteration, equal on every rank; collective.

        Args:
            total: sum of this replica's losses, on the last stage.
        """
        squares, finite = squares_of(self._param_ranges)
        written, not_written = self.save_status()
        counted = self._take_counted()  # on every rank: what remained would be counted by the next validation
        is_counted = self.grid.coordinates.tp == 0  # all ranks of a tensor-parallel group have the same sums
        local_sums = _StepSums(
            losses=total if is_counted else 0.0,
            squares=squares,
            bad_ranks=0.0 if finite and math.isfinite(total) else 1.0,
            stop=float(self.should_stop()),
            written=float(written),
            not_written=float(not_written),
            counted=float(counted) if is_counted else 0.0,
        )
        elements = norm_elements(self.config.model, self.config.data.counts_targets)
        sums = torch.tensor(local_sums[:elements], dtype=torch.float64)
        self.grid.world.all_reduce(sums)
        return _StepSums(*sums.tolist())
