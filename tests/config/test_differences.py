"""Tests that settings in which runs differ are named once, and shortly where that is clear."""

from __future__ import annotations

from fugaku_gpt.config.differences import MOST_NAMED, differing_settings


def test_only_differences_that_no_column_shows_are_named() -> None:
    runs = [
        {"training.lr": 0.001, "training.seed": 1, "layout.tp": 2, "job.elapse": 60},
        {"training.lr": 0.0003, "training.seed": 1, "layout.tp": 4, "job.elapse": 90},
        {"training.seed": 1},
    ]
    named = differing_settings(runs, {"layout.tp"})
    assert named[:2] == [("lr=0.001",), ("lr=0.0003",)] and named[2][0].startswith("lr=")
    assert differing_settings(runs[:1], set()) == [()] and differing_settings([], set()) == []


def test_texts_of_values() -> None:
    first = {"node.tcmalloc": True, "node.preload": ["liba.so", "libb.so"], "training.ramp_start": 8}
    assert differing_settings([first, {}], set()) == [
        ("preload=liba.so+libb.so", "tcmalloc=true", "ramp_start=8"),
        ("preload=none", "tcmalloc=false", "ramp_start=default"),
    ]


def test_the_same_name_in_two_sections_is_written_with_the_section() -> None:
    runs = [{"training.seed": 1, "other.seed": 2}, {"training.seed": 3, "other.seed": 4}]
    assert differing_settings(runs, set())[0] == ("other.seed=2", "training.seed=1")


def test_many_differences_are_counted() -> None:
    runs = [{f"x.k{number:02d}": run for number in range(MOST_NAMED + 2)} for run in (1, 2)]
    (first, _) = differing_settings(runs, set())
    assert len(first) == MOST_NAMED + 1 and first[-1] == "and 2 more settings"


def test_a_submitted_run_has_the_corpus_of_the_run_file_by_another_path() -> None:
    runs = [{"data.paths": ["runs/corpus"]}, {"data.paths": ["/home/u/runs/corpus"]}]
    assert differing_settings(runs, set()) == [(), ()]
    runs = [{"data.paths": ["/a/corpus"]}, {"data.paths": ["/b/corpus", "c"]}, {}]
    assert differing_settings(runs, set()) == [("paths=/a/corpus",), ("paths=/b/corpus+c",), ("paths=none",)]
