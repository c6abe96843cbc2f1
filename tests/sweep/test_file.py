"""Tests of axes, filters and order of a sweep file, and of row identities that depend only on a row's settings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Dict, List, Tuple

import pytest
import yaml

from fugaku_gpt.config import dump_run_config
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.records.sweep import digest_of_config
from fugaku_gpt.sweep.expand import Run, Sweep, expand_sweep, expand_text
from fugaku_gpt.sweep.folder import with_recorded_names
from fugaku_gpt.sweep.run import run_sweep
from tests.sweep.fake import FakeLaunch, QuietProgress
from tests.sweep.runs import names


def expand(text: str, *overrides: str) -> Sweep:
    return expand_text(text, "s.yaml", "s", overrides)


def identities(sweep: Sweep) -> Dict[str, Tuple[str, int]]:
    return {run.name: (run.digest, run.repeat) for run in sweep.runs}


def test_lists_under_zip_advance_together_and_multiply_with_the_matrix() -> None:
    sweep = expand(
        "preset: tiny\nmatrix: {training.seed: [1, 2]}\nzip: {layout.dp: [1, 2, 4], training.global_batch: [8, 16, 32]}"
    )
    assert names(sweep) == [
        f"dp{dp}-tp1-gbs{gbs}-seed{seed}-r1" for seed in (1, 2) for dp, gbs in ((1, 8), (2, 16), (4, 32))
    ]
    two = expand("preset: tiny\nzip: [{layout.dp: [1, 2], training.seed: [1, 2]}, {layout.tp: [1, 2]}]")
    assert [(run.written_settings["layout.dp"], run.written_settings["layout.tp"]) for run in two.runs] == [
        ("1", "1"), ("1", "2"), ("2", "1"), ("2", "2"),
    ]  # fmt: skip


VARIANTS = """
preset: tiny
matrix: {layout.dp: [1, 2]}
variants:
  base: {}
  2.2GHz: {node: {freq_mhz: 2200, eco_state: 2}}
  LD_PRELOAD=libtcmalloc.so: {node.tcmalloc: yes}
"""


def test_variants_are_named_settings_multiplied_with_the_matrix() -> None:
    runs = expand(VARIANTS).runs
    assert [(run.name, run.variant) for run in runs[3:]] == [
        ("dp2-tp1-r1", ""),
        ("dp2-tp1-2.2GHz-r1", "2.2GHz"),
        ("dp2-tp1-LD_PRELOAD_libtcmalloc.so-r1", "LD_PRELOAD=libtcmalloc.so"),
    ]
    config = runs[4].config
    assert config is not None and (config.node.freq_mhz, config.node.eco_state) == (2200, 2)


def test_a_list_of_variants_is_every_toggle_with_every_other() -> None:
    text = (
        "preset: tiny\nvariants:\n- {off: {}, 2.2GHz: {node.freq_mhz: 2200}}\n- {off: {}, tc: {node.tcmalloc: yes}}\n"
    )
    assert [run.variant for run in expand(text).runs] == ["", "tc", "2.2GHz", "2.2GHz, tc"]


def test_filters_look_at_the_resolved_row_and_not_at_included_ones() -> None:
    sweep = expand(
        """
preset: tiny
defaults: {node.threads_per_rank: 1}
matrix: {layout.dp: [1, 2, 4], layout.tp: [1, 2, 3], node.tcmalloc: [no, yes]}
where:
  - layout.ranks <= 4 and model.heads == 4
  - layout.tp in (1, 3) or not node.tcmalloc
exclude:
  - {layout.dp: 4}
  - layout.dp == 2 and node.tcmalloc
include: [{label: wide, layout.dp: 8}]
"""
    )
    assert names(sweep) == [
        "dp1-tp1-r1", "dp1-tp1-tcmalloc-r1", "dp1-tp2-r1", "dp1-tp3-r1", "dp1-tp3-tcmalloc-r1", "dp2-tp1-r1",
        "dp2-tp2-r1", "wide-r1",
    ]  # fmt: skip
    assert [run.config is None for run in sweep.runs][3:5] == [True, True]  # filtered by what is written


def test_a_single_expression_may_stand_alone() -> None:
    text = "preset: tiny\nmatrix: {layout.dp: [1, 2, 4]}\nwhere: layout.dp > 1\nexclude: layout.dp == 2"
    assert names(expand(text)) == ["dp4-tp1-r1"]


def test_repeats_are_interleaved_or_grouped() -> None:
    text = "preset: tiny\nmatrix: {layout.dp: [1, 2]}\nrepeats: 2\n"
    assert names(expand(text)) == ["dp1-tp1-r1", "dp2-tp1-r1", "dp1-tp1-r2", "dp2-tp1-r2"]
    assert expand(text + "order: interleaved").runs == expand(text).runs
    assert names(expand(text + "order: grouped")) == ["dp1-tp1-r1", "dp1-tp1-r2", "dp2-tp1-r1", "dp2-tp1-r2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zip: {layout.dp: [1, 2], layout.tp: [1]}", "s.yaml:1: zip: .*one length; layout.dp has 2, layout.tp has 1"),
        ("zip: {layout.dp: 2}", "zip: layout.dp: expected a list"),
        ("zip: [1]", "zip: expected settings"),
        ("variants: [1]", "variants: expected names with their settings"),
        ("variants: {a: 1}", "variants: a: expected settings"),
        ("variants: {a: {node.tcmaloc: yes}}", "node.tcmaloc: unknown key .*did you mean node.tcmalloc"),
        ("matrix: {layout.dp: [1]}\nzip: {layout.dp: [2]}", "layout.dp: stands in two of matrix, zip and variants"),
        ("order: random", "s.yaml:1: order: 'random'; valid: interleaved, grouped"),
        ("name: x\nwhere: layout.dq == 1", "s.yaml:2: where: 'layout.dq == 1', character 1: unknown name layout.dq"),
        ("where: [{layout.dp: 1}]", "s.yaml:1: where: expected an expression"),
        ("where: {layout.dp: 1}", "where: expected a list"),
        ("where: node.freq_mhz > 2000", r"null \(not set\) and the number 2000 have no order \(in dp1-tp1\)"),
        ("exclude: [layout.dp]", "s.yaml:1: exclude: 'layout.dp', character 1: is the number 1"),
        ("where: layout.dp == 2", "no rows are left: where and exclude"),
        ("matrix: {layout.dp: [1, 1]}", "2 rows have the same settings"),
        ("variants: {a: {}, b: {}}", "2 rows have the same settings"),
    ],
)
def test_mistakes_are_reported_with_line_and_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(text)


@pytest.mark.slow
def test_a_product_that_is_too_large_is_refused_before_it_is_made() -> None:
    axes = "".join(f"  training.{key}: {list(range(1, 1001))}\n" for key in ("seed", "iterations", "log_interval"))
    with pytest.raises(ConfigError, match="1000000000 combinations; at most 10,000 runs"):
        expand("matrix:\n" + axes)
    with pytest.raises(ConfigError, match="1000 rows [*] 11 repeats; at most 10,000"):
        expand(f"repeats: 11\nzip: {{training.seed: {list(range(1000))}}}")


def test_identities_depend_only_on_the_settings_of_a_row() -> None:
    chance = random.Random(3)
    matrix = {"training.seed": [1, 2], "layout.dp": [1, 2], "node.tcmalloc": [False, True], "job.nodes": [1]}
    defaults = {"training.lr": "1e-3", "model.dropout": 0.1, "layout.tp": 2}
    reference = identities(expand(yaml.safe_dump({"preset": "tiny", "matrix": matrix, "defaults": defaults})))
    for _ in range(10):
        shuffled = {key: chance.sample(matrix[key], len(matrix[key])) for key in chance.sample(sorted(matrix), 4)}
        more = {key: defaults[key] for key in chance.sample(sorted(defaults), 3)}
        tree = {"matrix": shuffled, "preset": "tiny", "defaults": more, "include": [{"label": "more", "layout.dp": 4}]}
        shuffled_identities = identities(expand(yaml.safe_dump(tree, sort_keys=False)))
        del shuffled_identities["more-r1"]
        assert shuffled_identities == reference


def test_a_setting_that_is_written_with_the_default_value_changes_no_identity() -> None:
    plain = expand("preset: tiny\ninclude: [{label: a, layout.dp: 2}]").runs[0]
    written = expand("preset: tiny\ninclude: [{label: b, layout.dp: 2.0, layout.tp: 1, node.tcmalloc: no}]").runs[0]
    assert plain.digest == written.digest
    assert plain.config is not None and plain.digest == digest_of_config(plain.config)
    first, second = (
        expand(f"preset: tiny\nmatrix: {{layout.tp: [1, 3], training.lr: [{lr}]}}").runs[1] for lr in ("1e-3", "0.001")
    )
    assert first.config is None and first.digest == second.digest  # a refused row too


def test_a_row_that_gets_a_namesake_stays_where_it_has_run(tmp_path: Path) -> None:
    first = expand("preset: tiny\ninclude: [{label: a, training.lr: 1e-3}]")
    run_sweep(first, tmp_path, FakeLaunch(), QuietProgress())
    text = "preset: tiny\ninclude:\n- {label: a, training.lr: 2e-3}\n- {label: a, training.lr: 1e-3}\n"
    runs: List[Run] = list(with_recorded_names(expand(text), tmp_path).runs)
    assert runs[1].name == "a-r1" and runs[1].digest == first.runs[0].digest and runs[0].name.startswith("a-")
    launch = FakeLaunch()
    run_sweep(expand(text), tmp_path, launch, QuietProgress())
    assert launch.started == [runs[0].name] != ["a-r1"]


def test_a_folder_of_the_first_format_is_continued(tmp_path: Path) -> None:
    sweep = expand("preset: tiny\nmatrix: {layout.dp: [1, 2]}")
    run_sweep(sweep, tmp_path, FakeLaunch(), QuietProgress())
    for run in sweep.runs:  # as older programs wrote it: the digest is of the text with every field
        assert run.config is not None
        file = tmp_path / run.name / "sweep.json"
        values = {**json.loads(file.read_text()), "version": 1, "digest": "0123456789abcdef"}
        del values["variant"]
        file.write_text(json.dumps(values))
        assert "seed" in dump_run_config(run.config)
    launch = FakeLaunch()
    run_sweep(sweep, tmp_path, launch, QuietProgress())
    assert launch.started == []
    with pytest.raises(UsageError, match="training.lr: 0.002 then, 0.001 now"):
        run_sweep(
            expand("preset: tiny\ndefaults: {training.lr: 1e-3}\nmatrix: {layout.dp: [1, 2]}"),
            tmp_path,
            launch,
            QuietProgress(),
        )


@pytest.mark.parametrize("file", sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "sweeps").glob("*.yaml")))
def test_shipped_sweeps_expand_to_rows_of_different_settings(file: Path) -> None:
    sweep = expand_sweep(file)
    rows = {run.row: run.digest for run in sweep.runs}
    assert len(set(rows.values())) == len(rows)
