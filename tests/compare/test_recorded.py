"""Tests of comparisons of earlier runs, matched by all of their configuration but the compared settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.compare.recorded import compare_recorded
from fugaku_gpt.compare.report import NO_VERDICT, report_recorded
from fugaku_gpt.compare.sides import RecordedSide, parse_side
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.operators import CLASSES, MATMUL, OPTIMISER, Operators, write_operators
from tests.compare.runs import ENVIRONMENT, leave_run, tiny
from tests.support.measurements import MEASUREMENTS

HEADER = (
    "id,hardware,layers,hidden,heads,vocab,seq_len,nodes,ranks_per_node,dp,tp,pp,micro_batch,global_batch,"
    "torch,tcmalloc,mem_value,mem_unit,sec_per_it,status"
)


def side(text: str) -> RecordedSide:
    recorded_side = parse_side(text, lambda _: False)
    assert isinstance(recorded_side, RecordedSide)
    return recorded_side


def rows(*cells: str) -> str:
    return "\n".join([HEADER, *cells]) + "\n"


def row(name: str, torch: str, seconds: float, nodes: int = 1, status: str = "ok") -> str:
    return f"{name},A64FX,12,768,12,50304,1024,{nodes},1,{nodes},1,1,1,64,{torch},False,100,MiB,{seconds},{status}"


@pytest.mark.slow
def test_the_notes_leave_1_10_against_1_7_undecided() -> None:
    recorded = compare_recorded(side(f"{MEASUREMENTS}:torch=1.7"), side(f"{MEASUREMENTS}:pytorch=1.10"), 2, 0.02)
    report = report_recorded("A", "B", recorded, 0.02)
    assert report.verdict == "undecided"
    ratios = {block.summary.split(", ")[2]: block.ratio for block in recorded.blocks}
    assert len(recorded.blocks) == 4
    assert ratios["64 x 1"] == pytest.approx(31.2 / 36.1) and ratios["256 x 1"] == pytest.approx(21.1 / 9.9)
    assert any("4 of 4 configurations have one run alone" in line for line in report.reasons)


def test_repeats_make_a_verdict_and_unmatched_runs_are_reported(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(
        rows(
            *(row(f"a.{n}", "1.7", seconds) for n, seconds in enumerate((10.0, 10.1, 9.9))),
            *(row(f"b.{n}", "1.10", seconds) for n, seconds in enumerate((8.0, 8.1, 7.9))),
            row("b.other", "1.10", 3.0, nodes=4),
            row("a.oom", "1.7", 3.0, status="oom"),
            row("again.0", "1.7", 10.0),  # the same measurement in another table
        )
    )
    recorded = compare_recorded(side(f"{table}:torch=1.7"), side(f"{table}:torch=1.10"), 2, 0.02)
    (block,) = recorded.blocks
    assert [run.name for run in block.a] == ["a.0", "a.1", "a.2"]
    assert block.comparison is not None and block.comparison.verdict == "faster"
    assert recorded.comparison == block.comparison
    assert "A: 1 row that another table shows too: counted once" in recorded.left_out
    assert "A: 1 row with status oom" in recorded.left_out
    assert "B: 1 run of configurations that the other side lacks: b.other" in recorded.left_out


def test_a_single_run_each_is_undecided(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(rows(row("a", "1.7", 10.0), row("b", "1.10", 5.0)))
    recorded = compare_recorded(side(f"{table}:torch=1.7"), side(f"{table}:torch=1.10"), 2, 0.02)
    report = report_recorded("A", "B", recorded, 0.02)
    assert report.verdict == "undecided"
    assert report.values["comparison"]["low"] is None
    assert report.sections[0].rows[0]["verdict"] == "none by itself: one run each"


def test_nodes_and_ranks_per_node_change_the_replicas_too() -> None:
    recorded = compare_recorded(
        side(f"{MEASUREMENTS}:torch=1.7,nodes=1,ranks_per_node=1"),
        side(f"{MEASUREMENTS}:torch=1.7,nodes=1,ranks_per_node=4"),
        2,
        0.02,
    )
    ratios = [block.ratio for block in recorded.blocks]
    # one rank in each core-memory group: 2.06 times as fast
    assert ratios == [pytest.approx(721.7 / 1489.7)]


def test_run_directories_of_a_sweep(tmp_path: Path) -> None:
    for repeat, (plain, preloaded) in enumerate(((1.0, 0.8), (1.01, 0.81), (0.99, 0.79))):
        leave_run(tmp_path / f"plain-r{repeat}", [plain] * 6)
        leave_run(tmp_path / f"tcmalloc-r{repeat}", [preloaded] * 6, tiny("node.tcmalloc=true"))
    leave_run(tmp_path / "broken", [1.0] * 6, status="oom", reason="memory")
    recorded = compare_recorded(side(f"{tmp_path}:tcmalloc=false"), side(f"{tmp_path}:tcmalloc=true"), 2, 0.02)
    (block,) = recorded.blocks
    assert recorded.comparison is not None and recorded.comparison.verdict == "faster"
    assert recorded.comparison.ratio == pytest.approx(0.8, abs=0.001)
    assert recorded.left_out == ("A: 1 run with status oom",)
    assert [job.name for job in recorded.jobs_b] == ["tcmalloc-r0", "tcmalloc-r1", "tcmalloc-r2"]
    titles = [section.title for section in report_recorded("A", "B", recorded, 0.02).sections]
    assert titles == [
        "Configurations that both sides have",
        "Left out",
        "What was run",
        "Memory",
        "Loss curves",
        "What differs at start-up",
    ]


def test_operator_times_are_reported_where_both_sides_were_profiled(tmp_path: Path) -> None:
    for name, product, optimiser in (("a", 0.6, 0.4), ("b", 0.6, 0.2)):
        path = leave_run(tmp_path / name, [product + optimiser] * 6, tiny(f"training.seed={ord(name)}"))
        classes = {**dict.fromkeys(CLASSES, 0.0), MATMUL: product, OPTIMISER: optimiser}
        write_operators(path, Operators(3, product + optimiser, 1, classes, 0.9 * (product + optimiser)))
    recorded = compare_recorded(side(str(tmp_path / "a")), side(str(tmp_path / "b")), 2, 0.02)
    report = report_recorded("A", "B", recorded, 0.02)
    assert [(row["class"], row["share of the difference"]) for row in report.operators] == [
        (MATMUL, 0.0),
        (OPTIMISER, 1.0),
    ]
    (section,) = [section for section in report.sections if section.title == "Where the time of an iteration goes"]
    assert "optimiser" in section.lines[0] and "1.11 (A) and 1.11 (B) times" in section.lines[1]


def test_two_folders_of_a_single_configuration_each_need_no_condition(tmp_path: Path) -> None:
    for repeat in range(3):
        leave_run(tmp_path / "one" / f"r{repeat}", [1.0 + repeat / 100] * 6)
        leave_run(tmp_path / "two" / f"r{repeat}", [1.2 + repeat / 100] * 6, tiny("training.dtype=bfloat16"))
    recorded = compare_recorded(side(str(tmp_path / "one")), side(str(tmp_path / "two")), 2, 0.02)
    assert recorded.comparison is not None and recorded.comparison.verdict == "slower"
    assert (recorded.comparison.a, recorded.comparison.b) == (3, 3)


def test_a_run_whose_toggle_was_not_applied_is_no_run_with_it(tmp_path: Path) -> None:
    toggle = {"name": "tcmalloc", "requested": True, "applied": False, "seen": "libc"}
    leave_run(tmp_path / "plain", [1.0] * 6)
    environment = {**ENVIRONMENT, "toggles": [toggle]}
    leave_run(tmp_path / "in-vain", [0.8] * 6, tiny("node.tcmalloc=true"), environment=environment)
    recorded = compare_recorded(side(f"{tmp_path}:tcmalloc=false"), side(f"{tmp_path}:tcmalloc=true"), 2, 0.02)
    assert recorded.blocks == ()
    assert "B: in-vain: node.tcmalloc was not applied, by its own record" in recorded.left_out
    assert report_recorded("A", "B", recorded, 0.02).verdict == NO_VERDICT


def test_a_toggle_applied_on_a_single_side_gives_no_verdict(tmp_path: Path) -> None:
    toggle = {"name": "tcmalloc", "requested": True, "applied": False, "seen": "libc"}
    in_vain = {**ENVIRONMENT, "toggles": [toggle]}
    for repeat in range(3):
        seconds = [1.0 + repeat / 100] * 6
        leave_run(tmp_path / f"a{repeat}", seconds, tiny("node.tcmalloc=true"))
        leave_run(
            tmp_path / f"b{repeat}", seconds, tiny("node.tcmalloc=true", "training.dtype=bfloat16"), environment=in_vain
        )
        leave_run(
            tmp_path / f"c{repeat}", seconds, tiny("node.tcmalloc=true", "training.dtype=float64"), environment=in_vain
        )
    sides = {name: side(f"{tmp_path}:dtype={name}") for name in ("float32", "bfloat16", "float64")}
    recorded = compare_recorded(sides["float32"], sides["bfloat16"], 2, 0.02)
    assert recorded.blocks == () and recorded.comparison is None
    assert "B: b0: node.tcmalloc was not applied, by its own record" in recorded.left_out
    # a toggle that no run of either side got is the same for all
    assert len(compare_recorded(sides["float64"], sides["bfloat16"], 2, 0.02).blocks) == 1


def test_the_same_run_on_both_sides_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(rows(row("a", "1.7", 10.0), row("b", "1.10", 5.0)))
    with pytest.raises(UsageError, match="a on both sides"):
        compare_recorded(side(f"{table}:torch=1.7"), side(str(table)), 2, 0.02)
    leave_run(tmp_path / "runs" / "x", [1.0] * 6)
    leave_run(tmp_path / "runs" / "y", [1.0] * 6)
    with pytest.raises(UsageError, match="x on both sides"):
        compare_recorded(side(str(tmp_path / "runs" / "x")), side(str(tmp_path / "runs")), 2, 0.02)


def test_iterations_of_other_work_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(rows(row("a", "1.7", 10.0), row("b", "1.7", 20.0).replace(",1024,", ",2048,")))
    leave_run(tmp_path / "one" / "r", [1.0] * 6)
    leave_run(tmp_path / "two" / "r", [2.0] * 6, tiny("training.global_batch=32"))
    with pytest.raises(UsageError, match="do not do the same work"):
        compare_recorded(side(str(tmp_path / "one")), side(str(tmp_path / "two")), 2, 0.02)
    with pytest.raises(UsageError, match="do not do the same work"):
        compare_recorded(side(f"{table}:seq_len=1024"), side(f"{table}:seq_len=2048"), 2, 0.02)


def test_runs_of_equal_name_on_both_sides_are_distinguished(tmp_path: Path) -> None:
    for folder, dtype in (("one", "float32"), ("two", "bfloat16")):
        leave_run(tmp_path / folder / "r0", [1.0] * 6, tiny(f"training.dtype={dtype}"))
    leave_run(tmp_path / "one" / "r1", [1.0] * 6, tiny("node.threads_per_rank=1"))
    leave_run(tmp_path / "two" / "r1", [1.0] * 6, tiny("layout.dp=2", "training.dtype=bfloat16"))
    leave_run(tmp_path / "two" / "r2", [1.0] * 6, tiny("node.threads_per_rank=1", "training.dtype=bfloat16"))
    folder_a, folder_b = tmp_path / "one", tmp_path / "two"
    recorded = compare_recorded(side(f"{folder_a}:dtype=float32"), side(f"{folder_b}:dtype=bfloat16"), 2, 0.02)
    assert [job.name for job in recorded.jobs_a] == ["r0", "r1"]
    assert [job.name for job in recorded.jobs_b] == ["r0", "r2"]
    assert recorded.left_out == ("B: 1 run of configurations that the other side lacks: r1",)


def test_rows_of_a_table_with_equal_times_are_repeats(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(
        rows(row("n.1", "1.7", 10.0), row("n.2", "1.7", 10.0).replace(",100,", ",101,"), row("m.3", "1.10", 8.0))
    )
    recorded = compare_recorded(side(f"{table}:torch=1.7"), side(f"{table}:torch=1.10"), 2, 0.02)
    assert [run.name for run in recorded.blocks[0].a] == ["n.1", "n.2"]


def test_sides_that_cannot_be_matched_are_refused(tmp_path: Path) -> None:
    runs_folder = leave_run(tmp_path / "runs" / "one", [1.0] * 6).parent
    with pytest.raises(UsageError, match="are the same runs"):
        compare_recorded(side(str(runs_folder)), side(str(runs_folder)), 2, 0.02)
    with pytest.raises(UsageError, match="no columns in common"):
        compare_recorded(side(str(runs_folder)), side(f"{MEASUREMENTS}:torch=1.7"), 2, 0.02)
    with pytest.raises(UsageError, match="no row with status ok"):
        compare_recorded(side(f"{MEASUREMENTS}:torch=1.7"), side(f"{MEASUREMENTS}:torch=9.9"), 2, 0.02)
    with pytest.raises(UsageError, match="holds no run directory"):
        compare_recorded(side(str(tmp_path)), side(str(runs_folder)), 2, 0.02)
