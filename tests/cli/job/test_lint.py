"""Tests of ``fugaku-gpt job lint``."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fugaku_gpt.cli.job.lint import SITES
from fugaku_gpt.cli.main import run
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE
from fugaku_gpt.limits import SCRIPT_TEXT
from fugaku_gpt.pjm.groups import format_limits, load_limits, other_sites
from tests.support.commands import Capture

BAD = "#!/bin/bash\n#PJM -L rscunit=rscunit_ft01\n#PJM -L freq=1800,eco_state=0\n"
CLEAN = """\
#!/bin/bash
#PJM -L "rscunit=rscunit_ft01,rscgrp=small,node=2,elapse=1:00:00"
#PJM -L "freq=2000,eco_state=0,retention_state=0"
#PJM -g hp000000
#PJM -x PJM_LLIO_GFSCACHE=/vol0004
#PJM --mpi max-proc-per-node=4
#PJM -S
mpiexec ./a.out
"""
PJACL = "(-L/--rsc-list) lower upper default\n (elapse=) 00:01:00 12:00:00 00:01:00\n (node=) 1 192 1\n"


@pytest.fixture
def bad_script(tmp_path: Path) -> Path:
    path = tmp_path / "bad.sh"
    path.write_text(BAD)
    return path


def lint(*arguments: object) -> int:
    return run(["job", "lint", *(str(argument) for argument in arguments)])


def test_findings_end_with_exit_code_three(
    bad_script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lint(bad_script) == EXIT_FINDINGS
    assert f"{bad_script}:3:9: PJM050 error: freq=1800" in capsys.readouterr().out
    (tmp_path / "clean.sh").write_text(CLEAN)
    assert lint(tmp_path / "clean.sh", "--fail-on", "info", "--strict") == EXIT_OK
    assert capsys.readouterr().out == "1 file checked, nothing found; taken for Fugaku (rscunit=rscunit_ft01)\n"


def test_fail_on_is_the_least_severity_that_fails(bad_script: Path) -> None:
    assert lint(bad_script, "--select", "PJM052,PJM011") == EXIT_OK
    assert lint(bad_script, "--select", "PJM052,PJM011", "--fail-on", "info") == EXIT_FINDINGS
    assert lint(bad_script, "--select", "PJM020", "--fail-on", "error") == EXIT_OK
    assert lint(bad_script, "--select", "PJM020", "--fail-on", "error", "--strict") == EXIT_FINDINGS


def test_select_and_ignore_take_prefixes_of_ids(bad_script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lint(bad_script, "--select", "PJM05", "--select", "pjm020", "--ignore", "PJM050", "--format", "json")
    data = json.loads(capsys.readouterr().out)
    assert [finding["id"] for finding in data["files"][0]["findings"]] == ["PJM020"]


def test_an_unknown_id_is_refused_with_similar_ids(bad_script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(bad_script, "--select", "PMJ050") == EXIT_USAGE
    assert "--select PMJ050" in capsys.readouterr().err
    assert lint(bad_script, "--ignore", "PJM059") == EXIT_USAGE
    assert "similar: PJM05" in capsys.readouterr().err
    assert lint("--explain", "PJM500") == EXIT_USAGE


def test_a_file_that_cannot_be_read_does_not_stop_the_rest(
    bad_script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lint(bad_script.parent / "none.sh", bad_script) == EXIT_USAGE
    captured = capsys.readouterr()
    assert "PJM050" in captured.out and "none.sh" in captured.err and "No such file" in captured.err


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(BAD.encode() + b"\xff\n")))
    assert lint("-") == EXIT_FINDINGS
    assert "<stdin>:3:9: PJM050 error" in capsys.readouterr().out


def test_a_long_standard_input_is_refused_as_a_long_file_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"#" * (SCRIPT_TEXT.value + 1))))
    assert lint("-") == EXIT_USAGE
    assert "it is longer than 4 MiB" in capsys.readouterr().err


def test_a_folder_is_searched(bad_script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bad_script.parent / "README").write_text("no script\n")
    assert lint(bad_script.parent, "--format", "json") == EXIT_FINDINGS
    assert [file["path"] for file in json.loads(capsys.readouterr().out)["files"]] == [str(bad_script)]


def test_sarif_is_json(bad_script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(bad_script, "--format", "sarif") == EXIT_FINDINGS
    assert json.loads(capsys.readouterr().out)["version"] == "2.1.0"


def test_explain_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint("--explain", "PJM050") == EXIT_OK
    assert "PowerControlFunction" in capsys.readouterr().out
    assert lint("--explain", "pjm073") == EXIT_OK
    assert "no rule checks this" in capsys.readouterr().out
    assert lint("--rules") == EXIT_OK
    assert "PJM099" in capsys.readouterr().out
    assert lint("--rules", "--format", "json") == EXIT_OK
    assert json.loads(capsys.readouterr().out)[0]["id"] == "PJM001"


def test_lint_without_files_is_refused(bad_script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint() == EXIT_USAGE and "name a FILE" in capsys.readouterr().err
    assert lint(bad_script, "-o", "x") == EXIT_USAGE and "--update-limits" in capsys.readouterr().err


def test_limits_are_refreshed_from_pjacl_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pjacl_output, out, job = tmp_path / "saved.txt", tmp_path / "my.yaml", tmp_path / "job.sh"
    pjacl_output.write_text(PJACL)
    job.write_text(CLEAN.replace("node=2,elapse=1:00:00", "node=240,elapse=24:00:00"))
    assert lint("--update-limits", f"small={pjacl_output}", "-o", out) == EXIT_OK
    assert "wrote" in capsys.readouterr().out
    assert load_limits(out).groups["small"].max_nodes == 192
    assert lint(job) == EXIT_OK
    capsys.readouterr()
    assert lint(job, "--limits", out) == EXIT_FINDINGS
    output = capsys.readouterr().out
    assert "PJM030" in output and "PJM040" in output and load_limits(out).groups["small"].date in output


def test_limits_from_standard_input_go_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = "$ pjacl --rg small\n" + PJACL
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert lint("--update-limits", "-") == EXIT_OK
    (tmp_path / "x.yaml").write_text(capsys.readouterr().out)
    assert load_limits(tmp_path / "x.yaml").groups["small"].max_nodes == 192


def test_a_bad_limits_file_or_pjacl_output_is_refused(
    bad_script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lint(bad_script, "--limits", bad_script) == EXIT_USAGE
    assert lint("--update-limits", tmp_path / "none.txt") == EXIT_USAGE
    assert lint("--update-limits", bad_script) == EXIT_USAGE
    assert "write GROUP=FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fugaku_gpt.cli.main import run; run(['job', 'lint', '--help']); "
        "assert not {'yaml', 'numpy', 'jinja2', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)


def test_every_data_file_of_a_site_can_be_named() -> None:
    assert set(SITES) == {"auto", "fugaku", "fx1000", "any", *(limits.site for limits in other_sites())}


def test_a_limits_file_replaces_the_data_of_the_site(tmp_path: Path, capsys: Capture) -> None:
    script, limits = tmp_path / "job.sh", tmp_path / "flow.yaml"
    script.write_text("#!/bin/bash\n#PJM -L rscgrp=fx-small,node=30,elapse=1:00:00\n#PJM -S\n./a\n")
    (flow,) = [site for site in other_sites() if site.site == "flow"]
    limits.write_text(format_limits(flow).replace("nodes: 1-24", "nodes: 1-48"))
    assert run(["job", "lint", str(script), "--select", "PJM030", "--fail-on", "info"]) == 3
    assert run(["job", "lint", str(script), "--select", "PJM030", "--fail-on", "info", "--limits", str(limits)]) == 0
