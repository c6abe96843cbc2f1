"""Tests of the comparison of measured nodes with a healthy A64FX node, and of the report's text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Callable, Dict, List

import pytest

from fugaku_gpt.doctor.node_findings import DEVIATES, NOT_COMPARED, OK, Finding, findings_of, size_text
from fugaku_gpt.doctor.node_text import report_text
from tests.doctor.node_measurements import NO_PRODUCTS, healthy_a64fx

Change = Callable[[Dict[str, Any]], None]


def deviating(measurements: Dict[str, Any]) -> List[Finding]:
    return [finding for finding in findings_of(measurements, NO_PRODUCTS, "") if finding.status == DEVIATES]


def test_nothing_deviates_on_a_healthy_node() -> None:
    findings = findings_of(healthy_a64fx(), NO_PRODUCTS, "")
    assert [finding for finding in findings if finding.status == DEVIATES] == []
    by_subject = {finding.subject: finding for finding in findings}
    assert by_subject["a01: cores"] == Finding("a01: cores", "12-59", "12-59", OK)
    assert by_subject["a01: multiply-adds"].expected == "5.53 to 6.144 TFLOP/s"
    assert by_subject["a01: memory of NUMA node 4"].expected == "128 to 256 GB/s"
    assert by_subject["a01: memory of all nodes"].expected == "512 to 1024 GB/s"
    assert by_subject["all-reduce of 1 MiB"].seen == "1000.0 us, 1.05 GB/s"
    assert by_subject["all-reduce of 8 bytes"].status == NOT_COMPARED


def set_rank(key: str, value: Any) -> Change:
    return lambda measured: measured["environment"]["ranks"][1].__setitem__(key, value)


def set_host(key: str, value: Any) -> Change:
    return lambda measured: measured["hosts"][0].__setitem__(key, value)


def set_rate(key: str, value: Any) -> Change:
    return lambda measured: measured["rates"][0].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "subjects"),
    [
        (set_rank("threads", 3), ["a01: all cores have a thread"]),
        (set_rank("threads", 24), ["a01: threads", "a01: all cores have a thread"]),
        (
            set_rank("affinity", list(range(12, 24))),  # as the first rank
            ["a01: threads", "a01: cores"],
        ),
        (set_rank("numa_nodes", [5, 6]), ["a01: each rank within a NUMA node"]),
        (set_host("page_bytes", 4096), ["a01: pages"]),
        (set_host("sve_bits", 256), ["a01: SVE vectors"]),
        (set_host("memory_limit_bytes", 8 * 2**30), ["a01: memory"]),
        (
            set_host("power", {"freq": "2200", "eco_state": "2"}),
            ["a01: eco_state", *(f"a01: clock of core {core}" for core in (12, 24, 36, 48)), "a01: multiply-adds"],
        ),
        (set_rate("clock_hertz", {"12": 2.2e9}), ["a01: clock of core 12"]),
        (set_rate("multiply_add_flops", 3.07e12), ["a01: multiply-adds"]),  # one pipe, though both were granted
        (set_rate("bandwidth", {"4": 90e9, "all": 600e9}), ["a01: memory of NUMA node 4"]),
        (set_rate("bandwidth", {"4": 300e9, "all": 600e9}), ["a01: memory of NUMA node 4"]),  # above what is possible
        (lambda measured: measured["kernels"].update(problem="rank 2: none are compiled"), ["our kernels"]),
    ],
)
def test_deviations_are_named(change: Change, subjects: List[str]) -> None:
    measured = healthy_a64fx()
    change(measured)
    assert [finding.subject for finding in deviating(measured)] == subjects


def test_rates_that_were_measured_for_moments_are_not_compared() -> None:
    measured = healthy_a64fx()
    measured["rates"][0].update(multiply_add_flops=1e12, bandwidth={"4": 900e9, "all": 3000e9})  # in caches
    findings = {finding.subject: finding for finding in findings_of(measured, NO_PRODUCTS, "", is_short=True)}
    assert [finding for finding in findings.values() if finding.status == DEVIATES] == []
    assert findings["a01: memory of NUMA node 4"] == Finding(
        "a01: memory of NUMA node 4", "-", "900 GB/s", NOT_COMPARED
    )
    assert findings["a01: pages"].status == OK


def test_an_eco_state_that_was_asked_for_does_not_deviate() -> None:
    measured = healthy_a64fx()
    measured["hosts"][0]["power"]["eco_state"] = "2"
    measured["rates"][0]["multiply_add_flops"] = 3.0e12
    assert [finding.subject for finding in deviating(measured)] == ["a01: eco_state"]
    findings = findings_of(measured, NO_PRODUCTS, "", eco_state=2)
    assert [finding.subject for finding in findings if finding.status == DEVIATES] == []


@pytest.mark.parametrize(("ranks", "compared"), [(4, True), (8, True), (16, True), (48, True), (2, False), (20, False)])
def test_ranks_that_divide_the_groups_evenly_are_within_one(ranks: int, compared: bool) -> None:
    measured = healthy_a64fx()
    first = measured["environment"]["ranks"][0]
    measured["environment"]["ranks"] = [{**first, "rank": rank} for rank in range(ranks)]
    subjects = {finding.subject for finding in findings_of(measured, NO_PRODUCTS, "")}
    assert ("a01: each rank within a NUMA node" in subjects) is compared


def test_another_processor_is_compared_with_nothing_of_a64fx() -> None:
    measured = healthy_a64fx()
    measured["hosts"][0].update(processor="AMD EPYC", page_bytes=4096, sve_bits=0)
    findings = findings_of(measured, NO_PRODUCTS, "")
    assert [finding.subject for finding in findings if finding.status == OK] == ["a01: threads", "our kernels"]
    assert deviating(measured) == []


def test_a_clock_that_was_not_granted_is_not_compared() -> None:
    measured = healthy_a64fx()
    measured["hosts"][0]["power"] = {}
    subjects = {finding.subject: finding.status for finding in findings_of(measured, NO_PRODUCTS, "")}
    assert subjects["a01: clock of core 12"] == subjects["a01: multiply-adds"] == NOT_COMPARED
    assert "a01: eco_state" not in subjects


def test_measurements_before_a_failure_are_compared() -> None:
    measured = healthy_a64fx()
    for section in ("rates", "all_reduce", "step"):
        del measured[section]
    findings = findings_of(measured, NO_PRODUCTS, "the ranks failed while measuring rates: ended by signal 4")
    assert findings[0].status == DEVIATES and findings[0].seen.endswith("signal 4")
    assert "our kernels" in {finding.subject for finding in findings}
    assert len(findings_of({}, NO_PRODUCTS, "the ranks failed")) == 1
    problem = {"problem": "trials ended by SIGILL", "verdicts": []}
    assert [finding.seen for finding in findings_of({}, problem, "")] == ["trials ended by SIGILL"]


def test_the_text_begins_with_deviations_and_has_every_section() -> None:
    measured = healthy_a64fx()
    measured["hosts"][0]["page_bytes"] = 4096
    findings = [asdict(finding) for finding in findings_of(measured, NO_PRODUCTS, "")]
    report = {
        "made": 0.0,
        "fugaku_gpt": "0.1.0",
        "git_commit": "abc",
        "checks": [{"name": "Python", "status": "ok", "seen": "3.8", "mend": ""}],
        "products": NO_PRODUCTS,
        "measurements": measured,
        "failure": "",
        "findings": findings,
    }
    lines = report_text(report).splitlines()
    assert lines[0] == "Report of `fugaku-gpt doctor node`, 1970-01-01 00:00:00 UTC, fugaku_gpt 0.1.0 (abc)"
    assert lines[1].endswith("; 1 deviate") and lines[2] == "  a01: pages: expected 64 KiB, seen 4 KiB"
    titles = [lines[number - 1] for number, line in enumerate(lines) if line and set(line) == {"-"}]
    assert titles == ["Checks", "Build and ranks", "Node a01", "Measured and expected", "Step"]
    assert "1     a01   12       24-35  5           any        by the launcher  libc" in lines
    assert "power, as PJM granted it: freq=2000 eco_state=0 retention_state=1" in lines
    assert "NUMA node 5: cores 24-35, 7.80 GiB" in lines
    assert "3 iterations: 1.1 s in the median, 1 to 1.2 s; loss 10.9000" in lines


def test_sizes_are_in_their_largest_unit() -> None:
    assert [size_text(size) for size in (8, 65536, 2**20, 3 * 2**29)] == ["8 bytes", "64 KiB", "1 MiB", "1.5 GiB"]
