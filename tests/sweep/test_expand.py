"""Tests of the expansion of a sweep file into runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.sweep.expand import Sweep, expand_sweep, expand_text
from tests.data.test_run_vocabulary import a_corpus
from tests.sweep.runs import names

DEMO = Path(__file__).resolve().parents[2] / "benchmarks" / "sweeps" / "demo.yaml"


def expand(folder: Path, text: str, *overrides: str) -> Sweep:
    file = folder / "sweep.yaml"
    file.write_text(text, encoding="utf-8")
    return expand_sweep(file, overrides)


def test_matrix_exclude_include_and_repeats(tmp_path: Path) -> None:
    sweep = expand(
        tmp_path,
        """
preset: tiny
defaults: {training.lr: 1e-3}
matrix:
  layout: {dp: [1, 2], tp: [1, 2]}
  node.tcmalloc: [no, yes]
exclude:
  - {layout.dp: 2.0, node.tcmalloc: True}
  - {layout.dp: 1, layout.tp: 1}
include:
  - {label: "wide one", layout.tp: 4}
repeats: 2
""",
    )
    assert sweep.name == "sweep"
    rows = ["dp1-tp2", "dp1-tp2-tcmalloc", "dp2-tp1", "dp2-tp2", "wide_one"]
    assert names(sweep) == [f"{row}-r1" for row in rows] + [f"{row}-r2" for row in rows]  # A B A B, not A A B B
    assert [run.order for run in sweep.runs] == [0, 1, 2, 3, 4] * 2
    wide = sweep.runs[4].config
    assert wide is not None and wide.layout.tp == 4 and wide.training.lr == 1e-3 and not wide.node.tcmalloc
    assert sweep.runs[0].digest == sweep.runs[5].digest != sweep.runs[1].digest


def test_without_matrix_and_include_the_defaults_are_the_row(tmp_path: Path) -> None:
    sweep = expand(tmp_path, "name: one\npreset: tiny\ndefaults: {job.elapse: 01:00:00}\n", "training.lr=2e-4")
    assert (sweep.name, names(sweep)) == ("one", ["dp1-tp1-r1"])
    config = sweep.runs[0].config
    assert config is not None and config.job.elapse == 3600 and config.training.lr == 2e-4


def test_a_row_that_is_not_valid_is_a_refused_row(tmp_path: Path) -> None:
    sweep = expand(tmp_path, "preset: tiny\nmatrix:\n  layout.tp: [1, 3]\n")
    good, refused = sweep.runs
    assert good.config is not None and good.refusal == ""
    assert refused.config is None and refused.name == "dp1-tp3-r1"
    assert "sweep.yaml:3: layout.tp: 3: must divide model.heads 4; valid: 1, 2, 4" in refused.refusal
    assert refused.written_settings["layout.tp"] == "3" and refused.written_settings["model.hidden"] == "128"


def test_rows_with_the_same_label_get_names_from_their_settings(tmp_path: Path) -> None:
    text = "preset: tiny\ninclude:\n  - {label: a, training.lr: %s}\n  - {label: a, training.lr: %s}\n"
    first, second = names(expand(tmp_path, text % ("1e-3", "8e-4")))
    assert re.fullmatch(r"a-[0-9a-f]{6}-r1", first) and first != second
    assert names(expand(tmp_path, text % ("8e-4", "1e-3"))) == [second, first]  # whatever their order
    with pytest.raises(ConfigError, match="2 rows have the same settings .*repeats"):
        expand(tmp_path, text % ("1e-3", "0.001"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matrx: {}", r"sweep.yaml.*: matrx: unknown key of a sweep file; did you mean matrix\?"),
        ("preset: tinny", r"sweep.yaml:1: preset: 'tinny' is not a preset; valid: tiny, llama-tiny, 124m"),
        ("matrix: {layout.dq: [1]}", r"sweep.yaml:1: layout.dq: unknown key .*did you mean layout.dp\?"),
        ("defaults: {dp: 1}", r"sweep.yaml:1: dp: unknown key .*did you mean layout.dp\?"),
        ("matrix: {layout.dp: 2}", r"sweep.yaml:1: matrix: layout.dp: expected a list of values"),
        ("matrix: {layout.dp: []}", "expected a list of values"),
        ("matrix: [1]", "matrix: expected settings"),
        ("repeats: 0", r"sweep.yaml:1: repeats: '0': expected a whole number, at least 1"),
        ("repeats: many", "repeats: 'many'"),
        ("include: {layout.dp: 2}", "include: expected a list"),
        ("include: [2]", "include: expected a list of mappings"),
        (
            "matrix: {layout.dp: [1]}\nexclude: [{layout.tp: 1}]",
            "exclude: layout.tp: is in neither matrix nor defaults",
        ),
        ("matrix: {layout.dp: [1]}\nexclude: [{layout.dp: 1}]", "no rows are left"),
        ("defaults: {layout.dp: two}", "no row can be run\n.*sweep.yaml:1: layout.dp: 'two': expected a number"),
        (f"matrix: {{training.seed: {list(range(99))}}}\nrepeats: 200", "at most 10,000 runs"),
        ("defaults: {layout.dp: 1, layout: {dp: 2}}", "layout.dp: written twice"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_are_reported_with_line_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(tmp_path, text)


def test_a_wrong_override_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set .*layout.dq: unknown key"):
        expand(tmp_path, "preset: tiny", "layout.dq=2")
    with pytest.raises(ConfigError, match="no such file"):
        expand_sweep(tmp_path / "none.yaml")


VALUES: Dict[str, List[object]] = {
    "layout.dp": [1, 2, 4],
    "training.micro_batch": [1, 2],
    "training.lr": ["1e-3", "2e-3", 0.004],
    "node.tcmalloc": [False, True],
    "model.name": ["a b", "A/B", "..", "ü"],
}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_expansion_counts_names_and_excludes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4))
    matrix = {
        key: data.draw(st.lists(st.sampled_from(VALUES[key]), unique=True, min_size=1, max_size=3)) for key in keys
    }
    repeats = data.draw(st.integers(1, 3))
    tree: Dict[str, object] = {"preset": "tiny", "repeats": repeats, "matrix": matrix}
    count = 1
    for values in matrix.values():
        count *= len(values)
    if keys and len(matrix[keys[0]]) > 1:
        tree["exclude"] = [{keys[0]: matrix[keys[0]][0]}]
        count -= count // len(matrix[keys[0]])
    sweep = expand(tmp_path_factory.mktemp("sweep"), yaml.safe_dump(tree, allow_unicode=True))
    assert len(sweep.runs) == count * repeats
    assert len({name.lower() for name in names(sweep)}) == len(sweep.runs)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name) for name in names(sweep))
    for repeat in range(repeats):
        part = sweep.runs[repeat * count : (repeat + 1) * count]
        assert {run.repeat for run in part} == {repeat + 1}
    if "exclude" in tree:
        assert all(
            run.written_settings[keys[0]] != str(matrix[keys[0]][0]) for run in sweep.runs if keys[0] != "node.tcmalloc"
        )


def test_the_demo_covers_the_layouts_and_a_refused_row() -> None:
    runs = {run.row: run for run in expand_sweep(DEMO).runs}
    layouts = {(run.config.layout.dp, run.config.layout.tp) for run in runs.values() if run.config is not None}
    assert layouts == {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert [name for name, run in runs.items() if run.config is None] == ["tp3"]
    seeds = {run.config.training.seed for run in runs.values() if run.config is not None}
    assert len(seeds) == 1 and load_run_config(preset="tiny").model == runs["dp2"].config.model  # type: ignore[union-attr]


def test_rows_have_the_vocabulary_of_their_corpora_and_stay_the_same_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "defaults: {data.paths: [corpus]}\nmatrix: {training.lr: [1e-3, 2e-3]}\nwhere: model.vocab_size < 10000\n"
    monkeypatch.chdir(tmp_path)
    before = expand_text(text, "sweep.yaml", "sweep", base=tmp_path)
    a_corpus(tmp_path / "corpus", 300)
    for base in (tmp_path, None):
        after = expand_text(text, "sweep.yaml", "sweep", base=base)
        assert [run.digest for run in after.runs] == [run.digest for run in before.runs], "as the rows are written"
        assert [run.config.model.vocab_size for run in after.runs if run.config is not None] == [300, 300]
        assert after.runs[0].notes == ("model.vocab_size is 300, that of the corpus corpus",)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    from_base = expand_text(text, "sweep.yaml", "sweep", base=tmp_path).runs[0].config
    assert from_base is not None and from_base.model.vocab_size == 300
    stated = expand_text(text.replace("[corpus]", "[corpus], model.vocab_size: 400"), "s.yaml", "s", base=tmp_path)
    assert stated.runs[0].notes == ()
    tiny = expand_text("preset: tiny\n" + text, "s.yaml", "s", base=tmp_path).runs[0].config
    assert tiny is not None and tiny.model.vocab_size == 2048, "the corpus fits into the preset's"
    a_corpus(tmp_path / "large", 5000)
    large = expand_text("preset: tiny\n" + text, "s.yaml", "s", ["data.paths=[large]"], tmp_path).runs[0].config
    assert large is not None and large.model.vocab_size == 5000
