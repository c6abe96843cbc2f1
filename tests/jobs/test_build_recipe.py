"""Tests of the job that compiles a build: our own check and shellcheck pass, and it runs on a fork of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config.profile import Build, Profile
from fugaku_gpt.environments.registry import find_profile, profile_files, resolve
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.jobs.build_recipe import activation, build_job
from fugaku_gpt.records.job import exit_records

A64FX = [name for name in profile_files() if name.startswith("a64fx-")]
SETTINGS = ["job.group=hp000000", "job.resource_group=small", "job.volumes=[/vol0004]"]
SHELLCHECK = str(Path(sys.executable).parent / "shellcheck")


@pytest.mark.slow
@pytest.mark.parametrize("name", A64FX)
def test_the_job_of_a_shipped_build_is_clean(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = resolve(name)
    script, lines = tmp_path / "build.sh", tmp_path / "activate.sh"
    script.write_text(build_job(profile, find_profile(name), SETTINGS).text, encoding="utf-8")
    lines.write_text(activation(profile, tmp_path / "a.tar"), encoding="utf-8")
    assert run(["job", "lint", str(script), "--strict", "--fail-on", "info"]) == 0, capsys.readouterr().out
    done = subprocess.run([SHELLCHECK, "--shell=bash", str(script), str(lines)], stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stdout.decode()
    assert all(limit in script.read_text(encoding="utf-8") for limit in profile.limits)


SETTINGS_FILE = "#export TOOLS=/opt/fx1000\nexport TOOLS=/opt/fx700\nHERE=~/prefix\n. ./more\n"
STEP = 'echo "$TOOLS|$HERE|$CC|$1" > "$HERE/told"\n'
PYTHON = '#!/bin/sh\necho "$@" >> "$(dirname "$0")/../pip"\n'


@pytest.fixture
def fork(tmp_path: Path) -> Profile:
    """A profile for a repository whose only step installs a Python that records its arguments."""
    scripts = tmp_path / "fork" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "env.src").write_text(SETTINGS_FILE, encoding="utf-8")
    (scripts / "more").write_text("export HERE TOOLS\n", encoding="utf-8")
    (scripts / "1.sh").write_text(STEP + 'mkdir "$HERE/bin"\ncp python "$HERE/bin/python3"\n', encoding="utf-8")
    (scripts / "python").write_text(PYTHON, encoding="utf-8")
    (scripts / "python").chmod(0o755)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path / "fork")]
    for arguments in (["init", "-q", "-b", "theirs"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    build = Build(
        repository=str(tmp_path / "fork"),
        branch="theirs",
        scripts="scripts",
        settings="env.src",
        compiler="/opt/tools-1",
        prefix="torch-9",
        set=("HERE={prefix}", "TOOLS={compiler}"),
        edit=("1.sh: s/told/words/",),
        environment=("CC={compiler}/bin/fcc -Kfast",),
        steps=("bash 1.sh 'two words'",),
        packages=("mpi4py==4.1.2",),
        mpicc="mpifcc",
    )
    return Profile("mine", python="torch-9/bin/python3", limits=("slow",), build=build)


def _run(profile: Profile, folder: Path) -> "subprocess.CompletedProcess[str]":
    disk = folder / "disk of the node"
    disk.mkdir()
    job = folder / "job"
    job.mkdir()
    (folder / "mine.yaml").touch()
    (job / "build.sh").write_text(build_job(profile, folder / "mine.yaml", SETTINGS).text, encoding="utf-8")
    return subprocess.run(
        ["bash", "build.sh"],
        cwd=job,
        env={**os.environ, "PJM_LOCALTMP": str(disk), "PJM_JOBID": "7"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_the_job_builds_and_leaves_a_tar_file(fork: Profile, tmp_path: Path) -> None:
    done = _run(fork, tmp_path)
    assert done.returncode == 0, done.stdout
    with tarfile.open(tmp_path / "job" / "mine.tar") as tar:
        assert {"torch-9/words", "torch-9/bin/python3"} <= set(tar.getnames())
        assert not any(name.startswith("sources") for name in tar.getnames())
    prefix = tmp_path / "disk of the node" / "torch-9"
    assert (prefix / "words").read_text() == f"/opt/tools-1|{prefix}|/opt/tools-1/bin/fcc -Kfast|two words\n"
    first, second, kernels, check = (prefix / "pip").read_text().splitlines()
    assert first == "-m pip install --no-cache-dir --no-binary mpi4py mpi4py==4.1.2" and "--no-binary" not in second
    assert kernels == "-m fugaku_gpt env kernels" and "kernels: not usable" not in done.stdout
    assert check == f"-m fugaku_gpt env check {tmp_path}/mine.yaml --at {prefix.parent}"
    assert [record.exit_code for record in exit_records(tmp_path / "job").values()] == [0]


def test_a_build_without_a_settings_file_takes_its_settings_from_variables(fork: Profile, tmp_path: Path) -> None:
    step = 'bash -c \'mkdir -p "$1/bin" && cp python "$1/bin/python3" && echo "$CC" > "$1/words"\' step {prefix}'
    done = _run(replace(fork, build=replace(fork.build, settings="", set=(), edit=(), steps=(step,))), tmp_path)
    assert done.returncode == 0, done.stdout
    prefix = tmp_path / "disk of the node" / "torch-9"
    assert (prefix / "words").read_text() == "/opt/tools-1/bin/fcc -Kfast\n"


def test_the_build_of_pytorch_s_own_sources_leaves_out_what_a64fx_has_not() -> None:
    script = build_job(resolve("a64fx-torch-2.9"), find_profile("a64fx-torch-2.9"), SETTINGS).text
    for name in ("KLEIDIAI", "XNNPACK", "MKLDNN_ACL", "CUDA", "ROCM", "XPU"):
        assert f"  export USE_{name}=0\n" in script
    assert "put()" not in script and "--branch v2.9.1 " in script
    checks, compiling = script.index("--atleast-version=0.3.31 openblas"), script.index("--no-build-isolation")
    assert checks < compiling  # a node without the libraries says so before hours of compiling


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"steps": ("bash 1.sh", "bash no.sh")}, "failed with exit code 127: bash no.sh"),
        ({"set": ("PREFIX={prefix}",)}, "env.src has no line PREFIX=: this branch is not what its profile is for"),
        ({"branch": "ours"}, "failed with exit code 128: git clone"),
    ],
)
def test_a_failed_build_reports_the_step_and_leaves_no_tar_file(
    fork: Profile, tmp_path: Path, build: "dict[str, object]", message: str
) -> None:
    done = _run(replace(fork, build=replace(fork.build, **build)), tmp_path)  # type: ignore[arg-type]
    assert done.returncode != 0 and message in done.stdout
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["build.sh", "exit"]
    assert [record.exit_code for record in exit_records(tmp_path / "job").values()] == [done.returncode]


def test_compiled_files_are_saved_when_a_later_step_fails(fork: Profile, tmp_path: Path) -> None:
    (tmp_path / "fork" / "scripts" / "python").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path / "fork")]
    subprocess.run([*git, "commit", "-qam", "no network"], check=True)
    done = _run(fork, tmp_path)
    assert done.returncode == 9 and "failed with exit code 9: env MPICC=mpifcc" in done.stdout
    assert "is made" not in done.stdout and "mine.incomplete.tar is compiled and lacks" in done.stdout
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["build.sh", "exit", "mine.incomplete.tar"]
    assert [record.exit_code for record in exit_records(tmp_path / "job").values()] == [9]


def test_a_build_without_our_kernels_is_complete_and_reports_that_they_are_missing(
    fork: Profile, tmp_path: Path
) -> None:
    text = PYTHON + 'case "$*" in *"env kernels") echo no C compiler >&2; exit 2;; esac\n'
    (tmp_path / "fork" / "scripts" / "python").write_text(text, encoding="utf-8")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path / "fork")]
    subprocess.run([*git, "commit", "-qam", "no compiler"], check=True)
    done = _run(fork, tmp_path)
    assert done.returncode == 0 and "mine.tar is made" in done.stdout
    assert "no C compiler\nkernels: not usable, see above: PyTorch's own will be used" in done.stdout
    assert 'run "$python" -m fugaku_gpt env kernels there' in done.stdout


@pytest.mark.parametrize("name", A64FX)
def test_kernels_of_a_shipped_build_are_in_the_tar_file(name: str) -> None:
    profile = resolve(name)
    prefix = Path(profile.python).parents[1]  # sys.prefix: the kernels are in its lib/
    archived_folders = [Path(profile.build.prefix, folder) for folder in profile.build.keep] or [
        Path(profile.build.prefix)
    ]
    assert prefix in archived_folders and " env kernels" in build_job(profile, find_profile(name), SETTINGS).text


def test_files_needed_at_the_end_are_checked_first(fork: Profile, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    script = build_job(fork, tmp_path / "mine.yaml", ["job.group=hp000000"], str(tmp_path / "ours.whl"))
    assert any("no job.volumes" in note for note in script.notes)
    (tmp_path / "job" / "build.sh").write_text(script.text, encoding="utf-8")
    variables = {**os.environ, "PJM_LOCALTMP": str(tmp_path), "PJM_JOBID": "7"}
    command = ["bash", "build.sh"]
    done = subprocess.run(command, cwd=tmp_path / "job", env=variables, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and f"failed with exit code 1: test -r {tmp_path}/ours.whl" in done.stderr
    assert not (tmp_path / "sources").exists()


def test_settings_unfit_for_a_build_job_are_refused(fork: Profile) -> None:
    file = Path("mine.yaml")
    with pytest.raises(UsageError, match="installed by pip, not compiled"):
        build_job(resolve("torch-1.7"), file)
    with pytest.raises(ConfigError, match="one job of one node"):
        build_job(fork, file, ["job.chain=2"])
    with pytest.raises(ConfigError, match="takes keys of job and node"):
        build_job(fork, file, ["layout.dp=2"])
    with pytest.raises(ConfigError, match=r"build\.steps: .*No closing quotation"):
        build_job(replace(fork, build=replace(fork.build, steps=("bash 'x",))), file)
    with pytest.raises(ConfigError, match=r"build\.set: changes lines of build\.settings, which is not set"):
        build_job(replace(fork, build=replace(fork.build, settings="")), file)
    with pytest.raises(ConfigError, match=r"build\.branch: is not set"):
        build_job(replace(fork, build=replace(fork.build, branch="")), file)


def test_the_activation_unpacks_once_and_points_inside(fork: Profile, tmp_path: Path) -> None:
    inside = tmp_path / "torch-9" / "bin"
    inside.mkdir(parents=True)
    (inside / "python3").write_text(PYTHON, encoding="utf-8")
    subprocess.run(["tar", "-cf", str(tmp_path / "mine.tar"), "-C", str(tmp_path), "torch-9"], check=True)
    (tmp_path / "disk").mkdir()
    profile = replace(fork, library_path=("torch-9/lib", "/lib64"), environment=("K=a b",))
    lines = tmp_path / "activate.sh"
    lines.write_text(activation(profile, tmp_path / "mine.tar"), encoding="utf-8")
    done = subprocess.run(
        ["bash", "-uc", f'. {lines} && echo "$python|$LD_LIBRARY_PATH|$K" && ls "$python"'],
        env={"PATH": os.environ["PATH"], "PJM_LOCALTMP": str(tmp_path / "disk")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    variables_line, listed = done.stdout.splitlines()
    assert variables_line == f"{tmp_path}/disk/torch-9/bin/python3|{tmp_path}/disk/torch-9/lib:/lib64|a b"
    assert listed == variables_line.partition("|")[0]


def test_an_activation_that_fails_leaves_the_shell_as_it_was_and_nothing_half_unpacked(
    fork: Profile, tmp_path: Path
) -> None:
    lines = tmp_path / "activate.sh"
    half = tmp_path / "disk" / "torch-9" / "bin"  # a tar that was killed
    half.mkdir(parents=True)
    (half / "python3").touch()
    (tmp_path / "mine.tar").write_text("no tar file", encoding="utf-8")

    def source(profile: Profile, module: str) -> str:
        lines.write_text(activation(profile, tmp_path / "mine.tar"), encoding="utf-8")
        command = f"module() {{ {module}; }}; . {lines}; echo $? $-"
        variables = {"PATH": os.environ["PATH"], "PJM_LOCALTMP": str(tmp_path / "disk")}
        done = subprocess.run(["bash", "-c", command], env=variables, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    with_modules = replace(fork, modules=("lang/x",))
    code, flags = source(with_modules, "return 4").split()
    assert code == "1" and "u" not in flags
    assert source(with_modules, "true").split()[0] == "1"  # this is no tar file
    (tmp_path / "torch-9" / "lib").mkdir(parents=True)
    subprocess.run(["tar", "-cf", str(tmp_path / "mine.tar"), "-C", str(tmp_path), "torch-9"], check=True)
    code, flags = source(with_modules, "true").split()
    assert code == "0" and "u" not in flags
    assert (tmp_path / "disk" / "torch-9" / "lib").is_dir()
    (tmp_path / "mine.tar").unlink()
    assert source(with_modules, "true").split()[0] == "0"  # unpacked once
