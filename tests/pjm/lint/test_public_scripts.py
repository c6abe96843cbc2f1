"""Tests that working patterns of public scripts have no errors and no wrong warnings."""

from __future__ import annotations

import json
from typing import List

import pytest

from fugaku_gpt.pjm.lint.engine import Linter, LintFinding
from fugaku_gpt.pjm.lint.registry import ERROR, INFO, WARNING, find_rule
from fugaku_gpt.pjm.lint.sites import ANY, FUGAKU
from tests.pjm.lint.cases import FT

MANY = FT + "#PJM -L node=500,rscgrp=large --mpi proc=1000\n"


def check(text: str, *ids: str) -> List[LintFinding]:
    rules = {"rules": [find_rule(id) for id in ids]} if ids else {}
    return list(Linter(**rules).check(text, "job.sh").findings)


def test_no_staging_is_an_info_and_staging_is_an_error() -> None:
    (finding,) = check(FT + "#PJM --no-stging\n", "PJM006")
    assert finding.severity == INFO and "remove" in finding.fix
    (finding,) = check(FT + "#PJM --stg-transfiles all\n", "PJM006")
    assert finding.severity == ERROR


@pytest.mark.parametrize("option", ["--no-stging", "--stgin 'a b'", "-I a", "--mpi use-rankdir"])
def test_staging_marks_a_script_of_another_site(option: str) -> None:
    text = "#!/bin/ksh\n#PJM -L node=2,elapse=1:00:00,rscgrp=small\n#PJM --mpi proc=96\n"
    assert Linter().check(text, "job.sh").site == FUGAKU
    report = Linter().check(f"{text}#PJM {option}\n", "job.sh")
    assert report.site == ANY and {finding.severity for finding in report.findings} <= {INFO}
    assert Linter().check(f"{text}#PJM {option}\n#PJM -L freq=2000\n", "job.sh").site == FUGAKU


def test_both_statistics_options_are_a_warning() -> None:
    (finding,) = check(FT + "#PJM -S\n#PJM -s\n", "PJM010")
    assert finding.severity == WARNING and finding.downgraded


@pytest.mark.parametrize(
    "body",
    [
        "out=log/%j/%/1000r/o\nmpiexec -stdout-proc $out ./a\n",
        'name=x\nout="log/${name}/%/1000r"\nmpiexec -stdout-proc ${out}/o ./a\n',
        "mpiexec -stdout-proc ${SET_ELSEWHERE}/o ./a\n",
        "out=log\nout=log/%/1000r/o\nmpiexec -stdout-proc $out ./a\n",
        "a=${b[0]}\nmpiexec -stdout-proc ${a}/${x:-y} ./a\n",
    ],
)
def test_an_output_path_in_a_variable_may_spread_the_files(body: str) -> None:
    assert check(MANY + body, "PJM071") == []


@pytest.mark.parametrize(
    "body",
    [
        "out=log/o\nmpiexec -stdout-proc $out ./a\n",
        "out=$out/o\nmpiexec -stdout-proc $out ./a\n",
        'out="log/${PJM_JOBID}"\nmpiexec -stdout-proc ${out}/o -stderr-proc log/%/1000r/e ./a\n',
    ],
)
def test_an_output_path_in_a_variable_that_does_not_spread_the_files_is_reported(body: str) -> None:
    (finding,) = check(MANY + body, "PJM071")
    assert finding.line == 5


def test_a_launch_with_a_process_count_leaves_no_node_empty() -> None:
    nodes = FT + "#PJM -L node=384,rscgrp=small\n#PJM --mpi proc=1\n#PJM --mpi max-proc-per-node=1\n"
    assert check(nodes + "N=384\nmpirun -n ${N} --vcoordfile v ./a\n", "PJM061") == []
    (finding,) = check(nodes + "mpirun ./a\n", "PJM061")
    assert "383" in finding.message


def test_texts_that_only_look_like_commands_have_no_findings() -> None:
    text = (
        FT
        + "#PJM -L node=2 --mpi proc=8\n"
        + "echo 'mpiexec -std out -n 999 ./a > /dev/stderr'\n"
        + "cat <<'EOT' > next.sh\n#PJM -L node=4\nexport LD_PRELOAD=libx.so\nmpiexec -std out ./a > /dev/stdout\nEOT\n"
        + ": <<TALK\nmpiexec -std out ./a\nTALK\n"
        + "# mpiexec -std out ./a\n"
        + "awk '{ print > \"/dev/stderr\" }' log\n"
        + "cat log | tee /dev/stderr\n"
        + 'echo "active: $VIRTUAL_ENV"\n'
    )
    assert check(text, "PJM001", "PJM065", "PJM070", "PJM072", "PJM090", "PJM095") == []


def test_messages_can_be_written_as_json() -> None:
    findings = check(FT + "#PJM -L elapse=1:00:00\u3000until then\n", "PJM040")
    assert [finding.severity for finding in findings] == [ERROR] and json.dumps(
        [finding.message for finding in findings]
    )
