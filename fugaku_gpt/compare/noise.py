"""The noise guard: measures what else the machine did during a job, and decides whether that spoils its pair.

Everything is read from counters of the kernel: before a job, after it, and for a moment on either side. A counter that
this machine does not have is None, and is reported as unknown.

========================  =========  =================================================================================
other processes           5 %        of all cores' time. Ranks that use every core lose at most this share to other
                                     processes, and the pair's ratio shows it in full, since the other side ran without
                                     it. It is as large as the differences that are sought; daemons of an idle machine
                                     take less than 1 %
just before and after     15 %       of all cores' time in half a second, the resolution of the clock ticks: another
                                     process was running, which the job's own time may have hidden
stolen                    2 %        of all cores' time: the virtual machine was ready to run and was not scheduled. It
                                     comes in bursts, so it affects one side, and nothing here can prevent it
throttled                 any        events of the processor's own counters: the clock was lowered for heat or power
swapped in                1 MiB      pages read back from swap: iterations waited for a disk
========================  =========  =================================================================================

Page faults, first touch among them, and context switches are reported and have no threshold: they belong to the
measured job as often as to a disturbance. Those that other processes cause show as time of these processes.
"""

from __future__ import annotations

import contextlib
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Callable, List, Optional, Type

import psutil

from fugaku_gpt.machine.system import this_system

MAX_OTHER_LOAD = 0.05
MAX_LOAD_AROUND = 0.15
MAX_STOLEN = 0.02
MAX_SWAPPED_BYTES = 2**20
AROUND_SECONDS = 0.5
_THROTTLE_COUNTERS = "devices/system/cpu/cpu*/thermal_throttle/*_throttle_count"
_CLOCK_FILES = "devices/system/cpu/cpu*/cpufreq/scaling_cur_freq"


@dataclass(frozen=True)
class CounterReading:
    """Counters at one moment; seconds are of all cores together.

    Attributes:
        busy: seconds in which some process of this machine ran.
        idle: seconds in which none did.
        stolen: seconds in which this virtual machine was not scheduled; None where the kernel does not count them.
        own: seconds of this process and of all its descendants that have ended.
        minor_faults, major_faults: pages that these touched first or mapped, and pages that they read from a disk.
        yields, switches: number of times that these waited, and that they were preempted by another process.
        throttled: number of throttling events; None where the processor does not count them.
        swapped_in: bytes read back from swap; None where the kernel does not count them.
    """

    busy: float
    idle: float
    stolen: Optional[float]
    own: float
    minor_faults: int
    major_faults: int
    yields: int
    switches: int
    throttled: Optional[int]
    swapped_in: Optional[int]


@dataclass(frozen=True)
class Noise:
    """Disturbances during one job. Shares are of the time of all cores; None means unknown.

    Attributes:
        seconds: duration of the job.
        others: share of processes that do not belong to the job.
        others_before, others_after: share of all processes in the moments before and after it.
        stolen: share in which this virtual machine was not scheduled.
        throttled: number of throttling events.
        swapped_in: bytes read back from swap.
        mhz: mean clock of the cores during the job.
        minor_faults, major_faults, yields, switches: counts of the job's processes, per second of the job.
    """

    seconds: float
    others: Optional[float]
    others_before: Optional[float]
    others_after: Optional[float]
    stolen: Optional[float]
    throttled: Optional[int]
    swapped_in: Optional[int]
    mhz: Optional[float]
    minor_faults: Optional[float]
    major_faults: Optional[float]
    yields: Optional[float]
    switches: Optional[float]


def disturbances(noise: Noise, max_load: float = MAX_OTHER_LOAD) -> List[str]:
    """Reasons not to trust a job's time; empty where no counter speaks against it.

    Args:
        max_load: share of other processes that is tolerated.
    """
    reasons = []
    if noise.others is not None and noise.others > max_load:
        reasons.append(f"other processes took {noise.others:.1%} of the machine")
    # a load that is tolerated during a job is tolerated before and after it, too
    max_load_around = max(MAX_LOAD_AROUND, max_load)
    for when, share in (("before", noise.others_before), ("after", noise.others_after)):
        if share is not None and share > max_load_around:
            reasons.append(f"just {when} it, other processes took {share:.0%}")
    if noise.stolen is not None and noise.stolen > MAX_STOLEN:
        reasons.append(f"{noise.stolen:.1%} of the machine's time was stolen by its host")
    if noise.throttled:
        reasons.append(f"the clock was throttled {noise.throttled} times")
    if noise.swapped_in is not None and noise.swapped_in > MAX_SWAPPED_BYTES:
        reasons.append(f"{noise.swapped_in / 2**20:.0f} MiB were swapped in")
    return reasons


def unknown_quantities(noise: Noise) -> List[str]:
    """Names of the quantities that this machine does not measure."""
    quantities = (
        ("others", "load of other processes during a job"),
        ("others_before", "load before and after"),
        ("stolen", "stolen time"),
        ("throttled", "throttling"),
        ("swapped_in", "swapping"),
        ("mhz", "clock"),
        ("minor_faults", "page faults and context switches"),
    )
    return [quantity for field, quantity in quantities if getattr(noise, field) is None]


def read_counters() -> CounterReading:
    """Reads the counters."""
    times = psutil.cpu_times()
    stolen = getattr(times, "steal", None)
    idle = times.idle + getattr(times, "iowait", 0.0)
    busy = times.user + getattr(times, "nice", 0.0) + times.system
    busy += getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return CounterReading(
        busy=busy,
        idle=idle,
        stolen=stolen,
        own=sum(usage.ru_utime + usage.ru_stime for usage in usages),
        minor_faults=sum(usage.ru_minflt for usage in usages),
        major_faults=sum(usage.ru_majflt for usage in usages),
        yields=sum(usage.ru_nvcsw for usage in usages),
        switches=sum(usage.ru_nivcsw for usage in usages),
        throttled=_summed_counters(_THROTTLE_COUNTERS),
        swapped_in=_swapped_in(),
    )


def load_between(first: CounterReading, last: CounterReading) -> Optional[float]:
    """Share of all cores' time that processes of others used between two readings; None if no time passed."""
    elapsed = _elapsed(first, last)
    if elapsed <= 0:
        return None
    other_busy = last.busy - first.busy - (last.own - first.own)
    return min(1.0, max(0.0, other_busy / elapsed))


class NoiseWatch:
    """Measures the noise around one job: ``with NoiseWatch() as watch: ...``, then ``watch.noise``.

    Args:
        descendants: True if the job's processes are descendants of this one, so that their time can be separated from
            that of other processes. Ranks that another program of the machine starts are not.
    """

    def __init__(
        self,
        descendants: bool = True,
        read: Callable[[], CounterReading] = read_counters,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._descendants, self._read, self._sleep, self._clock = descendants, read, sleep, clock
        self._mhz: List[float] = []
        self.noise: Optional[Noise] = None

    def __enter__(self) -> "NoiseWatch":
        before = self._read()
        self._sleep(AROUND_SECONDS)
        self._first, self._started = self._read(), self._clock()
        self._before = load_between(before, self._first)
        return self

    def sample_clock(self) -> None:
        """Samples the cores' clock, within microseconds; to be called from time to time while the job runs."""
        mhz = clock_mhz()
        if mhz is not None:
            self._mhz.append(mhz)

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        last, seconds = self._read(), max(self._clock() - self._started, 1e-9)
        if kind is not None:
            return
        self._sleep(AROUND_SECONDS)
        after = load_between(last, self._read())
        first, includes_job = self._first, self._descendants
        elapsed = _elapsed(first, last)
        stolen = None
        if first.stolen is not None and last.stolen is not None and elapsed > 0:
            stolen = (last.stolen - first.stolen) / elapsed
        self.noise = Noise(
            seconds=seconds,
            others=load_between(first, last) if includes_job else None,
            others_before=self._before,
            others_after=after,
            stolen=stolen,
            throttled=_difference(first.throttled, last.throttled),
            swapped_in=_difference(first.swapped_in, last.swapped_in),
            mhz=sum(self._mhz) / len(self._mhz) if self._mhz else None,
            minor_faults=(last.minor_faults - first.minor_faults) / seconds if includes_job else None,
            major_faults=(last.major_faults - first.major_faults) / seconds if includes_job else None,
            yields=(last.yields - first.yields) / seconds if includes_job else None,
            switches=(last.switches - first.switches) / seconds if includes_job else None,
        )


def clock_mhz() -> Optional[float]:
    """Mean current clock of the cores; None where the kernel does not report it.

    /proc/cpuinfo of a virtual machine shows the clock that its host had when the machine was created.
    """
    clocks = [int(text) for text in map(_text, this_system().path("sys").glob(_CLOCK_FILES)) if text.isdecimal()]
    return sum(clocks) / len(clocks) / 1000 if clocks else None


def _elapsed(first: CounterReading, last: CounterReading) -> float:
    stolen = (last.stolen or 0.0) - (first.stolen or 0.0)
    return last.busy - first.busy + last.idle - first.idle + stolen


def _difference(first: Optional[int], last: Optional[int]) -> Optional[int]:
    return last - first if first is not None and last is not None else None


def _summed_counters(pattern: str) -> Optional[int]:
    counts = [int(text) for text in map(_text, this_system().path("sys").glob(pattern)) if text.isdecimal()]
    return sum(counts) if counts else None


def _swapped_in() -> Optional[int]:
    for line in (this_system().read("proc/vmstat") or "").splitlines():
        name, _, count = line.partition(" ")
        if name == "pswpin" and count.isdecimal():
            return int(count) * this_system().page_bytes()
    return None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):  # absent or not readable: unknown
        return path.read_text(encoding="utf-8").strip()
    return ""
