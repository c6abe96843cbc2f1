"""Tests of what is looked at before a script is submitted."""

from __future__ import annotations

import datetime

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.jobs.before_submission import check_run_script, check_script
from tests.jobs.cases import config_of, rendered
from tests.support.prepared_corpus import PREPARED

TODAY = datetime.date(2026, 6, 1)


def test_a_rendered_script_has_neither_errors_nor_warnings() -> None:
    assert check_script(rendered("pjm-one-node").text, "pjm", "job.sh", TODAY) == []


def test_an_error_refuses_the_script_with_line_and_mend() -> None:
    text = rendered("pjm-one-node").text.replace('"elapse=1:00:00"', '"elapse=1-0:0:0"')
    number = next(number for number, line in enumerate(text.splitlines(), 1) if "elapse=1-" in line)
    with pytest.raises(UsageError, match=f"^runs/a/job.sh:{number}: PJM044 error: .*write 24:00:00"):
        check_script(text, "pjm", "runs/a/job.sh", TODAY)
    assert check_script(text.replace('0:0"', '0:0" # noqa: PJM044'), "pjm", "job.sh", TODAY) == []


def test_warnings_are_returned() -> None:
    text = rendered("pjm-one-node").text.replace("\n", "\r\n")
    warnings = check_script(text, "pjm", "job.sh", TODAY)
    assert any(line.startswith("job.sh:1: PJM017 warning: ") for line in warnings)


def test_scripts_of_other_schedulers_are_not_linted() -> None:
    assert check_script("#!/bin/bash\n#PJM -L node=x\n", "slurm", "job.sh") == []


def test_a_corpus_is_required_only_if_the_script_reads_it() -> None:
    config, text = config_of("pjm-one-node"), rendered("pjm-one-node").text
    with pytest.raises(UsageError, match="^data.paths: empty"):
        check_run_script(config, text, "job.sh", TODAY)
    measures = text.replace("-m fugaku_gpt train", "-m fugaku_gpt doctor node")
    assert check_run_script(config, measures, "job.sh", TODAY) == []
    group = load_run_config(preset="tiny", overrides=[f"data.paths=[{PREPARED}]", "job.scheduler=pjm"])
    with pytest.raises(UsageError, match="^job.group: not set"):
        check_run_script(group, text, "job.sh", TODAY)
