"""A machine of counted cycles whose figures are easy to check."""

from __future__ import annotations

from dataclasses import replace

from fugaku_gpt.machine.constants import Machine, load_machine
from fugaku_gpt.machine.counted import LOSS_OF_COLUMNS, CountedCycles, CountedKernel
from fugaku_gpt.machine.probed import ATTENTION, ATTENTION_BACKWARD, INPUT, LINEAR, WEIGHT

PEAK_CYCLES = 1 / 32  # of a multiply-add: two pipes of 16
CYCLES = {
    LINEAR: PEAK_CYCLES,
    INPUT: PEAK_CYCLES,
    WEIGHT: PEAK_CYCLES,
    ATTENTION: 2 * PEAK_CYCLES,
    ATTENTION_BACKWARD: 2 * PEAK_CYCLES,
    "layer_norm": 0.5,
    "layer_norm_backward": 0.5,
    "gelu_erf": 2.0,
    "gelu_erf_backward": 2.0,
    "gelu_tanh": 1.0,
    "gelu_tanh_backward": 1.0,
    "loss": 3.0,
    LOSS_OF_COLUMNS: 4.0,
    "squares": 0.25,
    "optimiser": 2.0,
}


def counted_machine() -> Machine:
    """A64FX with the cycles above."""
    counted = CountedCycles(
        table="table.csv",
        compiler="cc",
        cores=48,
        groups=4,
        bandwidth=256e9,
        l2_bytes=8 * 2**20,
        line_bytes=256,
        tile_rows=8,
        tile_columns=48,
        depth=512,
        group_rows=64,
        packed_columns=192,
        kernels=tuple(CountedKernel(operation, cycles, operation) for operation, cycles in CYCLES.items()),
    )
    return replace(load_machine("a64fx"), name="counted", title="Counted", base="a64fx", counted=counted)
