"""Tests of job scripts: their exact text, shellcheck, their behaviour under bash, and reading the run back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Dict, List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from fugaku_gpt.config.profile import Profile, load_profile
from fugaku_gpt.config.schema import POWER_KNOBS
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.jobs.render import job_name, render_from_files, render_job, settings_of
from fugaku_gpt.machine.fugaku import power_knobs
from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.pjm.options import parse_elapse, parse_node
from fugaku_gpt.records.job import exit_records
from fugaku_gpt.records.run import Result, RunDirectory
from tests.jobs.cases import CASES, GOLDEN, PLAIN, config_of, rendered
from tests.support.waiting import until

PJM = sorted(name for name in CASES if name.startswith("pjm-"))
SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_text_equals_the_golden_file(case: str) -> None:
    assert rendered(case).text == (GOLDEN / f"{case}.sh").read_text(encoding="utf-8")


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sh")} == set(CASES)


@pytest.mark.slow
def test_shellcheck_reports_nothing() -> None:
    files = sorted(str(path) for path in GOLDEN.glob("*.sh"))
    done = subprocess.run([str(SHELLCHECK), *files], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout.decode()


def test_our_own_check_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(GOLDEN / f"{case}.sh") for case in PJM]
    assert run(["job", "lint", *files, "--strict", "--fail-on", "info"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_run_is_read_back_from_a_script(case: str) -> None:
    assert settings_of(rendered(case).text) == config_of(case)


@pytest.mark.parametrize("case", PJM)
def test_the_directives_agree_with_the_settings(case: str) -> None:
    config, script = config_of(case), read_script(rendered(case).text)
    job, node = config.job, config.node
    assert (
        not script.problems
        and not script.ignored_lines
        and all(directive.is_supported for directive in script.directives)
    )
    shape = parse_node(str(script.resources["node"]))
    assert shape.count == job.nodes and (not job.shape or "x".join(map(str, shape.dims)) == job.shape)
    assert (shape.allocation or "", shape.strict or "") == (job.allocation, job.strict)
    elapse = parse_elapse(str(script.resources["elapse"]))
    assert (elapse.maximum, elapse.is_range) == (job.elapse, job.elapse_min is not None)
    assert elapse.minimum == (job.elapse_min or job.elapse)
    assert script.options["group"] == job.group and script.resources["rscgrp"] == job.resource_group
    assert script.resources.get("rscunit", "") == job.resource_unit
    assert script.resources.get("node-mem", "") == job.node_memory
    assert {knob: script.resources[knob] for knob in power_knobs(node, job.nodes)} == {
        knob: str(value) for knob, value in power_knobs(node, job.nodes).items()
    }
    assert script.mpi["proc"] == str(config.layout.ranks)
    assert script.mpi["max-proc-per-node"] == str(config.ranks_per_node)
    mapped = [f"{key}:{value}" if value else key for key, value in script.mpi.items() if key.startswith("rank-map-b")]
    assert mapped == ([f"rank-map-{job.rank_map}"] if job.rank_map else [])
    llio = {f"{key}={value}" for key, value in script.llio.items()}
    llio_settings = {*job.llio, f"localtmp-size={job.local_tmp}", f"sharedtmp-size={job.shared_tmp}"}
    assert llio == {setting for setting in llio_settings if not setting.endswith("=")}
    assert script.options["environment"] == {"PJM_LLIO_GFSCACHE": ":".join(job.volumes)}
    assert script.options["name"] == job_name(config)
    assert (script.options.get("sparam") or "") == job.bulk and ("bulk" in script.options) == bool(job.bulk)
    assert ("step" in script.options) == (job.chain > 1)
    stats = "nodes" if "stats_nodes" in script.options else "job" if "stats" in script.options else "none"
    assert stats == job.statistics


def test_all_power_knobs_are_always_written_out() -> None:
    assert len(POWER_KNOBS) >= 6
    for case in PJM:
        text = rendered(case).text
        for knob in POWER_KNOBS:
            assert text.count(f'#PJM -L "{knob.resource}=') == 1, (case, knob.resource)


@pytest.mark.parametrize(
    ("overrides", "nodes", "freq", "eco", "retention"),
    [
        ([], 1, 2000, 0, 1),
        (["node.freq_mhz=2000"], 1, 2000, 0, 1),
        (["node.freq_mhz=2200"], 1, 2200, 2, 1),
        (["node.eco_state=0"], 1, 2000, 0, 1),
        (["node.eco_state=2"], 9216, 2200, 2, 1),
        (["node.retention_state=1"], 9217, 2000, 0, 1),
        ([], 9217, 2000, 0, 0),
    ],
)
def test_power_knobs_that_are_not_set_get_legal_values(
    overrides: List[str], nodes: int, freq: int, eco: int, retention: int
) -> None:
    knobs = power_knobs(load_run_config(overrides=overrides).node, nodes)
    assert (knobs["freq"], knobs["eco_state"], knobs["retention_state"]) == (freq, eco, retention)


def test_nothing_is_preloaded_into_the_job_itself() -> None:
    for case in CASES:
        for line in rendered(case).text.splitlines():
            assert "LD_PRELOAD" not in line or line.startswith("preload=(env LD_PRELOAD=")
    with pytest.raises(ConfigError, match="use node.preload"):
        render_job(load_run_config(overrides=["job.environment=[LD_PRELOAD=x.so]"]), PLAIN)


def test_a_finding_of_no_rule_is_not_accepted() -> None:
    config = load_run_config(overrides=["job.scheduler=pjm", "job.accept_findings=[PJM032,PJM999]"])
    with pytest.raises(ConfigError, match="^job.accept_findings: PJM999: there is no such rule"):
        render_job(config, PLAIN)


def test_settings_that_slurm_lacks_are_reported_and_noted_in_the_script() -> None:
    script = rendered("slurm-everything-13824-nodes")
    for key in ("eco_state", "shape", "allocation", "strict", "volumes", "shared_tmp", "transfer_dirs", "statistics"):
        assert any(f".{key}" in note for note in script.notes), key
    assert all(f"# Note: {note}\n" in script.text for note in script.notes)


@pytest.mark.parametrize("scheduler", ["pjm", "slurm", "local"])
@pytest.mark.parametrize("name", ["a b", "$(x)", "1st", "ü", "x" * 64, 'a"b', "a\nb", "-x"])
def test_a_name_that_no_batch_system_takes_is_refused(name: str, scheduler: str) -> None:
    config = load_run_config(overrides=[f"job.scheduler={scheduler}"])
    with pytest.raises(ConfigError, match="a letter, then letters, digits"):
        render_job(replace(config, job=replace(config.job, name=name)), PLAIN)


@pytest.mark.parametrize("text", ['a"b', "a\nb", "a$b", "a`b", "a\\b", "ä"])
def test_a_text_that_a_directive_cannot_hold_is_refused(text: str) -> None:
    config = load_run_config(overrides=["job.group=x"])
    with pytest.raises(ConfigError, match="cannot stand in a scheduler's line"):
        render_job(replace(config, job=replace(config.job, group=text)), PLAIN)


# -- scripts run by bash -----------------------------------------------------------------------------------------------


def dump_program(folder: Path, name: str) -> Path:
    """Write a program that writes its arguments and variables as JSON to ``called-<name>.json``."""
    path = folder / name
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(folder / f'called-{name}.json')!r}, 'w'))\n"
        "sys.exit(int(os.environ.get('EXIT_WITH', '0')))\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def run_script(folder: Path, text: str, variables: Dict[str, str]) -> int:
    """Run a script in a folder whose programs come first on PATH."""
    (folder / "job.sh").write_text(text, encoding="utf-8")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    return subprocess.run(["bash", "job.sh"], cwd=str(folder), env=environment, check=False, timeout=300).returncode


LINE = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=40)


@settings(max_examples=15, deadline=None)
@given(value=LINE, path=LINE.filter(bool))
@pytest.mark.slow
def test_any_text_reaches_the_ranks_as_it_is_and_nothing_of_it_is_executed(
    value: str, path: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("job")
    python = dump_program(folder, "python3")
    config = load_run_config(overrides=["job.group=g", "job.elapse=60"])
    job = replace(config.job, environment=(f"SAID={value}",), transfer=(path,))
    dump_program(folder, "mpiexec"), dump_program(folder, "llio_transfer")
    script = render_job(replace(config, job=job), Profile(name="x", python=str(python)))
    assert run_script(folder, script.text, {"PJM_JOBID": "7", "PJM_SUBJOBID": "7"}) == 0
    arguments, variables = json.loads((folder / "called-mpiexec.json").read_text())
    assert variables["SAID"] == value
    assert arguments[arguments.index(str(python)) + 1 :][:4] == ["-m", "fugaku_gpt", "train", "config.yaml"]
    assert json.loads((folder / "called-llio_transfer.json").read_text())[0] == [path]
    assert settings_of(script.text) == replace(config, job=job)


def test_preloaded_libraries_precede_those_already_preloaded(tmp_path: Path) -> None:
    dump_program(tmp_path, "srun")
    assert run_script(tmp_path, rendered("slurm-two-nodes").text, {"SLURM_JOB_ID": "7"}) == 0
    arguments, variables = json.loads((tmp_path / "called-srun.json").read_text())
    assert "LD_PRELOAD" not in variables and "env" in arguments and "LD_PRELOAD=libtcmalloc.so" in arguments


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_script_ends_with_the_exit_code_of_the_ranks_and_records_it(tmp_path: Path, code: int) -> None:
    dump_program(tmp_path, "mpiexec")
    variables = {"PJM_JOBID": "239", "PJM_SUBJOBID": "239[1]", "EXIT_WITH": str(code)}
    assert run_script(tmp_path, rendered("pjm-one-node").text, variables) == code
    record = exit_records(tmp_path)["239[1]"]
    assert (record.job_id, record.exit_code, record.signal) == ("239", code, "") and record.started <= record.ended


@pytest.mark.parametrize(("signal", "name"), [("TERM", "TERM"), ("XCPU", "XCPU"), ("USR1", "USR1")])
def test_a_signalled_script_signals_the_ranks_and_records_the_signal(tmp_path: Path, signal: str, name: str) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/bash\ntrap 'echo told; exit 75' USR1\ntouch up\nsleep 60 & wait\n", encoding="utf-8")
    launcher.chmod(0o755)
    (tmp_path / "job.sh").write_text(rendered("pjm-one-node").text, encoding="utf-8")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PJM_JOBID": "7"}
    process = subprocess.Popen(["bash", "job.sh"], cwd=str(tmp_path), env=environment)
    until((tmp_path / "up").exists, process=process)
    subprocess.run(["kill", f"-{signal}", str(process.pid)], check=True)
    assert process.wait(timeout=300) == 75
    record = exit_records(tmp_path)["7"]
    assert (record.exit_code, record.signal) == (75, name)


@pytest.mark.parametrize("before", ['  "$@" &', "  child=$!", "  if [[ -n $stop_signal ]]; then # meanwhile"])
def test_a_script_signalled_while_it_starts_the_ranks_still_signals_them(tmp_path: Path, before: str) -> None:
    """The signal arrives right before the ranks begin, before the script knows their process id, or right after."""
    _write_launcher(tmp_path / "mpiexec")
    text = rendered("pjm-one-node").text
    assert text.count(f"\n{before}") == 1 and text.count("    sleep 1\n") == 1
    text = text.replace(f"\n{before}", f"\n  kill -s TERM $$\n{before}")
    text = text.replace("    sleep 1\n", "    while [[ ! -e up ]]; do sleep 0.01; done\n")  # on a busy machine too
    if before.startswith("  if"):
        text = text.replace("\n  kill -s TERM $$\n", "\n  while [[ ! -e up ]]; do sleep 0.01; done; kill -s TERM $$\n")
    assert run_script(tmp_path, text, {"PJM_JOBID": "7"}) == 75
    record = exit_records(tmp_path)["7"]
    assert (record.exit_code, record.signal) == (75, "TERM")


def test_a_script_signalled_before_the_ranks_begin_starts_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal arrives while the script runs another command, such as unpacking the environment."""
    _write_launcher(tmp_path / "mpiexec")
    text = rendered("pjm-one-node").text
    launch = '\nrun "${launch[@]}"'
    assert text.count(launch) == 1
    text = text.replace(launch, f'\nrun bash -c "trap : USR1; kill -s XCPU $$; sleep 0.5; exit 0"{launch}')
    assert run_script(tmp_path, text, {"PJM_JOBID": "7"}) == 152
    record = exit_records(tmp_path)["7"]
    assert (record.exit_code, record.signal) == (152, "XCPU") and not (tmp_path / "up").exists()
    assert "asked to stop (SIGXCPU): not started: mpiexec" in capfd.readouterr().err


def _write_launcher(launcher: Path) -> None:
    launcher.write_text("#!/bin/bash\ntrap 'exit 75' USR1\ntouch up\nsleep 60 & wait\n", encoding="utf-8")
    launcher.chmod(0o755)


@pytest.mark.parametrize(
    ("reason", "earlier", "code"), [("stopped: x", "", 75), ("rank 1: x", "", 9), ("", "stopped: x", 9)]
)
def test_the_result_of_the_run_overrides_the_exit_code_of_the_launcher(
    tmp_path: Path, reason: str, earlier: str, code: int
) -> None:
    """The launcher killed a rank while all ranks were exiting; the result of an earlier job does not count."""
    results = RunDirectory(tmp_path)
    if earlier:
        results.write_result(Result("interrupted", earlier, 1.0, 2.0))
        os.utime(tmp_path / "result.json", (1.0, 1.0))
    results.path = tmp_path / "new"
    results.path.mkdir()
    results.write_result(Result("interrupted", reason, 1.0, 2.0))
    launcher = tmp_path / "mpiexec"
    copies = "cp new/result.json result.json; " if reason else ""
    launcher.write_text(f"#!/bin/bash\nsleep 0.1; {copies}exit 9\n", encoding="utf-8")
    launcher.chmod(0o755)
    assert run_script(tmp_path, rendered("pjm-one-node").text, {"PJM_JOBID": "7"}) == code
    assert exit_records(tmp_path)["7"].exit_code == code


def test_a_script_killed_after_a_signal_has_left_an_exit_record(tmp_path: Path) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/bash\ntrap '' TERM USR1\ntouch up\nsleep 30\n", encoding="utf-8")
    launcher.chmod(0o755)
    (tmp_path / "job.sh").write_text(rendered("pjm-one-node").text, encoding="utf-8")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PJM_JOBID": "7"}
    process = subprocess.Popen(["bash", "job.sh"], cwd=str(tmp_path), env=environment, start_new_session=True)
    until((tmp_path / "up").exists, process=process)
    process.terminate()
    until((tmp_path / "exit" / "7.json").exists, process=process)
    os.killpg(process.pid, 9)
    process.wait(timeout=300)
    record = exit_records(tmp_path)["7"]
    assert (record.exit_code, record.signal) == (143, "TERM")


def test_slurm_s_ranks_are_signalled_and_not_killed_with_srun(tmp_path: Path) -> None:
    """A real srun that gets SIGTERM kills its ranks at once."""
    for name, text in (
        ("srun", "trap 'exit 137' TERM\ntouch up\nuntil [ -e told ]; do sleep 0.1; done\nexit 75\n"),
        ("scancel", 'echo "$*" > told.tmp && mv told.tmp told\n'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(rendered("slurm-two-nodes").text, encoding="utf-8")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(["bash", "job.sh"], cwd=str(tmp_path), env=environment)
    until((tmp_path / "up").exists, process=process)
    process.terminate()
    assert process.wait(timeout=300) == 75
    assert (tmp_path / "told").read_text(encoding="utf-8") == "--signal=TERM 7\n"
    assert exit_records(tmp_path)["7"].signal == "TERM"


def test_srun_gets_the_cores_of_a_rank_explicitly() -> None:
    """Since Slurm 22.05 srun does not inherit them from the job: a rank would have one core."""
    launch = next(line for line in rendered("slurm-two-nodes").text.splitlines() if line.startswith("launch="))
    assert " --cpus-per-task=12" in launch


@pytest.mark.parametrize(("elapse", "warned"), [("job.elapse=2:00", False), ("job.elapse=1:00:00", True)])
def test_a_short_job_of_slurm_is_not_signalled_as_it_starts(elapse: str, warned: bool) -> None:
    config = load_run_config(preset="tiny", overrides=["job.scheduler=slurm", elapse])
    assert ("--signal=B:TERM@60" in render_job(config, PLAIN).text) == warned


def test_a_missing_module_ends_the_job_before_the_ranks_start(tmp_path: Path) -> None:
    dump_program(tmp_path, "mpiexec")
    config = config_of("pjm-one-node")
    text = render_job(config, replace(PLAIN, modules=("lang/none",))).text
    assert run_script(tmp_path, text, {"PJM_JOBID": "7"}) == 127
    assert exit_records(tmp_path)["7"].exit_code == 127 and not (tmp_path / "called-mpiexec.json").exists()
    sloppy = {"PJM_JOBID": "7", "BASH_FUNC_module%%": "() { echo $not_set_anywhere; }"}
    assert run_script(tmp_path, text, sloppy) == 0 and (tmp_path / "called-mpiexec.json").exists()


def test_a_launcher_other_than_srun_passes_the_variables_on(tmp_path: Path) -> None:
    dump_program(tmp_path, "mpirun")
    text = render_job(config_of("slurm-two-nodes"), replace(PLAIN, launcher="mpirun")).text
    run_script(tmp_path, text, {"SLURM_JOB_ID": "7", "SLURM_EXPORT_ENV": "NONE"})
    _, variables = json.loads((tmp_path / "called-mpirun.json").read_text(encoding="utf-8"))
    assert variables["SLURM_EXPORT_ENV"] == "ALL"


def test_srun_under_pjm_is_refused() -> None:
    with pytest.raises(ConfigError, match="srun starts ranks under Slurm only; valid: mpiexec"):
        render_job(config_of("pjm-one-node"), replace(PLAIN, launcher="srun"))


def test_a_chain_without_a_time_limit_has_a_note() -> None:
    assert not any("job.chain" in note for note in rendered("slurm-chain").notes)
    endless = replace(config_of("slurm-chain"), job=replace(config_of("slurm-chain").job, elapse=None))
    assert any("job.chain: no job.elapse" in note for note in render_job(endless, PLAIN).notes)


# -- the user's templates and profiles ---------------------------------------------------------------------------------


def test_a_template_of_the_users_overrides_a_block(tmp_path: Path) -> None:
    template = '{% extends "pjm.sh.j2" %}\n{% block before %}\necho {{ name | sh }}\n{% endblock %}\n'
    (tmp_path / "own.j2").write_text(template, encoding="utf-8")
    config = load_run_config(overrides=["job.name=mine", f"job.template={tmp_path / 'own.j2'}"])
    lines = render_from_files(config).text.splitlines()
    assert lines.index("echo mine") < next(n for n, line in enumerate(lines) if line.startswith("launch=("))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ no_such_value }}", "'no_such_value' is undefined"),
        ("{% block x %}", "own.j2:1: "),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ('{% extends "no.j2" %}', "no.j2"),
    ],
)
def test_a_template_with_an_error_is_refused_with_the_file(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "own.j2").write_text(template, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        render_from_files(load_run_config(overrides=[f"job.template={tmp_path / 'own.j2'}"]))
    assert message in str(caught.value) and "own.j2" in str(caught.value)


def test_a_profile_is_read_and_mistakes_in_it_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "build.yaml"
    file.write_text(
        "name: b\npython: /opt/python3\nmodules: [a, b c]\nenvironment: [X=1]\ncores: 48\n", encoding="utf-8"
    )
    assert load_profile(file) == Profile("b", "/opt/python3", modules=("a", "b c"), environment=("X=1",), cores=48)
    file.write_text("name: b\npyton: x\ncores: many\nenvironment: [1X=2]\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_profile(file)
    assert f"{file}:2: pyton: unknown key of a profile; did you mean python?" in str(caught.value)
    assert f"{file}:3: cores: 'many'" in str(caught.value) and f"{file}:4: environment" in str(caught.value)


def test_settings_edited_to_nonsense_are_refused() -> None:
    text = (
        rendered("pjm-one-node")
        .text.replace("#   job.nodes", "#   job.nods")
        .replace("layout.dp: 4", "layout.dp: four")
    )
    with pytest.raises(ConfigError, match="layout.dp"):
        settings_of(text)
    assert settings_of("#!/bin/bash\necho\n") is None


def test_a_python_relative_to_the_profile_is_resolved_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "b.yaml").write_text("name: b\npython: ../.venv/bin/python\nsrun_mpi: pmi2\n", encoding="utf-8")
    config = load_run_config(overrides=["job.scheduler=slurm", f"job.profile={tmp_path / 'env' / 'b.yaml'}"])
    text = render_from_files(config).text
    assert f"python={tmp_path}/.venv/bin/python\n" in text and " --mpi=pmi2" in text


def test_a_run_file_of_the_checkout_is_rendered_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(tmp_path)
    assert run(["job", "render", str(root / "benchmarks" / "runs" / "fugaku-1.3b.yaml")]) == 0
    assert f'#   job.profile: "{root}/env/a64fx-torch-1.10.yaml"\n' in capsys.readouterr().out


def test_paths_of_a_build_are_resolved_where_the_tar_file_is_unpacked() -> None:
    build = Profile(
        "b",
        "t/bin/python3",
        path=("t/bin", "/site/bin"),
        library_path=("t/lib", "/site/lib"),
        preload=("/site/libpmix.so", "t/lib/a.so"),
        tcmalloc="t/lib/libtcmalloc.so",
    )
    tarball = ["job.group=hp000000", "job.tarball=/vol0004/t.tar", "job.local_tmp=9Gi"]
    text = render_job(load_run_config(overrides=[*tarball, "node.tcmalloc=true"]), build).text
    assert 'export LD_LIBRARY_PATH=/site/lib"${LD_LIBRARY_PATH:+' in text
    assert 'export LD_LIBRARY_PATH="$PJM_LOCALTMP"/t/lib"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"' in text
    assert 'export PATH=/site/bin:"$PATH"' in text and 'export PATH="$PJM_LOCALTMP"/t/bin:"$PATH"' in text
    preload = '"$PJM_LOCALTMP"/t/lib/libtcmalloc.so:/site/libpmix.so:"$PJM_LOCALTMP"/t/lib/a.so"${LD_PRELOAD'
    assert f"preload=(env LD_PRELOAD={preload}" in text
    assert "tcmalloc" not in render_job(load_run_config(overrides=tarball), build).text.partition("preload=(")[2]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("\n{{ 1 / 0 }}", "user.j2:2: cannot be rendered: ZeroDivisionError: division by zero"),
        ("{{ nodes + 'x' }}", "user.j2:1: cannot be rendered: TypeError: unsupported operand"),
        ("{{ 'x' * 10**9 }}", "user.j2: cannot be rendered: the template needs more than 256 MiB of memory"),
        ("{{ '{:>99999999999}'.format(1) }}", "user.j2: cannot be rendered: the template needs more than 256 MiB"),
        (
            "{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}",
            "user.j2: cannot be rendered: the template makes more than 4,194,305 characters",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "user.j2:1: cannot be rendered: RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "user.j2:1: cannot be rendered: access to attribute '__class__'"),
    ],
)
def test_a_template_that_fails_or_has_no_end_is_refused(template: str, message: str) -> None:
    config = load_run_config(preset="tiny", overrides=["job.template=user.j2"])
    with pytest.raises(ConfigError, match=re.escape(message)):
        render_job(config, Profile(), template)


def test_an_error_whose_line_is_unknown_names_the_file_alone() -> None:
    config = load_run_config(preset="tiny", overrides=["job.template=user.j2"])
    with pytest.raises(ConfigError, match=r"^user\.j2: cannot be rendered: RecursionError"):
        render_job(config, Profile(), "{{ " + "(" * 5000)


def test_no_name_of_a_template_turns_an_error_into_a_script() -> None:
    config = load_run_config(preset="tiny", overrides=["job.template==own.j2"])
    with pytest.raises(ConfigError, match="^=own.j2:1: cannot be rendered: ZeroDivisionError"):
        render_job(config, Profile(), "{{ 1 / 0 }}")
