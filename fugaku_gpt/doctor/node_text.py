"""The report of ``doctor node`` as plain text."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List, Mapping, Sequence

from fugaku_gpt.doctor.node_findings import DEVIATES, size_text
from fugaku_gpt.records.text import aligned, spans


def report_text(report: Mapping[str, Any]) -> str:
    """A report's values, as they are in ``node-report.json``, as text that ends with a newline."""
    return "\n".join([*_lines(report), ""])


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(report["made"]))
    commit = report.get("git_commit") or "commit unknown"
    yield f"Report of `fugaku-gpt doctor node`, {made} UTC, fugaku_gpt {report['fugaku_gpt']} ({commit})"
    if report.get("short"):
        yield "measured for moments only (--short): figures mean little, and rates are compared with nothing"
    findings = report["findings"]
    deviating = [finding for finding in findings if finding["status"] == DEVIATES]
    compared = sum(finding["status"] != "not compared" for finding in findings)
    yield f"{compared} values were compared with what is expected; {len(deviating)} deviate"
    for finding in deviating:
        yield f"  {finding['subject']}: expected {finding['expected']}, seen {finding['seen']}"
    yield from _section("Checks", table(("name", "status", "seen"), report["checks"]))
    measurements = report["measurements"]
    if "environment" in measurements:
        yield from _section("Build and ranks", _environment(measurements["environment"]))
    for host in measurements.get("hosts", []):
        yield from _section(f"Node {host['host']}", _host(host))
    if findings:
        yield from _section("Measured and expected", table(("subject", "seen", "expected", "status"), findings))
    for rates in measurements.get("rates", [])[:1]:
        yield (
            f"memory: z = x + 0.5 y in float32 by {rates['triad']}, a thread pinned to each core, 12 bytes an element"
        )
    if "step" in measurements:
        yield from _section("Step", _step(measurements["step"]))
    if report["failure"]:
        yield from _section("Failure", [report["failure"]])


def _section(title: str, lines: Sequence[str]) -> List[str]:
    return ["", title, "-" * len(title), *lines]


def table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> List[str]:
    """Rows as aligned columns under their names."""
    return aligned(columns, [[str(row[column]) for column in columns] for row in rows], has_rule=False)


def _environment(environment: Mapping[str, Any]) -> List[str]:
    build, mpi = environment["build"], environment["mpi"]
    lines = [
        f"torch {build['torch']}: BLAS {build['blas']}, kernels for {build['instruction_set']}",
        f"MPI {mpi['library']}, threads: {mpi['thread_level']}, mpi4py {mpi['mpi4py']}",
        environment["system"],
        *(f"note: {note}" for note in environment["notes"]),
    ]
    ranks = [
        {
            "rank": rank["rank"],
            "host": rank["host"],
            "threads": rank["threads"],
            "cores": spans(rank["affinity"]),
            "NUMA nodes": spans(rank["numa_nodes"]) or "unknown",
            "memory of": spans(rank["memory_nodes"]) or "any",
            "bound": rank.get("bound") or "no",
            "allocator": rank["allocator"],
        }
        for rank in environment["ranks"]
    ]
    return [*lines, *table(tuple(ranks[0]), ranks)]


def _host(host: Mapping[str, Any]) -> List[str]:
    lines = [
        f"{host['processor']}, pages of {size_text(host['page_bytes'])}, "
        f"memory {host['memory_limit_bytes'] / 2**30:.1f} GiB"
        + (f", SVE vectors of {host['sve_bits']} bits" if host["sve_bits"] else ""),
        "power, as PJM granted it: " + (_pairs(host["power"]) or "not readable"),
        "settings: " + (_pairs(host["settings"]) or "none"),
    ]
    if host["huge_pages"] is not None:
        lines.append(f"large pages of 2 MiB in the system's pool: {host['huge_pages']}")
    for node, facts in host["numa_nodes"].items():
        memory = f"{facts['memory_bytes'] / 2**30:.2f} GiB" if facts["memory_bytes"] else "memory unknown"
        lines.append(f"NUMA node {node}: cores {spans(facts['cores'])}, {memory}")
    return lines


def _step(step: Mapping[str, Any]) -> List[str]:
    seconds = sorted(step["seconds"])
    settings: Dict[str, Any] = step["settings"]
    return [
        f"a GPT of {step['model']} parameters: {_pairs(settings)}",
        f"{step['iterations']} iterations: {seconds[len(seconds) // 2]:.4g} s in the median, {seconds[0]:.4g} to "
        f"{seconds[-1]:.4g} s; loss {step['loss']:.4f}",
        f"{step['tokens_per_second']:.5g} tokens/s, {step['tflops_exact']:.4g} TFLOP/s a node "
        f"({step['tflops_notes']:.4g} by the notes' formula)",
    ]


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
