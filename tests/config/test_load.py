"""Tests of presets, files and overrides: their precedence, and how errors are reported."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import List

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import changed_settings, dump_run_config, load_run_config, preset_names, valid_keys
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.formulas.parameters import size_name


def errors_of(tmp_path: Path, text: str = "", overrides: List[str] = []) -> str:  # noqa: B006  # never changed
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_run_config(file, overrides=overrides)
    return str(caught.value)


def test_overrides_take_precedence_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: tiny\nmodel.layers: 3\ntraining: {lr: 5e-3}\n", encoding="utf-8")
    config = load_run_config(file, overrides=["training.lr=7e-3"])
    assert (config.model.hidden, config.model.layers, config.training.lr) == (128, 3, 7e-3)
    assert load_run_config(file, preset="124m").model.hidden == 768


@pytest.mark.parametrize(
    ("preset", "name"),
    [("tiny", "1.1M"), ("124m", "124M"), ("350m", "350M"), ("1.3b", "1.3B"), ("13b", "13B"), ("30b", "30B")]
    + [("fugaku-llm-13b", "13B")],
)
def test_presets_have_the_size_of_their_name(preset: str, name: str) -> None:
    assert preset in preset_names()
    config = load_run_config(preset=preset)
    assert size_name(config.model) == name
    nameless = load_run_config(preset=preset, overrides=["model.name="])
    assert size_name(nameless.model) == name.replace("350M", "355M")


def test_the_preset_of_the_published_model_has_the_published_settings() -> None:
    model = load_run_config(preset="fugaku-llm-13b").model
    assert (model.layers, model.hidden, model.heads, model.vocab_size, model.gelu) == (40, 5184, 36, 49152, "tanh")
    assert load_run_config(preset="13b").model.vocab_size == 50257


def test_the_production_layout_is_accepted() -> None:
    layout = ["layout.tp=6", "layout.pp=8", "layout.dp=288", "job.nodes=13824"]
    assert load_run_config(preset="13b", overrides=layout).micro_batches == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainig: {lr: 1}", "run.yaml:1: trainig.lr: unknown key (value '1'); did you mean training.lr?"),
        ("layout:\n  dpx: 2", "run.yaml:2: layout.dpx: unknown key (value '2'); did you mean layout.dp?"),
        ("dp: 2", "did you mean layout.dp?"),
        ("model:\n  zzz: 1", "model.zzz: unknown key (value '1'); valid: model.name, model.layers"),
        ("whatever: 1", "valid: checkpoint.*, data.*, job.*, layout.*, model.*, node.*, preset, training.*"),
        ("training: {dtype: half}", "'half': not one of the choices; valid: one of float32, float64"),
        (
            "preset: enormous",
            "run.yaml:1: preset: 'enormous' is not a preset; "
            "valid: tiny, llama-tiny, 124m, smollm2-135m, 350m, qwen-0.5b, llama-1.1b, 1.3b, llama-8b, 13b, "
            "fugaku-llm-13b, 30b, arc-nano, arc-small",
        ),
        ("training: {lr: 1, lr: 2}", "run.yaml:1: lr: written twice"),
        ("model: [1", "run.yaml:2: not valid YAML:"),
        ("- 1\n- 2", "expected `key: value` lines at the top"),
        ("? [a]\n: 1", "a key must be a plain word"),
        ("model: {heads: 5}", "model.heads: 5: must divide model.hidden 128; valid: 1, 2, 4, 8"),
        ("layout: {tp: 3}", "layout.tp: 3: must divide model.heads 4; valid: 1, 2, 4"),
        ("training: {global_batch: 7, micro_batch: 2}", "training.micro_batch 2 * layout.dp 1 = 2; valid: 6 or 8"),
        ("layout: {dp: 4}\nnode: {ranks_per_node: 3}", "node.ranks_per_node: 3: times job.nodes 1 must be layout.dp 4"),
        ("layout: {dp: 4}\njob: {nodes: 3}", "job.nodes: 3: must divide layout.dp 4"),
        ("model: {padded_vocab_size: 2000}", "model.padded_vocab_size: 2000: must be at least model.vocab_size 2048"),
        ("model: {padded_vocab_size: 2049}\nlayout: {tp: 2}", "must be a multiple of layout.tp 2; valid: 2050"),
        ("training: {min_lr: 1}", "training.min_lr: 1.0: must be at most training.lr"),
        ("training: {warmup_iterations: 9, decay_iterations: 9}", "must be below training.decay_iterations 9"),
        ("data: {paths: [a], weights: [1, 2]}", "data.weights: [1.0, 2.0]: must have one weight for each of the 1"),
        ("data: {split: [1, 1]}", "must be three shares"),
        ("model: {dropout: 1}", "outside the limits; valid: a number, at least 0 and below 1"),
    ],
)  # fmt: skip
def test_an_error_is_reported_with_line_key_value_and_valid_values(tmp_path: Path, text: str, message: str) -> None:
    assert message in errors_of(tmp_path, text)


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    report = errors_of(tmp_path, "training: {lr: x, seed: -1}", ["layout.dp=zero", "nothing=1"])
    assert len(report.splitlines()) == 4


@pytest.mark.parametrize("text", ["training.lr", "=3", "", "training.lr=[", "training=3", "training.lr=[1, 2]"])
def test_overrides_that_cannot_be_parsed_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_run_config(overrides=[text])


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"job: {name: \xe9}")
    for name, message in (("none.yaml", "no such file"), ("latin.yaml", "not UTF-8"), (".", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            load_run_config(tmp_path / name)


@pytest.mark.slow
def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "more than 100,000 values" in errors_of(tmp_path, "\n".join(lines))
    assert errors_of(tmp_path, "a: &a [*a]")


def test_a_run_may_end_within_the_warm_up() -> None:
    assert load_run_config(preset="tiny", overrides=["training.iterations=5"]).training.iterations == 5


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("", encoding="utf-8")
    assert load_run_config(tmp_path / "run.yaml") == load_run_config()


@settings(max_examples=50, deadline=None)
@given(
    dp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]), lr=st.floats(1e-8, 1), elapse=st.floats(0.5, 1e6),
    name=st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="/."), max_size=20),
    # without dots: a path that is there beside the file, as . is, is read as one of that folder
    paths=st.lists(
        st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="."), min_size=1), max_size=3
    ),
    seed=st.integers(0, 2**62), clock=st.none() | st.integers(1, 5000), flag=st.booleans(),
)  # fmt: skip
@pytest.mark.slow
def test_a_run_written_out_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, dp: int, tp: int, lr: float, elapse: float, name: str, paths: List[str],
    seed: int, clock: object, flag: bool,
) -> None:  # fmt: skip
    from dataclasses import replace

    config = load_run_config(preset="tiny", overrides=[f"layout.dp={dp}", f"layout.tp={tp}"])
    config = replace(
        config,
        training=replace(config.training, lr=lr, min_lr=0.0, seed=seed),
        job=replace(config.job, elapse=elapse, name=name),
        data=replace(config.data, paths=tuple(paths)),
        node=replace(config.node, tcmalloc=flag, freq_mhz=clock),
    )
    file = tmp_path_factory.mktemp("round") / "config.yaml"
    file.write_text(dump_run_config(config), encoding="utf-8")
    assert load_run_config(file) == config


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60) | st.from_regex(r"([a-z]{1,8}[.:=\[\]{}&*!|>'\" \n-]{1,3}){1,6}", fullmatch=True))
@pytest.mark.slow
def test_no_text_gives_anything_but_a_config_or_a_config_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "any.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    for arguments in ({"file": file}, {"overrides": [text]}):
        with contextlib.suppress(ConfigError):
            load_run_config(**arguments)


def test_every_key_has_a_meaning() -> None:
    assert len(valid_keys()) > 40 and "training.global_batch" in valid_keys()


WIDE = ["layout.dp=24", "training.global_batch=24"]


def test_only_settings_that_differ_from_their_defaults_are_changed() -> None:
    overrides = [*WIDE, "job.shape=2x3x4", "job.elapse=90:00", "job.volumes=[/vol0004]", "node.tcmalloc=no"]
    assert changed_settings(load_run_config(overrides=overrides)) == {
        "layout.dp": 24,
        "training.global_batch": 24,
        "job.nodes": 24,
        "job.shape": "2x3x4",
        "job.elapse": "1:30:00",
        "job.volumes": ["/vol0004"],
    }
    assert changed_settings(load_run_config()) == {}


def test_the_nodes_follow_from_a_shape_and_must_agree_with_it() -> None:
    assert load_run_config(overrides=[*WIDE, "job.shape=2x3x4"]).job.nodes == 24
    with pytest.raises(ConfigError, match="job.nodes: 12: must be the product of job.shape 2x3x4; valid: 24"):
        load_run_config(overrides=[*WIDE, "job.shape=2x3x4", "job.nodes=12"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["job.strict=strict"], "needs a shape of three sides, such as"),
        (["job.strict=strict", "job.shape=24", "job.allocation=torus"], "job.shape is 24"),
        (["job.strict=strict-io", "job.shape=2x3x4"], "needs job.allocation=torus"),
        (["job.elapse_min=1:00:00"], "must be below job.elapse"),
        (["job.elapse_min=1:00:00", "job.elapse=1:00:00"], "must be below job.elapse"),
        (["job.bulk=9-0"], "valid: 0-9"),
        (["job.bulk=0-9", "job.chain=2"], "a bulk job is not chained"),
        (["job.shape=4x6", "job.rank_map=bychip:XYZ"], "names 3 axes"),
        (["job.tarball=env.tar"], "needs job.local_tmp"),
        (["job.name=a/b"], "a name without /"),
    ],
)
def test_a_job_with_contradictory_settings_is_refused(overrides: List[str], message: str) -> None:
    assert message in errors_of_overrides([*WIDE, *overrides])


def errors_of_overrides(overrides: List[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(overrides=overrides)
    return str(caught.value)
