"""The report of ``doctor node``: what its ranks have measured, and what was checked around them.

``measurements.json`` is written by rank 0 after each section, so that the sections before a failure are kept:

* ``version``; ``section``: the section that is being measured, or empty once all are;
* ``environment``: as in the ``environment.json`` of a run, with the facts of each rank;
* ``hosts``: of each node host, processor, page_bytes, memory_limit_bytes, sve_bits, numa_nodes (number →
  cores, memory_bytes), power (the power knobs that PJM granted), settings (variables of OpenMP, of MPI's placement and
  of large pages), huge_pages (of 2 MiB in the system's pool);
* ``kernels``: problem (why they are not used, or empty) and lanes (float32 numbers of a vector);
* ``rates``: of each node host, cores (how many took part), clock_hertz (core → cycles per second),
  multiply_add_flops (float32 operations per second of all cores at once, in registers), triad (what computes it)
  and bandwidth (NUMA node, or ``all`` → bytes per second of z = x + 0.5 y, each core with arrays of its own);
* ``all_reduce``: of each size bytes, seconds (median) and spread (standard deviation of the logarithm);
* ``step``: model, settings, iterations (timed), seconds (of each), tokens_per_second, tflops_exact and
  tflops_notes (per node), loss.

``node-report.json`` has ``version``, ``made`` (seconds since 1970), ``fugaku_gpt``, ``git_commit``, ``short`` (whether
the ranks measured for moments only; such rates are compared with nothing), ``checks`` (name, status, seen, mend),
``products`` (problem, or verdicts on matrix products), ``measurements`` (the above), ``failure`` (how the ranks failed
or were stopped, or empty) and ``findings``: subject, expected, seen, and status (``ok``, ``deviates`` or
``not compared``).
``node-report.txt`` is the same as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.files import write_json_atomically, write_text_atomically
from fugaku_gpt.versioned_json import read_versioned_json

VERSION = 1
MEASUREMENTS_FILE = "measurements.json"
REPORT_FILE = "node-report.json"
TEXT_FILE = "node-report.txt"
ALL_CORES = "all"  # in place of a NUMA node: all cores of the node's ranks


def write_measurements(folder: Path, section: str, measured: Mapping[str, Any]) -> None:
    """Write what has been measured so far, and which section comes next (empty: none)."""
    write_json_atomically(folder / MEASUREMENTS_FILE, {"version": VERSION, "section": section, **measured})


def read_measurements(folder: Path) -> Optional[Dict[str, Any]]:
    """Read what the ranks have measured; None if they have not begun.

    Raises:
        UsageError: the file is damaged, or of another version.
    """
    return read_versioned_json(
        folder / MEASUREMENTS_FILE,
        "measurements of nodes",
        (VERSION,),
        lambda values: {**values, "section": str(values["section"])},
        mend="measure again",
    )


def remove_report(folder: Path) -> None:
    """Remove the measurements and the report of an earlier call from a folder."""
    for name in (MEASUREMENTS_FILE, REPORT_FILE, TEXT_FILE):
        (folder / name).unlink(missing_ok=True)


def write_report(folder: Path, report: Mapping[str, Any], text: str) -> None:
    """Write a report, as JSON and as text."""
    write_json_atomically(folder / REPORT_FILE, {"version": VERSION, **report})
    write_text_atomically(folder / TEXT_FILE, text)


def read_report(path: Path) -> Dict[str, Any]:
    """Read a report that :func:`write_report` has written, from its JSON file or its folder.

    Raises:
        UsageError: there is none, it is damaged, or of another version.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    mend = "give the folder of a report, or its node-report.json"
    report = read_versioned_json(file, "a report of nodes", (VERSION,), _checked, mend=mend)
    if report is None:
        raise UsageError(f"{file}: no such file; {mend}")
    return report


def _checked(values: Dict[str, Any]) -> Dict[str, Any]:
    """The values of a report, once it is seen to have what its text is made of."""
    for key in ("made", "fugaku_gpt", "products", "measurements", "failure"):
        values[key]
    for row in values["checks"]:
        row["name"], row["status"], row["seen"]
    for row in values["findings"]:
        row["subject"], row["expected"], row["seen"], row["status"]
    return values
