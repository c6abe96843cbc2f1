"""Tests that the JSON Schemas accept every real file of their form, and refuse what the readers refuse."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fugaku_gpt.api import SCHEMA_NAMES, UsageError, json_schema, load_run
from fugaku_gpt.config import config_values, load_run_config, preset_names, valid_keys
from fugaku_gpt.config.load import PRESET_DIR, coerce_setting
from fugaku_gpt.config.tree import Scalar
from fugaku_gpt.config.values import BadValue
from fugaku_gpt.records.run import OK, Result, RunDirectory

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: make dev")

ROOT = Path(__file__).resolve().parents[2]
OLD = ROOT / "tests" / "golden" / "v0.1.0"


@lru_cache(maxsize=None)
def validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(json_schema(name))


def problems(name: str, value: Any) -> List[str]:
    """Where a value does not follow a schema."""
    return [f"{error.json_path}: {error.message}" for error in validator(name).iter_errors(value)]


class Loader(yaml.SafeLoader):
    """Reads numbers such as 2e-4 as YAML 1.2 and JSON do; YAML 1.1 has them as texts."""


_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?e[-+]?[0-9]+")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("0123456789"))


def as_json(file: Path) -> Any:
    """The values of a YAML file as JSON has them."""
    return json.loads(json.dumps(Loader(file.read_text(encoding="utf-8")).get_single_data()))


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_each_schema_is_valid(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema(name))


def test_another_form_is_refused() -> None:
    with pytest.raises(UsageError, match="'rows': no JSON form; valid: run, sweep, job, result"):
        json_schema("rows")


def test_runs_as_they_are_recorded_follow_the_schema() -> None:
    refused = {file.parent for file in OLD.glob("runs/**/result.json") if '"refused"' in file.read_text("utf-8")}
    # the settings of a refused row are as they were written
    files = [file for file in sorted(OLD.glob("runs/**/config.yaml")) if file.parent not in refused]
    assert len(files) > 5
    for file in files:
        assert problems("run", as_json(file)) == [], file
    for name in preset_names():
        assert problems("run", config_values(load_run_config(preset=name))) == [], name


@pytest.mark.parametrize("file", [*sorted(PRESET_DIR.glob("*.yaml")), *sorted(ROOT.glob("docs/examples/*.yaml"))])
def test_run_and_sweep_files_follow_their_schemas(file: Path) -> None:
    name = "sweep" if file.name == "sweep.yaml" else "run"
    assert problems(name, as_json(file)) == []


def test_every_setting_has_a_description_and_a_valid_default() -> None:
    properties = json_schema("run")["properties"]
    for key in valid_keys():
        section, _, leaf = key.partition(".")
        setting = properties[section]["properties"][leaf]
        assert setting["description"] and problems("run", {section: {leaf: setting["default"]}}) == [], key
        assert properties[key] == {"$ref": f"#/properties/{section}/properties/{leaf}"}


def wrong_runs() -> Iterator[Dict[str, Any]]:
    """Runs that the loader refuses for one field alone."""
    yield {"model": {"layers": 0}}
    yield {"model": {"layers": "many"}}
    yield {"model.layers": 1.5}
    yield {"model": {"norm": "batchnorm"}}
    yield {"model": {"dropout": 1}}
    yield {"model": {"levels": 3}}
    yield {"modell": {"layers": 3}}
    yield {"training": {"dtype": "int8"}}
    yield {"job": {"elapse": "soon"}}
    yield {"job": {"elapse": ""}}
    yield {"job": {"elapse": "0"}}
    yield {"job": {"elapse": "1:00:99"}}
    yield {"job": {"shape": "4x6\n"}}
    yield {"node": {"memory_limit": "23 GB"}}
    yield {"data": {"paths": [{"a": 1}]}}
    yield {"preset": "13t"}
    yield {"node": {"retention_state": 7}}


digits = st.text("0123456789", min_size=1, max_size=3)
clocks = st.lists(digits, min_size=2, max_size=4).map(":".join)
units = st.lists(st.tuples(digits, st.sampled_from("dhmsDHMS")).map("".join), max_size=4).flatmap(
    lambda texts: st.sampled_from([" ", "", "\n"]).map(lambda space: space.join(texts))
)
numbers = st.tuples(
    st.sampled_from(["", "+", "-"]),
    digits,
    st.sampled_from(["", ".", "_0"]),
    digits,
    st.sampled_from(["", "e-3", "E+10"]),
).map("".join)
texts = st.text("0159:._+-edhms \n٣ſ", max_size=9)
examples = st.sampled_from(
    ["", "0", "1:00:99", "0:00:00", "1:99:00", "0h", "1:00:00\n", "1:00:59.99999999999999999999", "1e999"]
)
decorated = st.tuples(st.one_of(clocks, units, numbers), st.sampled_from(["", ".5", "\n", " ", "s"])).map("".join)


@pytest.mark.parametrize("key", ["job.elapse", "job.stop_margin", "node.hang_timeout"])
@settings(max_examples=300)
@given(
    value=st.one_of(examples, clocks, units, numbers, decorated, texts, st.integers(-2, 10**6), st.floats(-1e3, 1e60))
)
def test_schema_and_loader_accept_the_same_durations(key: str, value: Any) -> None:
    assume(not isinstance(value, float) or value == 0 or abs(value) > 1e-90)
    is_text = isinstance(value, str)
    try:
        coerce_setting(key, Scalar(value if is_text else json.dumps(value), is_text, ""))
        is_accepted = True
    except BadValue:
        is_accepted = False
    assert is_accepted == (problems("run", {key: value}) == [])


@pytest.mark.parametrize("values", list(wrong_runs()), ids=str)
def test_the_schema_refuses_values_that_the_loader_refuses(tmp_path: Path, values: Dict[str, Any]) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UsageError):
        load_run(file)
    assert len(problems("run", values)) == 1


def test_a_run_file_may_be_written_as_json(tmp_path: Path) -> None:
    values = {"preset": "tiny", "layout": {"tp": 2}, "training.lr": 2e-4, "job": {"elapse": "1:00:00"}}
    assert problems("run", values) == []
    file = tmp_path / "run.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    config = load_run(file).config
    assert (config.layout.tp, config.training.lr, config.job.elapse) == (2, 2e-4, 3600.0)


def test_sweeps_follow_the_schema_in_every_form() -> None:
    sweep = {
        "name": "s",
        "preset": "tiny",
        "defaults": {"training": {"iterations": 3}, "node.tcmalloc": True},
        "matrix": {"layout": {"dp": [1, 2]}},
        "zip": [{"job.nodes": [1, 2], "training.global_batch": [8, 16]}],
        "variants": {"base": {}, "2.2GHz": {"node.freq_mhz": 2200}},
        "where": "layout.dp < 4",
        "exclude": [{"layout.dp": 1}, "layout.dp == 3"],
        "include": [{"label": "more", "layout.tp": 2}],
        "repeats": 2,
        "order": "grouped",
    }
    assert problems("sweep", sweep) == []
    assert problems("sweep", as_json(OLD / "sweep.yaml")) == []
    for key, value in (("repeats", 0), ("order", "random"), ("matrix", {"layout.dp": 2}), ("defaults", {"x": 1})):
        assert problems("sweep", {**sweep, key: value}), key
    assert problems("sweep", {"rows": []})


def test_recorded_jobs_and_results_follow_their_schemas(tmp_path: Path) -> None:
    lines = [line for file in OLD.glob("runs/**/job.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
    assert {json.loads(line)["kind"] for line in lines} >= {"intent", "submitted", "status"}
    for line in lines:
        assert problems("job", json.loads(line)) == [], line
    results = sorted(OLD.glob("runs/**/result.json"))
    assert len(results) > 5
    for file in results:
        assert problems("result", json.loads(file.read_text(encoding="utf-8"))) == [], file
    directory = RunDirectory(tmp_path)
    directory.write_result(Result(OK, "", 1.0, 2.0, 3, {"last_loss": 2.5, "first_loss": None}))
    assert problems("result", json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("job", {"kind": "status", "time": 1.0, "job_id": "7", "state": "asleep"}),
        ("job", {"kind": "intent", "time": 1.0}),
        ("job", {"kind": "dreamt", "time": 1.0}),
        ("job", {"kind": "cancelled", "job_id": "7"}),
        ("result", {"status": "fine", "reason": "", "started": 1.0, "ended": 2.0}),
        ("result", {"status": "ok", "reason": "", "started": 1.0}),
        ("result", {"status": "ok", "reason": "", "started": 1.0, "ended": 2.0, "summary": {"last_loss": "low"}}),
    ],
)
def test_lines_and_results_of_another_form_are_refused(name: str, value: Dict[str, Any]) -> None:
    assert problems(name, value)
