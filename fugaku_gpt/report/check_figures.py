"""Rules on figures: do TFLOPs follow from the time, the aggregate from the TFLOPs, and can the machine do it?"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterator, List, Optional, Tuple

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.formulas.parameters import parameter_count
from fugaku_gpt.report.facts import Context, Facts
from fugaku_gpt.report.figures import Figure, Interval, nearest_whole
from fugaku_gpt.report.findings import Finding

_LENGTHS = (512, 1024, 2048, 4096)
_SLIGHT = 0.1  # deviation that averaging over other iterations can explain
_LEAST_BYTES = 2  # of a parameter, in the narrowest precision
_LEAST_NODE = 128 * 2.0**20  # bytes; system and libraries take more on every machine


def expected_tflops(facts: Facts) -> List[Interval]:
    """TFLOPs by the notes' formula for every model that the row may mean; empty where something is not known."""
    batch, seconds, units = facts.counts["gbs"], facts.seconds, facts.units
    if not (batch and seconds and units and facts.seq_len) or seconds.low <= 0:
        return []
    modes = (facts.recompute,) if facts.recompute is not None else (False, True)
    return [
        _speed(_flops(facts, replace(shape, seq_len=facts.seq_len), batch, mode), seconds, units)
        for shape in facts.shapes
        for mode in modes
    ]


def _flops(facts: Facts, model: ModelConfig, batch: int, recompute: Optional[bool]) -> Interval:
    """Over all paddings of the vocabulary that people use."""
    tp = facts.counts["tp"] or 1
    bounds = (model.vocab_size, max(model.padded_vocab(1), model.padded_vocab(tp)))
    low, high = (notes_flops(model, batch, vocab, bool(recompute)) for vocab in bounds)
    return Interval(low, high)


def _speed(flops: Interval, seconds: Interval, units: int) -> Interval:
    return Interval(tflops_per_node(flops.low, seconds.high, units), tflops_per_node(flops.high, seconds.low, units))


def check_tflops(facts: Facts, context: Context) -> Iterator[Finding]:
    """TFLOPs that do not follow from Sec/it."""
    said, expected = facts.tflops, expected_tflops(facts)
    if said is None or not expected or any(one.meets(said) for one in expected):
        return
    if context.table.on_gpus and _simple_fits(facts, said):
        return
    near = min(expected, key=lambda one: abs(one.middle - said.middle))
    printed, time = facts.figures["tflops"], facts.figures["seconds"]
    what = f"TFLOPs {printed.text} do not follow from Sec/it {time.text}, which gives {_words(near, printed)}"
    yield Finding(facts.row.line, "tflops", what, _cause(facts, context, said, near))


def _cause(facts: Facts, context: Context, said: Interval, near: Interval) -> str:
    """The slip that would explain the figure; the commonest first."""
    unit = "GPU" if context.table.on_gpus else "node"
    ratio = said.over(near)
    per_node, nodes, batch = facts.ranks_per_node or 1, facts.nodes.nodes or 1, facts.counts["gbs"] or 1

    def is_ratio(value: float) -> bool:
        return ratio.meets(Interval(value, value))

    peak, _ = peak_of(facts, context)
    if is_ratio(1000.0):
        over = peak is not None and said.low > peak
        return "gigaFLOP/s, not teraFLOP/s" if over else "Sec/it is in milliseconds"
    if is_ratio(0.001):
        return "petaFLOP/s, not teraFLOP/s, or Sec/it is a thousandth of what it was"
    if per_node > 1 and is_ratio(1.0 / per_node):
        return f"TFLOPs of one rank: times {per_node} ranks per {unit} it fits"
    if per_node > 1 and is_ratio(per_node):
        return f"multiplied by {per_node} ranks once too often"
    if nodes > 1 and is_ratio(nodes):
        return f"TFLOPs of all {nodes} nodes: divided by {nodes} it fits"
    if is_ratio(4 / 3) or is_ratio(3 / 4):
        with_or_without = "with" if said.middle > near.middle else "without"
        return f"reckoned {with_or_without} activation checkpointing, against the heading"
    if _exact_fits(facts, said):
        return "by the exact formula, not the notes'"
    others = tuple(value for value in context.global_batches if value != batch)
    implied = nearest_whole(ratio.times(batch), others)
    if implied is not None and not 0.85 < ratio.middle < 1.15:
        return f"GBS {batch} for {implied}: with {implied} it fits"
    length = next((one for one in _LENGTHS if one != facts.seq_len and _fits_with_length(facts, said, one)), None)
    if length is not None:
        return f"with a sequence length of {length} it fits"
    printed = facts.figures["tflops"]
    if Interval(printed.value, printed.value + 10.0**-printed.decimals).meets(near):
        return "the last digit was cut, not rounded, or the two were averaged over different iterations"
    if is_slight(facts):
        return "one of the two has a slip, or they were averaged over different iterations"
    return f"one of the two, GBS or the number of nodes is wrong (off by a factor of {ratio.middle:.3g})"


def is_slight(facts: Facts) -> bool:
    """Whether TFLOPs are so near to what Sec/it gives that both may have been measured, over different iterations."""
    said = facts.tflops
    return said is not None and any(abs(said.middle / one.middle - 1) <= _SLIGHT for one in expected_tflops(facts))


def _exact_fits(facts: Facts, said: Interval) -> bool:
    batch, seconds, units = facts.counts["gbs"], facts.seconds, facts.units
    if not (batch and seconds and units and facts.seq_len):
        return False
    for shape in facts.shapes:
        model = replace(shape, seq_len=facts.seq_len)
        bounds = (model.vocab_size, model.padded_vocab(facts.counts["tp"] or 1))
        low, high = (exact_flops(model, batch, vocab) for vocab in bounds)
        if _speed(Interval(low, high), seconds, units).meets(said):
            return True
    return False


def _fits_with_length(facts: Facts, said: Interval, length: int) -> bool:
    return any(one.meets(said) for one in expected_tflops(replace(facts, seq_len=length)))


def _simple_fits(facts: Facts, said: Interval) -> bool:
    """The older GPU notes: billions of parameters * {4, 3} * 2 * s * B / (t * GPUs * 1e3), with or without those of the
    embedding."""
    batch, seconds, units = facts.counts["gbs"], facts.seconds, facts.units
    if not (batch and seconds and units and facts.seq_len) or seconds.low <= 0:
        return False
    counts = [_labelled(facts.size)]
    for shape in facts.shapes:
        matrices = 12.0 * shape.layers * shape.hidden**2
        layers = matrices + 13.0 * shape.layers * shape.hidden
        counts.append(Interval(matrices, layers))
        counts.append(Interval(layers, parameter_count(replace(shape, seq_len=facts.seq_len))))
    for count in counts:
        for factor in (4, 3):
            if count is not None:
                flops = count.times(factor * 2.0 * facts.seq_len * batch)
                if _speed(flops, seconds, units).meets(said):
                    return True
    return False


def _labelled(size: str) -> Optional[Interval]:
    """The parameters that a label such as 1.3B stands for."""
    number, letter = size[:-1].strip(), size[-1:]
    if letter not in ("M", "B") or not number.replace(".", "", 1).isdigit():
        return None
    unit = 1e9 if letter == "B" else 1e6
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    return Interval(max(0.0, float(number) - half) * unit, (float(number) + half) * unit)


def check_aggregate(facts: Facts, context: Context) -> Iterator[Finding]:
    """An aggregate that is not TFLOPs times nodes / 1024 (or / 1000 where that is asked for)."""
    said, tflops, nodes = facts.aggregate, facts.tflops, facts.nodes.nodes
    if said is None or tflops is None or not nodes:
        return
    divisor, other = (1000.0, 1024.0) if context.si else (1024.0, 1000.0)
    expected = tflops.times(nodes / divisor)
    if expected.meets(said):
        return
    printed = facts.figures["aggregate"]
    what = (
        f"aggregate {printed.text} is not TFLOPs {facts.figures['tflops'].text} * {nodes} nodes / {divisor:.0f} = "
        f"{_words(expected, printed)}"
    )
    if tflops.times(nodes / other).meets(said):
        cause = f"it is / {other:.0f}" + (
            "" if context.si else "; the notes divide by 1024 (--si where a table is / 1000)"
        )
    elif tflops.times(nodes).meets(said):
        cause = "these are teraFLOP/s: not divided by 1024"
    elif tflops.times(1 / divisor).meets(said):
        cause = "not multiplied by the number of nodes"
    elif facts.ranks and tflops.times(facts.ranks / divisor).meets(said):
        cause = f"multiplied by {facts.ranks} ranks, not by {nodes} nodes"
    else:
        cause = "a figure of another row, or another number of nodes"
    yield Finding(facts.row.line, "aggregate", what, cause)


def check_machine(facts: Facts, context: Context) -> Iterator[Finding]:
    """More TFLOPs than the machine can do, more memory than it has, or less than the model needs."""
    machine, unit = context.machine, "GPU" if context.table.on_gpus else "node"
    peak, words = peak_of(facts, context)
    if peak is not None and facts.tflops is not None and facts.tflops.low > peak:
        what = f"TFLOPs {facts.figures['tflops'].text} are over the peak of one {unit}, {peak:.3f} ({words})"
        yield Finding(facts.row.line, "peak", what, "of all nodes, in other units, or in another column")
    mem, printed = facts.mem, facts.figures["mem"]
    if mem is None:
        return
    if machine.memory_bytes is not None and mem.low > machine.memory_bytes:
        what = f"Mem {printed.text} is more than the {machine.memory_bytes / 2**30:.0f} GiB of one {unit}"
        fits = mem.times(1 / 1024.0).low <= machine.memory_bytes
        yield Finding(facts.row.line, "memory", what, _smaller_unit(printed) if fits else "of all nodes")
    least = _least_memory(facts)
    if mem.high < least:
        held = f"the weights of {facts.size}" if least > _LEAST_NODE else "PyTorch"
        what = f"Mem {printed.text} cannot hold {held} (at least {least / 2**20:.0f} MiB)"
        yield Finding(facts.row.line, "memory", what, "the unit is too small, or another column's figure")


def peak_of(facts: Facts, context: Context) -> Tuple[Optional[float], str]:
    """TFLOP/s that one unit can do with the row's clock and pipes, and of what."""
    machine = context.machine
    if machine.peak_tflops is None or machine.clock_ghz is None:
        return machine.peak_tflops, machine.words
    clock = (facts.nodes.freq_mhz or 0) / 1000.0
    clock = clock if 0.5 <= clock <= 5 else 2.2  # where the row does not say: the highest that there is
    one_pipe = dict(facts.nodes.states).get("eco_state", 0) in (1, 2)
    peak = machine.peak_tflops * clock / machine.clock_ghz * (0.5 if one_pipe else 1.0)
    return peak, f"{machine.words}, {clock:g} GHz" + (", one pipe" if one_pipe else "")


def _least_memory(facts: Facts) -> float:
    """Bytes that one rank's share of the weights takes, and that any node with PyTorch on it does."""
    if not facts.shapes:
        return _LEAST_NODE
    parts = (facts.counts["tp"] or 1) * (facts.counts["pp"] or 1)
    return max(_LEAST_NODE, min(parameter_count(shape) for shape in facts.shapes) * _LEAST_BYTES / parts)


def _smaller_unit(printed: Figure) -> str:
    smaller = {"gib": "MiB", "gb": "MB", "tib": "GiB", "tb": "GB", "g": "M"}.get(printed.unit.lower())
    return f"{printed.unit} for {smaller}" if smaller else "of all nodes, or a figure of another column"


def _words(interval: Interval, printed: Figure) -> str:
    digits = max(printed.decimals, 2)
    low, high = f"{interval.low:.{digits}f}", f"{interval.high:.{digits}f}"
    return low if low == high else f"{low} to {high}"
