"""Tests of the statistics file: Fugaku's keys and format, read back by the package's own reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fugaku_gpt.pjm.stats import read_stats_file
from fugaku_gpt.simulator.session import Simulator
from tests.simulator.conftest import Write
from tests.support.simulated import simulated

# keys and order of a real file of Fugaku (2024), as far as the simulator writes them
REAL_KEYS = """JOB ID|SUB JOB NUM|START BULKNO|END BULKNO|HOST NAME|JOB NAME|JOB TYPE|JOB MODEL|USER|GROUP|RESOURCE UNIT
RESOURCE GROUP|APRIORITY|PRIORITY|SHELL|STANDARD OUT FILE|STANDARD ERR FILE|PJSUB DIRECTORY|MPI PROC (REQUIRE)
PROC CPU LIMIT|PROC OPEN FILES LIMIT|COMMENT|RETRY NUM|LAST STATE|STATE|ACCEPT DATE|JOB START DATE|EXIT DATE|EXIT CODE
SIGNAL NO|PJM CODE|REASON|ELAPSE TIME (LIMIT)|ELAPSE TIME (USE)|MAX MEMORY SIZE (USE)|CPU NUM (REQUIRE)
AVG POWER CONSUMPTION OF NODE (MEASURED)|ENERGY CONSUMPTION OF NODE (MEASURED)|LLIO SHAREDTMP SIZE (REQUIRE)
POWER CAPPING DATE|NODE NUM (REQUIRE)|NODE NUM (ALLOC)|NODE NUM (USE)|freq (REQUIRE)|freq (ALLOC)|freq (USE)
eco_state (REQUIRE)|retention_state (REQUIRE)|knob_io (REQUIRE)|freq_min (REQUIRE)|jobenv (REQUIRE)"""


def run(site: Simulator, write: Write, tmp_path: Path, directives: str, body: str = "sleep 1.1; exit 4") -> Path:
    job_id = site.submit("-L", "elapse=1:00", write(body, directives), cwd=tmp_path)
    site.wait(job_id)
    return tmp_path / f"job.sh.{job_id}.stats"


def test_keys_and_form_are_those_of_a_real_file(site: Simulator, write: Write, tmp_path: Path) -> None:
    text = run(site, write, tmp_path, '-s\n-L "node=4x4:torus,freq=2200"', "true").read_text()
    assert text.startswith("Job Statistical Information\n\n JOB ID                    : ")
    assert " NODE NUM (REQUIRE)        : 16:4x4:torus\n" in text
    assert " ELAPSE TIME (LIMIT)       : 00:01:00 (60)\n" in text
    assert " freq (REQUIRE)            : 2200\n" in text
    assert " eco_state (REQUIRE)       : 2 <DEFAULT>\n" in text
    assert " throttling_state (REQUIRE) : 0 <DEFAULT>\n" in text  # a long key pushes its colon out
    keys = re.findall(r"^ (\S.*?) +: ", text, re.MULTILINE)
    expected_keys = [key for line in REAL_KEYS.splitlines() for key in line.split("|")]
    assert [key for key in keys if key in expected_keys] == expected_keys


@pytest.mark.slow
def test_the_package_reads_the_file(write: Write, tmp_path: Path) -> None:
    with simulated(tmp_path / "sim", sampling=1.0) as site:
        path = run(site, write, tmp_path, '-S\n-L "node=2,freq=2000,eco_state=0"\n--mpi proc=4')
        (stats,) = read_stats_file(path)
    assert stats.values["EXIT CODE"] == "4"
    assert stats.nodes_allocated is not None and stats.nodes_allocated.count == 2
    assert stats.elapsed_seconds is not None and stats.elapsed_seconds >= 1
    # the model: two nodes of 118 W ideal (124 W, the cores' 60 W less a tenth), and a tenth more measured
    watts = float(stats.values["AVG POWER CONSUMPTION OF NODE (MEASURED)"] or 0)
    watt_hours = float(stats.values["ENERGY CONSUMPTION OF NODE (MEASURED)"] or 0)
    assert abs(watts - 2 * 1.1 * 118) < 0.01
    assert abs(watt_hours * 3600 / watts - stats.elapsed_seconds) < 1
    assert stats.measured_joules is None  # a job of seconds: the reader trusts no energy of it, whoever wrote it
    text = path.read_text()
    assert "SIMULATED: power and energy rows are a crude model, no measurement" in text
    assert " AVG POWER CONSUMPTION OF CORES/CMG(3) (IDEAL) : " in text
    assert text.count(" NODE ID                   : 0x") == 2 and " RANK NO                   : 2 3\n" in text


def test_a_short_job_has_no_energy(site: Simulator, write: Write, tmp_path: Path) -> None:
    (stats,) = read_stats_file(run(site, write, tmp_path, "-s", "true"))
    assert stats.measured_joules is None and stats.measured_watts is None


def test_a_job_that_never_ran_has_dashes(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit("-s", "--at", "20991231", write("true"), cwd=tmp_path)
    site.run("pjdel", job_id)
    text = (tmp_path / f"job.sh.{job_id}.stats").read_text()
    for key in ("EXIT CODE", "SIGNAL NO", "JOB START DATE", "ELAPSE TIME (USE)", "NODE NUM (ALLOC)"):
        assert f" {key:<25} : -\n" in text
    assert " PJM CODE                  : 1\n" in text and " LAST STATE                : QUE\n" in text
    assert " freq (ALLOC)              : \n" in text


@pytest.mark.slow
def test_statistics_of_pjstat_name_the_same_rows(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit("--at", "20991231", write("true"), cwd=tmp_path)
    out = site.run("pjstat", "-s", job_id).stdout
    site.run("pjdel", job_id)
    assert f"\n JOB ID                    : {job_id}\n" in out
    assert " STATE                     : QUE\n" in out
