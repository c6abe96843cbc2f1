"""Tests of recorded runs as observations, from designs, folders and the notes: levels, blocks and runs left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest

from fugaku_gpt.compare.effects import Effect, estimate_effects
from fugaku_gpt.compare.factorial import HIGH, parse_factors, plan_design, sweep_text
from fugaku_gpt.compare.observations import ToggleObservations, observe_runs, observe_table
from fugaku_gpt.config import RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.sweep.expand import expand_text
from tests.compare.runs import ENVIRONMENT, leave_run, tiny
from tests.support.measurements import MEASUREMENTS

HEADER = (
    "id,hardware,layers,hidden,heads,vocab,seq_len,nodes,ranks_per_node,dp,tp,pp,micro_batch,global_batch,"
    "torch,tcmalloc,freq_ghz,mem_value,mem_unit,sec_per_it,status"
)


def times(seconds: float) -> List[float]:
    """Seconds of six iterations, the first two of which are the warm-up."""
    return [3 * seconds, 2 * seconds, seconds, seconds, 1.01 * seconds, 0.99 * seconds]


def environment_of(config: RunConfig) -> Dict[str, Any]:
    """Environment record of a run that got the threads that it asked for."""
    (rank,) = ENVIRONMENT["ranks"]
    return {**ENVIRONMENT, "ranks": [{**rank, "threads": config.node.threads_per_rank}]}


def effects_of(observed: ToggleObservations) -> Dict[str, Effect]:
    estimates = estimate_effects(observed.observations, observed.names, observed.levels, notes=observed.notes)
    return {effect.name: effect for effect in estimates.effects}


@pytest.mark.slow
def test_the_sweep_of_a_design_is_read_back_with_levels_and_blocks(tmp_path: Path) -> None:
    base = tiny("node.threads_per_rank=2")
    design = plan_design(parse_factors("tcmalloc,ranks=1|2,recompute", base), repeats=2)
    sweep = expand_text(sweep_text(design, base, "toggles"), "a file", "toggles")
    for number, run in enumerate(sweep.runs):
        assert isinstance(run.config, RunConfig)
        seconds = 1.0 if run.config.node.tcmalloc else 1.25
        seconds *= 0.6 if run.config.layout.dp == 2 else 1.0
        seconds *= 1.2 if run.name.startswith("b2") else 1.0  # the machine was slower in the second block
        leave_run(
            tmp_path / run.name,
            times(seconds * (1 + 0.002 * (number % 3))),
            run.config,
            environment=environment_of(run.config),
        )
    observed = observe_runs(tmp_path, design, warm_up=2)
    labels = design.labels()
    assert len(observed.observations) == 16
    for observation in observed.observations:
        assert observation.levels == labels[observation.name[:-3]][1]
        assert observation.block.startswith(f"block {labels[observation.name[:-3]][0]}, ")
    assert len({observation.block for observation in observed.observations}) == 2
    effects = effects_of(observed)
    assert effects["tcmalloc"].ratio == pytest.approx(0.8, abs=0.005) and effects["tcmalloc"].verdict == "faster"
    assert effects["ranks"].ratio == pytest.approx(0.6, abs=0.005)
    assert {effects[name].verdict for name in ("recompute", "tcmalloc×ranks")} == {"same"}


def test_a_design_s_failed_runs_are_named_and_another_folder_s_are_left_out(tmp_path: Path) -> None:
    design = plan_design(parse_factors("tcmalloc", tiny()), repeats=2)
    for label, (_, (level,)) in design.labels().items():
        leave_run(tmp_path / f"{label}-r1", times(1.0), tiny(f"node.tcmalloc={'true' if level == HIGH else 'false'}"))
    leave_run(tmp_path / "b2-tcmalloc-r1", times(1.0), tiny("node.tcmalloc=true"), status="oom", reason="memory")
    assert observe_runs(tmp_path, design, warm_up=2).failures == ("b2-tcmalloc-r1: oom: memory",)
    assert observe_runs(tmp_path, "tcmalloc", warm_up=2).failures == ()


@pytest.mark.slow
def test_a_folder_without_a_design_gives_the_varied_toggles_and_blocks(tmp_path: Path) -> None:
    for number in range(3):
        for settings, seconds in (
            ((), 1.0),
            (("node.tcmalloc=true",), 0.8),
            (("layout.tp=2",), 0.7),
            (("layout.tp=2", "node.tcmalloc=true"), 0.56),
        ):
            name = f"run-{number}-{len(list(tmp_path.iterdir()))}"
            leave_run(tmp_path / name, times(seconds * (1 + 0.003 * number)), tiny(*settings))
    leave_run(tmp_path / "broken", times(9.0), tiny(), status="oom")
    observed = observe_runs(tmp_path, "tcmalloc", warm_up=2)
    # each tensor-parallel layout is a block
    assert len({observation.block for observation in observed.observations}) == 2
    assert observed.names == ("tcmalloc",) and observed.levels == (("false", "true"),)
    assert effects_of(observed)["tcmalloc"].ratio == pytest.approx(0.8, abs=0.002)
    assert any("1 run with status oom" in note for note in observed.notes)
    with pytest.raises(UsageError, match="none of recompute varies"):
        effects_of(observe_runs(tmp_path, "recompute", warm_up=2))


def test_a_run_at_neither_level_is_left_out_and_reported(tmp_path: Path) -> None:
    for threads, seconds in ((1, 2.0), (2, 1.2), (4, 1.0), (1, 2.01), (2, 1.21)):
        name = f"{threads}-{len(list(tmp_path.iterdir()))}"
        config = tiny(f"node.threads_per_rank={threads}")
        leave_run(tmp_path / name, times(seconds), config, environment=environment_of(config))
    observed = observe_runs(tmp_path, "threads=1|2", warm_up=2)
    assert sorted(observation.levels for observation in observed.observations) == [(-1,), (-1,), (HIGH,), (HIGH,)]
    assert observed.notes[0] == "left out: 1 run at neither level of threads (1 | 2)"


def test_settings_common_to_both_levels_belong_to_the_block(tmp_path: Path) -> None:
    for eco, freq, seconds in ((0, 2000, 1.0), (2, 2000, 0.9), (2, 2200, 0.85)):
        settings = (f"node.eco_state={eco}", f"node.freq_mhz={freq}")
        leave_run(tmp_path / f"{eco}-{freq}", times(seconds), tiny(*settings))
    observed = observe_runs(tmp_path, "freq", warm_up=2)
    estimates = estimate_effects(observed.observations, observed.names, observed.levels)
    # the run with both pipes is no match for the run at 2.2 GHz: its pipes are no effect of the clock
    assert estimates.effects[0].ratio == pytest.approx(0.85 / 0.9) and estimates.jobs == 2


def test_a_run_whose_toggle_was_not_applied_is_left_out_and_named(tmp_path: Path) -> None:
    toggle = {"name": "tcmalloc", "requested": True, "applied": False, "seen": "libc"}
    for name in ("a", "c"):
        leave_run(tmp_path / name, times(1.0))
    leave_run(tmp_path / "d", times(0.8), tiny("node.tcmalloc=true"))
    leave_run(tmp_path / "b", times(1.0), tiny("node.tcmalloc=true"), environment={**ENVIRONMENT, "toggles": [toggle]})
    observed = observe_runs(tmp_path, "tcmalloc", warm_up=2)
    assert observed.failures == ("left out: b: node.tcmalloc=True was not applied (seen: libc)",) == observed.notes
    assert [observation.name for observation in observed.observations] == ["a", "c", "d"]
    assert effects_of(observed)["tcmalloc"].ratio == pytest.approx(0.8)


def rows(path: Path, *cells: str) -> Path:
    path.write_text("\n".join([HEADER, *cells]) + "\n")
    return path


def row(name: str, seconds: float, tcmalloc: bool = False, freq: float = 2.0, ranks: int = 1) -> str:
    return f"{name},A64FX,12,768,12,50304,1024,1,{ranks},{ranks},1,1,1,64,1.10,{tcmalloc},{freq},1,MiB,{seconds},ok"


def test_rows_of_a_table(tmp_path: Path) -> None:
    table = rows(
        tmp_path / "t.csv",
        row("a.1", 10.0), row("a.2", 7.0, True), row("a.3", 9.9), row("a.4", 7.1, True), row("a.5", 4.0, ranks=4),
        row("b.1", 20.0), row("b.2", 10.0),
    )  # fmt: skip
    observed = observe_table(table, "tcmalloc,ranks")
    assert observed.notes == ("left out: 1 row that another table shows too: counted once",)
    assert {observation.name: observation.levels for observation in observed.observations}["a.5"] == (-1, 1)
    assert {observation.block.partition(",")[0] for observation in observed.observations} == {"a", "b"}
    # four ranks are four replicas, not another layout
    assert len({observation.block for observation in observed.observations}) == 2
    assert estimate_effects(observed.observations, observed.names, observed.levels).jobs == 5


@pytest.mark.parametrize(
    ("text", "message"), [("tcmaloc", "two levels"), ("torch", "two levels"), ("nonsense=1|2", "no such column"),
                          ("torch=1.7|", "two levels"), ("", "empty name")]
)  # fmt: skip
def test_invalid_toggles_of_a_table_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        observe_table(MEASUREMENTS, text)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        observe_runs(tmp_path / "none", "tcmalloc", 2)


def test_the_notes_show_the_speedup_of_a_higher_clock() -> None:
    observed = observe_table(MEASUREMENTS, "freq")
    clock = effects_of(observed)["freq"]
    # 3.2/3.7, 1261.2/1489.7, 10532.4/11727.9 and 1804.3/2157.3: their geometric mean
    assert clock.ratio == pytest.approx(0.861, abs=0.001) and clock.verdict == "faster"
    assert 0.8 < clock.low < clock.high < 0.92


def test_the_notes_do_not_identify_retention_beside_toggles_that_varied_with_it() -> None:
    observed = observe_table(MEASUREMENTS, "freq,tcmalloc,retention,ranks")
    estimates = estimate_effects(observed.observations, observed.names, observed.levels)
    assert set(estimates.not_identified) >= {"freq", "tcmalloc", "retention", "ranks"}
    effects = {(effect.name, effect.given): effect for effect in estimates.effects}
    assert effects["retention", "no interactions"].verdict == "undecided"
    assert effects["tcmalloc", "no interactions"].verdict == "faster"
    assert effects["ranks where freq=2.0, tcmalloc=false, retention=default", ""].verdict == "faster"
    observed_builds = observe_table(MEASUREMENTS, "torch=1.7|1.10,tcmalloc")
    assert estimate_effects(observed_builds.observations, observed_builds.names, observed_builds.levels).jobs > 0
