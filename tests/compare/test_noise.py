"""Tests of the noise guard: counters become shares, and shares become messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fugaku_gpt.compare.noise import (
    CounterReading,
    Noise,
    NoiseWatch,
    clock_mhz,
    disturbances,
    read_counters,
    unknown_quantities,
)
from fugaku_gpt.machine.system import System, use_system

START = CounterReading(100.0, 100.0, 1.0, 50.0, 1000, 10, 100, 10, 7, 0)


def around(*readings: CounterReading, descendants: bool = True) -> Noise:
    left = list(readings)
    times = iter((0.0, 10.0))
    watch = NoiseWatch(descendants, read=lambda: left.pop(0), sleep=lambda _: None, clock=lambda: next(times))
    with watch:
        pass
    assert watch.noise is not None
    return watch.noise


def test_shares_of_all_cores_during_a_job_and_around_it() -> None:
    first = replace(START, busy=100.1, idle=100.9)  # a tenth of the second before
    last = CounterReading(115.1, 104.9, 1.0, 64.0, 3000, 20, 300, 20, 9, 4096)
    after = replace(last, busy=115.6, idle=105.4)
    noise = around(START, first, last, after)
    assert noise.seconds == 10.0
    assert noise.others_before is not None and abs(noise.others_before - 0.1) < 1e-9
    assert noise.others is not None and abs(noise.others - 1 / 19) < 1e-9  # 15 s busy, 14 of them ours, of 19
    assert noise.others_after == 0.5
    assert (noise.stolen, noise.throttled, noise.swapped_in) == (0.0, 2, 4096)
    assert (noise.minor_faults, noise.switches) == (200.0, 1.0)
    assert disturbances(noise) == [
        "other processes took 5.3% of the machine",
        "just after it, other processes took 50%",
        "the clock was throttled 2 times",
    ]
    assert disturbances(noise, max_load=0.6) == ["the clock was throttled 2 times"]


def test_missing_counters_are_unknown_and_disturb_nothing() -> None:
    bare = replace(START, stolen=None, throttled=None, swapped_in=None)
    noise = around(
        bare, bare, replace(bare, busy=120.0, idle=120.0), replace(bare, busy=120.0, idle=121.0), descendants=False
    )
    assert disturbances(noise) == []
    assert unknown_quantities(noise) == [
        "load of other processes during a job",
        "load before and after",
        "stolen time",
        "throttling",
        "swapping",
        "clock",
        "page faults and context switches",
    ]


def test_stolen_time_and_swapping_disturb() -> None:
    last = replace(START, busy=109.0, idle=100.0, stolen=2.0, own=59.0, swapped_in=3 * 2**20)
    noise = around(START, START, last, last)
    assert disturbances(noise) == [
        "10.0% of the machine's time was stolen by its host",
        "3 MiB were swapped in",
    ]


def test_counters_of_this_machine_and_of_files(tmp_path: Path) -> None:
    counters = read_counters()
    assert counters.busy > 0 and counters.idle >= 0 and counters.own > 0 and counters.minor_faults > 0
    for core, (count, clock) in enumerate(((3, 2_000_000), (4, 2_200_000))):
        core_directory = tmp_path / "sys" / "devices" / "system" / "cpu" / f"cpu{core}"
        (core_directory / "thermal_throttle").mkdir(parents=True)
        (core_directory / "cpufreq").mkdir()
        (core_directory / "thermal_throttle" / "core_throttle_count").write_text(f"{count}\n")
        (core_directory / "cpufreq" / "scaling_cur_freq").write_text(f"{clock}\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("pgfault 9\npswpin 2\n")
    with use_system(System(tmp_path)):
        read = read_counters()
        assert read.throttled == 7 and read.swapped_in is not None and read.swapped_in >= 2 * 4096
        assert clock_mhz() == 2100.0
    with use_system(System(tmp_path / "none")):
        empty = read_counters()
        assert empty.throttled is None and empty.swapped_in is None and clock_mhz() is None
