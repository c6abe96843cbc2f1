"""Tests of the seconds of a job and of its curves, start-up facts and settings that were not applied."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.compare.curves import compare_curves, farthest_repeat
from fugaku_gpt.compare.facts import Difference, differences
from fugaku_gpt.compare.samples import NOT_RUN, read_job, timed_seconds, unapplied_settings
from tests.compare.runs import ENVIRONMENT, leave_run, tiny


def test_a_job_counts_as_the_median_of_iterations_after_the_warm_up(tmp_path: Path) -> None:
    job = read_job(leave_run(tmp_path / "run", [9.0, 5.0, 1.0, 1.2, 1.1, 1.3]), warm_up=2)
    assert job.is_usable and job.timed_count == 4
    assert job.seconds == pytest.approx(1.15)
    assert job.settling_ratio == pytest.approx(1.1 / 1.2)
    assert (job.rss_max_bytes, job.node_used_bytes) == (2**20, 2**22)
    assert job.losses[1] == pytest.approx(7.9)
    short = read_job(tmp_path / "run", warm_up=6)
    assert short.status == "ok" and not short.is_usable


def test_a_line_that_reaches_into_the_warm_up_does_not_count() -> None:
    lines = [{"iteration": number, "seconds": number / 10, "global_batch": 8} for number in (4, 8, 12)]
    assert timed_seconds(lines, 0) == [0.4, 0.8, 1.2]
    assert timed_seconds(lines, 5) == [1.2]  # that of iteration 8 is the mean of 5 to 8, and 5 is warm-up
    assert timed_seconds(lines, 4) == [0.8, 1.2]


def test_runs_without_a_result_are_not_usable(tmp_path: Path) -> None:
    assert read_job(tmp_path / "none", 2).status == NOT_RUN
    path = leave_run(tmp_path / "run", [1.0, 1.0, 1.0])
    (path / "result.json").unlink()
    assert not read_job(path, 1).is_usable


def test_settings_that_a_run_did_not_get(tmp_path: Path) -> None:
    toggle = {"name": "tcmalloc", "requested": True, "applied": False, "seen": "libc"}
    environment = {**ENVIRONMENT, "toggles": [toggle]}
    config = tiny("node.tcmalloc=true", "node.threads_per_rank=2")
    job = read_job(leave_run(tmp_path / "run", [1.0] * 4, config, environment=environment), 1)
    assert unapplied_settings(job) == {
        "node.tcmalloc": "=True was not applied (seen: libc)",
        "node.threads_per_rank": "=2 was not applied (seen: 1)",
    }


def test_an_allocator_that_nobody_asked_for_is_reported(tmp_path: Path) -> None:
    (rank,) = ENVIRONMENT["ranks"]
    environment = {**ENVIRONMENT, "ranks": [rank, {**rank, "rank": 1, "allocator": "libtcmalloc.so.4"}]}
    job = read_job(leave_run(tmp_path / "off", [1.0] * 4, environment=environment), 1)
    assert unapplied_settings(job) == {"node.tcmalloc": "=False was not applied (seen: libtcmalloc.so.4)"}
    asked = tiny("node.tcmalloc=true")
    assert unapplied_settings(read_job(leave_run(tmp_path / "on", [1.0] * 4, asked, environment=environment), 1)) == {}


def test_facts_that_differ(tmp_path: Path) -> None:
    a = read_job(leave_run(tmp_path / "a", [1.0] * 4), 1)
    other = {
        **ENVIRONMENT,
        "build": {**ENVIRONMENT["build"], "torch": "2.13", "fused_adamw": True},
        "toggles": [{"name": "tcmalloc", "requested": True, "applied": True, "seen": "libtcmalloc.so"}],
    }
    b = read_job(leave_run(tmp_path / "b", [1.0] * 4, tiny("node.tcmalloc=true"), environment=other), 1)
    assert differences([a], [a, a]) == []
    assert differences([a, a], [b]) == [
        Difference("torch", "1.7.1", "2.13"),
        Difference("fused AdamW", "no", "yes"),
        Difference("toggle tcmalloc=True", "not asked for", "applied (seen: libtcmalloc.so)"),
        Difference("node.tcmalloc", "default", "yes"),
    ]
    # jobs of one side that differ are reported, too
    assert Difference("torch", "1.7.1; 2.13", "1.7.1; 2.13") in differences([a, b], [a, b])


def test_curves_are_equal_within_the_tolerance_of_the_coarser_type() -> None:
    a = {1: 8.0, 2: 7.0, 3: 6.0}
    curve_distance = compare_curves(a, {1: 8.0, 2: 7.0007, 3: 6.0, 4: 5.0}, ("float32", "float32"))
    assert curve_distance is not None and curve_distance.points == 3 and curve_distance.iteration == 2
    assert (
        curve_distance.distance == pytest.approx(1e-4, rel=1e-3)
        and not compare_curves(a, {2: 7.0008}, ("float32", "float32")).is_within_tolerance
    )  # type: ignore[union-attr]
    coarse = compare_curves(a, {2: 7.1}, ("float32", "bfloat16"))
    assert coarse is not None and coarse.is_within_tolerance
    assert compare_curves(a, {9: 1.0}, ("float32", "float32")) is None
    assert farthest_repeat([a], "float32") is None
    own = farthest_repeat([a, a, {1: 8.0, 2: 7.7}], "float32")
    assert own is not None and own.iteration == 2 and not own.is_within_tolerance
