"""Tests that the sweeps of the notes are the configurations of their tables, and that their jobs lint clean."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Dict, List, Set

import pytest

from fugaku_gpt.config import RunConfig, dump_run_config
from fugaku_gpt.config.knobs import is_requested
from fugaku_gpt.config.schema import NODE_KNOBS
from fugaku_gpt.config.values import parse_duration
from fugaku_gpt.jobs.billing import node_hours
from fugaku_gpt.pjm.lint.engine import Linter
from fugaku_gpt.records.run import OK, Result, RunDirectory
from fugaku_gpt.records.summary import WARMUP_SAMPLES
from fugaku_gpt.report.beside import Pair, put_beside
from fugaku_gpt.report.collect import collect_rows
from fugaku_gpt.report.notes_table import heading
from fugaku_gpt.report.reference import read_reference
from fugaku_gpt.sweep.expand import expand_sweep
from fugaku_gpt.sweep.folder import write_entry
from fugaku_gpt.sweep.plan import plan_of
from fugaku_gpt.sweep.submit import planned_jobs
from tests.support.measurements import MEASUREMENTS
from tests.support.runs import write_run

ROOT = MEASUREMENTS.parents[2]
SWEEPS = sorted((ROOT / "benchmarks" / "sweeps" / "notes").glob("*.yaml"))
GIVEN = ("job.group=hp000000", "data.paths=[/vol0004/hp000000/corpus]")
DAY = datetime.date(2026, 6, 1)  # the site's limits are of that year
# each note says which value was chosen, or what cannot be seen from here
NOTES = (
    "data.paths: /vol0004/hp000000/corpus: there is no corpus",
    "job.tarball: /vol0004/hp000000/torch-",
    "freq and eco_state are not set: 2000 MHz with both pipes is written out",
    "eco_state is not set: 2 is written out, as at 2200 MHz",
    "not set, Fugaku's defaults are written out: ",
    "retention_state=1: idle cores sleep",
    "job.nodes: 512 nodes are used, 528 are billed",
    "job.nodes: 4096 nodes are used, 4128 are billed",
)
SECONDS = 100.0


def leave_run(directory: Path, config: RunConfig) -> None:
    """The files of a run on Fugaku that has applied every toggle."""
    record = RunDirectory(directory)
    record.create(dump_run_config(config))
    asked = {knob.name: getattr(config.node, knob.name) for knob in NODE_KNOBS}
    toggles = [{"name": name, "applied": True} for name, value in asked.items() if is_requested(value)]
    torch = config.job.profile.rpartition("-")[2].replace(".yaml", "")
    environment = {"build": {"torch": f"{torch}.1"}, "processor": "Fujitsu A64FX", "toggles": toggles}
    summary = {"seconds_per_iteration": SECONDS, "node_used_bytes": 8.0 * 2**30}
    write_run(record, environment, (), Result(OK, "", 1.7e9, 1.7e9 + 900, 5, summary))


@pytest.fixture(scope="module")
def pairs_of_sweep(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, List[Pair]]:
    """For each sweep the pairs of its rows, each run once, and the notes' rows on Fugaku."""
    references, _ = read_reference(MEASUREMENTS, lambda row: row.hardware == "A64FX Fugaku")
    pairs: Dict[str, List[Pair]] = {}
    for file in SWEEPS:
        folder = tmp_path_factory.mktemp(file.stem)
        sweep = expand_sweep(file)
        for run in sweep.runs:
            assert run.config is not None, run.refusal
            if run.repeat == 1:
                write_entry(sweep.name, run, folder / run.name)
                leave_run(folder / run.name, run.config)
        merged, runs = collect_rows([folder])
        assert len(merged) == len({run.row for run in sweep.runs})
        pairs[file.stem] = put_beside(references, merged, runs)
    return pairs


@pytest.mark.slow
def test_the_rows_of_the_sweeps_are_the_configurations_of_the_tables(pairs_of_sweep: Dict[str, List[Pair]]) -> None:
    run_by: Dict[str, List[str]] = {}
    for name, pairs in pairs_of_sweep.items():
        for pair in pairs:
            assert pair.reference is not None, f"{name}: no table has {pair.row}"
            run_by.setdefault(pair.reference.ids[0], []).extend([name] if pair.measured is not None else [])
    assert len(run_by) == 58 and {ident: names for ident, names in run_by.items() if len(names) != 1} == {}


@pytest.mark.slow
def test_a_sweep_is_of_a_single_table(pairs_of_sweep: Dict[str, List[Pair]]) -> None:
    heading_of_sweep: Dict[str, str] = {}
    for name, pairs in pairs_of_sweep.items():
        rows = [pair.reference.row for pair in pairs if pair.reference is not None and pair.measured is not None]
        (heading_of_sweep[name],) = {heading(row, row.torch) for row in rows}
    assert len(set(heading_of_sweep.values())) == len(SWEEPS) == 13
    assert heading_of_sweep["124m-torch-1.10"] == (
        "### 124M model on A64FX Fugaku (reference), Sequence Length=1024, PyTorch 1.10"
    )
    assert heading_of_sweep["1.3b-recompute-torch-1.7"] == (
        "### 1.3B model on A64FX Fugaku (reference), Sequence Length=1024, Activation Checkpointing, PyTorch 1.7"
    )


@pytest.mark.slow
def test_no_run_needs_longer_than_the_job_has(pairs_of_sweep: Dict[str, List[Pair]]) -> None:
    for name, pairs in pairs_of_sweep.items():
        for pair in pairs:
            if pair.measured is None or pair.reference is None:
                continue
            settings = dict(pair.measured.settings)
            iterations, elapse = settings["training.iterations"], parse_duration(settings["job.elapse"])
            seconds = pair.reference.row.seconds_per_iteration
            assert iterations > WARMUP_SAMPLES, name
            # runs stop before the limit, by a tenth of it or five minutes; and they need time to start
            assert seconds is None or iterations * seconds < elapse - min(0.1 * elapse, 300) - 300, (name, pair.row)


@pytest.mark.slow
def test_the_jobs_of_the_sweeps_have_no_error_and_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    linter = Linter(today=DAY)
    notes: Set[str] = set()
    for file in SWEEPS:
        plan = plan_of(file, GIVEN)
        sweep = plan.sweep()
        jobs = [job for job in planned_jobs(sweep, tmp_path / file.stem, plan, resume=False)[1] if job.run.repeat == 1]
        assert len(jobs) == len({run.row for run in sweep.runs})
        for planned in jobs:
            assert planned.job is not None, planned.refusal
            report = linter.check(planned.job.text, planned.run.name)
            assert [finding for finding in report.findings if finding.severity != "info"] == []
            assert report.site == "fugaku" and planned.job.node_hours is not None and planned.job.node_hours > 0
            assert set(planned.job.config.job.accept_findings) <= {"PJM032"}  # billed as a larger torus: a note says so
            notes.update(planned.job.notes)
    assert [note for note in sorted(notes) if not note.startswith(NOTES)] == []
    assert all(any(note.startswith(start) for note in notes) for start in NOTES)


def test_the_guide_lists_the_sweeps_with_their_rows_and_node_hours() -> None:
    page = (ROOT / "docs" / "guide" / "redo-fugaku.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(.+)\.yaml` \| (\d+) \| (.+) \| (\d+) \| ([\d,]+) \|$", page, re.MULTILINE)
    expected = set()
    for file in SWEEPS:
        runs = expand_sweep(file).runs
        configs = [run.config for run in runs if run.config is not None]
        nodes = [config.job.nodes for config in configs]
        hours = sum(node_hours(config) or 0.0 for config in configs)
        extent = f"{min(nodes):,} to {max(nodes):,}" if min(nodes) < max(nodes) else f"{max(nodes):,}"
        expected.add((file.stem, str(len({run.row for run in runs})), extent, str(len(runs)), f"{hours:,.0f}"))
    assert set(listed) == expected and len(listed) == len(SWEEPS)
