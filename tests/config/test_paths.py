"""Tests of paths in run and sweep files: they are relative to the file that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.sweep.expand import expand_sweep
from fugaku_gpt.sweep.plan import plan_of, read_plan, write_plan


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder ``exp`` with a run file, a corpus, a pair and a tar file; the present folder is the one above it."""
    folder = tmp_path / "exp"
    (folder / "corpus").mkdir(parents=True)
    for name in ("pair.idx", "torch.tar", "map.txt", "lib.so", "own.j2"):
        (folder / name).write_text("")
    (folder / "run.yaml").write_text(
        "data: {paths: [corpus, pair, gone]}\n"
        "job: {tarball: torch.tar, local_tmp: 30Gi, rank_map_file: map.txt, transfer: [lib.so],"
        " transfer_dirs: [corpus], template: own.j2}\n"
    )
    monkeypatch.chdir(tmp_path)
    return folder


def test_each_path_of_a_run_file_is_relative_to_the_file(experiment: Path) -> None:
    run = load_run_config(Path("exp/run.yaml"))
    assert run.data.paths == ("exp/corpus", "exp/pair", "gone")
    job = run.job
    assert (job.tarball, job.rank_map_file, job.template) == ("exp/torch.tar", "exp/map.txt", "exp/own.j2")
    assert job.transfer == ("exp/lib.so",) and job.transfer_dirs == ("exp/corpus",)


@pytest.mark.parametrize("written", ["~", "null", "Null", "''"])
def test_no_path_is_looked_up_for_a_setting_that_is_not_set(experiment: Path, written: str) -> None:
    for name in ("~", "null", "Null"):
        (experiment / name).mkdir()
    (experiment / "run.yaml").write_text(f"job: {{tarball: {written}, template: {written}}}\n")
    run = load_run_config(Path("exp/run.yaml"))
    assert (run.job.tarball, run.job.template) == ("", "")


def test_a_path_in_quotes_may_be_named_as_if_there_were_none(experiment: Path) -> None:
    (experiment / "null").write_text("")
    (experiment / "run.yaml").write_text("job: {template: 'null'}\n")
    assert load_run_config(Path("exp/run.yaml")).job.template == "exp/null"


def test_a_path_that_is_in_the_present_folder_alone_stays(experiment: Path) -> None:
    (experiment.parent / "gone").mkdir()
    assert load_run_config(Path("exp/run.yaml")).data.paths[2] == "gone"
    (experiment / "gone").mkdir()
    assert load_run_config(Path("exp/run.yaml")).data.paths[2] == "exp/gone", "the file's own folder comes first"


def test_paths_of_the_command_line_are_relative_to_the_present_folder(experiment: Path) -> None:
    assert load_run_config(Path("exp/run.yaml"), overrides=["data.paths=[corpus]"]).data.paths == ("corpus",)


def test_absolute_paths_and_files_of_the_present_folder_stay(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run_config(experiment / "run.yaml", overrides=["job.template="])
    assert run.data.paths[0] == str(experiment / "corpus")
    monkeypatch.chdir(experiment)
    assert load_run_config(Path("run.yaml")).data.paths == ("corpus", "pair", "gone")


def test_paths_of_a_sweep_are_relative_to_its_file(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path("exp/sweep.yaml")
    file.write_text("defaults: {data.paths: [corpus]}\nmatrix: {training.lr: [1e-3, 1e-4]}\n")
    configs = [run.config for run in expand_sweep(file).runs]
    assert [config.data.paths for config in configs if config is not None] == [("exp/corpus",)] * 2
    (tmp_path / "out").mkdir()
    write_plan(tmp_path / "out", plan_of(file))
    monkeypatch.chdir("/")
    plan = read_plan(tmp_path / "out")
    assert plan is not None
    resumed = plan.sweep().runs[0].config
    assert resumed is not None and resumed.data.paths == ("exp/corpus",), "relative to the plan's base, as before"


def test_paths_of_a_record_are_those_of_the_run_and_not_relative_to_its_folder(experiment: Path) -> None:
    record = experiment / "config.yaml"
    record.write_text("data: {paths: [corpus]}\n")
    (experiment.parent / "corpus").mkdir()  # the run's; that of the same name in the run directory is not
    assert load_run_config(Path("exp/config.yaml")).data.paths == ("exp/corpus",)  # a file that a user has named so
    (experiment / ".claim.1").write_text("{}")
    assert load_run_config(Path("exp/config.yaml")).data.paths == ("corpus",)
    (experiment / "run.yaml").write_text("data: {paths: [corpus]}\n")
    assert load_run_config(Path("exp/run.yaml")).data.paths == ("exp/corpus",)  # beside a record, a file of a user's
