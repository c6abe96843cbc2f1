"""Tests that run directories, sweeps, jobs and checkpoints of version 0.1.0 are read, shown and resumed, and that files
written today have the names that they had then."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set

import pytest
import yaml

from fugaku_gpt.cli.main import run
from tests.support.commands import Capture
from tests.support.forks import starting
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[1]
OLD = ROOT / "tests" / "golden" / "v0.1.0"
WAIT_SECONDS = 240.0  # for the end of a run, on a machine with other things to do
LOSS_TOLERANCE = 1e-4  # BLAS differs from machine to machine; losses of successive iterations are 0.02 to 0.05 apart

# Names of metrics.jsonl by kind of line.
METRICS = {
    "iteration": """kind iteration consumed_samples consumed_tokens seconds lr global_batch loss grad_norm
        samples_per_second tokens_per_second tflops_notes tflops_exact compute_max compute_max_rank compute_max_node
        compute_min compute_min_rank compute_min_node rss_max_bytes node_used_bytes""",
    "validation": "kind iteration loss tokens",
    "checkpoint": "kind iteration name bytes snapshot_seconds write_seconds",
    "resumed": "kind iteration checkpoint",
}

BUBBLE = "bubble bubble_max bubble_predicted bubble_ideal"  # of several pipeline stages

RESULT = """version status reason started ended iterations judged rank node exception last_checkpoint summary.parameters
    summary.nodes summary.ranks summary.samples summary.warmup_samples summary.seconds_per_iteration
    summary.tokens_per_second summary.tflops_notes summary.tflops_exact summary.rss_max_bytes summary.node_used_bytes
    summary.first_loss summary.last_loss summary.first_validation_loss summary.last_validation_loss"""

ENVIRONMENT = """version fugaku_gpt git_commit python numpy build.torch build.blas build.instruction_set
    build.fused_adamw build.torch_threads precision.dtype precision.in_float32 precision.gelu_by_erf
    precision.onednn precision.compiled
    precision.compiled_products replica_sums.replicas replica_sums.node_first replica_sums.nodes replica_sums.why_flat
    notes mpi.library mpi.standard mpi.thread_level mpi.mpi4py mpi.host processor vector_extensions system
    memory_limit_bytes toggles ranks.rank ranks.host ranks.process ranks.affinity ranks.memory_nodes ranks.threads
    ranks.flush_denormals ranks.allocator ranks.allocator_keeps_pages data_fingerprint"""

CONFIG = {
    "model": """name layers hidden heads ffn_hidden seq_len vocab_size vocab_multiple padded_vocab_size dropout
        attention_dropout embedding_layernorm layernorm_eps gelu init_std""",
    "layout": "dp tp pp order schedule chunks split sequence_parallel hierarchical_sum zero",
    "training": """micro_batch global_batch ramp_start ramp_increment ramp_samples seq_ramp_start seq_ramp_increment
        seq_ramp_iterations skip_samples iterations seed dtype gradient_dtype loss_scale loss_scale_window
        loss_scale_min lr min_lr warmup_iterations lr_schedule decay_iterations decay_fraction weight_decay beta1 beta2
        eps clip_grad non_finite max_skips rollback_every spike_window spike_deviations spike_ratio log_interval
        eval_interval eval_batches profile_operators bucket_mib buckets_at_once progress_ms recompute recompute_layers
        recompute_budget_mib""",
    "data": "paths weights split",
    "checkpoint": "interval at_end keep_last keep_every asynchronous ranks_per_file",
    "node": """ranks_per_node threads_per_rank bind compiled_kernels tcmalloc preload freq_mhz eco_state
        retention_state throttling_state issue_state ex_pipe_state large_pages paging_policy arena_lock open_files
        memory_check memory_guard memory_limit flight_recorder hang_timeout check_collectives""",
    "job": """name scheduler nodes shape allocation strict elapse elapse_min stop_margin group resource_group
        resource_unit node_memory rank_map rank_map_file statistics volumes local_tmp shared_tmp llio transfer
        transfer_dirs tarball environment profile template bulk chain""",
}

EXIT_RECORD = "version job_id sub_job exit_code signal started ended host"

MANIFEST = """version format digest iteration consumed_samples consumed_tokens data_fingerprint tensors build.blas
    build.fugaku_gpt build.git_commit build.instruction_set build.mpi build.threads build.torch files.bytes files.crc32
    files.header_crc32 files.name files.tensors state.iteration state.consumed_samples state.consumed_tokens state.copy
    state.loss_scale state.optimizer_steps state.validation_loss state.health.in_a_row state.health.kept_losses
    state.health.left_out state.health.losses state.health.returns state.kernels.compiled
    state.kernels.compiled_products state.kernels.dtype state.kernels.gelu_by_erf state.kernels.in_float32
    state.kernels.onednn"""

ACCOUNT = """scheduler job_id elapsed_seconds nodes energy_joules energy_joules_ideal power_watts power_watts_ideal
    knobs capped max_memory_bytes exit_code signal code reason source values"""

JOB_EVENTS = {
    "intent": "kind time scheduler tag link chain bulk",
    "submitted": "kind time scheduler job_id script command tag link chain bulk",
    "status": "kind time job_id state raw exit_code signal code reason group",
}

SWEEP_TABLE = """\
### 0.0M model, Sequence Length=16, PyTorch 2.13
| Nodes | Size | DP | TP | PP | MBS | GBS | Mem | Sec/it | TFLOPs | Est. Aggr. PetaFLOPs | Validation loss | Notes |
| ----: | ---: | -: | -: | -: | --: | --: | --: | -----: | -----: | -------------------: | --------------: | ----: |
| 1 | 0.0M | 1 | 1 | 1 | 2 | 8 | 3220.4 MiB | 0.378 | 0.00 | 0.000 | 5.661 to 5.523 | 11-26, lr=0.01 |
| 1 (max-proc-per-node=2) | 0.0M | 1 | 2 | 1 | 2 | 8 | 3239.5 MiB | 0.594 | 0.00 | 0.000 | 5.661 to 5.523 | \
11-26, lr=0.01, not applied: 2.2GHz, retention_state=0 |
| 1 (max-proc-per-node=3) | 0.0M | 1 | 3 | 1 | 2 | 8 | - | - | - | - | - | \
11-26, lr=0.01, refused: layout.tp: 3: must divide model.heads 2; valid: 1, 2 (and 1 more) |
| 1 | 0.0M | 1 | 1 | 1 | 2 | 8 | 3326.6 MiB | 0.320 | 0.00 | 0.000 | 5.661 | \
11-26, lr=1e+30, failed: rank 0: iteration 2: loss nan, gradient norm nan: not finite; lower training.lr… |
"""


def copy_of_old_files(folder: Path) -> Path:
    """Copies the old files into a folder and uncompresses their flight records."""
    shutil.copytree(OLD, folder)
    for packed in folder.rglob("*.flight.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return folder


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the old files as working folder, in the time zone of the tables, with an empty home."""
    folder = copy_of_old_files(tmp_path / "old")
    (tmp_path / "home").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path / "home"))
        patch.setenv("TZ", "UTC")
        patch.chdir(folder)
        time.tzset()
        yield folder
    time.tzset()


def output_of(capsys: Capture, *arguments: str, code: int = 0) -> str:
    """Standard output of a command that ends with an exit code."""
    capsys.readouterr()
    assert run(list(arguments)) == code, capsys.readouterr()
    return capsys.readouterr().out


def read_lines(path: Path) -> List[Dict[str, Any]]:
    """Objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def key_paths(value: Any, prefix: str = "") -> Set[str]:
    """Keys of nested objects, joined by dots; objects in lists count as one, and an empty object as a value."""
    if isinstance(value, dict) and value:
        return set().union(*(key_paths(inner, f"{prefix}.{key}" if prefix else key) for key, inner in value.items()))
    if isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        return set().union(*(key_paths(inner, prefix) for inner in value))
    return {prefix}


def assert_named(names: str, value: Any) -> None:
    """Asserts that an object has at least these keys; a name may be that of an object, or of a value."""
    paths = key_paths(value)
    missing = [
        name for name in names.split() if name not in paths and not any(path.startswith(f"{name}.") for path in paths)
    ]
    assert not missing


ENDS = {
    "runs/finished": "ok",
    "runs/stopped": "interrupted",
    "runs/failed": "failed",
    "runs/hung": "hung",
    "runs/job-local": "ok",
    "runs/job-pjm": "ok",
}

# reports


def test_a_sweep_becomes_the_same_table(old: Path, capsys: Capture) -> None:
    assert output_of(capsys, "report", "table", "runs/sweep", "--format", "md") == SWEEP_TABLE
    stored, again = (
        list(csv.DictReader(io.StringIO(text)))
        for text in (
            (old / "runs" / "sweep" / "table.csv").read_text(encoding="utf-8"),
            output_of(capsys, "report", "table", "runs/sweep", "--format", "csv"),
        )
    )
    remarks = [line.pop("remarks") for line in again]
    assert remarks == ["lr=0.01", "lr=0.01", "lr=0.01", "lr=1e+30"]  # version 0.1.0 did not name what differs
    assert [line.pop("remarks") for line in stored] == [""] * 4 and again == stored


def test_run_directories_become_rows_by_how_they_ended(old: Path, capsys: Capture) -> None:
    rows = json.loads(output_of(capsys, "report", "table", "runs", "--format", "json"))
    assert {directory: row["status"] for row in rows for directory in row["runs"]} == ENDS


def test_runs_are_listed_and_shown(old: Path, capsys: Capture) -> None:
    listed = {
        row["run"]: row["status"] for row in json.loads(output_of(capsys, "runs", "ls", "runs", "--format", "json"))
    }
    assert (listed["sweep/tp3-r1"], listed["stopped"], listed["compared/pair-002/b"]) == (
        "refused",
        "interrupted",
        "ok",
    )
    shown = json.loads(output_of(capsys, "runs", "show", "runs/finished", "--format", "json"))
    assert (shown["run"]["status"], shown["run"]["iterations"]) == ("ok", 6)
    assert shown["run"]["figures"]["last_loss"] == 5.4222105741500854
    table = output_of(capsys, "runs", "show", "runs/finished")
    for cells in (
        r"training\.lr +0\.01 ",
        r"build\.torch +2\.13\.0\+cpu",
        r"mpi\.host +node-1",
        r"git_commit +2f4c4bece8a9",
    ):
        assert re.search(cells, table)


def test_the_status_of_a_sweep_is_read_and_it_continues_without_running_again(old: Path, capsys: Capture) -> None:
    rows = json.loads(output_of(capsys, "sweep", "status", "runs/sweep", "--format", "json"))
    assert {row["run"]: row["status"] for row in rows} == {
        "one-rank-r1": "ok",
        "tp2-r1": "ok",
        "tp3-r1": "refused",
        "lr-r1": "failed",
    }
    results = [old / "runs" / "sweep" / name / "result.json" for name in ("one-rank-r1", "tp2-r1", "lr-r1")]
    before = [path.read_bytes() for path in results]
    assert run(["sweep", "run", "sweep.yaml", "--out", "runs/sweep"]) == 1  # one run has failed
    assert [path.read_bytes() for path in results] == before


# jobs


@pytest.mark.parametrize(("name", "job"), [("job-local", "local-1"), ("job-pjm", "1")])
def test_state_and_accounting_of_an_ended_job_are_read(old: Path, capsys: Capture, name: str, job: str) -> None:
    (row,) = json.loads(output_of(capsys, "job", "status", f"runs/{name}", "--format", "json"))
    assert (row["job"], row["state"], row["status"]) == (job, "ended", "ok")
    accounting = old / "runs" / name / "accounting.json"
    before = json.loads(accounting.read_text(encoding="utf-8"))
    assert f"11-26, {job}" in output_of(capsys, "job", "collect", f"runs/{name}")
    assert json.loads(accounting.read_text(encoding="utf-8")) == before
    assert "validation at iteration 3 | lm loss: 5.562430" in output_of(capsys, "job", "logs", f"runs/{name}")


# checkpoints


def test_a_checkpoint_is_listed_inspected_and_verified(old: Path, capsys: Capture) -> None:
    (row,) = json.loads(output_of(capsys, "ckpt", "ls", "runs/stopped", "--format", "json"))
    assert (row["checkpoint"], row["iteration"], row["samples"], row["problem"]) == ("step-00000004", 4, 32, None)
    inspected = output_of(capsys, "ckpt", "inspect", "runs/finished", "--format", "csv").splitlines()
    for line in (
        "iteration,6",
        "samples,48",
        "tokens,768",
        "tensors,28",
        "config.layout.dp,2",
        "state.optimizer_steps,6",
    ):
        assert line in inspected
    output_of(capsys, "ckpt", "verify", "runs/finished")
    data = old / "runs" / "finished" / "checkpoints" / "step-00000006" / "data-000001.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    output_of(capsys, "ckpt", "verify", "runs/finished", code=3)


def test_a_checkpoint_is_exported_to_the_same_bytes_and_imported_again(old: Path, capsys: Capture) -> None:
    output_of(capsys, "ckpt", "export", "runs/finished", "again")
    assert (old / "again" / "model.safetensors").read_bytes() == (OLD / "exported" / "model.safetensors").read_bytes()
    # since then the end of a document is that of the corpus
    before = (OLD / "exported" / "config.json").read_text().replace('_id": null', '_id": 0')
    assert (old / "again" / "config.json").read_text() == before
    output_of(capsys, "ckpt", "import", "exported", "imported/checkpoints")
    output_of(capsys, "ckpt", "verify", "imported/checkpoints")


# plans, comparisons, corpora, hangs


def test_a_machine_file_of_plan_probe_is_used(old: Path, capsys: Capture) -> None:
    figures = output_of(capsys, "plan", "time", "run.yaml", "--machine", "machine-local.yaml", "--format", "csv")
    seconds = {line.split(",")[0]: line.split(",")[1] for line in figures.splitlines()}
    assert float(seconds["iteration"]) == pytest.approx(0.2349, rel=1e-3)
    assert float(seconds["memory_bound"]) == pytest.approx(0.02816, rel=1e-3)


def test_a_comparison_is_reported_again(old: Path, capsys: Capture) -> None:
    report = output_of(capsys, "compare", "runs/compared", "--format", "md")
    for line in (
        "| pair | order | A (s) | B (s) | B/A | counts |",
        "| pair-001 | A B | 0.1629 | 0.1901 | 1.166 | yes |",
        "| pair-002 | B A | 0.1069 | 0.148 | 1.384 | yes |",
        "| A | 2 | 0.132 | 0.1069 | 0.1629 | 29.8% |",
        "| node used | 3338 | 3905 | 1.170 |",
    ):
        assert line in report.splitlines()
    assert "undecided" in report and "0.580 to 2.786" in report
    comparison = json.loads(output_of(capsys, "compare", "runs/compared", "--format", "json"))["comparison"]
    assert_named("ratio low high p a b paired verdict more", comparison)


def test_figures_of_a_corpus_are_read(old: Path, capsys: Capture) -> None:
    (row,) = json.loads(output_of(capsys, "data", "info", "corpus", "--format", "json"))
    assert (row["tokens"], row["documents"], row["vocab_size"], row["dtype"]) == (12362, 28, 288, "uint16")
    assert row["fingerprint"] == "077aa7e72c9b0f07ccabd124a6d8aae3e54bb0f90e7d56c2d98739d806a48968"


def test_the_doctor_names_the_cause_of_a_hang(old: Path, capsys: Capture) -> None:
    hang = json.loads(output_of(capsys, "doctor", "hang", "runs/hung", "--format", "json", code=3))["hang"]
    assert (hang["culprits"], hang["kind"]) == ([1], "silent")
    call = {key: hang["call"][key] for key in ("communicator", "operation", "shape", "sequence", "site", "step")}
    assert call == {
        "communicator": "dp",
        "operation": "all_reduce_max",
        "shape": [1],
        "sequence": 15,
        "site": "parallel/overlap.py:85",
        "step": 5,
    }
    states = [(position["ranks"], position["state"]) for position in hang["positions"]]
    assert states == [([1], "silent"), ([0], "waits")]


def test_the_doctor_reads_a_failed_and_a_finished_run(old: Path, capsys: Capture) -> None:
    assert "rank 1: killed by signal 9 (SIGKILL)" in output_of(capsys, "doctor", "runs/failed")
    assert "5.4222" in output_of(capsys, "doctor", "runs/finished")


# training


def train_command(*arguments: str) -> List[str]:
    """Command line of a training run."""
    return [sys.executable, "-m", "fugaku_gpt", "train", *arguments]


def assert_continued(out: Path) -> None:
    """Asserts that iterations 5 to 8 of a run are those that version 0.1.0 continued with."""
    continued = json.loads((OLD / "continued.json").read_text(encoding="utf-8"))
    lines = {line["iteration"]: line for line in read_lines(out / "metrics.jsonl") if line["kind"] == "iteration"}
    for line in continued:
        resumed = lines[line["iteration"]]
        assert resumed["loss"] == pytest.approx(line["loss"], abs=LOSS_TOLERANCE)
        assert resumed["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-2)
        assert resumed["lr"] == pytest.approx(line["lr"], rel=1e-9)
        assert resumed["consumed_samples"] == line["consumed_samples"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, forking_python: Optional[Path]) -> Path:
    """The stopped run, resumed in its own layout up to iteration 8 by today's code."""
    folder = copy_of_old_files(tmp_path_factory.mktemp("resumed") / "old")
    arguments = ["--set", "training.iterations=8", "--resume", "auto", "--ranks", "2", "--out", "runs/stopped"]
    with starting(forking_python):
        done = subprocess.run(
            train_command("runs/stopped/config.yaml", *arguments),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    return folder / "runs" / "stopped"


@pytest.mark.mpi
def test_a_run_is_resumed_in_the_same_layout(resumed: Path) -> None:
    assert_continued(resumed)
    lines = read_lines(resumed / "metrics.jsonl")
    old_lines = read_lines(OLD / "runs" / "stopped" / "metrics.jsonl")
    assert lines[: len(old_lines)] == old_lines
    points = [(line["iteration"], line["checkpoint"]) for line in lines if line["kind"] == "resumed"]
    assert points == [(4, "step-00000004")]


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_a_run_is_resumed_in_another_layout_and_stopped_again_with_code_75(tmp_path: Path) -> None:
    folder = copy_of_old_files(tmp_path / "old")
    arguments = [
        "--set",
        "layout.dp=1",
        "--set",
        "layout.pp=2",
        "--resume",
        "runs/stopped",
        "--ranks",
        "2",
        "--out",
        "other",
    ]
    with open(tmp_path / "output.txt", "wb") as output:
        process = subprocess.Popen(
            train_command("runs/stopped/config.yaml", *arguments),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
        )
        try:
            until(lambda: has_reached(folder / "other", 8), (tmp_path / "output.txt").read_text, process=process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_SECONDS) == 75, (tmp_path / "output.txt").read_text()
        finally:
            process.kill()
            process.wait()
    assert_continued(folder / "other")
    assert json.loads((folder / "other" / "result.json").read_text(encoding="utf-8"))["status"] == "interrupted"
    for line in read_lines(folder / "other" / "metrics.jsonl"):
        if line["kind"] == "iteration":
            assert_named(BUBBLE, line)


def has_reached(out: Path, iteration: int) -> bool:
    """True if the metrics of a run that is being written have come to an iteration."""
    with contextlib.suppress(FileNotFoundError):
        text = (out / "metrics.jsonl").read_text(encoding="utf-8")
        return any(f'"iteration": {iteration},' in line for line in text.splitlines() if '"iteration"' in line)
    return False


# names


@pytest.mark.mpi
def test_metrics_have_all_names(resumed: Path) -> None:
    lines = read_lines(resumed / "metrics.jsonl")
    new_lines = lines[len(read_lines(OLD / "runs" / "stopped" / "metrics.jsonl")) :]
    assert {line["kind"] for line in new_lines} == set(METRICS)
    for line in new_lines:
        assert_named(METRICS[line["kind"]], line)


@pytest.mark.mpi
def test_result_and_environment_have_all_names(resumed: Path) -> None:
    assert_named(RESULT, json.loads((resumed / "result.json").read_text(encoding="utf-8")))
    assert_named(ENVIRONMENT, json.loads((resumed / "environment.json").read_text(encoding="utf-8")))


@pytest.mark.mpi
def test_config_has_all_sections_and_fields(resumed: Path) -> None:
    config = yaml.safe_load((resumed / "config.yaml").read_text(encoding="utf-8"))
    for section, names in CONFIG.items():
        assert_named(names, config[section])


@pytest.mark.mpi
def test_a_checkpoint_has_all_files_and_names(resumed: Path) -> None:
    folder = resumed / "checkpoints" / "step-00000006"
    assert sorted(path.name for path in folder.iterdir()) == [
        "data-000000.safetensors",
        "data-000001.safetensors",
        "manifest.json",
    ]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert_named(MANIFEST, manifest)
    for section, names in CONFIG.items():
        assert_named(names, manifest["config"][section])
    assert json.loads((resumed / "checkpoints" / "latest.json").read_text(encoding="utf-8"))["name"] == folder.name


@pytest.mark.mpi
def test_a_run_directory_has_all_files(resumed: Path) -> None:
    names = {path.relative_to(resumed).as_posix() for path in resumed.rglob("*")}
    assert names >= {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "log.txt",
        "result.json",
        "result.1.json",  # how the run ended that was stopped
        "checkpoints/latest.json",
        "flight/000/rank-000000.flight",
        "flight/000/rank-000001.flight",
    }


@pytest.mark.parametrize("scheduler", ["local", "pjm", "slurm"])
def test_a_script_writes_an_exit_record_with_all_names(old: Path, capsys: Capture, scheduler: str) -> None:
    script = output_of(capsys, "job", "render", "job.yaml", "--scheduler", scheduler)
    (record,) = re.findall(r"printf '(\{.*\})\\n'", script)
    assert re.findall(r'"(\w+)":', record) == EXIT_RECORD.split()
    assert 'exit/$sub_job.json"' in script


@pytest.mark.parametrize("name", ["job-local", "job-pjm"])
def test_records_of_a_job_have_all_names(old: Path, capsys: Capture, name: str) -> None:
    folder = old / "runs" / name
    (folder / "accounting.json").unlink()
    output_of(capsys, "job", "collect", f"runs/{name}")
    if name == "job-pjm":  # read again from the statistics file; the local queue is empty
        (account,) = json.loads((folder / "accounting.json").read_text(encoding="utf-8"))["jobs"]
        assert_named(ACCOUNT, account)
    for event in read_lines(folder / "job.jsonl"):
        assert_named(JOB_EVENTS[event["kind"]], event)


def test_a_missing_name_is_detected() -> None:
    named = {"a": {"b": 1, "c": {}}, "d": [{"e": 1}, {"f": []}]}
    assert key_paths(named) == {"a.b", "a.c", "d.e", "d.f"}
    assert_named("a a.b a.c d d.e d.f", named)
    for missing in ("b", "a.x", "e", "d.g", "a.bb"):
        with pytest.raises(AssertionError):
            assert_named(missing, named)
