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


def test_settings_of_the_job_that_change_a_run_are_named_and_those_of_the_submission_are_not() -> None:
    runs = [
        {
            "job.shape": "2x3x2",
            "job.environment": ["A=1"],
            "job.elapse": 60,
            "job.group": "hp1",
            "checkpoint.at_end": True,
        },
        {"job.shape": "12", "checkpoint.interval": 100, "job.name": "b"},
    ]
    assert differing_settings(runs, set()) == [
        ("checkpoint.interval=default", "job.environment=A=1", "job.shape=2x3x2"),
        ("checkpoint.interval=100", "job.environment=none", "job.shape=12"),
    ]


def test_numbers_that_differ_in_the_last_digit_differ_in_their_text() -> None:
    runs = [{"training.lr": 0.0001}, {"training.lr": 0.00010000001}]
    assert differing_settings(runs, set()) == [("lr=0.0001",), ("lr=0.00010000001",)]
    assert differing_settings([{"training.lr": 0.00025}, {"training.lr": 6e-05}], set())[1] == ("lr=6e-05",)


def test_a_path_that_a_job_made_absolute_is_no_difference() -> None:
    by_hand, job = {"data.paths": ["runs/corpus"]}, {"data.paths": ["/home/me/runs/corpus"]}
    assert differing_settings([by_hand, job], set()) == [(), ()]
    both = {"data.paths": ["runs/a", "runs/b"]}
    assert differing_settings([both, {"data.paths": ["/home/me/runs/a", "/home/me/runs/b"]}], set()) == [(), ()]
    (first, *_) = differing_settings([by_hand, {"data.paths": ["/home/me/runs/other"]}], set())
    assert first == ("paths=runs/corpus",)


def test_a_relative_path_that_several_absolute_ones_end_in_is_none_of_them() -> None:
    runs = [{"data.paths": [path]} for path in ("corpus", "/home/a/corpus", "/home/b/corpus")]
    assert [named[0] for named in differing_settings(runs, set())] == [
        "paths=corpus", "paths=/home/a/corpus", "paths=/home/b/corpus",
    ]  # fmt: skip
