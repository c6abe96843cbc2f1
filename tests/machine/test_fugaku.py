"""Tests of what is known of Fugaku's nodes."""

from __future__ import annotations

import pytest

from fugaku_gpt.machine.fugaku import peak_flops, site_power_knobs


@pytest.mark.parametrize(
    ("freq", "eco", "tflops"),
    [(2000, 0, 6.144), (2200, 0, 6.7584), (2000, 1, 3.072), (2000, 2, 3.072), (2200, 2, 3.3792)],
)
def test_a_node_with_one_pipe_has_half_the_peak(freq: int, eco: int, tflops: float) -> None:
    assert peak_flops(freq, eco) == pytest.approx(tflops * 1e12, rel=1e-12)


def test_the_sites_default_has_one_pipe_and_keeps_cores_awake_in_the_largest_jobs() -> None:
    assert (site_power_knobs(1)["freq"], site_power_knobs(1)["eco_state"]) == (2200, 2)
    assert (site_power_knobs(9216)["retention_state"], site_power_knobs(9217)["retention_state"]) == (1, 0)
