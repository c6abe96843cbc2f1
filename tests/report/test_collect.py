"""Tests of the rows of a report, collected from run directories."""

from __future__ import annotations

import math
from pathlib import Path
from typing import List

import pytest

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.metrics import MetricsWriter
from fugaku_gpt.records.run import FAILED, OK, OUT_OF_MEMORY
from fugaku_gpt.report.collect import collect_rows, find_runs, name_runs, read_run
from fugaku_gpt.report.notes_table import notes_cell, row_cells
from fugaku_gpt.report.rows import UNREADABLE, ResultRow, merge_repeats
from fugaku_gpt.sweep.expand import expand_sweep
from fugaku_gpt.sweep.run import run_sweep
from tests.sweep.fake import FakeLaunch, QuietProgress, failing, leave_run

TOGGLES = ["node.freq_mhz=2200", "node.tcmalloc=true", "node.retention_state=0", "layout.dp=2"]


def tiny(*overrides: str) -> RunConfig:
    return load_run_config(preset="tiny", overrides=overrides)


def test_a_run_is_a_row_with_only_the_applied_toggles(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", tiny(*TOGGLES))
    row = read_run(tmp_path / "run")
    assert (row.size, row.torch, row.torch_build, row.git_commit) == ("1.1M", "2.13", "2.13.0+cpu", "0123abc")
    assert row.tcmalloc and row.freq_mhz is None and row.retention_state is None
    assert row.not_applied == ("2.2GHz", "retention_state=0")
    assert row_cells(row)[0] == "1 (max-proc-per-node=2, LD_PRELOAD=libtcmalloc.so)"
    assert row_cells(row)[7:9] == ["1028.0 MiB", "0.500"]
    assert notes_cell(row) == "11-14, not applied: 2.2GHz, retention_state=0"
    assert (row.first_validation_loss, row.last_validation_loss) == (8.0, 4.5)


def test_a_row_has_the_first_and_the_last_loss_of_each_evaluation_file(tmp_path: Path) -> None:
    config = tiny("training.eval_interval=2", "training.eval_files=[news.txt, code.py]")
    leave_run(tmp_path / "run", config)
    writer = MetricsWriter(tmp_path / "run" / "metrics.jsonl")
    for iteration, news in ((0, 8.0), (2, math.nan), (4, 4.0)):
        writer.write("evaluation", {"iteration": iteration, "name": "news", "loss": news, "tokens": 9})
        writer.write("evaluation", {"iteration": iteration, "name": "code.py", "loss": 7.0, "tokens": 9})
    assert read_run(tmp_path / "run").evaluations == (("news", 8.0, 4.0), ("code.py", 7.0, 7.0))
    writer.write("evaluation", {"iteration": 6, "name": 3, "loss": 7.0})
    with pytest.raises(UsageError, match="name 3: not a text"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize("tp", [2, 3])
def test_every_knob_that_a_run_requested_is_not_applied_where_it_never_ran(tmp_path: Path, tp: int) -> None:
    """With 3, which does not divide the heads, the run is refused, and its settings are read as they were written."""
    knobs = "{eco_state: 2, retention_state: 0, throttling_state: 1, tcmalloc: true, freq_mhz: 2000}"
    text = f"preset: tiny\nlayout: {{tp: {tp}}}\nnode: {knobs}\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    row = read_run(tmp_path)
    assert row.not_applied == (
        "2.0GHz", "LD_PRELOAD=libtcmalloc.so", "retention_state=0", "eco_state=2", "throttling_state=1",
    )  # fmt: skip


def test_a_run_killed_without_a_result_is_a_row(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", tiny(), status=None)
    row = read_run(tmp_path / "run")
    assert (row.status, row.iterations, row.seconds_per_iteration) == ("unfinished", 4, 0.5)
    assert notes_cell(row) == "unfinished"


def test_measurements_of_a_failed_run_are_shown_with_the_failure(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", tiny(), OUT_OF_MEMORY, "MemoryError")
    row = read_run(tmp_path / "run")
    assert row.seconds_per_iteration == 0.5 and notes_cell(row) == "11-14, OOM"


def test_repeats_become_a_single_row_of_medians(tmp_path: Path) -> None:
    for name, pace in (("a", 0.4), ("b", 0.9), ("c", 0.5)):
        leave_run(tmp_path / name, tiny(), pace=pace)
    leave_run(tmp_path / "d", tiny(), FAILED, "exit code 1", pace=99)
    leave_run(tmp_path / "other", tiny("layout.tp=2"))
    rows, runs = collect_rows([tmp_path])
    assert len(rows) == 2 and len(runs) == 5
    assert rows[0].seconds_per_iteration == 0.5 and len(rows[0].runs) == 4
    assert rows[0].remarks == ("n=3", "1 of 4 did not end well")
    assert rows[1].tp == 2 and rows[1].remarks == ()


def test_the_row_of_repeats_fails_only_if_all_of_them_failed() -> None:
    def row(status: str) -> ResultRow:
        return ResultRow("1M", 8, 1, 1, 1, 1, 1, 8, status=status, reason="why")

    assert merge_repeats([row(FAILED), row("timeout")]).status == "timeout"
    assert merge_repeats([row(FAILED), row(OK)]).status == OK


@pytest.mark.slow
def test_rows_of_a_sweep_are_in_order_with_refusals_and_attempts(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("preset: tiny\nrepeats: 2\nmatrix:\n  layout.tp: [4, 3, 1]\n", encoding="utf-8")
    sweep, out = expand_sweep(file), tmp_path / "out"
    run_sweep(sweep, out, FakeLaunch(dp1_tp1=failing), QuietProgress())
    run_sweep(sweep, out, FakeLaunch(), QuietProgress(), retry_failed=True)
    rows, runs = collect_rows([out])
    assert [row.tp for row in rows] == [4, 3, 1] and len(runs) == 6
    assert notes_cell(rows[1]).endswith("refused: layout.tp: 3: must divide model.heads 4; valid: 1, 2, 4 (and 1 more)")
    assert row_cells(rows[1])[:7] == ["1 (max-proc-per-node=3)", "1.1M", "1", "3", "1", "4", "16"]
    assert rows[2].remarks == ("n=2", "attempt 2")
    again: List[ResultRow] = collect_rows([out])[0]
    assert again == rows


def test_folders_without_a_readable_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        collect_rows([tmp_path / "none"])
    with pytest.raises(UsageError, match="holds no run directory"):
        collect_rows([tmp_path])
    leave_run(tmp_path / "run", tiny())
    assert find_runs([tmp_path, tmp_path / "run"]) == [tmp_path / "run"]
    (tmp_path / "run" / "sweep.json").write_text("{}")
    with pytest.raises(UsageError, match="sweep.json: not a sweep entry"):
        collect_rows([tmp_path])


def test_a_damaged_run_among_several_is_an_empty_row_that_names_the_file(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        leave_run(tmp_path / name, tiny())
    for name in ("b", "c"):
        (tmp_path / name / "result.json").write_text("[1, 2")
    merged, runs = collect_rows([tmp_path])
    assert [Path(row.runs[0]).name for row in runs if row.status == OK] == ["a"]
    damaged = [row for row in merged if row.status == UNREADABLE]
    assert [Path(row.runs[0]).name for row in damaged] == ["b", "c"]  # neither repeats the other
    assert all(f"{row.runs[0]}/result.json" in row.reason and row.nodes is row.seconds_per_iteration is None
               for row in damaged)  # fmt: skip
    with pytest.raises(UsageError, match="result.json"):
        collect_rows([tmp_path / "b"])


def test_a_refused_run_shows_all_that_it_asked_for(tmp_path: Path) -> None:
    """Also knobs that tables leave out where a run took place, and values that no knob has."""
    knobs = "{paging_policy: demand:demand:prepage, open_files: 4096, preload: [liba.so, libb.so], freq_mhz: 2.2GHz}"
    (tmp_path / "config.yaml").write_text(f"preset: tiny\nlayout: {{tp: 3}}\nnode: {knobs}\n", encoding="utf-8")
    assert read_run(tmp_path).not_applied == (
        "freq_mhz=2.2GHz", "preload=liba.so:libb.so", "paging_policy=demand:demand:prepage", "open_files=4096",
    )  # fmt: skip


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(0, 6), (1, 6), (2, 3), (8, 1)])
def test_the_ranks_of_a_node_of_a_refused_run_are_shared_out(tmp_path: Path, nodes: int, ranks_per_node: int) -> None:
    """Whatever the number of nodes is that makes it refused."""
    text = f"preset: tiny\nlayout: {{dp: 2, tp: 3}}\njob: {{nodes: {nodes}}}\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    row = read_run(tmp_path)
    assert (row.nodes, row.ranks_per_node) == (nodes, ranks_per_node)


def test_settings_that_differ_between_runs_are_notes(tmp_path: Path) -> None:
    for number, lr in enumerate((0.001, 0.0003)):
        overrides = (f"training.lr={lr}", f"training.seed={number + 1}", "layout.dp=2", f"job.name=run-{number}")
        leave_run(tmp_path / f"run{number}", tiny(*overrides))
    leave_run(
        tmp_path / "other", tiny("model.layers=2", "training.seed=1")
    )  # of another model: nothing to compare with
    merged, runs = collect_rows([tmp_path])
    notes = sorted(notes_cell(row) for row in merged)
    assert notes == ["11-14", "11-14, lr=0.0003, seed=2", "11-14, lr=0.001, seed=1"]
    assert all(not row.remarks for row in runs)
    assert notes_cell(collect_rows([tmp_path / "run0"])[0][0]) == "11-14"


def test_a_run_that_is_there_by_a_link_too_is_listed_once_by_its_own_name(tmp_path: Path) -> None:
    leave_run(tmp_path / "store" / "run-7", load_run_config(preset="tiny"))
    (tmp_path / "store" / "best").symlink_to("run-7")
    (run,) = find_runs([tmp_path / "store"])
    assert run == tmp_path / "store" / "run-7"
    assert find_runs([tmp_path / "store" / "best"]) == [tmp_path / "store" / "best"]


def test_runs_are_named_by_their_paths_below_the_folder_of_all(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("s1/a", "s2/a", "s2/b")]
    for run in runs:
        leave_run(run, load_run_config(preset="tiny"))
    assert list(name_runs(runs, [tmp_path / "s1", tmp_path / "s2"]).values()) == ["s1/a", "s2/a", "s2/b"]
    assert list(name_runs(runs[1:], [tmp_path / "s2"]).values()) == ["a", "b"]
    assert list(name_runs(runs[1:2], runs[1:2]).values()) == ["a"]
