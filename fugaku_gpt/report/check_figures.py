"""Rules on figures: TFLOPs follow from the time, the aggregate from the TFLOPs, and the machine can reach them."""

from __future__ import annotations

from dataclasses import replace
from typing import Iterator, List, Optional, Tuple

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.formulas.parameters import parameter_count
from fugaku_gpt.machine.fugaku import ONE_PIPE_STATES
from fugaku_gpt.report.facts import Context, Facts
from fugaku_gpt.report.figures import Figure, Interval, simplest_integer
from fugaku_gpt.report.findings import RowFinding
from fugaku_gpt.report.row_models import parameters_of_label

_LENGTHS = (512, 1024, 2048, 4096)
_SLIGHT_DEVIATION = 0.1  # deviation that averaging over other iterations can explain
_GPU_SLACK = 1e-3
_DECIMALS_OF_NOTES = 2
_BYTES_PER_PARAMETER = 2  # of a parameter, in the narrowest precision
_MINIMUM_NODE_BYTES = 128 * 2.0**20  # bytes; system and libraries take more on every machine


def expected_tflops(facts: Facts) -> List[Interval]:
    """Compute TFLOPs by the notes' formula for every model that the row may mean; empty if an input is missing."""
    batch, seconds, units = facts.counts["gbs"], facts.seconds, facts.units
    if not (batch and seconds and units and facts.seq_len and facts.has_vocabulary) or seconds.low <= 0:
        return []
    modes = (facts.recompute,) if facts.recompute is not None else (False, True)
    return [
        _tflops_interval(_flops(facts, replace(shape, seq_len=facts.seq_len), batch, mode), seconds, units)
        for shape in facts.shapes
        for mode in modes
    ]


def _flops(facts: Facts, model: ModelConfig, batch: int, recompute: Optional[bool]) -> Interval:
    """Floating-point operations of an iteration, over all paddings of the vocabulary in use."""
    tp = facts.counts["tp"] or 1
    bounds = (model.vocab_size, max(model.padded_vocab(1), model.padded_vocab(tp)))
    low, high = (notes_flops(model, batch, vocab, bool(recompute)) for vocab in bounds)
    return Interval(low, high)


def _tflops_interval(flops: Interval, seconds: Interval, units: int) -> Interval:
    return Interval(tflops_per_node(flops.low, seconds.high, units), tflops_per_node(flops.high, seconds.low, units))


def check_tflops(facts: Facts, context: Context) -> Iterator[RowFinding]:
    """Find TFLOPs that do not follow from Sec/it."""
    claimed, expected, printed = facts.tflops, expected_tflops(facts), facts.figures["tflops"]
    if claimed is None or not expected:
        return
    if any(_agree(interval, _cut_or_rounded(printed, claimed), context) for interval in expected):
        return
    if context.on_gpus and (_matches_simple_formula(facts, claimed) or _matches_exact_formula(facts, claimed)):
        return
    nearest = min(expected, key=lambda interval: abs(interval.middle - claimed.middle))
    time = facts.figures["seconds"]
    problem = (
        f"TFLOPs {printed.text} do not follow from Sec/it {time.text}, which gives {_interval_text(nearest, printed)}"
    )
    yield RowFinding(facts.row.line, "tflops", problem, _likely_cause(facts, context, claimed, nearest))


def _cut_or_rounded(figure: Figure, claimed: Interval) -> Interval:
    """The values behind TFLOPs of fewer decimals than the notes', whose last digit may be cut instead of rounded."""
    if figure.decimals >= _DECIMALS_OF_NOTES:
        return claimed
    return Interval(claimed.low, max(claimed.high, figure.value + 10.0**-figure.decimals))


def _agree(expected: Interval, claimed: Interval, context: Context) -> bool:
    """True if two figures can be of the same iterations. On GPUs, averages over different iterations differ
    in the last of their five digits."""
    slack = _GPU_SLACK if context.on_gpus else 0.0
    return Interval(expected.low * (1 - slack), expected.high * (1 + slack)).overlaps(claimed)


def batch_of_heading(facts: Facts, context: Context) -> Optional[int]:
    """The global batch that the text above the table states, if a row's TFLOPs fit it and not the row's own cell."""
    stated, claimed = context.table.heading.global_batch, facts.tflops
    if stated is None or claimed is None or stated == facts.counts["gbs"]:
        return None
    other = replace(facts, counts={**facts.counts, "gbs": stated})
    return stated if any(_agree(interval, claimed, context) for interval in expected_tflops(other)) else None


def _likely_cause(facts: Facts, context: Context, claimed: Interval, nearest: Interval) -> str:
    """Return the commonest slip that would explain the figure."""
    unit = "GPU" if context.on_gpus else "node"
    ratio = claimed.divided_by(nearest)
    per_node, nodes, batch = facts.ranks_per_node or 1, facts.nodes.nodes or 1, facts.counts["gbs"] or 1

    def is_ratio(value: float) -> bool:
        return ratio.overlaps(Interval(value, value))

    peak, _ = peak_of(facts, context)
    if is_ratio(1000.0):
        over = peak is not None and claimed.low > peak
        return "gigaFLOP/s, not teraFLOP/s" if over else "Sec/it is in milliseconds"
    if is_ratio(0.001):
        return "petaFLOP/s, not teraFLOP/s, or Sec/it is a thousandth of what it was"
    if per_node > 1 and is_ratio(1.0 / per_node):
        return f"TFLOPs of one rank: times {per_node} ranks per {unit} it fits"
    if per_node > 1 and is_ratio(per_node):
        return f"multiplied by {per_node} ranks once too often"
    if nodes > 1 and is_ratio(nodes):
        return f"TFLOPs of all {nodes} nodes: divided by {nodes} it fits"
    if facts.recompute is not None and _matches_with(replace(facts, recompute=not facts.recompute), claimed):
        return f"reckoned {'without' if facts.recompute else 'with'} activation checkpointing, against the heading"
    if _matches_exact_formula(facts, claimed):
        return "by the exact formula, not the notes'"
    stated = batch_of_heading(facts, context)
    if stated is not None:
        return f"GBS {batch} for the {stated} that the text above the table states: with {stated} it fits"
    other_batches = tuple(value for value in context.global_batches if value != batch)
    implied = simplest_integer(ratio.times(batch), other_batches)
    if implied is not None and not 0.85 < ratio.middle < 1.15:
        return f"GBS {batch} for {implied}: with {implied} it fits"
    length = next(
        (
            candidate
            for candidate in _LENGTHS
            if candidate != facts.seq_len and _matches_with(replace(facts, seq_len=candidate), claimed)
        ),
        None,
    )
    if length is not None:
        return f"with a sequence length of {length} it fits"
    printed = facts.figures["tflops"]
    if Interval(printed.value, printed.value + 10.0**-printed.decimals).overlaps(nearest):
        return "the last digit was cut, not rounded, or the two were averaged over different iterations"
    if is_slight(facts):
        return "one of the two has a slip, or they were averaged over different iterations"
    return f"one of the two, GBS or the number of nodes is wrong (off by a factor of {ratio.middle:.3g})"


def is_slight(facts: Facts) -> bool:
    """True if TFLOPs are close enough to what Sec/it gives that both may be averages over different iterations."""
    claimed = facts.tflops
    return claimed is not None and any(
        abs(claimed.middle / interval.middle - 1) <= _SLIGHT_DEVIATION for interval in expected_tflops(facts)
    )


def _matches_exact_formula(facts: Facts, claimed: Interval) -> bool:
    batch, seconds, units = facts.counts["gbs"], facts.seconds, facts.units
    if not (batch and seconds and units and facts.seq_len and facts.has_vocabulary):
        return False
    for shape in facts.shapes:
        model = replace(shape, seq_len=facts.seq_len)
        bounds = (model.vocab_size, model.padded_vocab(facts.counts["tp"] or 1))
        low, high = (exact_flops(model, batch, vocab) for vocab in bounds)
        if _tflops_interval(Interval(low, high), seconds, units).overlaps(claimed):
            return True
    return False


def _matches_with(facts: Facts, claimed: Interval) -> bool:
    return any(interval.overlaps(claimed) for interval in expected_tflops(facts))


def _matches_simple_formula(facts: Facts, claimed: Interval) -> bool:
    """True if TFLOPs follow the older GPU notes: billions of parameters * {4, 3} * 2 * s * B / (t * GPUs * 1e3), with
    or without the parameters of the embedding."""
    batch, seconds, units = facts.counts["gbs"], facts.seconds, facts.units
    if not (batch and seconds and units and facts.seq_len):
        return False
    counts = [parameters_of_label(facts.size)]
    for shape in facts.shapes:
        matrices = 12.0 * shape.layers * shape.hidden**2
        layers = matrices + 13.0 * shape.layers * shape.hidden
        counts.append(Interval(matrices, layers))
        counts.append(Interval(layers, parameter_count(replace(shape, seq_len=facts.seq_len))))
    for count in counts:
        for factor in (4, 3):
            if count is not None:
                flops = count.times(factor * 2.0 * facts.seq_len * batch)
                if _tflops_interval(flops, seconds, units).overlaps(claimed):
                    return True
    return False


def check_aggregate(facts: Facts, context: Context) -> Iterator[RowFinding]:
    """Find an aggregate that is not TFLOPs times nodes / 1024 (or / 1000 if ``context.si``)."""
    claimed, tflops, nodes = facts.aggregate, facts.tflops, facts.nodes.nodes
    if claimed is None or tflops is None or not nodes:
        return
    divisor, other = (1000.0, 1024.0) if context.si else (1024.0, 1000.0)
    expected, printed = tflops.times(nodes / divisor), facts.figures["aggregate"]
    cut = Interval(printed.value, printed.value + 10.0**-printed.decimals)  # a last digit that was cut, not rounded
    if expected.overlaps(claimed) or (printed.value > 0 and expected.overlaps(cut)):
        return
    problem = (
        f"aggregate {printed.text} is not TFLOPs {facts.figures['tflops'].text} * {nodes} nodes / {divisor:.0f} = "
        f"{_interval_text(expected, printed)}"
    )
    if tflops.times(nodes / other).overlaps(claimed):
        cause = f"it is / {other:.0f}" + (
            "" if context.si else "; the notes divide by 1024 (--si where a table is / 1000)"
        )
    elif tflops.times(nodes).overlaps(claimed):
        cause = "these are teraFLOP/s: not divided by 1024"
    elif tflops.times(1 / divisor).overlaps(claimed):
        cause = "not multiplied by the number of nodes"
    elif facts.ranks and tflops.times(facts.ranks / divisor).overlaps(claimed):
        cause = f"multiplied by {facts.ranks} ranks, not by {nodes} nodes"
    else:
        cause = "a figure of another row, or another number of nodes"
    yield RowFinding(facts.row.line, "aggregate", problem, cause)


def check_machine(facts: Facts, context: Context) -> Iterator[RowFinding]:
    """Find more TFLOPs than the machine can reach, more memory than it has, or less than the model needs."""
    machine, unit = context.machine, "GPU" if context.on_gpus else "node"
    peak, label = peak_of(facts, context)
    if peak is not None and facts.tflops is not None and facts.tflops.low > peak:
        problem = f"TFLOPs {facts.figures['tflops'].text} are over the peak of one {unit}, {peak:.3f} ({label})"
        yield RowFinding(facts.row.line, "peak", problem, "of all nodes, in other units, or in another column")
    mem, printed = facts.mem, facts.figures["mem"]
    if mem is None:
        return
    if machine.memory_bytes is not None and mem.low > machine.memory_bytes:
        problem = f"Mem {printed.text} is more than the {machine.memory_bytes / 2**30:.0f} GiB of one {unit}"
        fits = mem.times(1 / 1024.0).low <= machine.memory_bytes
        yield RowFinding(facts.row.line, "memory", problem, _smaller_unit(printed) if fits else "of all nodes")
    minimum = _minimum_memory(facts)
    if mem.high < minimum:
        contents = f"the weights of {facts.size}" if minimum > _MINIMUM_NODE_BYTES else "PyTorch"
        problem = f"Mem {printed.text} cannot hold {contents} (at least {minimum / 2**20:.0f} MiB)"
        yield RowFinding(facts.row.line, "memory", problem, "the unit is too small, or another column's figure")


def peak_of(facts: Facts, context: Context) -> Tuple[Optional[float], str]:
    """Return (peak TFLOP/s of one unit at the row's clock and pipes, description of that peak)."""
    machine = context.machine
    if machine.peak_tflops is None or machine.clock_ghz is None:
        return machine.peak_tflops, machine.label
    clock = (facts.nodes.freq_mhz or 0) / 1000.0
    clock = clock if 0.5 <= clock <= 5 else 2.2  # where the row does not say: the highest that there is
    eco_mode = dict(facts.nodes.states).get("eco_state", 0) in ONE_PIPE_STATES
    peak = machine.peak_tflops * clock / machine.clock_ghz * (0.5 if eco_mode else 1.0)
    return peak, f"{machine.label}, {clock:g} GHz" + (", one pipe" if eco_mode else "")


def _minimum_memory(facts: Facts) -> float:
    """Bytes that a node needs at least: for one rank's share of the weights, and for PyTorch itself."""
    if not facts.shapes:
        return _MINIMUM_NODE_BYTES
    ranks_per_replica = (facts.counts["tp"] or 1) * (facts.counts["pp"] or 1)
    return max(
        _MINIMUM_NODE_BYTES,
        min(parameter_count(shape) for shape in facts.shapes) * _BYTES_PER_PARAMETER / ranks_per_replica,
    )


def _smaller_unit(printed: Figure) -> str:
    smaller = {"gib": "MiB", "gb": "MB", "tib": "GiB", "tb": "GB", "g": "M"}.get(printed.unit.lower())
    return f"{printed.unit} for {smaller}" if smaller else "of all nodes, or a figure of another column"


def _interval_text(interval: Interval, printed: Figure) -> str:
    digits = max(printed.decimals, 2)
    low, high = f"{interval.low:.{digits}f}", f"{interval.high:.{digits}f}"
    return low if low == high else f"{low} to {high}"
