"""A run file as a row of the cost model, and its iteration as figures that tables show."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Tuple

from fugaku_gpt.config.schema import SHORT_DTYPES, RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.flops import exact_flops, notes_flops, tflops_per_node
from fugaku_gpt.machine.constants import Machine
from fugaku_gpt.machine.fugaku import ONE_PIPE_STATES, power_knobs
from fugaku_gpt.planner.extrapolation import SETTING_DISTANCE, ExtrapolatedInput
from fugaku_gpt.planner.intervals import Estimate
from fugaku_gpt.planner.tables.predict import Prediction, predict_rows
from fugaku_gpt.planner.tables.rows import ConfigRow, invalid_reason
from fugaku_gpt.planner.tables.toggles import costly_toggles
from fugaku_gpt.planner.trainer.seconds import predict_run


@dataclass(frozen=True)
class Figure:
    """A predicted figure with its 80 % interval and unit."""

    name: str
    estimate: Estimate
    unit: str


@dataclass(frozen=True)
class TimePlan:
    """The predicted time of an iteration of a run, and what follows from it.

    Attributes:
        figures: seconds of the iteration and of its parts, speeds, utilisation, and energy if it is known. Those of a
            grid classifier are of batches of its largest bucket, but for speeds that name a smaller one.
        extrapolated: the inputs that are unlike every measured row, which widen the intervals.
        notes: settings of the run that are known to cost time.
    """

    figures: Tuple[Figure, ...]
    extrapolated: Tuple[str, ...] = ()
    notes: Tuple[str, ...] = ()


def plan_time(
    config: RunConfig,
    machine: Machine,
    hardware: Optional[str] = None,
    torch: str = "",
    watts: Optional[float] = None,
) -> TimePlan:
    """Predict an iteration on a machine of measured rows, or on a probed one.

    Args:
        hardware: kind of the machine's hardware; default: its first.
        torch: the PyTorch build, such as 1.10, where the machine's rows distinguish builds.
        watts: power of a node; default: the machine's fact ``watts_per_node``, without which energy is left out.

    Raises:
        UsageError: no run can have this shape on these nodes, or the machine has counted cycles alone.
    """
    if machine.counted is not None:
        raise UsageError(f"--machine {machine.name}: counts components of an iteration, and has no intervals")
    notes: Tuple[str, ...] = ()
    if machine.probed is not None:
        extrapolated, figures = local_run_figures(config, machine, watts)
    else:
        row = run_to_row(config, machine, hardware, torch)
        prediction, figures = run_figures(config, machine, row, watts)
        extrapolated, notes = list(prediction.extrapolated), tuple(costly_toggles(machine, row))
    figures += _speeds_of_smaller_buckets(config, machine, hardware, torch)
    return TimePlan(tuple(figures), tuple(extrapolated), notes)


def _speeds_of_smaller_buckets(
    config: RunConfig, machine: Machine, hardware: Optional[str], torch: str
) -> List[Figure]:
    """The speed at which a grid classifier learns batches of each bucket but the largest, which the other figures are
    of: a batch has grids of one bucket."""
    figures = []
    for side in config.data.buckets[-2::-1] if config.model.is_grid_classifier else ():
        model = replace(config.model, seq_len=side * side)
        smaller = replace(config, model=model, data=replace(config.data, buckets=(side,)))
        seconds, _ = predicted_seconds(smaller, machine, hardware, torch)
        figures.append(
            Figure(f"speed of grids of {side} x {side}", _inverse(seconds, _units_of_work(config)[1]), "images/s")
        )
    return figures


def refuse_choices(name: str, machine: Machine, hardware: Optional[str], torch: str) -> None:
    """Refuse a kind of hardware and a build for a machine that has neither to choose from; ``name`` is as it was given.

    Raises:
        UsageError: the machine is a probed or a counted one.
    """
    if (machine.probed is not None or machine.counted is not None) and (hardware or torch):
        raise UsageError(f"--machine {name}: a probed or counted machine is as it is; leave out --hardware and --torch")


def run_to_row(config: RunConfig, machine: Machine, hardware: Optional[str] = None, torch: str = "") -> ConfigRow:
    """The run's configuration at its full batch and sequence length, as a row of the cost model.

    Args:
        hardware: value of the column ``hardware``; default: the machine's first.
        torch: the PyTorch build, such as 1.10.

    Raises:
        UsageError: no run can have this shape on these nodes.
    """
    node, layout, training = config.node, config.layout, config.training
    hardware = hardware or next(iter(machine.hardware))
    if not machine.has_hardware(hardware):
        raise UsageError(f"--hardware {hardware}: machine {machine.name} has {', '.join(machine.hardware)}")
    row = ConfigRow(
        id="run",
        hardware=hardware,
        layers=config.model.layers,
        hidden=config.model.hidden,
        heads=config.model.heads,
        vocab=_rows_of_logits(config),
        seq_len=config.model.seq_len,
        nodes=config.job.nodes,
        ranks_per_node=config.ranks_per_node,
        processes=layout.ranks,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        micro_batch=training.micro_batch,
        global_batch=training.global_batch,
        zero=layout.zero,
        recompute=training.recompute == "full",
        torch=torch,
        dtype=SHORT_DTYPES[training.dtype],
        freq_ghz=(node.freq_mhz or 0) / 1000,
        tcmalloc=node.tcmalloc,
        retention=node.retention_state,
        mem_unit=machine.memory_unit,
        chunks=layout.chunks,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        order=layout.order,
    )
    reason = invalid_reason(row)
    if reason:
        raise UsageError(f"this run cannot be planned: {reason}")
    return row


def _rows_of_logits(config: RunConfig) -> int:
    """The vocabulary for which a model with logits for each token has as many of them: of a grid, all cells share
    those of the classes."""
    if config.model.is_grid_classifier:
        return math.ceil(config.padded_outputs / config.model.seq_len)
    return config.padded_vocab


def unmodelled_settings(config: RunConfig) -> List[ExtrapolatedInput]:
    """Settings of a run that no measured row of any machine has and that the model ignores."""
    texts: List[str] = []
    training = config.training
    if training.recompute == "selective":
        texts.append("training.recompute selective: counted as none")
    if training.recompute == "full" and training.recompute_layers is not None:
        texts.append(f"training.recompute_layers {training.recompute_layers}: counted as all")
    if config.layout.schedule == "zero_bubble" and config.layout.pp > 1:
        texts.append("layout.schedule zero_bubble: counted as 1f1b")
    eco_state = job_eco_state(config)
    if eco_state in ONE_PIPE_STATES:
        texts.append(
            f"node.eco_state {eco_state}: seconds are those with both floating-point pipes; with one, `compute` takes "
            "up to twice as long, and the rest is the same"
        )
    if config.model.ffn_size != 4 * config.model.hidden:
        texts.append(f"model.ffn_hidden {config.model.ffn_size}: counted as 4 * hidden")
    texts += [f"{setting}: counted as a GPT-2's" for setting in config.model.settings_unlike_gpt2]
    return [ExtrapolatedInput(text, SETTING_DISTANCE) for text in texts]


def job_eco_state(config: RunConfig) -> int:
    """The eco state that the run's job gets on Fugaku, whether the run asks for it or it follows from its clock."""
    return power_knobs(config.node, config.job.nodes)["eco_state"]


def local_run_figures(
    config: RunConfig, machine: Machine, watts: Optional[float] = None
) -> Tuple[List[str], List[Figure]]:
    """Like :func:`run_figures`, for our own trainer on a probed machine: the extrapolated inputs, and the figures.

    Utilisation is relative to the best rate that the probe has measured.
    """
    prediction = predict_run(config, machine)
    batch = config.training.global_batch
    flops_by_notes = notes_flops(config.model, batch, config.padded_outputs, config.training.recompute == "full")
    exact = exact_flops(config.model, batch, config.padded_outputs)
    return [*prediction.extrapolated, *_settings_without_times(config)], [
        Figure("iteration", prediction.seconds, "s"),
        *(Figure(name, guess, "s") for name, guess in prediction.components.items()),
        *_speeds(config, prediction.seconds, flops_by_notes, exact, machine.facts["peak_flops"]),
        *_energy(config, machine, prediction.seconds, watts),
    ]


def _settings_without_times(config: RunConfig) -> List[str]:
    """The settings of a model whose operations no probe has timed, but similar ones; see also
    :data:`fugaku_gpt.machine.probed.STAND_INS`."""
    model = config.model
    return [f"model.kv_heads {model.kv_heads}: timed as {model.heads}"] if model.kv_head_count != model.heads else []


def predicted_seconds(
    config: RunConfig, machine: Machine, hardware: Optional[str] = None, torch: str = ""
) -> Tuple[Estimate, List[str]]:
    """Return (seconds per iteration, the extrapolated inputs) of a run, on a machine of rows or a probed one.

    Raises:
        UsageError: the machine has counted cycles alone, or no run can have this shape on these nodes.
    """
    if machine.probed is not None:
        local = predict_run(config, machine)
        return local.seconds, [*local.extrapolated, *_settings_without_times(config)]
    prediction = _predict_row(config, machine, run_to_row(config, machine, hardware, torch))
    return prediction.seconds, list(prediction.extrapolated)


def _predict_row(config: RunConfig, machine: Machine, row: ConfigRow) -> Prediction:
    """The prediction for a run's row, whose extrapolated inputs are named as the run has them."""
    (prediction,) = predict_rows(machine, [row], [unmodelled_settings(config)])
    if not config.model.is_grid_classifier:
        return prediction
    classes = f"model.classes {config.model.classes}: counted as a vocabulary of {row.vocab}"
    texts = (classes if text.startswith("vocab ") else text for text in prediction.extrapolated)
    return replace(prediction, extrapolated=tuple(texts))


def run_figures(
    config: RunConfig, machine: Machine, row: ConfigRow, watts: Optional[float] = None
) -> Tuple[Prediction, List[Figure]]:
    """Seconds per iteration, its components, and the figures that follow from them.

    Args:
        watts: power of a node; default: the machine's fact ``watts_per_node``, without which energy is left out.
    """
    prediction = _predict_row(config, machine, row)
    seconds = prediction.seconds
    flops_by_notes = notes_flops(config.model, row.global_batch, config.padded_outputs, row.recompute)
    exact = exact_flops(config.model, row.global_batch, config.padded_outputs)
    lines = [Figure("iteration", seconds, "s")]
    lines += [Figure(name, guess, "s") for name, guess in prediction.components.items()]
    lines += _speeds(config, seconds, flops_by_notes, exact, peak_flops_of_node(machine, row, job_eco_state(config)))
    return prediction, lines + _energy(config, machine, seconds, watts)


def _speeds(config: RunConfig, seconds: Estimate, flops_by_notes: float, exact: float, peak: float) -> List[Figure]:
    """Speeds that follow from the seconds of an iteration.

    Args:
        flops_by_notes, exact: FLOPs of an iteration by the two formulas; ``peak``: FLOP/s of a node.
    """
    nodes, (unit, units) = config.job.nodes, _units_of_work(config)
    return [
        Figure("speed", _inverse(seconds, units), f"{unit}s/s"),
        Figure(
            "rate per node (notes' formula)", _inverse(seconds, tflops_per_node(flops_by_notes, 1, nodes)), "TFLOP/s"
        ),
        Figure("rate of all nodes", _inverse(seconds, flops_by_notes / 1e15), "PFLOP/s"),
        Figure("utilisation (exact FLOPs, no recompute)", _inverse(seconds, 100 * exact / (peak * nodes)), "%"),
    ]


def _units_of_work(config: RunConfig) -> Tuple[str, int]:
    """The name of what a run's speed counts, and its number in an iteration."""
    batch = config.training.global_batch
    return ("image", batch) if config.model.is_grid_classifier else ("token", batch * config.model.seq_len)


def _energy(config: RunConfig, machine: Machine, seconds: Estimate, watts: Optional[float]) -> List[Figure]:
    """The energy per token or image, if the power of a node is known."""
    power = machine.facts.get("watts_per_node") if watts is None else watts
    if power is None:
        return []
    unit, units = _units_of_work(config)
    joules = power * config.job.nodes / units
    energy = Estimate(joules * seconds.value, joules * seconds.low, joules * seconds.high)
    return [Figure("energy", energy, f"J/{unit}")]


def peak_flops_of_node(machine: Machine, row: ConfigRow, eco_state: Optional[int] = None) -> float:
    """FLOP/s of a node at the row's clock; half of it in an eco state that leaves one of two pipes."""
    facts: Dict[str, float] = dict(machine.facts)
    clock = row.freq_ghz / facts["base_clock_ghz"] if row.freq_ghz else 1.0
    pipes = 0.5 if eco_state in ONE_PIPE_STATES else 1.0
    return facts["peak_flops"] * facts["devices_per_node"] * clock * pipes


def _inverse(seconds: Estimate, count: float) -> Estimate:
    return Estimate(count / seconds.value, count / seconds.high, count / seconds.low)
