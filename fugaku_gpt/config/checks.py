"""Rules between the fields of a run, which no single value can break."""

from __future__ import annotations

import math
from typing import Callable, List, Sequence, Tuple

from fugaku_gpt.config.grid_checks import check_grids
from fugaku_gpt.config.schema import MEGATRON_ORDER, VALIDATION, RunConfig, TrainingConfig
from fugaku_gpt.limits import MICRO_BATCHES, RAMP_ITERATIONS, RANKS, RANKS_OF_NODE, TRACED_ITERATIONS, cut

# Megatron-Core shuffles with numpy.random.RandomState, and numbers the corpora of a blend with 16 bits
LARGEST_MEGATRON_SEED, MOST_MEGATRON_CORPORA = 2**32 - 1, 32766

Locate = Callable[[str], str]


def problems_of(config: RunConfig, locate: Locate) -> List[str]:
    """One line for each broken rule: location, key, value, and valid values; empty if the run can be started.

    ``locate`` returns the file and line at which a dotted key was written, or "" for a default.
    """
    problems: List[str] = []

    def report_problem(key: str, value: object, rule: str) -> None:
        location = locate(key)
        problems.append(f"{location + ': ' if location else ''}{key}: {cut(str(value))}: {rule}")

    _check_sizes(config, report_problem)
    if problems:  # what follows would take long
        return problems
    _check_model(config, report_problem)
    _check_dropout(config, report_problem)
    _check_layout(config, report_problem)
    _check_training(config, report_problem)
    _check_precision(config, report_problem)
    check_ramps(config, report_problem)
    _check_health(config, report_problem)
    _check_trace(config, report_problem)
    _check_recompute(config, report_problem)
    _check_data(config, report_problem)
    _check_evaluation(config, report_problem)
    check_grids(config, report_problem)
    _check_checkpoint(config, report_problem)
    _check_job(config, report_problem)
    return problems


ReportProblem = Callable[[str, object, str], None]


def _check_sizes(config: RunConfig, report_problem: ReportProblem) -> None:
    """Refuse products of fields beyond any machine; the fields' own limits are in the schema."""
    layout, training = config.layout, config.training
    if layout.ranks > RANKS.value:
        report_problem("layout.dp", layout.dp, f"layout.dp * tp * pp is {layout.ranks}; valid: at most {RANKS.value}")
    if config.ranks_per_node > RANKS_OF_NODE.value:
        ranks = f"{layout.ranks} ranks (layout.dp * layout.tp * layout.pp)"
        rule = f"{ranks} are {config.ranks_per_node} on each; valid: at most {RANKS_OF_NODE.value} on each"
        report_problem("job.nodes", config.job.nodes, rule)
    micro_batches = training.global_batch // (training.micro_batch * layout.dp)
    if micro_batches > MICRO_BATCHES.value:
        rule = f"makes {micro_batches} micro-batches for each replica; valid: at most {MICRO_BATCHES.value}"
        report_problem("training.global_batch", training.global_batch, rule)
    if (training.ramp_samples or 0) > RAMP_ITERATIONS.value * (training.ramp_start or 1):
        rule = f"takes more than {RAMP_ITERATIONS.value} iterations of training.ramp_start {training.ramp_start}"
        report_problem("training.ramp_samples", training.ramp_samples, rule)


def _check_model(config: RunConfig, report_problem: ReportProblem) -> None:
    model, tp = config.model, config.layout.tp
    if model.head_dim is None and model.hidden % model.heads:
        report_problem(
            "model.heads",
            model.heads,
            f"must divide model.hidden {model.hidden}; valid: {_divisors(model.hidden)}, or give model.head_dim",
        )
    if model.heads % model.kv_head_count:
        rule = f"must divide model.heads {model.heads}; valid: {_divisors(model.heads)}"
        report_problem("model.kv_heads", model.kv_head_count, rule)
    if model.heads % tp:
        report_problem("layout.tp", tp, f"must divide model.heads {model.heads}; valid: {_divisors(model.heads)}")
    elif model.heads % model.kv_head_count == 0 and not model.supports_tp(tp):
        valid = _format_list([ranks for ranks in _divisors_of(model.heads) if model.supports_tp(ranks)])
        rule = f"must divide model.kv_heads {model.kv_head_count} or be a multiple of it; valid: {valid}"
        report_problem("layout.tp", tp, rule)
    _check_rotary(config, report_problem)
    if model.ffn_size % tp:
        valid = _divisors(model.ffn_size)
        report_problem("layout.tp", tp, f"must divide model.ffn_hidden {model.ffn_size}; valid: {valid}")
    padded = config.padded_vocab
    if padded % tp:
        above = -(-padded // tp) * tp
        report_problem(
            "model.padded_vocab_size", padded, f"must be a multiple of layout.tp {tp}; valid: {above}, or leave it out"
        )
    if padded < model.vocab_size:
        report_problem(
            "model.padded_vocab_size", padded, f"must be at least model.vocab_size {model.vocab_size}, or leave it out"
        )


def _check_rotary(config: RunConfig, report_problem: ReportProblem) -> None:
    model = config.model
    if model.positions == "rope" and model.head_size % (4 if model.is_grid_classifier else 2):
        width = "a width that 4 divides, half of it for rows" if model.is_grid_classifier else "an even width"
        report_problem("model.positions", "rope", f"needs heads of {width}, not {model.head_size}")
    if (model.rope_factor > 1) != (model.rope_scaling != "none"):
        rule = f"needs a value above 1 with model.rope_scaling {model.rope_scaling}"
        if model.rope_scaling == "none":
            rule = "needs model.rope_scaling; valid with none: 1"
        report_problem("model.rope_factor", model.rope_factor, rule)
    if model.rope_scaling == "none":
        return
    if model.positions != "rope":
        report_problem("model.rope_scaling", model.rope_scaling, "needs model.positions rope; valid: none")
    if model.rope_scaling == "llama3":
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        if model.rope_original_seq_len is None:
            report_problem("model.rope_scaling", "llama3", "needs model.rope_original_seq_len")
        if low >= high:
            report_problem("model.rope_low_freq_factor", low, f"must be less than model.rope_high_freq_factor {high:g}")


def _check_dropout(config: RunConfig, report_problem: ReportProblem) -> None:
    for key, value in (("dropout", config.model.dropout), ("attention_dropout", config.model.attention_dropout)):
        if value > 0 and round(value * 65536) in (0, 65536):  # masks are drawn in 16 bits
            report_problem(f"model.{key}", value, "is 0 or 1 to 16 bits; valid: 0, or from 2e-5 to 0.9999")


def _check_layout(config: RunConfig, report_problem: ReportProblem) -> None:
    layout, node, job = config.layout, config.node, config.job
    if layout.chunks > 1 and layout.schedule != "interleaved":
        report_problem(
            "layout.chunks", layout.chunks, f"more than 1 with layout.schedule {layout.schedule}; valid: interleaved"
        )
    chunk_count = layout.pp * layout.chunks
    if chunk_count > config.model.layers:
        report_problem(
            "layout.pp",
            layout.pp,
            f"times layout.chunks {layout.chunks} is more than model.layers {config.model.layers}",
        )
    elif layout.split and (
        len(layout.split) != chunk_count or sum(layout.split) != config.model.layers or 0 in layout.split[:-1]
    ):
        report_problem(
            "layout.split",
            list(layout.split),
            f"must be {chunk_count} numbers, 1 or more but for the last, "
            f"that add up to model.layers {config.model.layers}",
        )
    if layout.sequence_parallel and config.model.seq_len % layout.tp:
        report_problem(
            "layout.tp",
            layout.tp,
            f"must divide model.seq_len {config.model.seq_len} with layout.sequence_parallel; "
            f"valid: {_divisors(config.model.seq_len)}",
        )
    if node.compiled_products == "on" and not node.compiled_kernels:
        report_problem(
            "node.compiled_products", "on", "needs our own kernels: set node.compiled_kernels to true, or this to auto"
        )
    product = f"layout.dp {layout.dp} * layout.tp {layout.tp} * layout.pp {layout.pp} = {layout.ranks} ranks"
    if node.ranks_per_node is None:
        if layout.ranks % job.nodes:
            key, value = ("job.shape", f"{job.shape} = {job.nodes} nodes") if job.shape else ("job.nodes", job.nodes)
            report_problem(key, value, f"must divide {product}; valid: {_divisors(layout.ranks)}")
    elif node.ranks_per_node * job.nodes != layout.ranks:
        report_problem(
            "node.ranks_per_node",
            node.ranks_per_node,
            f"times job.nodes {job.nodes} must be {product}; "
            + (
                f"valid: {layout.ranks // job.nodes}"
                if layout.ranks % job.nodes == 0
                else "change the layout or job.nodes"
            ),
        )


def _check_training(config: RunConfig, report_problem: ReportProblem) -> None:
    training, dp = config.training, config.layout.dp
    unit = training.micro_batch * dp
    if training.global_batch % unit:
        multiple = training.global_batch // unit * unit
        valid = f"{multiple} or {multiple + unit}" if multiple else str(unit)
        rule = f"training.micro_batch {training.micro_batch} * layout.dp {dp} = {unit}"
        report_problem("training.global_batch", training.global_batch, f"must be a multiple of {rule}; valid: {valid}")
    if training.min_lr > training.lr:
        report_problem("training.min_lr", training.min_lr, f"must be at most training.lr {training.lr:g}")
    if training.decay_fraction > 1:
        report_problem(
            "training.decay_fraction", f"{training.decay_fraction:g}", "is a share; valid: above 0, at most 1"
        )
    # a short trial of a long run may end within its warm-up; a schedule that is written out may not
    if training.decay_iterations is not None and training.warmup_iterations >= training.decay_iterations:
        report_problem(
            "training.warmup_iterations",
            training.warmup_iterations,
            f"must be below training.decay_iterations {training.decay_iterations}",
        )


def check_ramps(config: RunConfig, report_problem: ReportProblem) -> None:
    """Check that every size of a growing batch and every length of growing samples divides as the full one does."""
    training, layout = config.training, config.layout
    unit = training.micro_batch * layout.dp
    if training.global_batch % unit == 0:  # else reported above
        rule = f"training.micro_batch {training.micro_batch} * layout.dp {layout.dp} = {unit}"
        full_size = ("training.global_batch", training.global_batch)
        _check_ramp(training, ("ramp_start", "ramp_increment", "ramp_samples"), full_size, unit, rule, report_problem)
    tp_ranks = layout.tp if layout.sequence_parallel else 1
    if config.model.seq_len % tp_ranks == 0:
        rule = f"layout.tp {layout.tp} with layout.sequence_parallel"
        full_size = ("model.seq_len", config.model.seq_len)
        names = ("seq_ramp_start", "seq_ramp_increment", "seq_ramp_iterations")
        _check_ramp(training, names, full_size, tp_ranks, rule, report_problem)


def _check_ramp(
    training: TrainingConfig,
    names: Tuple[str, str, str],
    full_size: Tuple[str, int],
    unit: int,
    rule: str,
    report_problem: ReportProblem,
) -> None:
    """Check that start, increments and full size are multiples of ``unit``, and that increments reach the full size."""
    start, increment, length = values = [getattr(training, name) for name in names]
    if values == [None, None, None]:
        return
    if None in values:
        missing = names[values.index(None)]
        present = next(name for name, value in zip(names, values) if value is not None)
        report_problem(
            f"training.{missing}", "null", f"is needed with training.{present}; valid: all of {', '.join(names)}"
        )
        return
    key, size = full_size
    if start > size or start % unit:
        multiple = min(start, size) // unit * unit
        valid = ", ".join(str(candidate) for candidate in (multiple, multiple + unit) if 0 < candidate <= size)
        report_problem(
            f"training.{names[0]}", start, f"must be a multiple of {rule}, at most {key} {size}; valid: {valid}"
        )
    elif start < size and ((size - start) % increment or increment % unit):
        valid = _format_list([unit * step for step in _divisors_of((size - start) // unit)])
        report_problem(
            f"training.{names[1]}",
            increment,
            f"must be a multiple of {rule} that divides {key} {size} - {start} = {size - start}; valid: {valid}",
        )


def _check_trace(config: RunConfig, report_problem: ReportProblem) -> None:
    traced, text = config.training.traced, config.training.trace_iterations
    if traced is None:
        return
    (first, last), iterations, most = traced, config.training.iterations, TRACED_ITERATIONS.value
    if first > last:
        report_problem(
            "training.trace_iterations", text, f"must go from the lower to the higher number; valid: {last}-{first}"
        )
    elif first < 1 or last > iterations:
        report_problem("training.trace_iterations", text, f"must lie within training.iterations; valid: 1-{iterations}")
    elif last - first >= most:
        report_problem(
            "training.trace_iterations", text, f"at most {most} iterations; valid: {first}-{first + most - 1}"
        )
    if not config.node.flight_recorder:
        report_problem(
            "training.trace_iterations", text, "needs node.flight_recorder, whose records it keeps; valid: true"
        )


def _check_health(config: RunConfig, report_problem: ReportProblem) -> None:
    training = config.training
    for text in training.skip_samples:
        first, _, last = text.partition("-")
        if last and int(first) > int(last):
            report_problem(
                "training.skip_samples", text, f"must go from the lower to the higher number; valid: {last}-{first}"
            )
    if training.checksum_interval is not None and config.layout.ranks == 1:
        report_problem(
            "training.checksum_interval",
            training.checksum_interval,
            "one rank holds nothing that another holds alike; valid: null, or more replicas (layout.dp)",
        )
    if training.rollback_every is None:
        return
    if training.rollback_every > training.spike_window:
        report_problem(
            "training.rollback_every",
            training.rollback_every,
            "must be at most training.spike_window, so that there is a copy when the first loss can be judged; "
            f"valid: 1 to {training.spike_window}",
        )
    if training.spike_deviations is None and training.spike_ratio is None:
        report_problem(
            "training.rollback_every",
            training.rollback_every,
            "needs training.spike_deviations or training.spike_ratio, by which a loss is a spike",
        )


def _check_precision(config: RunConfig, report_problem: ReportProblem) -> None:
    training = config.training
    if training.dtype == "float64" and training.gradient_dtype is not None:
        report_problem(
            "training.gradient_dtype", training.gradient_dtype, "must be left out with training.dtype float64"
        )
    if training.loss_scale < training.loss_scale_min:
        report_problem(
            "training.loss_scale",
            f"{training.loss_scale:g}",
            f"must be at least training.loss_scale_min {training.loss_scale_min:g}",
        )


def _check_recompute(config: RunConfig, report_problem: ReportProblem) -> None:
    training = config.training
    if training.recompute_budget_mib is not None:
        if training.recompute == "none":
            report_problem(
                "training.recompute_budget_mib",
                f"{training.recompute_budget_mib:g}",
                "needs training.recompute, the most that may be recomputed; valid: selective, full",
            )
        if training.recompute_layers is not None:
            report_problem(
                "training.recompute_layers",
                training.recompute_layers,
                "is chosen by training.recompute_budget_mib; valid: one of the two",
            )
    elif training.recompute_layers is not None and training.recompute == "none":
        report_problem(
            "training.recompute_layers",
            training.recompute_layers,
            "needs training.recompute; valid: selective, full",
        )


def _check_data(config: RunConfig, report_problem: ReportProblem) -> None:
    data = config.data
    if data.weights and len(data.weights) != len(data.paths):
        report_problem(
            "data.weights", list(data.weights), f"must have one weight for each of the {len(data.paths)} data.paths"
        )
    if len(data.split) != 3 or sum(data.split) <= 0 or data.split[0] <= 0:
        report_problem(
            "data.split",
            list(data.split),
            "must be three shares (train, valid, test), train above 0, such as [969, 30, 1]",
        )
    for key in ("reset_positions", "loss_across_documents"):
        if getattr(data, key) and not data.document_mask:
            report_problem(f"data.{key}", True, "needs data.document_mask; valid: false, or data.document_mask=true")
    _check_order(config, report_problem)


def _check_order(config: RunConfig, report_problem: ReportProblem) -> None:
    data = config.data
    if data.order != MEGATRON_ORDER:
        if data.order_samples is not None:
            report_problem("data.order_samples", data.order_samples, "needs data.order megatron; valid: null")
        return
    if config.training.seed > LARGEST_MEGATRON_SEED:
        rule = f"is too large for the shuffles of data.order megatron; valid: 0 to {LARGEST_MEGATRON_SEED}"
        report_problem("training.seed", config.training.seed, rule)
    if len(data.paths) > MOST_MEGATRON_CORPORA:
        rule = f"is too many for data.order megatron; valid: {MOST_MEGATRON_CORPORA} at most"
        report_problem("data.paths", f"{len(data.paths)} paths", rule)


def _check_evaluation(config: RunConfig, report_problem: ReportProblem) -> None:
    training, checkpoint, best = config.training, config.checkpoint, config.checkpoint.keep_best
    for number, (path, name) in enumerate(zip(training.eval_files, training.eval_names)):
        if not name or name == VALIDATION:
            rule = f"its name would be {name!r}; valid: another one than {VALIDATION}, so give the file one"
            report_problem("training.eval_files", path, rule)
        elif name in training.eval_names[:number]:
            report_problem("training.eval_files", path, f"another file has the same name, {name}; rename one")
    if training.eval_files and training.eval_interval is None:
        rule = "needs training.eval_interval, the iterations between evaluations"
        report_problem("training.eval_files", list(training.eval_files), rule)
    if best is None:
        return
    valid = ((VALIDATION,) if has_validation_part(config) else ()) + training.eval_names
    interval, every = checkpoint.interval, training.eval_interval
    if best not in valid:
        rule = "names no loss that this run measures"
        report_problem("checkpoint.keep_best", best, f"{rule}; valid: {', '.join(valid) or 'null'}")
    if interval is None or every is None:
        rule = "needs checkpoint.interval and training.eval_interval, at which checkpoints are written and measured"
        report_problem("checkpoint.keep_best", best, rule)
    elif interval % every:
        multiple = interval // every * every
        rule = f"so that each is measured, must be a multiple of training.eval_interval {every} with "
        rule += f"checkpoint.keep_best; valid: {f'{multiple} or ' if multiple else ''}{multiple + every}"
        report_problem("checkpoint.interval", interval, rule)


def has_validation_part(config: RunConfig) -> bool:
    """Whether a validation reads the corpora's part for it: where other files are evaluated, they may have none."""
    return not config.training.eval_files or (len(config.data.split) == 3 and config.data.split[1] > 0)


def _check_checkpoint(config: RunConfig, report_problem: ReportProblem) -> None:
    interval, every = config.checkpoint.interval, config.checkpoint.keep_every
    if every is None:
        return
    if interval is None:
        report_problem("checkpoint.keep_every", every, "needs checkpoint.interval, which it is a multiple of")
    elif every % interval:
        valid = " or ".join(
            str(candidate)
            for candidate in (every // interval * interval, -(-every // interval) * interval)
            if candidate
        )
        report_problem(
            "checkpoint.keep_every", every, f"must be a multiple of checkpoint.interval {interval}; valid: {valid}"
        )


def _check_job(config: RunConfig, report_problem: ReportProblem) -> None:
    job = config.job
    if "/" in job.name or job.name in (".", ".."):
        report_problem("job.name", repr(job.name), "is used as the name of a folder; valid: a name without /")
    if job.shape:
        sides = job.shape.split("x")
        product = math.prod(int(side) for side in sides)
        if product != job.nodes:
            report_problem("job.nodes", job.nodes, f"must be the product of job.shape {job.shape}; valid: {product}")
        if job.strict and len(sides) != 3:
            report_problem("job.strict", job.strict, f"needs a shape of three sides; job.shape is {job.shape}")
    elif job.strict:
        report_problem("job.strict", job.strict, "needs a shape of three sides, such as job.shape=4x6x8")
    if job.strict and job.allocation != "torus":
        report_problem("job.strict", job.strict, "needs job.allocation=torus")
    if job.elapse_min is not None and (job.elapse is None or job.elapse_min >= job.elapse):
        report_problem("job.elapse_min", f"{job.elapse_min:g}", "must be below job.elapse, the upper end of the range")
    if job.stop_margin is not None and job.elapse is not None and job.stop_margin >= job.elapse:
        report_problem("job.stop_margin", f"{job.stop_margin:g}", f"must be below job.elapse {job.elapse:g}")
    if job.bulk:
        first, last = (int(text) for text in job.bulk.split("-"))
        if first > last:
            report_problem("job.bulk", job.bulk, f"must go from the lower to the higher number; valid: {last}-{first}")
        if job.chain > 1:
            report_problem("job.chain", job.chain, "a bulk job is not chained; valid: 1, or leave job.bulk out")
    if ":" in job.rank_map and job.shape:
        axes = len(job.rank_map.partition(":")[2])
        if axes != len(job.shape.split("x")):
            report_problem("job.rank_map", job.rank_map, f"names {axes} axes; job.shape {job.shape} has another number")
    if job.tarball and job.scheduler == "pjm" and not job.local_tmp:
        report_problem(
            "job.tarball", job.tarball, "is unpacked to node-local disk, which needs job.local_tmp, such as 30Gi"
        )


# limit of the divisors in a message, so that a slip of many zeros does not take minutes to refuse
_LARGEST_DIVISOR = 100_000


def _divisors(number: int) -> str:
    return _format_list(_divisors_of(number), is_truncated=number > _LARGEST_DIVISOR)


def _divisors_of(number: int) -> List[int]:
    return [divisor for divisor in range(1, min(number, _LARGEST_DIVISOR) + 1) if number % divisor == 0]


def _format_list(numbers: Sequence[int], is_truncated: bool = False) -> str:
    return ", ".join([str(number) for number in numbers] + (["..."] if is_truncated else []))
