"""Tests of parsing PJM's statistics files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Optional, Set, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.errors import UsageError
from fugaku_gpt.pjm.stats import IDEAL, MEASURED, JobStatistics, KnobStatistics, NodeCount, parse_stats, read_stats_file

JOB = """\
Job Statistical Information

 JOB ID                    : 31018950
 SUB JOB NUM               : -
 JOB NAME                  : run.sh
 USER                      : u00000
 RESOURCE GROUP            : small
 PRIORITY                  : 127 <DEFAULT>
 PROC COREFILE LIMIT       : 0.0 MB (0) <DEFAULT>
 COMMENT                   :
 STATE                     : EXT
 EXIT CODE                 : 3
 SIGNAL NO                 : 15
 PJM CODE                  : 11
 REASON                    : ELAPSE LIMIT EXCEEDED
 ELAPSE TIME (LIMIT)       : 1 00:00:00 (86400)
 ELAPSE TIME (USE)         : 00:15:02 (902)
 MAX MEMORY SIZE (USE)     : 12.3 GiB (13207024435)
 AVG POWER CONSUMPTION OF CORES/CMG(0) (IDEAL) : 21.394424
 AVG POWER CONSUMPTION OF NODE (IDEAL) : 1500.500000
 ENERGY CONSUMPTION OF NODE (IDEAL) : 375.000000
 AVG POWER CONSUMPTION OF NODE (MEASURED) : 1600.000000
 ENERGY CONSUMPTION OF NODE (MEASURED) : 400.000000
 POWER CAPPING DATE        : 2024/02/14 20:55:17
 NODE NUM (REQUIRE)        : 16:4x4:noncont
 NODE NUM (ALLOC)          : 24:4x3x2
 NODE NUM (USE)            : 16
 freq (REQUIRE)            : 2200
 freq (ALLOC)              : 2200
 freq (USE)                : 2000
 eco_state (REQUIRE)       : 2 <DEFAULT>
 eco_state (ALLOC)         :
 knob_io (REQUIRE)         : SYSTEM <DEFAULT>

"""
NODES = """\
------------------------------------------------------------
Node Statistical Information

 VNODE ID                  : -
 NODE ID                   : 0x01010001
 TOFU COORDINATE           : (1,1,1,0,0,0)
 PERF COUNT 1              : 12345
------------------------------------------------------------
 NODE ID                   : 0x01010002
 PERF COUNT 1              : 54321
"""


def parse_single_job(text: str) -> JobStatistics:
    (job,) = parse_stats(text)
    return job


def test_a_finished_job() -> None:
    job = parse_single_job(JOB + NODES)
    assert (job.job_id, job.job_name, job.state, job.group) == ("31018950", "run.sh", "EXT", "small")
    assert (job.exit_code, job.signal, job.code, job.reason) == (3, 15, 11, "ELAPSE LIMIT EXCEEDED")
    assert (job.elapsed_seconds, job.elapse_limit_seconds) == (902, 86400)
    assert job.nodes_required == NodeCount(16, (4, 4), "noncont")
    assert job.nodes_allocated == NodeCount(24, (4, 3, 2))
    assert job.nodes_used == NodeCount(16)
    assert job.energy_joules == {MEASURED: 1_440_000.0, IDEAL: 1_350_000.0}
    assert job.power_watts == {MEASURED: 1600.0, IDEAL: 1500.5}
    assert (job.is_energy_usable, job.measured_joules, job.measured_watts) == (True, 1_440_000.0, 1600.0)
    assert job.capping_date == "2024/02/14 20:55:17"
    assert job.max_memory_bytes == 13207024435
    assert job.knobs == {
        "freq": KnobStatistics("2200", "2200", "2000"),
        "eco_state": KnobStatistics("2"),
        "knob_io": KnobStatistics("SYSTEM"),
    }
    assert job.values["PRIORITY"] == "127"
    assert job.values["COMMENT"] is None and job.values["SUB JOB NUM"] is None
    assert job.nodes == (
        {"VNODE ID": None, "NODE ID": "0x01010001", "TOFU COORDINATE": "(1,1,1,0,0,0)", "PERF COUNT 1": "12345"},
        {"NODE ID": "0x01010002", "PERF COUNT 1": "54321"},
    )


def test_a_job_that_never_started() -> None:
    text = (
        " JOB ID : 1\n STATE : CCL\n EXIT CODE : -\n PJM CODE : 1\n REASON : -\n ELAPSE TIME (USE) : -\n"
        " MAX MEMORY SIZE (USE) : -\n NODE NUM (ALLOC) : -\n ENERGY CONSUMPTION OF NODE (MEASURED) : -\n"
        " POWER CAPPING DATE : -\n"
    )
    job = parse_single_job(text)
    assert (job.exit_code, job.signal, job.code, job.reason, job.elapsed_seconds) == (None, None, 1, "", None)
    assert (job.nodes_allocated, job.max_memory_bytes, job.capping_date, job.energy_joules) == (None, None, None, {})
    assert job.measured_joules is None


@pytest.mark.parametrize(("seconds", "usable"), [(59, False), (60, True)])
def test_energy_of_a_job_below_the_sampling_minute_is_not_used(seconds: int, usable: bool) -> None:
    job = parse_single_job(
        f" ELAPSE TIME (USE) : 00:00:{seconds} ({seconds})\n ENERGY CONSUMPTION OF NODE (MEASURED) : 1.0\n"
    )
    assert job.is_energy_usable is usable
    assert job.measured_joules == (3600.0 if usable else None)
    assert job.energy_joules[MEASURED] == 3600.0


def test_no_signal_is_none_and_success_has_codes_of_zero() -> None:
    job = parse_single_job(" EXIT CODE : 0\n SIGNAL NO : 0\n PJM CODE : 0\n")
    assert (job.exit_code, job.signal, job.code) == (0, None, 0)


@pytest.mark.slow
@given(st.randoms())
def test_the_order_of_keys_does_not_matter(shuffled: random.Random) -> None:
    lines = [line for line in JOB.splitlines() if " :" in line]
    shuffled.shuffle(lines)
    assert parse_single_job("\n".join(lines)) == parse_single_job(JOB)


def test_units_beside_numbers_and_sizes_without_brackets() -> None:
    job = parse_single_job(
        " MAX MEMORY SIZE (USE) : 1.5 GiB\n AVG POWER CONSUMPTION OF NODE (MEASURED) : 1.5 kW\n"
        " ENERGY CONSUMPTION OF NODE (MEASURED) : 2 kWh\n ENERGY CONSUMPTION OF NODE (IDEAL) : 3 apples\n"
    )
    assert job.max_memory_bytes == 3 * 2**29
    assert (job.power_watts, job.energy_joules) == ({MEASURED: 1500.0}, {MEASURED: 7_200_000.0})


def test_decimal_sizes() -> None:
    assert parse_single_job(" MAX MEMORY SIZE (USE) : 1.5 GB\n").max_memory_bytes == 1_500_000_000


def test_sub_jobs_of_a_file_are_separated() -> None:
    text = JOB.replace("31018950", "239[0]") + NODES + JOB.replace("31018950", "239[1]")
    assert [(job.job_id, len(job.nodes)) for job in parse_stats(text)] == [("239[0]", 2), ("239[1]", 0)]
    titled = "Job Statistical Information\n STATE : EXT\n[Job Statistical Information]\n STATE : CCL\n"
    assert [job.state for job in parse_stats(titled)] == ["EXT", "CCL"]
    assert [job.job_id for job in parse_stats(" JOB ID : 1\n STATE : EXT\n\n JOB ID : 2\n")] == ["1", "2"]


def pairs(text: str) -> Set[Tuple[str, Optional[str]]]:
    """All keys with their values, of jobs and of nodes."""
    records = [values for job in parse_stats(text) for values in (job.values, *job.nodes)]
    return {pair for values in records for pair in values.items()}


@pytest.mark.slow
@given(st.integers(0, len(JOB + NODES)), st.integers(0, len(JOB + NODES)))
def test_a_hole_in_a_file_costs_only_that_line(start: int, end: int) -> None:
    text = (JOB + NODES)[:start] + (JOB + NODES)[end:]
    lines = text.split("\n")
    mixed = pairs(lines.pop(text[:start].count("\n")))
    pairs_by_line = [pair for line in lines for pair in pairs(line)]
    assert pairs(text) <= mixed.union(pairs_by_line)
    # of a key that comes again within a record, the last line counts
    last_values = {key: value for key, value in pairs_by_line if key not in dict(mixed)}
    assert set(last_values.items()) <= pairs(text)


@pytest.mark.slow
@given(
    st.one_of(st.text(), st.lists(st.sampled_from((JOB + NODES).splitlines()) | st.text(), max_size=20).map("\n".join))
)
def test_any_text_can_be_parsed(text: str) -> None:
    for job in parse_stats(text):
        assert job.values or job.nodes


def test_numbers_beyond_reason_are_left_out() -> None:
    job = parse_single_job(
        f" EXIT CODE : {'9' * 5000}\n NODE NUM (USE) : {'9' * 5000}\n MAX MEMORY SIZE (USE) : {'9' * 5000}\n"
    )
    assert (job.exit_code, job.nodes_used, job.max_memory_bytes) == (None, None, None)


def test_files_with_any_bytes_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "job.1.stats"
    path.write_bytes(b"\xff\xfe JOB ID : 1\n\0 JOB NAME : \x80\n")
    assert len(read_stats_file(path)) == 1
    with pytest.raises(UsageError, match="cannot be read"):
        read_stats_file(tmp_path / "none.stats")
