"""Tests of gathering after jobs have ended: statistics, states and results in run directories and in their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest

from fugaku_gpt.config import RunConfig, dump_run_config, load_run_config
from fugaku_gpt.jobs.gather import gather
from fugaku_gpt.jobs.schedulers.protocol import Accounting
from fugaku_gpt.records.accounting import TOO_SHORT, read_accounting
from fugaku_gpt.records.job import ENDED, LOST, REJECTED, RUNNING, JobStatus, append_event, read_history
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.report.collect import collect_rows, find_runs, read_run
from fugaku_gpt.report.notes_table import OptionalColumns, column_titles, notes_cell, row_cells
from fugaku_gpt.report.rows import raw_values
from tests.report.jobs import ScriptedScheduler, record_end, stats
from tests.support.job_records import SUBMITTED, record_submission, write_exit_record
from tests.sweep.fake import leave_run

CONFIG = load_run_config(
    preset="tiny",
    overrides=["node.freq_mhz=2200", "node.retention_state=0", "node.eco_state=0", "layout.dp=4", "job.nodes=4"],
)

ENERGY = OptionalColumns(energy=True)


def factory_of(scheduler: ScriptedScheduler) -> Callable[[str], ScriptedScheduler]:
    return lambda _name: scheduler


def run(directory: Path, config: RunConfig = CONFIG) -> Path:
    """Makes the directory of a finished run of 0.5 s per iteration, by job 21103755."""
    leave_run(directory, config)
    record_submission(directory, "21103755")
    record_end(directory, "21103755")
    write_exit_record(directory, 0, "21103755")
    return directory


def test_statistics_are_stored_in_the_run_and_shown_in_the_row(tmp_path: Path) -> None:
    directory = run(tmp_path / "run")
    (directory / "run.21103755.stats").write_text(stats("21103755"))
    (gathered,) = gather([directory], factory_of(ScriptedScheduler()))
    assert (gathered.jobs, gathered.accounts, gathered.status) == (("21103755",), 1, "ok")
    (account,) = read_accounting(directory)
    assert account.energy_joules == pytest.approx(240_000) and account.energy_joules_ideal == pytest.approx(228_000)
    assert (account.nodes, account.elapsed_seconds, account.code) == (4, 600.0, 0)
    assert account.max_memory_bytes == 8 * 2**30 and account.source == "run.21103755.stats"
    assert account.knobs["freq"].require == "2200" and account.values["JOB NAME"] == "run"
    row = read_run(directory)
    assert row.job_id == "21103755" and row.energy_basis == "measured"
    assert row.watts_per_node == pytest.approx(100.0)
    assert row.joules_per_iteration == pytest.approx(200.0)
    assert row.joules_per_token == pytest.approx(200.0 / (16 * 128))
    values = raw_values(row)
    assert values["energy_joules_all_nodes"] == pytest.approx(240_000) and "average power" in values["formula_energy"]


def test_knobs_really_used_are_the_applied_toggles(tmp_path: Path) -> None:
    directory = run(tmp_path / "run")
    before = read_run(directory)
    assert before.freq_mhz is None and before.not_applied == ("2.2GHz", "retention_state=0", "eco_state=0")
    (directory / "run.21103755.stats").write_text(stats("21103755", capped="2026/11/20 10:00:00"))
    gather([directory], factory_of(ScriptedScheduler()))
    row = read_run(directory)
    assert (row.freq_mhz, row.retention_state, row.knobs) == (2200, 0, (("eco_state", 2),))
    assert row.not_applied == ("eco_state=0",)
    assert row_cells(row)[0] == '4 (2.2GHz, "retention_state=0", "eco_state=2")'
    assert row.remarks == ("power capped 2026/11/20 10:00:00",)


def test_a_clock_and_an_eco_state_that_nobody_asked_for_are_reported(tmp_path: Path) -> None:
    directory = run(tmp_path / "run", load_run_config(preset="tiny"))
    (directory / "run.21103755.stats").write_text(stats("21103755"))
    gather([directory], factory_of(ScriptedScheduler()))
    row = read_run(directory)
    assert row_cells(row)[0] == '1 (2.2GHz, "eco_state=2")' and row.not_applied == ()


def test_energy_of_the_simulator_is_called_simulated(tmp_path: Path) -> None:
    directory = run(tmp_path / "run")
    text = stats("21103755") + " SUPPLEMENTARY INFORMATION : SIMULATED: a crude model, no measurement\n"
    (directory / "run.21103755.stats").write_text(text)
    gather([directory], factory_of(ScriptedScheduler()))
    row = read_run(directory)
    assert row.energy_basis == "simulated" and row.remarks == ("energy simulated",)


def test_a_job_shorter_than_the_sampling_has_no_energy(tmp_path: Path) -> None:
    directory = run(tmp_path / "run")
    (directory / "run.21103755.stats").write_text(stats("21103755", elapse="00:00:30 (30)"))
    gather([directory], factory_of(ScriptedScheduler()))
    row = read_run(directory)
    assert row.energy_joules is None and row.energy_basis == TOO_SHORT
    shown = dict(zip(column_titles(ENERGY), row_cells(row, ENERGY)))
    assert shown["W/node"] == TOO_SHORT and shown["J/token"] == "-"


def test_energy_columns_stand_before_the_notes(tmp_path: Path) -> None:
    directory = run(tmp_path / "run")
    (directory / "run.21103755.stats").write_text(stats("21103755"))
    gather([directory], factory_of(ScriptedScheduler()))
    assert column_titles(ENERGY)[-4:] == ("W/node", "J/it", "J/token", "Notes")
    assert row_cells(read_run(directory), ENERGY)[-4:-1] == ["100", "200", "0.09766"]


def test_slurm_accounts_come_from_the_scheduler(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", CONFIG)
    record_submission(tmp_path / "run", "92", "slurm")
    record_end(tmp_path / "run", "92", exit_code=0)
    write_exit_record(tmp_path / "run", 0, "92")
    accounting = Accounting(120.0, 4, 48_000.0, 400.0, {"State": "COMPLETED", "source": "sacct"})
    (gathered,) = gather([tmp_path / "run"], factory_of(ScriptedScheduler(accounting=accounting)))
    assert gathered.accounts == 1
    (account,) = read_accounting(tmp_path / "run")
    assert (account.scheduler, account.source, account.energy_joules) == ("slurm", "sacct", 48_000.0)
    (none,) = gather([tmp_path / "run"], factory_of(ScriptedScheduler()))
    assert none.accounts == 0 and "keeps no accounts" in none.notes[0]


def prepared(directory: Path, job_id: str = "7") -> Path:
    """Makes the directory of a submitted job whose ranks left nothing."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_run_config(load_run_config(preset="tiny")))
    record_submission(directory, job_id)
    return directory


def test_a_run_whose_ranks_left_no_result_gets_a_result(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    status = JobStatus("7", ENDED, "EXT", exit_code=0, signal=24, code=11, reason="ELAPSE LIMIT EXC")
    (gathered,) = gather([directory], factory_of(ScriptedScheduler({"7": status})), clock=lambda: SUBMITTED + 900)
    assert gathered.status == "timeout" and any(note.startswith("result written: timeout") for note in gathered.notes)
    result = RunDirectory(directory).result()
    assert result is not None and result.status == "timeout"
    assert read_history(directory).statuses["7"].code == 11
    row = read_run(directory)
    assert (row.status, row.job_id, row.date) == ("timeout", "7", "11-21")
    (again,) = gather([directory], factory_of(ScriptedScheduler()))
    assert again.status == "timeout"


@pytest.mark.parametrize("state", [LOST, REJECTED])
def test_lost_and_rejected_jobs_are_rows(tmp_path: Path, state: str) -> None:
    directory = prepared(tmp_path / "run")
    before = read_run(directory)
    assert before.status == "unfinished"
    gather([directory], factory_of(ScriptedScheduler({"7": JobStatus("7", state, reason="why")})))
    assert read_run(directory).status != "ok" and notes_cell(read_run(directory)).startswith("11-21, 7, ")


def test_a_running_job_is_left_unchanged(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    (gathered,) = gather([directory], factory_of(ScriptedScheduler({"7": JobStatus("7", RUNNING, "RUN")})))
    assert gathered.status == "" and RunDirectory(directory).result() is None
    assert notes_cell(read_run(directory)) == "11-21, 7, running"


def test_a_single_query_asks_for_all_jobs_that_have_not_ended(tmp_path: Path) -> None:
    first, second, third = (prepared(tmp_path / str(number), str(number)) for number in (1, 2, 3))
    record_end(third, "3", exit_code=1)
    scheduler = ScriptedScheduler({name: JobStatus(name, RUNNING) for name in "12"})
    gather([first, second, third], factory_of(scheduler))
    assert scheduler.asked == [["1", "2"]]


def test_a_scheduler_that_does_not_answer_is_a_note(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    (gathered,) = gather([directory], factory_of(ScriptedScheduler(trouble="pjstat: no such command\nmore")))
    assert gathered.notes == ("job 7: pjstat: no such command; more", "ask again later") and gathered.status == ""


def test_a_job_whose_submission_was_killed_is_looked_up_by_tag(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_run_config(CONFIG))
    append_event(directory, "intent", SUBMITTED, scheduler="pjm", tag="t-1", link=1, chain=1, bulk="")
    (silent,) = gather(
        [directory], factory_of(ScriptedScheduler(trouble="pjstat: no answer")), clock=lambda: SUBMITTED + 900
    )
    assert silent.jobs == () and "pjstat: no answer" in silent.notes[0]
    status = JobStatus("7", ENDED, "EXT", exit_code=0, signal=24, code=11, reason="ELAPSE LIMIT EXC")
    scheduler = ScriptedScheduler({"7": status}, tags={"t-1": "7"})
    (gathered,) = gather([directory], factory_of(scheduler), clock=lambda: SUBMITTED + 900)
    assert (gathered.jobs, gathered.status, scheduler.asked) == (("7",), "timeout", [["7"]])
    assert read_run(directory).job_id == "7"


def test_a_lost_job_that_turns_up_again_is_no_longer_lost(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    (lost,) = gather([directory], factory_of(ScriptedScheduler({"7": JobStatus("7", LOST)})))
    status = JobStatus("7", ENDED, "EXT", exit_code=0, signal=24, code=11, reason="ELAPSE LIMIT EXC")
    (back,) = gather([directory], factory_of(ScriptedScheduler({"7": status})))
    assert (lost.status, back.status, read_run(directory).status) == ("lost", "timeout", "timeout")


def test_sub_jobs_of_a_bulk_job_have_the_status_of_their_own_code(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_run_config(CONFIG))
    record_submission(directory, "239", bulk="0-1")
    timed_out = JobStatus("239[0]", ENDED, "EXT", exit_code=0, signal=24, code=11)
    out_of_memory = JobStatus("239[1]", ENDED, "EXT", exit_code=0, signal=9, code=12)
    bulk_job = JobStatus("239", ENDED, "EXT:2", exit_code=0, signal=24, code=11)
    gather([directory], factory_of(ScriptedScheduler({"239": bulk_job}, sub_jobs=(timed_out, out_of_memory))))
    results = [RunDirectory(directory / f"repeat-{number}").result() for number in (0, 1)]
    assert [result.status for result in results if result is not None] == ["timeout", "oom"]


def test_a_job_that_the_scheduler_does_not_mention_is_unknown(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    (gathered,) = gather([directory], factory_of(ScriptedScheduler()))
    assert gathered.notes == ("job 7: pjm does not answer for it", "ask again later")
    assert RunDirectory(directory).result() is None


def test_statistics_of_a_script_that_was_submitted_by_hand(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", CONFIG)
    (tmp_path / "run" / "run.123.stats").write_text(stats("123"))
    (gathered,) = gather([tmp_path / "run"], factory_of(ScriptedScheduler()))
    assert gathered.accounts == 1 and read_run(tmp_path / "run").watts_per_node == pytest.approx(100.0)


def test_sub_jobs_of_a_bulk_job_are_repeats_with_their_own_energy(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_run_config(CONFIG))
    record_submission(directory, "239", bulk="0-1")
    record_end(directory, "239")
    for number, elapse in ((0, "00:10:00 (600)"), (1, "00:00:30 (30)")):
        leave_run(directory / f"repeat-{number}", CONFIG, pace=0.5)
        write_exit_record(directory, 0, f"239[{number}]")
        (directory / f"run.239[{number}].stats").write_text(stats(f"239[{number}]", elapse=elapse))
    (directory / "run.239.stats").write_text(stats("239"))
    gather([directory], factory_of(ScriptedScheduler()))
    assert [account.job_id for account in read_accounting(directory)] == ["239[0]", "239[1]"]
    assert find_runs([directory]) == [directory / "repeat-0", directory / "repeat-1"]
    (merged,), singles = collect_rows([tmp_path])
    assert merged.remarks == ("n=2",) and [row.job_id for row in singles] == ["239[0]", "239[1]"]
    assert [row.energy_basis for row in singles] == ["measured", TOO_SHORT]


def test_a_chain_counts_the_energy_of_all_links(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    leave_run(directory, CONFIG)
    for link in (1, 2):
        record_submission(directory, f"240_{link - 1}", link=link, chain=2)
        record_end(directory, f"240_{link - 1}")
        write_exit_record(directory, 75 if link == 1 else 0, f"240_{link - 1}")
        (directory / f"run.240_{link - 1}.stats").write_text(stats(f"240_{link - 1}"))
    gather([directory], factory_of(ScriptedScheduler()))
    row = read_run(directory)
    assert row.energy_joules == pytest.approx(480_000) and row.job_id == "240_1"
