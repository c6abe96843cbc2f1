"""The program that ``test_knobs.py`` runs with a copy of the package that has one more power knob, ``prefetch_level``.

It goes through each stage that handles knobs, from a run file to the tables. Every function is one stage, and fails
where the knob is missing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Dict, Optional

from fugaku_gpt.cli.main import run
from fugaku_gpt.compare.factorial import parse_factors
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.config.profile import this_python
from fugaku_gpt.config.schema import POWER_KNOBS
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_USAGE, ConfigError
from fugaku_gpt.jobs.render import JobScript, render_job, settings_of
from fugaku_gpt.machine.local import read_back_toggles
from fugaku_gpt.pjm.lint.engine import Linter
from fugaku_gpt.pjm.lint.registry import find_rule
from fugaku_gpt.pjm.stats import read_stats_file
from fugaku_gpt.records.accounting import JobAccount, Knob, write_accounting
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.report.collect import read_run
from fugaku_gpt.report.markdown_tables import read_tables
from fugaku_gpt.report.notes_table import notes_cell, notes_tables, row_cells
from fugaku_gpt.report.rows import ResultRow, raw_values
from fugaku_gpt.simulator.job import Job
from fugaku_gpt.simulator.request import build_request
from fugaku_gpt.simulator.settings import Settings
from fugaku_gpt.simulator.site import Refusal, custom_resources
from fugaku_gpt.simulator.stats import format_stats
from fugaku_gpt.sweep.names import row_name
from tests.report.rows_of_tables import rows_from_tables
from tests.sweep.fake import leave_run

KEY = "node.prefetch_level"


def tiny(*overrides: str) -> RunConfig:
    """Returns the smallest preset with these overrides."""
    return load_run_config(preset="tiny", overrides=overrides)


def script_for(scheduler: str, *overrides: str) -> JobScript:
    """Returns the job script of the smallest preset with these overrides."""
    return render_job(tiny(f"job.scheduler={scheduler}", *overrides), this_python())


def the_schema_checks_it(folder: Path) -> None:
    """A run file accepts the knob's values and no other."""
    assert vars(tiny(f"{KEY}=2").node)["prefetch_level"] == 2
    try:
        tiny(f"{KEY}=30")
    except ConfigError as error:
        assert "valid: one of 0, 1, 2" in str(error), error
    else:
        raise AssertionError("a value that the knob does not have")


def job_scripts_write_or_note_it(folder: Path) -> None:
    """PJM's script sets the knob, requested or not; the others note that they cannot."""
    text = script_for("pjm", f"{KEY}=2").text
    before, last = POWER_KNOBS[-2:]
    assert last.key == KEY
    assert f'#PJM -L "{before.resource}={before.default}"\n#PJM -L "prefetch_level=2"\n' in text, text
    assert settings_of(text) == tiny("job.scheduler=pjm", f"{KEY}=2")
    assert '#PJM -L "prefetch_level=1"\n' in script_for("pjm").text
    notes = script_for("slurm", f"{KEY}=0").notes
    assert f"{KEY}=0: Slurm has no equivalent; not applied" in notes, notes
    notes = script_for("local", f"{KEY}=0").notes
    assert f"{KEY}=0: not applied on this machine" in notes, notes


def lint_checks_it(folder: Path) -> None:
    """Lint finds a value that the knob does not have, and the fix names the knob."""
    text = script_for("pjm", f"{KEY}=2").text.replace("prefetch_level=2", "prefetch_level=30")
    (finding,) = Linter(rules=[find_rule("PJM054")]).check(text, "job.sh").findings
    assert finding.message == "prefetch_level=30: the knob takes 0 to 2", finding
    resources = [knob.resource for knob in POWER_KNOBS if knob.values == (0, 1, 2)]
    assert f"{', '.join(resources[:-1])} and prefetch_level 0 to 2" in find_rule("PJM054").fix
    script = folder / "job.sh"
    script.write_text(text, encoding="utf-8")
    assert run(["job", "lint", str(script)]) == EXIT_FINDINGS


def ranks_read_it_back(folder: Path) -> None:
    """The value that PJM granted is compared with the requested value."""
    for granted, is_applied in (("prefetch_level=2", True), ("prefetch_level=1", False), ("", False)):
        os.environ["PJM_CUSTOM_RESOURCES"] = granted
        (toggle,) = read_back_toggles(tiny(f"{KEY}=2").node)
        assert (toggle.name, toggle.requested, toggle.applied) == ("prefetch_level", 2, is_applied), toggle


def recorded_row(folder: Path, is_applied: Optional[bool], used: str = "") -> ResultRow:
    """Returns the row of a run whose ranks report whether the knob is applied, or whose job's account has its value."""
    directory = folder / f"run-{is_applied}-{used}"
    config = tiny(f"{KEY}=0")
    leave_run(directory, config)
    if is_applied is not None:
        toggle = {"name": "prefetch_level", "requested": 0, "applied": is_applied, "seen": ""}
        RunDirectory(directory).write_environment({"toggles": [toggle]})
    if used:
        write_accounting(directory, (JobAccount("pjm", "7", knobs={"prefetch_level": Knob("0", "0", used)}),))
    return read_run(directory)


def tables_show_it(folder: Path) -> None:
    """Tables show an applied knob in the Nodes cell and any other in the notes, and a saved table is read back."""
    row = recorded_row(folder, True)
    assert row_cells(row)[0] == '1 ("prefetch_level=0")' and row.not_applied == (), row
    assert raw_values(row)["knobs_applied"] == "prefetch_level=0"
    (again,) = rows_from_tables(read_tables(notes_tables([row])))
    assert again.knobs == row.knobs, again
    assert recorded_row(folder, None, used="0").knobs == (("prefetch_level", 0),)
    for row in (recorded_row(folder, False), recorded_row(folder, True, used="2")):
        assert notes_cell(row).endswith("not applied: prefetch_level=0") and row_cells(row)[0] == "1", row
    refused = folder / "refused"
    refused.mkdir()
    (refused / "config.yaml").write_text(f"preset: tiny\nlayout: {{tp: 3}}\n{KEY}: 2\n", encoding="utf-8")
    assert read_run(refused).not_applied == ("prefetch_level=2",)


def comparisons_know_it(folder: Path) -> None:
    """A job cannot have two values of the knob, a factorial design has the lowest and the highest, a row names it."""
    options = ["--preset", "tiny", "--job", "pjm", "--out", str(folder / "job")]
    assert run(["compare", "base", "prefetch_level=2", *options]) == EXIT_USAGE
    (factor,) = parse_factors("prefetch_level", tiny())
    assert factor.low.settings == ((KEY, "0"),) and factor.high.settings == ((KEY, "2"),), factor
    assert row_name({}, {KEY: "2"}) == "dp1-tp1-prefetch_level2"


def the_simulator_grants_and_counts_it(folder: Path) -> None:
    """The knob's values are checked, its default is granted, and the statistics file lists it last."""
    for value, code in (("30", 57), ("x", 3)):
        try:
            custom_resources({"prefetch_level": value}, 1)
        except Refusal as refusal:
            assert refusal.code == code, refusal
        else:
            raise AssertionError("a value that the knob does not have")
    assert custom_resources({}, 1)["prefetch_level"] == "1"
    names: Dict[str, str] = {"name": "job.sh", "directory": str(folder), "text": "#!/bin/sh\n"}
    options = {"resources": {"prefetch_level": "2", "elapse": "1:00"}}
    request, _ = build_request(options, Settings(), **names, environment={}, umask=0o22, timestamp=0.0)
    job = Job(number=7, request=replace(request, stats="s"), user="user", group="group", host="host")
    file = folder / "job.sh.7.stats"
    file.write_text(format_stats(job, Settings(), "EXT"), encoding="utf-8")
    (statistics,) = read_stats_file(file)
    assert statistics.knobs["prefetch_level"].require == "2", statistics
    order = [name for name in statistics.knobs if name in custom_resources({}, 1)]
    assert order == [knob.resource for knob in sorted(POWER_KNOBS, key=lambda knob: knob.statistics_order)], order
    assert order[-1] == "prefetch_level", order


STAGES = (
    the_schema_checks_it, job_scripts_write_or_note_it, lint_checks_it, ranks_read_it_back, tables_show_it,
    comparisons_know_it, the_simulator_grants_and_counts_it,
)  # fmt: skip

if __name__ == "__main__":
    for stage in STAGES:
        stage(Path(sys.argv[1]))
        print(stage.__name__)
