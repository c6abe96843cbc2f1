"""Tests of what the interface does without ranks: its values are those of the commands, and so are its errors."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import pytest

from fugaku_gpt import api
from fugaku_gpt.cli.main import run as command
from fugaku_gpt.compare.shared_run import SharedRun
from fugaku_gpt.config import load_run_config
from fugaku_gpt.launch.run_to_train import run_to_train
from fugaku_gpt.records.job import append_event
from fugaku_gpt.records.run import OK, Result, RunDirectory
from tests.support.commands import Capture, json_of
from tests.support.killed_run import killed_run

JOB = {"job.group": "hp000000", "job.elapse": "1:00:00", "layout.dp": 2}
JOB_OPTIONS = ["--set", "job.group=hp000000", "--set", "job.elapse=1:00:00", "--set", "layout.dp=2"]
ROOT = Path(__file__).resolve().parents[2]


def write_run(folder: Path, run_file: str) -> None:
    """A run directory, of a run that has ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(run_file, encoding="utf-8")
    RunDirectory(folder).write_result(Result(OK, "", 1.0, 2.0, 3, {"seconds_per_iteration": 0.5}))


def test_settings_are_a_mapping_or_texts_and_the_last_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: tiny\ntraining: {lr: 1e-3}\n")
    run = api.load_run(file, settings={"training.lr": 2e-4, "data.paths": [tmp_path / "a b"], "model.ffn_hidden": None})
    assert run.config == load_run_config(file, None, [f'data.paths=["{tmp_path}/a b"]', "training.lr=2e-4"])
    assert run.with_settings(["training.lr=3e-4"]).config.training.lr == 3e-4
    assert run.config.training.lr == 2e-4


def test_a_run_is_loaded_from_a_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "r", "preset: tiny\nlayout: {dp: 2}\n")
    assert api.load_run(tmp_path / "r").config == api.RecordedRun(tmp_path / "r").config


def test_a_run_is_unaffected_by_later_edits_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: tiny\ntraining: {lr: 1e-3}\nlayout: {dp: 2}\njob: {scheduler: slurm, name: first}\n")
    run = api.load_run(file)
    needed = api.plan_memory(run).needed_bytes
    for change in (lambda: file.write_text("preset: 124m\njob: {scheduler: slurm, name: other}\n"), file.unlink):
        change()
        again = run.with_settings({"training.lr": 2e-3})
        assert again.config == replace(run.config, training=replace(run.config.training, lr=2e-3))
        assert '--job-name="first"' in api.render_job(run).text
        assert api.plan_memory(run).needed_bytes == needed
        assert SharedRun(run.source, None, 20, None).base().layout.dp == 2
        assert run_to_train(run.source, ranks=2).config.layout.dp == 2, "which the file states"


def errors() -> Dict[str, Any]:
    """Calls that are refused, and the commands that refuse the same."""

    def recorded(*arguments: str) -> List[str]:
        return list(arguments)

    run = api.load_run(preset="tiny")
    return {
        "a key": (lambda: api.load_run(settings={"layout.dq": 2}), recorded("train", "--set", "layout.dq=2")),
        "several": (
            lambda: api.load_run(settings={"layout.dp": 0, "training.lr": "fast"}),
            recorded("train", "--set", "layout.dp=0", "--set", 'training.lr="fast"'),
        ),
        "a preset": (lambda: api.load_run(preset="13t"), recorded("train", "--preset", "13t")),
        "ranks": (
            lambda: api.train(run.with_settings({"layout.dp": 1}), ranks=3),
            recorded("train", "--preset", "tiny", "--set", "layout.dp=1", "--ranks", "3"),
        ),
        "resume": (lambda: api.train(run, resume="auto"), recorded("train", "--preset", "tiny", "--resume", "auto")),
        "memory": (
            lambda: api.plan_memory(run, node_memory="23 GB"),
            recorded("plan", "memory", "--preset", "tiny", "--node-memory", "23 GB"),
        ),
        "hardware": (
            lambda: api.plan_time(run, hardware="V100"),
            recorded("plan", "time", "--preset", "tiny", "--hardware", "V100"),
        ),
        "topology": (
            lambda: api.plan_topology(run, api.TopologyRequest()),
            recorded("plan", "topology", "--preset", "tiny"),
        ),
        "a store": (lambda: api.Runs("nowhere"), recorded("runs", "ls", "nowhere")),
        "a script": (lambda: api.parse_script("nowhere.sh"), recorded("job", "parse", "nowhere.sh")),
        "lint": (lambda: api.lint("nowhere.sh"), recorded("job", "lint", "nowhere.sh")),
        "a rule": (lambda: api.lint("x.sh", select=["PJM999"]), recorded("job", "lint", "x.sh", "--select", "PJM999")),
        "submit": (
            lambda: api.submit(run, "out", scheduler="pjm"),
            recorded("job", "submit", "--preset", "tiny", "--out", "out", "--scheduler", "pjm"),
        ),
        "a sweep": (lambda: api.Sweep("nowhere.yaml", "out"), recorded("sweep", "expand", "nowhere.yaml")),
        "sides": (lambda: api.compare("nowhere", "base"), recorded("compare", "nowhere", "base")),
        "a checkpoint": (lambda: api.Checkpoint("nowhere"), recorded("ckpt", "verify", "nowhere")),
    }


@pytest.mark.parametrize("name", list(errors()))
def test_an_error_has_the_text_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, name: str
) -> None:
    call, arguments = errors()[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(api.UsageError) as error:
        call()
    assert command(arguments) == 2
    printed = [line.replace("fugaku-gpt: ", "", 1) for line in capsys.readouterr().err.splitlines()]
    assert [line for line in str(error.value).splitlines() if line not in printed] == []
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize("settings", ["training.lr=1", {"training.lr": float("nan")}, {"data.paths": {1, 2}}], ids=str)
def test_an_unknown_setting_is_refused(settings: Any) -> None:
    with pytest.raises(api.UsageError, match="valid: "):
        api.load_run(preset="tiny", settings=settings)


def test_a_script_is_rendered_parsed_and_linted_as_by_the_commands(tmp_path: Path, capsys: Capture) -> None:
    run = api.load_run(preset="tiny", settings=JOB)
    script = api.render_job(run, scheduler="pjm")
    file = tmp_path / "job.sh"
    assert command(["job", "render", "--preset", "tiny", *JOB_OPTIONS, "--scheduler", "pjm", "--out", str(file)]) == 0
    notes = capsys.readouterr().err
    assert file.read_text() == script.text and all(note in notes for note in script.notes)
    parsed = api.parse_script(file)
    assert parsed == json_of(capsys, "job", "parse", str(file))
    assert api.parse_script(script.text) == {key: value for key, value in parsed.items() if key != "file"}
    file.write_text(script.text.replace("#PJM -L", "#PJM --no-such-option\n#PJM -L", 1))
    (report,) = api.lint(file)
    assert {finding.severity for finding in report.findings} >= {"error"}
    assert api.lint([file], select=["PJM00"])[0].findings != report.findings
    assert api.lint(script.text, site="fugaku")[0].site == "fugaku"


def test_plans_have_the_figures_of_the_commands(capsys: Capture) -> None:
    run = api.load_run(preset="124m", settings={"layout.dp": 4, "job.nodes": 4})
    options = ["--preset", "124m", "--set", "layout.dp=4", "--set", "job.nodes=4", "--format", "json"]
    memory = api.plan_memory(run, machine="a64fx", node_memory="2Gi")
    rows = json_of(capsys, "plan", "memory", *options, "--machine", "a64fx", "--node-memory", "2Gi", codes=(3,))
    assert not memory.does_fit and memory.change
    assert rows[-1]["total"] == round(memory.needed_bytes / 2**20, 1)
    prediction = api.plan_time(run)
    rows = json_of(capsys, "plan", "time", *options)
    assert [row["figure"] for row in rows] == [figure.name for figure in prediction.figures]
    assert rows[0]["value"] == pytest.approx(prediction.figures[0].estimate.value, rel=1e-3)


@pytest.mark.slow
def test_the_fastest_layouts_are_those_of_the_command(capsys: Capture) -> None:
    run = api.load_run(preset="124m")
    request = api.TopologyRequest(nodes=2, constraints=("TP == 1", "MBS <= 2"), ranks_per_node=(1,), top=2)
    plan = api.plan_topology(run, request)
    options = ["--nodes", "2", "--constraint", "TP == 1", "--constraint", "MBS <= 2", "--ranks-per-node", "1"]
    rows = json_of(capsys, "plan", "topology", "--preset", "124m", *options, "--top", "2", "--format", "json")
    assert [row["dp"] for row in rows] == [layout.config.layout.dp for layout in plan.best]
    with pytest.raises(api.RunFailed, match="no layout is valid: other nodes or global batch, or fewer constraints"):
        api.plan_topology(run, api.TopologyRequest(nodes=2, constraints=("TP == 7",)))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of three runs with their results."""
    for name, lr in (("a", 0.1), ("b", 0.3), ("c", 0.2)):
        write_run(tmp_path / "runs" / name, f"preset: tiny\ntraining: {{lr: {lr}}}\n")
    return tmp_path / "runs"


def test_runs_are_filtered_sorted_and_shown_as_by_the_command(store: Path, capsys: Capture) -> None:
    runs = api.Runs(store)
    assert len(runs) == 3 and [record.run for record in runs] == ["a", "b", "c"]
    chosen = runs.where("training.lr > 0.15").sorted_by("-training.lr")
    columns = ["run", "training.lr", "status", "layout.ranks"]
    options = ["--where", "training.lr > 0.15", "--sort=-training.lr", "--columns", ",".join(columns)]
    assert chosen.rows(columns) == json_of(capsys, "runs", "ls", str(store), *options, "--format", "json")
    assert runs.directory(chosen[0]).config.training.lr == 0.3
    for call in (lambda: runs.where("lr >"), lambda: runs.sorted_by("height"), lambda: runs.rows(["width"])):
        with pytest.raises(api.UsageError):
            call()


def test_reading_a_store_writes_nothing_unless_asked(store: Path) -> None:
    killed_run(store / "d")

    def contents() -> Dict[Path, float]:
        return {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]}

    before = contents()
    assert [record.status for record in api.Runs(store)] == [OK, OK, OK, "unfinished"]
    assert [row["status"] for row in api.Table.of(store).rows(repeats=True)].count("lost") == 1
    assert contents() == before
    assert [record.status for record in api.Runs(store, update=True)] == [OK, OK, OK, "lost"]
    assert (store / "d" / "result.json").exists() and contents() != before


def test_runs_that_cannot_be_read_are_named(store: Path) -> None:
    assert api.Runs(store).problems == {}
    (store / "b" / "result.json").write_text("{")
    runs = api.Runs(store)
    assert list(runs.problems) == ["b"] and "result.json" in runs.problems["b"]
    assert "3 runs, 1 of them damaged" in repr(runs)
    assert runs.where('run == "a"').problems == {} and "damaged" not in repr(runs.where('run == "a"'))


def test_tables_become_data_frames(store: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: make dev")
    frame = api.Runs(store).to_pandas(["run", "training.lr"])
    assert list(frame.columns) == ["run", "training.lr"] and frame["training.lr"].max() == 0.3
    table = api.Table.of(store)
    assert table.to_pandas(repeats=True)["runs"].tolist() == [row["runs"] for row in table.rows(repeats=True)]
    assert table.markdown.startswith("### ")


def test_without_pandas_the_error_says_how_to_get_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(api.UsageError, match=r"pip install 'fugaku_gpt\[pandas\]'"):
        api.Runs(store).to_pandas()


def test_a_job_of_another_program_is_followed(tmp_path: Path) -> None:
    with pytest.raises(api.UsageError, match="holds no run directory with a job .job.jsonl.; `fugaku-gpt job submit`"):
        api.Job.in_directory(tmp_path)
    facts = {"scheduler": "local", "tag": "t", "link": 1, "chain": 1, "bulk": ""}
    append_event(tmp_path, "submitted", 1.0, job_id="7", script="job.sh", command=[], **facts)
    append_event(tmp_path, "status", 2.0, job_id="7", state="cancelled")
    job = api.Job.in_directory(tmp_path)
    assert job.ids == ("7",) and job.outcome().state == "cancelled"
    with pytest.raises(api.RunFailed, match="interrupted: .*cancelled"):
        job.result(timeout=60)


def test_recorded_runs_are_compared(capsys: Capture) -> None:
    rows = ROOT / "benchmarks" / "reference" / "measurements.csv"
    sides = [f"{rows}:tcmalloc=false", f"{rows}:tcmalloc=true"]
    report = api.compare(*sides)
    assert command(["compare", *sides, "--format", "json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["verdict"] == report.verdict


def test_arguments_of_live_runs_are_refused_for_recorded_runs(tmp_path: Path) -> None:
    rows = ROOT / "benchmarks" / "reference" / "measurements.csv"
    sides = f"{rows}:tcmalloc=false", f"{rows}:tcmalloc=true"
    for arguments, names in (
        ({"run": api.load_run(preset="tiny")}, "run"),
        ({"out": tmp_path / "out", "iterations": 20}, "out, iterations"),
        ({"settings": api.LiveSettings(pairs=3, tolerance=0.1)}, "settings.pairs"),
    ):
        with pytest.raises(api.UsageError, match=f"^{names}: for sides that are run now"):
            api.compare(*sides, **arguments)  # type: ignore[arg-type]
    assert api.compare(*sides, warm_up=3, settings=api.LiveSettings(tolerance=0.1)).verdict


def test_checkpoints_are_read_by_names(tmp_path: Path) -> None:
    old = ROOT / "tests" / "golden" / "v0.1.0" / "runs" / "finished"
    with api.Checkpoint(old) as checkpoint:
        assert checkpoint.path.name == "step-00000006" and checkpoint.iteration == 6 and checkpoint.verify() == []
        name = checkpoint.tensors[0]
        assert checkpoint.tensor(name).shape == checkpoint.manifest.tensors[name].shape
        with pytest.raises(api.CheckpointError):
            checkpoint.tensor("no such tensor")
        assert (checkpoint.export(tmp_path / "hf") / "model.safetensors").exists()
        assert checkpoint.model.layers == api.RecordedRun(old).config.model.layers
    result = api.RecordedRun(old).result
    assert result is not None and result.status == OK
    losses = [line["loss"] for line in api.RecordedRun(old).metrics()]
    assert losses and losses[-1] < losses[0]
    with pytest.raises(api.UsageError, match="not a run directory: it has no config.yaml"):
        api.RecordedRun(tmp_path)


def test_a_rank_of_a_launch_starts_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    reason = "--ranks 1: a launcher has started 2 ranks, by PMI_RANK and PMI_SIZE"
    with pytest.raises(api.UsageError, match=reason) as error:
        api.train(api.load_run(preset="tiny"), tmp_path / "out")
    assert command(["train", "--preset", "tiny", "--ranks", "1"]) == 2
    assert str(error.value) in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_calls_that_wait_give_up_at_their_time(tmp_path: Path) -> None:
    write_run(tmp_path, "preset: tiny\n")
    append_event(tmp_path, "intent", time.time(), scheduler="pjm", tag="t", link=1, chain=1, bulk="")
    with pytest.raises(TimeoutError, match="has not ended within 0 s"):
        api.Job.in_directory(tmp_path).result(timeout=0)
