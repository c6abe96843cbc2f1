"""Compares what was measured on nodes with what a healthy A64FX node of Fugaku has.

Sources of what is expected: the A64FX microarchitecture manual 1.8 (peak and bandwidth, in ``machine/fugaku.py``)
and Fugaku's user guide 1.52 (cores 12 to 59, NUMA nodes 4 to 7, pages of 64 KiB, memory of a job). The shares of the
peaks are bounds that a healthy node passes, not what it should reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

from fugaku_gpt.machine import fugaku, local
from fugaku_gpt.records.node_report import ALL_CORES
from fugaku_gpt.records.text import spans

OK, DEVIATES, NOT_COMPARED = "ok", "deviates", "not compared"
COMPUTE_CORES = tuple(range(12, 12 + fugaku.CORES))
NUMA_NODES = (4, 5, 6, 7)
PAGE_BYTES = 65536
_MIN_BANDWIDTH_SHARE = 0.5  # a store that reads its line first leaves at most three quarters to the counted bytes
_MIN_PEAK_SHARE = 0.9  # of multiply-adds in registers
_CLOCK_TOLERANCE = 0.02
_MIN_JOB_SHARE = 0.95  # of the memory that a job can ask for


@dataclass(frozen=True)
class Finding:
    """One comparison: ``status`` is ``ok``, ``deviates``, or ``not compared``: nothing is known to be expected."""

    subject: str
    expected: str
    seen: str
    status: str


def findings_of(
    measurements: Mapping[str, Any],
    products: Mapping[str, Any],
    failure: str,
    eco_state: int = 0,
    is_short: bool = False,
) -> List[Finding]:
    """Compare measurements, as far as there are any, with what is expected; a pure function.

    Args:
        products: the verdicts on matrix products.
        failure: why not everything was measured, or empty.
        eco_state: the one that the job asked for.
        is_short: the ranks measured for moments only, in caches, so that their rates are compared with nothing.
    """
    findings = [_of_failure(failure)] if failure else []
    for host in measurements.get("hosts", []):
        findings += _of_host(host, _ranks_of(measurements, host["host"]), eco_state)
    kernels = measurements.get("kernels")
    if kernels is not None:
        findings.append(_finding("our kernels", "used", kernels["problem"] or "used", not kernels["problem"]))
    if products["problem"]:
        findings.append(Finding("products", "measured", products["problem"], DEVIATES))
    for verdict in products["verdicts"]:
        findings.append(Finding(f"products {verdict['name']}", "-", verdict["text"], NOT_COMPARED))
    hosts = {host["host"]: host for host in measurements.get("hosts", [])}
    for rates in measurements.get("rates", []):
        findings += _of_rates(rates, hosts[rates["host"]], is_short)
    for timing in measurements.get("all_reduce", []):
        findings.append(
            Finding(
                f"all-reduce of {size_text(timing['bytes'])}",
                "-",
                f"{1e6 * timing['seconds']:.1f} us, {timing['bytes'] / timing['seconds'] / 1e9:.3g} GB/s",
                NOT_COMPARED,
            )
        )
    return findings


def size_text(size: int) -> str:
    """A number of bytes in its largest whole binary unit, such as ``64 KiB``."""
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**exponent:
            return f"{size / 2**exponent:g} {unit}"
    return f"{size} bytes"


def _of_failure(failure: str) -> Finding:
    return Finding("measurements", "complete", failure, DEVIATES)


def _finding(subject: str, expected: str, seen: str, same: bool) -> Finding:
    return Finding(subject, expected, seen, OK if same else DEVIATES)


def _ranks_of(measurements: Mapping[str, Any], host: str) -> List[Dict[str, Any]]:
    return [rank for rank in measurements["environment"]["ranks"] if rank["host"] == host]


def _of_host(host: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], eco_state: int) -> Iterator[Finding]:
    name, is_a64fx = host["host"], host["processor"] == local.A64FX
    cores = sorted({core for rank in ranks for core in rank["affinity"]})
    threads = sum(rank["threads"] for rank in ranks)
    yield _finding(f"{name}: threads", f"up to {len(cores)}, one a core", str(threads), threads <= len(cores))
    if not is_a64fx:
        yield Finding(f"{name}: processor", "-", f"{host['processor']}: not an A64FX", NOT_COMPARED)
        return
    nodes = sorted({node for rank in ranks for node in rank["numa_nodes"]})
    yield _finding(f"{name}: cores", spans(COMPUTE_CORES), spans(cores), tuple(cores) == COMPUTE_CORES)
    yield _finding(f"{name}: all cores have a thread", str(fugaku.CORES), str(threads), threads == fugaku.CORES)
    yield _finding(f"{name}: NUMA nodes", spans(NUMA_NODES), spans(nodes) or "none", tuple(nodes) == NUMA_NODES)
    page_bytes = host["page_bytes"]
    yield _finding(f"{name}: pages", size_text(PAGE_BYTES), size_text(page_bytes), page_bytes == PAGE_BYTES)
    bits = 8 * fugaku.VECTOR_BYTES
    yield _finding(f"{name}: SVE vectors", f"{bits} bits", f"{host['sve_bits']} bits", host["sve_bits"] == bits)
    memory = host["memory_limit_bytes"]
    yield _finding(
        f"{name}: memory",
        f"at least {_MIN_JOB_SHARE * fugaku.JOB_BYTES / 2**30:.1f} GiB",
        f"{memory / 2**30:.1f} GiB",
        memory >= _MIN_JOB_SHARE * fugaku.JOB_BYTES,
    )
    if ranks and len(ranks) % len(NUMA_NODES) == 0 and fugaku.CORES % len(ranks) == 0:  # as many in each group
        astride = [rank["rank"] for rank in ranks if len(rank["numa_nodes"]) != 1]
        seen = f"ranks {spans(astride)} have cores of several" if astride else "yes"
        yield _finding(f"{name}: each rank within a NUMA node", "yes", seen, not astride)
    granted = host["power"].get("eco_state")
    if granted is not None:
        yield _finding(f"{name}: eco_state", f"{eco_state}, as asked for", granted, granted == str(eco_state))


def _of_rates(rates: Mapping[str, Any], host: Mapping[str, Any], is_short: bool) -> Iterator[Finding]:
    name, is_compared = rates["host"], host["processor"] == local.A64FX and not is_short
    power = host["power"]
    freq = power.get("freq", "")
    for core, hertz in rates.get("clock_hertz", {}).items():
        seen = f"{hertz / 1e6:.0f} MHz"
        if is_compared and freq.isdecimal():
            same = abs(hertz / 1e6 / int(freq) - 1) <= _CLOCK_TOLERANCE
            yield _finding(f"{name}: clock of core {core}", f"{freq} MHz, as granted", seen, same)
        else:
            yield Finding(f"{name}: clock of core {core}", "-", seen, NOT_COMPARED)
    flops = rates.get("multiply_add_flops")
    if flops is not None:
        peak = _peak(rates["cores"], power) if is_compared else None
        yield _share_of_peak(f"{name}: multiply-adds", flops, peak, _MIN_PEAK_SHARE, 1e12, "TFLOP/s")
    for node, bandwidth in rates["bandwidth"].items():
        groups = rates["cores"] / fugaku.GROUP_CORES if node == ALL_CORES else 1.0
        peak = groups * fugaku.GROUP_BANDWIDTH if is_compared else None
        subject = f"{name}: memory of all nodes" if node == ALL_CORES else f"{name}: memory of NUMA node {node}"
        yield _share_of_peak(subject, bandwidth, peak, _MIN_BANDWIDTH_SHARE, 1e9, "GB/s")


def _peak(cores: int, power: Mapping[str, str]) -> Optional[float]:
    """FLOP/s of the cores at the clock and the pipes that PJM granted; None where it has not said."""
    freq, eco_state = power.get("freq", ""), power.get("eco_state", "")
    if not freq.isdecimal() or not eco_state.isdecimal():
        return None
    return fugaku.peak_flops(int(freq), int(eco_state)) * cores / fugaku.CORES


def _share_of_peak(
    subject: str, rate: float, peak: Optional[float], least: float, unit: float, unit_name: str
) -> Finding:
    seen = f"{rate / unit:.4g} {unit_name}"
    if peak is None:
        return Finding(subject, "-", seen, NOT_COMPARED)
    expected = f"{least * peak / unit:.4g} to {peak / unit:.4g} {unit_name}"
    # measured clocks differ from nominal ones by their rounding
    same = least * peak <= rate <= (1 + _CLOCK_TOLERANCE) * peak
    return _finding(subject, expected, f"{seen}, {100 * rate / peak:.0f} % of the peak", same)
