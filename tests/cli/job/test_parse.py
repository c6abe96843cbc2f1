"""Tests of ``fugaku-gpt job parse``."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from fugaku_gpt.cli.main import cli
from tests.jobs.cases import GOLDEN


def write(path: Path, text: bytes) -> str:
    path.write_bytes(text)
    return str(path)


def test_a_single_file_is_an_object(tmp_path: Path) -> None:
    name = write(tmp_path / "job.sh", b"#!/bin/sh\n#PJM -L node=4,elapse=10:00 -N run\nls\n")
    result = CliRunner().invoke(cli, ["job", "parse", name])
    script = json.loads(result.output)
    assert result.exit_code == 0
    assert (script["file"], script["name"], script["nodes"]["count"]) == (name, "run", 4)
    assert script["elapse"]["max_seconds"] == 600


def test_several_files_are_a_list(tmp_path: Path) -> None:
    names = [write(tmp_path / f"{number}.sh", b"#PJM -N a%d\n" % number) for number in range(3)]
    scripts = json.loads(CliRunner().invoke(cli, ["job", "parse", *names]).output)
    assert [(script["file"], script["name"]) for script in scripts] == list(zip(names, ["a0", "a1", "a2"]))


def test_standard_input_is_parsed() -> None:
    result = CliRunner().invoke(cli, ["job", "parse", "-"], input=b"#PJM -N \xff\xfe\n")
    assert json.loads(result.output)["name"] == "\udcff\udcfe"
    assert result.output.isascii()


def test_a_table_lists_the_problems_of_a_script(tmp_path: Path) -> None:
    text = b"# PJM -s\n#PJM -L node=4 --mystery x stray\n#PJM -N \xff\x1b[31m\nls\n#PJM -j\n"
    result = CliRunner().invoke(cli, ["job", "parse", "--format", "table", write(tmp_path / "job.sh", text)])
    assert result.exit_code == 0
    assert [line.split(None, 1)[0] for line in result.output.splitlines()[2:]] == ["1", "2", "2", "2", "3", "5"]
    for phrase in ("not pjsub's own", "stray-word", "comment", "below the first command", "\\udcff\\x1b[31m"):
        assert phrase in result.output


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["job", "parse", str(tmp_path / "none.sh")])
    assert result.exit_code != 0
    assert "cannot be read" in result.output + str(result.exception)


def test_settings_of_a_script_by_fugaku_gpt_are_read(tmp_path: Path) -> None:
    text = (GOLDEN / "pjm-chain.sh").read_bytes()
    script = json.loads(CliRunner().invoke(cli, ["job", "parse", write(tmp_path / "job.sh", text)]).output)
    assert script["settings"]["job.chain"] == 4 and script["settings"]["layout.dp"] == 4
    edited = text.replace(b"layout.dp: 4", b"layout.dp: four")
    script = json.loads(CliRunner().invoke(cli, ["job", "parse", write(tmp_path / "job.sh", edited)]).output)
    assert "layout.dp" in script["settings_problem"] and "settings" not in script
