"""Tests that the commands print the text of PJM, exactly where the exact text is known."""

from __future__ import annotations

import getpass
import re
import time
from pathlib import Path
from typing import Any

import pytest

from fugaku_gpt.pjm.limits import parse_acl, parse_limit_usage
from fugaku_gpt.pjm.messages import operation_results, parse_wait_results, submitted_ids
from fugaku_gpt.pjm.pjstat import parse_data, parse_table, statuses_of
from fugaku_gpt.simulator.client import invocation_values, send_request
from fugaku_gpt.simulator.session import Simulator
from tests.simulator.conftest import Write

pytestmark = pytest.mark.slow

VERBOSE_HEADER = (
    "JOB_ID     JOB_NAME   MD ST  USER     GROUP    START_DATE      ELAPSE_TIM ELAPSE_LIM            NODE_REQUIRE    "
    "VNODE  CORE V_MEM        V_POL E_POL RANK      LST EC  PC  SN PRI ACCEPT         RSC_GRP  REASON          "
)


def pjsub_reply(site: Simulator, directory: Path, *arguments: str) -> "dict[str, Any]":
    """Return the daemon's reply to a pjsub without starting a process."""
    return send_request(
        str(site.spool.root), {**invocation_values("pjsub", list(arguments)), "directory": str(directory)}
    )


def test_submission_prints_a_single_line_on_standard_output(site: Simulator, write: Write, tmp_path: Path) -> None:
    done = site.run("pjsub", write("true"), cwd=tmp_path)
    (job_id,) = submitted_ids(done.stdout)
    assert done.stdout == f"[INFO] PJM 0000 pjsub Job {job_id} submitted.\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_reports_on_standard_error_that_it_is_simulated(site: Simulator, tmp_path: Path) -> None:
    import subprocess

    for command in ("pjsub", "pjstat", "pjdel", "pjhold", "pjrls", "pjwait", "pjacl"):
        done = subprocess.run([str(site.bin / command), "--help"], capture_output=True, text=True)
        assert done.stderr.splitlines()[0] == f"{command}: simulated PJM on this machine, not Fugaku"
        assert done.stdout.splitlines()[0] == f"{command} (simulated PJM on this machine, not Fugaku)"


def test_z_prints_the_id_alone_or_nothing(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write("true")
    assert re.fullmatch(r"\d+\n", site.run("pjsub", "-z", "jid", script, cwd=tmp_path).stdout)
    assert site.run("pjsub", "-z", script, cwd=tmp_path).stdout == ""


def test_several_scripts_are_several_jobs(site: Simulator, write: Write, tmp_path: Path) -> None:
    names = [write("true", name=f"part{number}.sh") for number in range(3)]
    first = submitted_ids(site.run("pjsub", *names, cwd=tmp_path).stdout)
    assert len(set(first)) == 3
    assert len(submitted_ids(site.run("pjsub", ",".join(names), cwd=tmp_path).stdout)) == 3


def test_a_script_on_standard_input_is_called_stdin(site: Simulator, tmp_path: Path) -> None:
    done = site.run("pjsub", "-z", "jid", stdin="#!/bin/sh\n#PJM -L elapse=5\necho from the pipe\n", cwd=tmp_path)
    job_id = done.stdout.strip()
    assert site.wait(job_id) == [[job_id, "0", "0", "0"]]
    assert (tmp_path / f"STDIN.{job_id}.out").read_text() == "from the pipe\n"


def test_verbose_table_has_the_columns_and_widths_of_a_real_table(
    site: Simulator, write: Write, tmp_path: Path
) -> None:
    job_id = site.submit("-L", "node=12,elapse=1:00", write("sleep 30", name="job1.sh"), cwd=tmp_path)
    out = site.run("pjstat", "-v", job_id).stdout
    header, row = out.splitlines()
    site.run("pjdel", job_id)
    assert header == VERBOSE_HEADER
    # a real row: 6291500    job1.sh    NM RUN a03010   rccs-aot 04/12 11:25:55  0000:00:07 0000:01:00            12 ...
    date = r"\d\d/\d\d \d\d:\d\d:\d\d"
    user = getpass.getuser()[:8]
    assert re.fullmatch(
        rf"{job_id:<10} job1.sh    NM RUN {user:<8} .{{8}} {date}  0000:00:0\d 0000:01:00            12              "
        rf"-      -    -            -     -     bychip    RNP 0   0   0  127 {date} small    -               ",
        row,
    )


def test_default_table_and_cut_names(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit("-N", "a-name-of-twenty-chars", write("sleep 30"), cwd=tmp_path)
    header, row = site.run("pjstat", job_id).stdout.splitlines()
    site.run("pjdel", job_id)
    assert header.split()[5:] == ["START_DATE", "ELAPSE_LIM", "NODE_REQUIRE", "VNODE", "CORE", "V_MEM"]
    assert header.startswith("JOB_ID     JOB_NAME   MD ST  USER     START_DATE      ELAPSE_LIM ")
    assert row.startswith(f"{job_id:<10} a-name-of- NM ")


def test_data_rows_start_with_an_empty_field(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit("--bulk", "--sparam", "1-3", write("sleep 30"), cwd=tmp_path)
    out = site.run("pjstat", "-E", "--data", "--choose", "jid,jmdl", job_id).stdout
    glued = site.run("pjstat", "-E", "--data", "--choose=jmdl,jid", "--delimiter", ";", job_id).stdout
    site.run("pjdel", job_id)
    rows = "".join(f",{job_id}{sub},BU\n" for sub in ("", "[1]", "[2]", "[3]"))
    assert out == "H,JOB_ID,MD\n" + rows
    assert glued == out.replace(",", ";")  # in the table's own order, whatever order was asked for


def test_unknown_ids_are_omitted_silently(site: Simulator, write: Write, tmp_path: Path) -> None:
    done = site.run("pjstat", "--data", "--choose", "jid", "99999999", "88888888[3]", "77777777_1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "H,JOB_ID\n", "")
    bad = site.run("pjstat", "nonsense")
    assert (bad.returncode, bad.stdout, bad.stderr) == (1, "", "[ERR.] PJM 0211 pjstat Invalid job ID nonsense.\n")


def test_history_has_only_finished_jobs(site: Simulator, write: Write, tmp_path: Path) -> None:
    first_day = time.strftime("%Y%m%d")
    over = site.submit(write("exit 3"), cwd=tmp_path)
    site.wait(over)
    running = site.submit(write("sleep 30"), cwd=tmp_path)
    choose = ("--data", "--choose", "jid,st,ec,pc,sn,ermsg,rscg")
    current = statuses_of(parse_data(site.run("pjstat", *choose, over, running).stdout))
    finished = statuses_of(parse_data(site.run("pjstat", "-H", "day=5", *choose, over, running).stdout))
    today = time.strftime("%Y%m%d")
    dated = site.run("pjstat", "-H", f"start={first_day},end={today}", *choose, over).stdout
    older = site.run("pjstat", "-H", "start=20200101,period=5", *choose, over).stdout
    site.run("pjdel", running)
    assert list(current) == [running]
    assert list(finished) == [over]
    assert (finished[over].raw, finished[over].exit_code, finished[over].code) == ("EXT", 3, 0)
    assert f",{over}," in dated and f",{over}," not in older


def test_tables_are_read_back_by_the_package_itself(site: Simulator, write: Write, tmp_path: Path) -> None:
    ids = site.submit("--step", write("sleep 30"), cwd=tmp_path)
    table = parse_table(site.run("pjstat", "-v", "-E", ids.partition("_")[0]).stdout)
    long = parse_data(site.run("pjstat", "-s", "-E", "--data", "--choose", "jid,st,elpl,cmt", ids).stdout)
    site.run("pjdel", ids)
    assert [row["JOB_ID"] for row in table] == [ids.partition("_")[0], ids]
    assert table[1]["REASON"] == "-" and table[1]["RSC_GRP"] == "small" and table[1]["PRI"] == "127"
    assert statuses_of(long)[ids].raw == "RUN"
    assert long[0]["ELAPSE TIME (LIMIT)"] == "00:01:00 (60)"


def test_filter_sort_and_id_ranges(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_ids = []
    for number in (3, 1, 2):
        script = write("true")
        job_ids.append(site.submit("--at", "20991231", "-L", f"node={number}", script, cwd=tmp_path))
    choose = ("--data", "--choose", "jid,nnumr")
    span = f"{job_ids[0]}-{job_ids[-1]}"

    def nodes(*arguments: str) -> "list[str]":
        return [row["NODE_REQUIRE"] for row in parse_data(site.run("pjstat", *choose, *arguments, span).stdout)]

    assert nodes() == ["3", "1", "2"]
    assert nodes("--sort", "nnumr:A") == ["1", "2", "3"]
    assert nodes("--sort", "nnumr:D") == ["3", "2", "1"]
    assert nodes("--filter", "st=QUE+RUN,nnumr=2-9") == ["3", "2"]
    assert nodes("--filter", "st=HLD") == []
    site.run("pjdel", span)


def test_summary_counts_jobs_and_below_them_sub_jobs(site: Simulator, write: Write, tmp_path: Path) -> None:
    bulk = site.submit("--bulk", "--sparam", "0-1", "--at", "20991231", write("true"), cwd=tmp_path)
    single_job = site.submit("--at", "20991231", write("true"), cwd=tmp_path)
    out = site.run("pjstat", "--summary", bulk, single_job).stdout
    site.run("pjdel", bulk, single_job)
    assert out == (
        "  ACCEPT QUEUED RUNING RUNOUT   HOLD  ERROR REJECT   EXIT CANCEL  TOTAL\n"
        "       0      2      0      0      0      0      0      0      0      2\n"
        "s      0      3      0      0      0      0      0      0      0      3\n"
    )


def test_deletion_messages(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit("--at", "20991231", write("true"), cwd=tmp_path)
    done = site.run("pjdel", job_id, "12345678")
    assert done.stdout == f"[INFO] PJM 0100 pjdel Accepted job {job_id}.\n"
    assert done.stderr == "[ERR.] PJM 0112 pjdel Job 12345678 does not exist.\n"
    assert done.returncode == 1
    assert operation_results(done.stdout + done.stderr) == {job_id: "", "12345678": "Job 12345678 does not exist."}


def test_deletion_names_a_bulk_job_once_and_every_step(site: Simulator, write: Write, tmp_path: Path) -> None:
    script = write("true")
    bulk = site.submit("--bulk", "--sparam", "0-4", "--at", "20991231", script, cwd=tmp_path)
    ranged = site.run("pjdel", f"{bulk}[0-2]")
    assert ranged.stdout == f"[INFO] PJM 0100 pjdel Accepted job {bulk}[0-2].\n"
    single = site.run("pjdel", f"{bulk}[3]")
    assert single.stdout == f"[INFO] PJM 0100 pjdel Accepted job {bulk}[3].\n"
    all_sub_jobs = site.run("pjdel", bulk)
    assert all_sub_jobs.stdout == f"[INFO] PJM 0100 pjdel Accepted job {bulk}.\n"

    first = site.submit("--step", "--at", "20991231", script, cwd=tmp_path)
    number = first.partition("_")[0]
    for _ in range(2):
        site.submit("--step", "--sparam", f"jid={number}", "--at", "20991231", script, cwd=tmp_path)
    steps = site.run("pjdel", number)
    assert steps.stdout == "".join(f"[INFO] PJM 0100 pjdel Accepted job {number}_{step}.\n" for step in range(3))


def test_pjwait_lines(site: Simulator, write: Write, tmp_path: Path) -> None:
    good = site.submit(write("true"), cwd=tmp_path)
    bad = site.submit(write("exit 9"), cwd=tmp_path)
    done = site.run("pjwait", good, bad)
    assert done.stdout == f"{good} 0 0 0\n{bad} 0 9 0\n"
    assert [waited.exit_code for waited in parse_wait_results(done.stdout)] == [0, 9]
    assert site.run("pjwait", "-z", good).stdout == ""
    waiting = site.submit("--at", "20991231", write("true"), cwd=tmp_path)
    assert site.run("pjwait", "-w", "waitnone", waiting).stdout == f"{waiting} X X X\n"
    assert site.run("pjwait", "-w", "waitany", waiting, good).stdout == f"{waiting} X X X\n{good} 0 0 0\n"
    site.run("pjhold", waiting)
    assert site.run("pjwait", waiting).stdout == f"{waiting} H H H\n"
    site.run("pjdel", waiting)
    missing = site.run("pjwait", "12345678")
    assert (missing.returncode, missing.stderr) == (1, "[ERR.] PJM 0612 pjwait Job 12345678 does not exist.\n")


def test_limits_of_a_group_are_read_back(site: Simulator) -> None:
    out = site.run("pjacl", "-g", "hp000000", "--rg", "large").stdout
    assert (
        "pjsub option parameters\n    (-L/--rsc-list)                         lower            upper            default"
        in out
    )
    limits = parse_acl(out)
    assert limits.seconds("elapse") == (1, 24 * 3600, 60)
    assert limits.nodes("node") == (385, 55296, 385)  # as in the packaged limits
    assert limits.counts("freq") == (2000, 2200, 2200)
    unknown = site.run("pjacl", "--rg", "none")
    assert (unknown.returncode, unknown.stderr) == (1, "[ERR.] PJM 0058 pjacl rscgrp=none does not exist.\n")


def test_limits_of_a_user_are_read_back(site: Simulator, write: Write, tmp_path: Path) -> None:
    job_id = site.submit("--at", "20991231", write("true"), cwd=tmp_path)
    out = site.run("pjstat", "--limit").stdout
    site.run("pjdel", job_id)
    assert out.startswith("System Resource Information:\nRSCUNIT: rscunit_ft01\nUSER: ")
    assert " LIMIT-NAME                    LIMIT  ALLOC\n ru-accept                       100      1\n" in out
    assert " ru-accept-allsubjob       unlimited      0\n" in out
    accept = next(use for use in parse_limit_usage(out) if use.scope == "USER" and use.name == "ru-accept")
    assert (accept.limit, accept.used) == (100, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--none"], 1, "Invalid option --none."),
        (["-L"], 1, "Option -L needs an argument."),
        (["-s", "-S"], 2, "Invalid combination of options: stats and stats-nodes."),
        (["--bulk", "--step", "--sparam", "0-1"], 2, "Invalid combination of options: --bulk and --step."),
        (["--bulk"], 2, "Invalid combination of options: --bulk without --sparam."),
        (["--spath", "x"], 2, "Invalid combination of options: --spath without -s or -S."),
        (["-L", "elapse=soon"], 3, None),
        (["-N", "1st"], 3, None),
        (["--step", "--sparam", "jid=99999"], 12, "Job 99999 does not exist."),
        (["--llio", "localtmp-size=80Gi,sharedtmp-size=10Gi"], 49, None),
        (["-L", "rscgrp=large,node=1"], 54, "node=1 is less than the lower limit (385)."),
        (["-L", "elapse=0"], 54, "elapse=0 is less than the lower limit (1)."),
        (["--at", "20200101"], 56, None),
        (["-L", "rscgrp=spot-small,elapse=5:00:00"], 57, "elapse=18000 is greater than the upper limit (14400)."),
        (["-L", "rscgrp=small,node=385"], 57, "node=385 is greater than the upper limit (384)."),
        (["-L", "exepjrsh=2"], 57, "exepjrsh=2 is greater than the upper limit (1)."),
        (["-p", "256"], 57, "-p=256 is greater than the upper limit (255)."),
        (["-m", "b,x"], 3, "Invalid argument: -m=b,x ('b,x' is not a list of b, e, r, s, S)."),
        (["--mpi", "proc=49"], 57, "proc=49 is greater than the upper limit (48)."),
        (["--mpi", "proc=8,max-proc-per-node=4"], 54, "max-proc-per-node=4 is less than the lower limit (8)."),
        (["-L", "rscgrp=nowhere"], 58, "rscgrp=nowhere does not exist."),
        (["-L", "rscunit=pc"], 58, "rscunit=pc does not exist."),
        (["--step", "--sparam", "sn=70000"], 60, None),
        (["-L", "freq=2100"], 76, "freq=2100 must be one of 2000,2200."),
        (["-L", "freq=2200,eco_state=0"], 76, None),
        (["--interact"], 89, None),
    ],
)
def test_refusals_go_to_standard_error_with_their_number(
    site: Simulator, write: Write, tmp_path: Path, arguments: "list[str]", code: int, text: "str | None"
) -> None:
    script = [] if arguments == ["-L"] else [write("true")]
    done = pjsub_reply(site, tmp_path, *arguments, *script)
    assert (done["code"], done["out"]) == (1, "")
    assert done["err"].startswith(f"[ERR.] PJM {code:04d} pjsub ")
    if text is not None:
        assert done["err"].splitlines()[0] == f"[ERR.] PJM {code:04d} pjsub {text}"
    rests_on_site_data = code in (49, 58) or "eco_state" in str(arguments) or "rscgrp" in str(arguments)
    assert ("by what was published of the site up to 20" in done["err"]) is rests_on_site_data


def test_forms_that_users_have_seen_are_accepted_with_a_remark(site: Simulator, write: Write, tmp_path: Path) -> None:
    for arguments, remark in (
        (["-L", "rscgrp=small-s2"], "rscgrp=small-s2 is in no list of the site as of 20"),
        (["--llio", "localtmp-size=87Gi"], "jobs of June 2026 ran with 87Gi"),
    ):
        done = pjsub_reply(site, tmp_path, *arguments, write("true"))
        assert (done["code"], "submitted" in done["out"]) == (0, True) and remark in done["err"]


@pytest.mark.parametrize(
    ("directives", "code"),
    [('-L "elapse=5', 8), ("--no-check-directory", 1), ("--stgin x", 1), ("-L", 1), ("--mpi procc=4", 3)],
)
def test_directives_are_refused_as_well(
    site: Simulator, write: Write, tmp_path: Path, directives: str, code: int
) -> None:
    done = pjsub_reply(site, tmp_path, write("true", directives))
    assert done["err"].startswith(f"[ERR.] PJM {code:04d} pjsub ")
    assert done["code"] == 1


def test_a_missing_script_is_refused(site: Simulator, tmp_path: Path) -> None:
    done = site.run("pjsub", "nothing.sh", cwd=tmp_path)
    assert (done.returncode, done.stderr[:27]) == (1, "[ERR.] PJM 0020 pjsub File ")


def test_too_many_nodes_for_retention_are_warned_of_and_accepted(tmp_path: Path) -> None:
    from tests.support.simulated import simulated

    (tmp_path / "job.sh").write_text("true\n")
    with simulated(tmp_path / "sim", nodes=20000) as site:
        done = site.run(
            "pjsub", "-L", "rscgrp=large,node=9217,retention_state=1", "--at", "20991231", "job.sh", cwd=tmp_path
        )
        assert submitted_ids(done.stdout)
        assert done.stderr == ("warn: specification of core retention is invalid because job size is too large.\n")


def test_strict_groups_refuse_as_fugaku_does(tmp_path: Path) -> None:
    from tests.support.simulated import simulated

    (tmp_path / "job.sh").write_text("true\n")
    with simulated(tmp_path / "sim", strict_groups=True) as site:
        done = site.run("pjsub", "job.sh", cwd=tmp_path)
        assert done.stderr == "[ERR.] PJM 0071 pjsub Group not authorized to submit a job: group(59999)\n"
        for arguments in (["-g", "fugaku"], ["-g", "trial"]):
            assert "PJM 0071" in site.run("pjsub", *arguments, "job.sh", cwd=tmp_path).stderr
        assert site.run("pjsub", "-g", "hp000000", "job.sh", cwd=tmp_path).returncode == 0
        assert site.run("pjsub", "-g", "trial", "-L", "rscgrp=spot-small", "job.sh", cwd=tmp_path).returncode == 0
