"""Tests of each rule on scripts with and without findings, and of the severities."""

from __future__ import annotations

import re
from typing import List

import pytest

from fugaku_gpt.pjm.groups import fugaku_limits
from fugaku_gpt.pjm.lint.engine import Linter, LintFinding
from fugaku_gpt.pjm.lint.registry import ERROR, INFO, WARNING, all_rules, find_rule
from fugaku_gpt.pjm.lint.rules.elapse import _as_time
from fugaku_gpt.pjm.lint.undecided import NOT_DECIDED, UNDECIDED
from tests.pjm.lint.cases import ANY, CASES, FT, LOWERED, SURE

# every id of the reference's table, with its severity
TABLE = {
    "E": "001 003 004 005 006 007 010 012 013 015 017 019 020 021 024 030 031 034 040 042 044 050 054 060 064 072 080",
    "W": "002 008 014 016 018 022 025 026 032 033 035 041 043 051 053 061 062 063 065 066 067 068 069 070 071 081 082 "
    "083 084 085 086 087 088 089 090 091 092 093 094 095 096 097 098 099",
    "I": "009 011 023 027 052 055 073",
}
SEVERITIES = {"E": ERROR, "W": WARNING, "I": INFO}


def findings(id: str, text: str, strict: bool = False) -> List[LintFinding]:
    return list(Linter(rules=[find_rule(id)], strict=strict).check(text, "job.sh").findings)


@pytest.mark.parametrize(("id", "text"), [(id, text) for id, (bad, _) in CASES.items() for text in bad])
def test_a_rule_has_findings(id: str, text: str) -> None:
    rule_findings = findings(id, text)
    assert {finding.id for finding in rule_findings} == {id}
    lines = text.count("\n")
    for finding in rule_findings:
        assert 1 <= finding.line <= lines and finding.column >= 1
        assert finding.message and finding.fix and "\n" not in finding.message + finding.fix


@pytest.mark.parametrize(("id", "text"), [(id, text) for id, (_, good) in CASES.items() for text in good])
def test_a_similar_correct_script_has_no_findings(id: str, text: str) -> None:
    assert findings(id, text) == []


def test_every_id_of_the_table_has_a_rule_or_a_reason() -> None:
    table = {f"PJM{number}": SEVERITIES[letter] for letter, numbers in TABLE.items() for number in numbers.split()}
    rules = {rule.id: rule.severity for rule in all_rules()}
    assert {**rules, **dict.fromkeys(NOT_DECIDED, INFO)} == table
    assert not set(rules) & set(NOT_DECIDED)
    assert set(CASES) == set(rules)
    assert set(UNDECIDED) <= set(rules)


def test_every_rule_has_a_reason_and_a_source() -> None:
    for rule in all_rules():
        assert rule.title and rule.why.endswith((".", ")")) and rule.fix and rule.source


@pytest.mark.parametrize(("id", "text"), SURE.items())
def test_a_script_that_every_pjsub_refuses_is_an_error(id: str, text: str) -> None:
    assert [finding.severity for finding in findings(id, text)] == [ERROR]


@pytest.mark.parametrize(("id", "text"), LOWERED.items())
def test_an_uncertain_error_is_a_warning_unless_strict(id: str, text: str) -> None:
    (finding,) = findings(id, text)
    assert finding.severity == WARNING and finding.downgraded
    (strict_finding,) = findings(id, text, strict=True)
    assert strict_finding.severity == ERROR and not strict_finding.downgraded


def test_every_error_rule_is_sorted_into_sure_or_lowered() -> None:
    assert {rule.id for rule in all_rules() if rule.severity == ERROR} == set(SURE) | set(LOWERED)


def test_findings_from_limits_of_the_site_have_the_date_of_the_limits() -> None:
    date = fugaku_limits().date
    for id, text in (
        ("PJM030", "#PJM -L node=385\n"),
        ("PJM031", "#PJM -L node=12:mesh,rscgrp=small-torus\n"),
        ("PJM033", "#PJM -L rscgrp=large\n"),
        ("PJM040", "#PJM -L elapse=73:00:00\n"),
        ("PJM042", "#PJM -L rscgrp=spot-small,elapse=5:00:00\n"),
        ("PJM050", "#PJM -L freq=2200,eco_state=0\n"),
        ("PJM099", "#PJM -L rscgrp=small-s2\n"),
    ):
        assert date in findings(id, FT + text)[0].message, id


def test_options_of_the_k_computer_are_an_info_on_other_sites() -> None:
    assert findings("PJM006", ANY + "#PJM --stg-transfiles all\n")[0].severity == INFO
    k_computer_script = ANY + '#PJM --rsc-list "rscgrp=small,node=8"\n#PJM --mpi "use-rankdir"\n. /k/system/Env_base\n'
    assert findings("PJM006", k_computer_script)[0].severity == INFO and findings("PJM020", k_computer_script) == []


def test_a_line_disabled_by_a_second_hash_or_a_dash_is_an_info() -> None:
    for text in ("##PJM -S\n", "# #PJM -S\n", "#---#PJM -S\n", "#--PJM -S\n", "#-PJM -S\n"):
        assert findings("PJM002", FT + text)[0].severity == INFO
    assert findings("PJM002", FT + "# PJM -S\n")[0].severity == WARNING


@pytest.mark.parametrize(
    ("option", "mend"),
    [
        ("-D /vol0004/mine", "`cd DIR`"),
        ("--chdir=/x", "`cd DIR`"),
        ("-A hp000000", "-g GROUP"),
        ("-t 1:00:00", "-L elapse="),
        ("--partition=small", "-L rscgrp="),
        ("--ntasks 4", "--mpi proc="),
        ("--output=a.out", "-o FILE"),
        ("-V", "-X"),
        ("--array=1-3", "--bulk --sparam"),
    ],
)
def test_options_of_other_schedulers_are_named_with_those_of_pjsub(option: str, mend: str) -> None:
    (finding,) = findings("PJM005", FT + f"#PJM {option}\n")
    assert mend in finding.fix and finding.line == 3


def test_an_undocumented_option_that_a_public_script_has_is_no_error() -> None:
    (finding,) = findings("PJM005", FT + "#PJM -D /vol0004/mine\n")
    assert finding.severity == WARNING and "pjsub's manual has no option -D" in finding.message
    assert findings("PJM005", FT + "#PJM -Q x\n")[0].severity == ERROR


def test_more_ranks_than_nodes_without_mpi_are_named() -> None:
    (finding,) = findings("PJM066", FT + "#PJM -L node=4\nmpiexec ./a\nmpiexec -n 48 ./b\n")
    assert "this one starts 48 on 4 nodes: it fails" in finding.message and (finding.line, finding.column) == (5, 12)
    (finding,) = findings("PJM066", FT + "#PJM -L node=4\nmpiexec -n 4 ./a\n")
    assert "fails" not in finding.message


def test_values_and_fixes_are_in_the_messages() -> None:
    (finding,) = findings("PJM005", FT + "#PJM -L rscqrp=small\n")
    assert "rscqrp" in finding.message and "rscgrp" in finding.fix and (finding.line, finding.column) == (3, 9)
    (finding,) = findings("PJM005", FT + "#PJM --node-mem=20Gi\n")
    assert "-L node-mem=..." in finding.fix
    (finding,) = findings("PJM030", FT + "#PJM -L node=64x64,rscgrp=small\n")
    assert "64x64" in finding.message and "4096 nodes" in finding.message and "large" in finding.fix
    (finding,) = findings("PJM041", FT + "#PJM -L elapse=10:00\n")
    assert "10 minutes" in finding.message
    (finding,) = findings("PJM044", FT + "#PJM -L elapse=1-12:00:00\n")
    assert "36:00:00" in finding.fix
    (finding,) = findings("PJM062", FT + "#PJM -L node=1 --mpi proc=1\nexport OMP_NUM_THREADS=12\nmpiexec ./a\n")
    assert finding.message == "12 threads of 1 process on each node use 12 of 48 cores; 36 are idle"
    (finding,) = findings("PJM062", FT + "#PJM -L node=1 --mpi proc=4\nexport OMP_NUM_THREADS=13\nmpiexec ./a\n")
    assert "52" in finding.message and (finding.line, finding.column) == (4, 8)


def test_control_characters_of_a_script_do_not_reach_messages() -> None:
    text = FT + "#PJM -L freq=\x1b[31m1\x07\n#PJM -N \x1b]0;x\x07/\n"
    for finding in Linter(strict=True).check(text, "job.sh").findings:
        assert re.sub(r"[^\x00-\x1f\x7f]", "", finding.message + finding.fix) == ""


@pytest.mark.parametrize(
    ("elapse", "fix"),
    [
        ("1-0:0:0", "write 24:00:00 if 1 day is meant"),
        ("2-00:00:00", "write 48:00:00 if 2 days are meant"),
        ("1-02:30:00", "write 26:30:00 if Slurm's days and hours are meant"),
        ("0-12:00:00", "write 12:00:00 if Slurm's days and hours are meant"),
    ],
)
def test_days_of_slurm_are_converted_to_the_second(elapse: str, fix: str) -> None:
    assert [finding.fix for finding in findings("PJM044", FT + f"#PJM -L elapse={elapse}\n")] == [fix]


@pytest.mark.parametrize(
    ("node", "fix"),
    [
        ("4x4x4:torus", "ask for 4x6x4, 96 nodes"),
        ("16x16x16:strict", "ask for 16x18x16, 4608 nodes"),
        ("400", "ask for 432 nodes"),
    ],
)
def test_a_torus_is_rounded_to_a_box_that_is_named(node: str, fix: str) -> None:
    assert [finding.fix for finding in findings("PJM032", FT + f"#PJM -L node={node}\n")] == [fix]


@pytest.mark.parametrize(
    ("resources", "fix"),
    [
        ("rscgrp=huge,node=20000", "use large"),
        ("rscgrp=huge,node=82944", "no group of the list takes 82944 nodes: `pjacl` lists yours"),
        ("rscgrp=eap-large,node=2000", "use large"),
        ("rscgrp=eap-small,node=4", "use small"),
        ("rscgrp=eap-small", "use small or large"),
    ],
)
def test_the_successor_of_a_group_takes_the_nodes_of_the_job(resources: str, fix: str) -> None:
    assert [finding.fix for finding in findings("PJM099", FT + f"#PJM -L {resources}\n")] == [fix]


def test_lines_that_are_off_on_purpose_are_one_finding() -> None:
    off = '#\tPJM -L "node=16"\n##PJM -L elapse=1:00:00\n# #PJM --llio perf\n# PJM -S\n'
    hits = [(finding.line, finding.severity) for finding in findings("PJM002", FT + off)]
    assert hits == [(3, INFO), (6, WARNING)]
    assert "as 2 more such lines are" in findings("PJM002", FT + off)[0].message


@pytest.mark.parametrize(
    ("lines", "severity"),
    [("# PJM -L node=4\n", "warning"), ("# PJM -L node=4\n#PJM -L node=8\n", "info"), ("##PJM -L node=4\n", "info")],
)
def test_a_line_that_is_off_beside_another_value_is_off_on_purpose(lines: str, severity: str) -> None:
    assert [finding.severity for finding in findings("PJM002", FT + lines)] == [severity]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 minutes"), (121, "0:02:01"), (3540, "59 minutes"), (3600, "1 hour"),
     (3660, "61 minutes"), (5400, "90 minutes"), (7140, "119 minutes"), (7200, "2 hours"), (7260, "2:01:00"),
     (86400, "24 hours"), (3601, "1:00:01")],
)  # fmt: skip
def test_a_limit_is_in_the_unit_that_reads_best(seconds: int, text: str) -> None:
    assert _as_time(seconds).lstrip("0") == text.lstrip("0")


@pytest.mark.parametrize(
    ("body", "line", "text"),
    [
        ("cd x\ncat <<EOF\nmpiexec ./a\n", 4, "no line EOF ends <<EOF"),
        ("cat <<EOF\nmpiexec ./a\n EOF\n", 3, "no line EOF ends <<EOF"),
        ("echo a\necho 'x\nmpiexec ./a\n", 4, "' is never closed"),
        ('echo "x\nmpiexec ./a\n', 3, '" is never closed'),
        ("x=$(date\nmpiexec ./a\n", 3, "$( is never closed"),
        ("x=`date\nmpiexec ./a\n", 3, "` is never closed"),
        ("if x; then\nmpiexec ./a\n", 3, "if has no fi"),
        ("for i in 1 2; do\nif x; then\nmpiexec ./a\ndone\n", 4, "if has no fi"),
        ("while x; do\nmpiexec ./a\n", 3, "while has no done"),
        ("case x in\na) mpiexec ./a ;;\n", 3, "case has no esac"),
        ("f() {\nmpiexec ./a\nf\n", 3, "{ has no }"),
        ("(cd x\nmpiexec ./a\n", 3, "( has no )"),
    ],
)
def test_an_unclosed_construct_is_named_with_its_line(body: str, line: int, text: str) -> None:
    (finding,) = findings("PJM087", FT + body)
    assert finding.line == line and text in finding.message


@pytest.mark.parametrize(
    ("body", "line", "text"),
    [
        ("wait\nmpiexec ./a &\n", 4, "only before"),
        ("mpiexec -vcoordfile v ./a &\nmpiexec -vcoordfile w ./b &\nwait -n\n", 4, "one of several"),
        ("mpiexec ./a &\nfg\n", 3, "no job control"),
        ("f() { mpiexec ./a & }\nf\n", 4, "which f starts"),
    ],
)
def test_the_reason_why_nothing_waits_is_named(body: str, line: int, text: str) -> None:
    (finding,) = findings("PJM069", FT + body)
    assert finding.line == line and text in finding.message


@pytest.mark.parametrize(("group", "fix"), [("smal", "small"), ("Small", "small"), ("spot_small", "spot-small")])
def test_the_group_that_a_misspelt_one_resembles_is_named(group: str, fix: str) -> None:
    (finding,) = findings("PJM025", FT + f"#PJM -L rscgrp={group}\n")
    assert f"did you mean {fix}?" in finding.fix and fugaku_limits().date in finding.message


def test_forms_of_times_that_are_not_sure_are_an_info_with_what_is_meant() -> None:
    for elapse, fix in (("90m", "1:30:00"), ("1h", "1:00:00"), ("1:60:00", "2:00:00"), ("1:00:75", "1:01:15")):
        (finding,) = findings("PJM041", FT + f"#PJM -L elapse={elapse}\n")
        assert finding.severity == INFO and f"write {fix} " in finding.fix


def test_a_shape_beyond_the_nodes_is_uncertain_and_too_many_processes_for_it_are_not() -> None:
    (finding,) = findings("PJM064", FT + "#PJM -L node=4 --mpi shape=2,proc=144\n")
    assert finding.severity == ERROR and "96 cores of shape=2" in finding.message
    (finding,) = findings("PJM064", FT + "#PJM -L node=4 --mpi shape=8\n")
    assert finding.severity == WARNING and finding.downgraded


def test_a_body_of_nested_calls_is_read_in_bounded_time() -> None:
    levels = "".join(f"f{i}() {{ {'; '.join([f'f{i + 1}'] * 40)}; }}\n" for i in range(12))
    text = FT + levels + "f12() { mpiexec ./a & }\nf0\n"
    assert len(Linter().check(text, "job.sh").findings) < 100
