"""Tests of rows of reference: how they are read, and which settings of a run they are matched by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.report.collect import read_run
from fugaku_gpt.report.imported import import_logs
from fugaku_gpt.report.logged_run import parse_settings
from fugaku_gpt.report.reference import ReferenceRow, read_reference, settings_of_row
from fugaku_gpt.report.rows import ResultRow
from fugaku_gpt.report.sheet import import_bullets
from tests.report.test_imported import ARGUMENTS, log_of
from tests.support.measurements import MEASUREMENTS
from tests.sweep.fake import leave_run

HEADER = (
    "id,hardware,model,layers,hidden,heads,vocab,seq_len,nodes,ranks_per_node,dp,tp,pp,micro_batch,global_batch,"
    "zero_stage,recompute,torch,dtype,freq_ghz,tcmalloc,retention_state,mem_value,mem_unit,sec_per_it,tflops,status\n"
)
TINY = "t.1,A64FX Fugaku,tiny,4,128,4,2048,128,1,1,1,1,1,4,16,,,,fp32,2.0,,,100.5,MiB (node),0.50,0.03,ok\n"


RUN_OF_TINY = ResultRow("1.1M", 128, 1, 1, 1, 1, 4, 16, layers=4, hidden=128, heads=4)


def reference(tmp_path: Path, *lines: str) -> ReferenceRow:
    """The only row of a table."""
    (tmp_path / "rows.csv").write_text(HEADER + "".join(lines), encoding="utf-8")
    (row,) = read_reference(tmp_path / "rows.csv")[0]
    return row


def matches(row: ReferenceRow, tmp_path: Path, *overrides: str) -> bool:
    """Whether a run of the tiny preset with these settings has what the row states."""
    directory = tmp_path / "_".join(("run", *overrides)).replace("/", "")
    if not directory.exists():
        leave_run(directory, load_run_config(preset="tiny", overrides=overrides))
    return row.is_met_by(settings_of_row(read_run(directory)))


def test_a_row_of_a_table_has_the_cells_and_the_rounding_of_seconds(tmp_path: Path) -> None:
    row = reference(tmp_path, TINY)
    assert (row.ids, row.memory, row.seconds_digit) == (("t.1",), "100.5 MiB", pytest.approx(0.005))
    assert (row.row.size, row.row.hardware, row.row.is_reference) == ("tiny", "A64FX Fugaku", True)
    assert (row.row.seconds_per_iteration, row.row.tflops_notes, row.row.freq_mhz) == (0.5, 0.03, None)
    boosted = reference(tmp_path, TINY.replace(",2.0,", ",2.2,"))
    assert boosted.row.freq_mhz == 2200 and not matches(boosted, tmp_path)


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        ("training.iterations=7", True),
        ("training.seed=7", True),
        ("layout.order=dp,tp,pp", True),  # one rank has one order
        ("training.micro_batch=2", False),
        ("training.global_batch=32", False),
        ("model.hidden=256", False),
        ("model.seq_len=64", False),
        ("model.mlp=swiglu", False),
        ("model.kv_heads=1", False),
        ("model.ffn_hidden=1024", False),
        ("model.ffn_hidden=512", True),  # the default
        ("model.norm=rmsnorm", False),
        ("model.vocab_size=4096", False),
        ("model.vocab_size=2040", True),  # 2048 with padding
        ("training.recompute=full", False),
        ("training.dtype=bfloat16", False),
        ("layout.zero=1", False),
        ("node.tcmalloc=true", False),
        ("node.retention_state=1", True),  # the default of a job that asks for none
        ("node.freq_mhz=2200", True),  # asked for and not applied: the run was at the default clock
    ],
)
def test_a_run_matches_by_the_figures_that_a_row_states(tmp_path: Path, override: str, is_same: bool) -> None:
    row = reference(tmp_path, TINY)
    assert matches(row, tmp_path) and matches(row, tmp_path, override) is is_same


def test_retention_that_was_applied_is_the_default_or_not(tmp_path: Path) -> None:
    row = reference(tmp_path, TINY)
    settings = [replace(RUN_OF_TINY, retention_state=state) for state in (None, 1, 0)]
    assert [row.is_met_by(settings_of_row(of_run)) for of_run in settings] == [True, True, False]


def test_recompute_is_all_or_nothing(tmp_path: Path) -> None:
    row = reference(tmp_path, TINY.replace(",16,,,,fp32", ",16,,True,,fp32"))
    assert matches(row, tmp_path, "training.recompute=full")
    assert not matches(row, tmp_path, "training.recompute=selective")
    assert not matches(row, tmp_path, "training.recompute=full", "training.recompute_layers=2")
    assert not matches(reference(tmp_path, TINY), tmp_path, "training.recompute=full", "training.recompute_layers=2")


def test_the_order_counts_where_there_are_several_ranks_along_two_axes(tmp_path: Path) -> None:
    row = reference(tmp_path, TINY.replace(",1,1,1,1,1,4,16", ",1,4,2,1,2,4,16"))
    layout = ("layout.dp=2", "layout.pp=2")
    assert matches(row, tmp_path, *layout, "layout.order=tp,dp,pp") and not matches(row, tmp_path, *layout)


def test_a_figure_that_a_row_does_not_state_is_not_matched(tmp_path: Path) -> None:
    assert matches(reference(tmp_path, TINY.replace(",fp32,", ",,")), tmp_path, "training.dtype=bfloat16")
    assert not matches(reference(tmp_path, TINY.replace(",,,,fp32", ",,,1.7,fp32")), tmp_path)
    assert matches(reference(tmp_path, TINY.replace(",,,,fp32", ",,,2.13,fp32")), tmp_path)


def test_a_measurement_in_several_tables_is_a_single_row(tmp_path: Path) -> None:
    row = reference(tmp_path, TINY, TINY.replace("t.1", "u.9"))
    assert row.ids == ("t.1", "u.9")
    (tmp_path / "rows.csv").write_text(HEADER + TINY + TINY.replace("0.50,", "0.51,"), encoding="utf-8")
    assert len(read_reference(tmp_path / "rows.csv")[0]) == 2


def test_rows_that_are_no_configuration_are_counted(tmp_path: Path) -> None:
    rows, notes = read_reference(MEASUREMENTS)
    assert len(rows) > 100 and notes[0].endswith("left out: 9, such as v100.t3.L78")
    with pytest.raises(UsageError, match="rows.csv: no row of it is left"):
        reference(tmp_path, TINY.replace(",128,4,", ",130,4,"))
    (tmp_path / "rows.csv").write_text("id,nodes\n1,1\n", encoding="utf-8")
    with pytest.raises(UsageError, match="rows.csv: columns are missing: hardware"):
        read_reference(tmp_path / "rows.csv")


def test_selected_rows_alone_are_read() -> None:
    rows, _ = read_reference(MEASUREMENTS, lambda row: row.hardware == "A64FX Fugaku" and row.nodes == 20)
    assert [row.ids for row in rows] == [("dsf.042",)]


def test_a_sheet_matches_by_the_settings_of_bullets(tmp_path: Path) -> None:
    sheet = tmp_path / "s.md"
    text = """\
# 1.1M on 4x L4
- batch 16, recompute=none, fp32, seq_len=128: ~ 30 samples/s
- batch 16, flat: ~ 40 samples/s
- batch 16, ranks_per_node=1: OOM
- batch 16, dp=2, zero=1, sequence_parallel=false: OOM
"""
    sheet.write_text(text, encoding="utf-8")
    import_bullets([sheet], tmp_path / "sheet")
    (plain, flat, single, sharded), _ = read_reference(tmp_path / "sheet")
    assert matches(sharded, tmp_path, "layout.dp=2", "layout.zero=1") and not matches(sharded, tmp_path, "layout.dp=2")
    assert matches(single, tmp_path) and not matches(single, tmp_path, "layout.dp=2")
    assert plain.ids == ("s.md:2",) and matches(plain, tmp_path) and matches(plain, tmp_path, "layout.dp=2")
    assert plain.seconds_digit == pytest.approx(16 / 30 * 0.5 / 30)
    assert not matches(plain, tmp_path, "training.recompute=full") and not matches(flat, tmp_path)
    with pytest.raises(UsageError, match="no imported sheet in it"):
        read_reference(tmp_path)


def test_an_imported_log_matches_by_the_stated_figures(tmp_path: Path) -> None:
    (tmp_path / "run.out").write_text(log_of(ARGUMENTS), encoding="utf-8")
    row = import_logs([tmp_path / "run.out"], tmp_path / "row", parse_settings(["nodes=4", "torch=1.7"]))
    (of_notes,) = [row for row in read_reference(MEASUREMENTS)[0] if "f1b3.t2.L44" in row.ids]
    stated = {name: value for name, value in of_notes.stated.items() if name not in ("recompute", "dtype", "heads")}
    settings = settings_of_row(row)
    assert {name: settings[name] for name in stated} == stated
