"""Tests of noqa comments, site detection, folders and arbitrary bytes."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Dict, List, Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.pjm.groups import fugaku_limits, other_sites
from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.pjm.lint.engine import Linter, find_scripts
from fugaku_gpt.pjm.lint.formats import as_json, as_sarif, as_text
from fugaku_gpt.pjm.lint.registry import all_rules
from fugaku_gpt.pjm.lint.sites import ANY as ANY_SITE
from fugaku_gpt.pjm.lint.sites import FUGAKU, FX1000, choose_site
from tests.pjm.lint.cases import ANY, CASES, FT

GOLDEN = Path(__file__).parents[2] / "jobs" / "golden"
PIECES = [text for bad, good in CASES.values() for text in (*bad, *good) if len(text) < 1000]


def ids(text: str, strict: bool = False) -> List[str]:
    return [finding.id for finding in Linter(strict=strict).check(text, "job.sh").findings]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("pjm-*.sh")), ids=lambda path: path.name)
def test_golden_scripts_have_no_findings(path: Path) -> None:
    assert Linter(strict=True).check(path.read_text(encoding="utf-8"), path.name).findings == ()


def test_there_are_golden_scripts() -> None:
    assert list(GOLDEN.glob("pjm-*.sh"))


def test_noqa_silences_ids_on_the_same_line() -> None:
    bad = FT + "#PJM -g fugaku -L freq=1800"
    assert {"PJM021", "PJM050"} <= set(ids(bad + "\n"))
    assert set(ids(bad + " # noqa: PJM050\n")) == set(ids(bad + "\n")) - {"PJM050"}
    assert not {"PJM021", "PJM050"} & set(ids(bad + " # noqa: PJM050, PJM021\n"))
    assert not {"PJM021", "PJM050", "PJM051"} & set(ids(bad + " # noqa\n"))
    assert not {"PJM050", "PJM051"} & set(ids(bad + " #noqa:PJM05 as agreed\n"))
    assert {"PJM021", "PJM050"} <= set(ids(bad + " # noqa: E501\n"))
    assert {"PJM021", "PJM050"} <= set(ids(bad + "\n# noqa\n"))


def test_noqa_works_in_the_body_and_for_missing_options() -> None:
    assert "PJM090" not in ids(FT + "export LD_PRELOAD=a.so  # noqa: PJM090\n")
    assert "PJM020" in ids(FT)
    assert "PJM020" not in ids("#!/bin/bash\n#PJM -L rscunit=rscunit_ft01 # noqa: PJM020\n")


def test_noqa_for_a_file() -> None:
    assert {"PJM020", "PJM022"} <= set(ids(FT))
    assert not {"PJM020", "PJM022"} & set(ids(FT + "cd x\n# noqa-file: PJM020, PJM022\n"))
    assert ids(FT + "# noqa-file\n") == []


@pytest.mark.parametrize(
    ("directives", "site", "reason"),
    [
        ("-L rscunit=rscunit_ft01,rscgrp=ppu2023", FUGAKU, "rscunit=rscunit_ft01"),
        ("-L rscunit=rscunit_ft02,rscgrp=dvall", ANY_SITE, "rscunit=rscunit_ft02"),
        ("-L rscgrp=small", FUGAKU, "rscgrp=small"),
        ("-L rscgrp=small-s2", FUGAKU, "rscgrp=small-s2"),
        ("-L rscgrp=eap-small", FUGAKU, "rscgrp=eap-small"),
        ("-L freq=2000,rscgrp=unheard-of", FUGAKU, "freq"),
        ("-L rscgrp=qc-hpc-ibm-a -x PJM_LLIO_GFSCACHE=/vol0004", FUGAKU, "PJM_LLIO_GFSCACHE"),
        ("-L node=2", FUGAKU, "nothing in it names a site"),
        ("-L rscgrp=${QUEUE}", FUGAKU, "nothing in it names a site"),
        ("-L rscunit=fx,rscgrp=fx-small", FX1000, "rscunit=fx"),
        ("-L rscgrp=fx-small", FX1000, "rscgrp=fx-small"),
        ("-L rscgrp=regular-o", FX1000, "rscgrp=regular-o"),
        ("-L rscgrp=regular-a", ANY_SITE, "rscgrp=regular-a"),
        ("-L rscgrp=a-batch", ANY_SITE, "rscgrp=a-batch"),
        ("-L rscunit=bwmpc,rscgrp=batch,vnode=1", ANY_SITE, "rscunit=bwmpc"),
        ("-L rscunit=ito-b,rscgrp=ito-g-4,vnode=1", ANY_SITE, "rscunit=ito-b"),
        ("-L rscgrp=small --stg-transfiles all", ANY_SITE, "file staging, or the set-up of the K computer"),
        ("-L node=2 --mpi use-rankdir", ANY_SITE, "file staging, or the set-up of the K computer"),
        ("-L gpu=1,elapse=1:00:00", ANY_SITE, "gpu"),
        ("-L node=1 --omp thread=16", ANY_SITE, "--omp"),
        ("-L rscgrp=small,vnode=1", FUGAKU, "rscgrp=small"),
    ],
)
def test_the_site_is_chosen_by_the_directives(directives: str, site: str, reason: str) -> None:
    script = read_script(f"#!/bin/bash\n#PJM {directives}\n")
    assert choose_site(script, fugaku_limits(), other_sites())[:2] == (site, reason)


@pytest.mark.parametrize("line", ['FLAGS="-KHPC_ACE2"', "cd /opt/FJSVXosDevkit/sparc64fx", "# FX100", "make FX10"])
def test_commands_that_name_an_older_machine_mean_another_site(line: str) -> None:
    text = f"#!/bin/bash\n#PJM -L node=1\nls\n{line}\n"
    assert choose_site(read_script(text), fugaku_limits(), other_sites()).site == ANY_SITE
    assert (
        choose_site(read_script(text.replace("node=1", "rscgrp=small")), fugaku_limits(), other_sites()).site == FUGAKU
    )
    assert choose_site(read_script("#PJM -L node=1\nls\necho FX1000\n"), fugaku_limits(), other_sites()).site == FUGAKU


def test_findings_from_old_data_of_the_site_are_infos() -> None:
    text = FT + "#PJM -L node=385,rscgrp=small,elapse=90:00:00\n#PJM -g fugaku\n"
    limits = fugaku_limits()
    date = datetime.date.fromisoformat(limits.date)
    dated = {"PJM021", "PJM030", "PJM040"}

    def severities(days: int, strict: bool = False) -> Dict[str, Set[str]]:
        linter = Linter(strict=strict, today=date + datetime.timedelta(days=days))
        by_rule: Dict[str, Set[str]] = {}
        for finding in linter.check(text).findings:
            by_rule.setdefault(finding.id, set()).add(finding.severity)
        return by_rule

    fresh, stale = severities(limits.fresh_days), severities(limits.fresh_days + 1, strict=True)
    assert {fresh[id].pop() for id in dated} == {"warning"}
    assert {stale[id].pop() for id in dated} == {"info"}
    assert severities(limits.fresh_days + 1)["PJM022"] == {"warning"}  # it rests on no data


def test_a_template_is_read_through_the_tags_of_its_own_lines() -> None:
    text = '#!/bin/bash\n{{#job.name}}\n#PJM --name "x"\n{{/job.name}}\n{% if a %}\n#PJM -L node=1\n./a.out\n'
    assert read_script(text).body_line == 2
    assert len(read_script(text, skips_template_tags=True).directives) == 2
    assert "PJM001" not in ids(text)


@pytest.mark.parametrize("name", ["job.sh", "job.sh.tmpl"])
def test_lines_that_a_template_lacks_may_come_when_it_is_filled_in(name: str) -> None:
    tags = "{{#attributes}}\n#PJM -L {{key}}={{value}}\n{{/attributes}}\n" if name == "job.sh" else ""
    text = f'#!/bin/bash\n{tags}#PJM --name "{{{{.}}}}"\n#PJM -L "node=0"\nmpiexec ./a.out\n'
    findings = Linter().check(text, name).findings
    assert {finding.id: finding.severity for finding in findings if finding.id != "PJM098"} == {"PJM031": "error"}
    assert {finding.severity for finding in findings if finding.id == "PJM098"} == {"info"}
    plain = Linter().check(text.replace(tags, ""), "job.sh").findings
    assert {"PJM020", "PJM022", "PJM040", "PJM052", "PJM066"} <= {finding.id for finding in plain}


@pytest.mark.parametrize("group", ["{queue}", "%QUEUE%", "##QUEUE##", "__QUEUE__", "<queue>", "$QUEUE"])
def test_a_group_that_is_yet_to_be_filled_in_names_no_site(group: str) -> None:
    report = Linter().check(f"#!/bin/bash\n#PJM -L rscgrp={group},node=1,elapse=1:00:00\n./a.out\n", "job.sh")
    assert (report.site, report.site_reason) == ("fugaku", "nothing in it names a site")
    assert {"PJM098"} <= {finding.id for finding in report.findings if finding.line == 2}


def test_a_script_of_another_site_is_not_checked_by_rules_of_fugaku() -> None:
    text = ANY + "#PJM -L rscgrp=regular-o,node=2000,elapse=48:00:00 --mpi proc=3000\nmpiexec -of o ./a\n"
    assert ids(text.replace("regular-o", "regular-a")) == []
    assert ids(text) == ["PJM061", "PJM070"]  # what holds for every FX1000 system
    assert "PJM020" in [finding.id for finding in Linter(site="fugaku").check(text, "").findings]
    assert ids(text) == [finding.id for finding in Linter(site="fx1000").check(text, "").findings]
    assert [finding.id for finding in Linter(site="any").check(FT + "#PJM -L freq=1\n", "").findings] == []


@pytest.mark.parametrize(
    ("directives", "site", "expected"),
    [
        ("rscgrp=fx-large,node=48,elapse=80:00:00", "Flow", {"PJM030", "PJM040"}),
        ("rscunit=fx,rscgrp=fx-large,node=96,elapse=72:00:00", "Flow", set()),
        ("rscgrp=fx-interactive,node=1,elapse=1:00:00", "Flow", {"PJM024"}),
        ("rscgrp=regular-o,node=9999,elapse=999:00:00", "Odyssey", set()),  # its limits are not known
        ("rscgrp=a-batch,node=64,elapse=12:00:00", "Genkai", {"PJM040"}),
        ("rscgrp=a-batch,node=63,elapse=12:00:00", "Genkai", set()),
        ("rscgrp=a-batch,vnode=1,vnode-core=40,elapse=168:00:00", "Genkai", set()),
        ("rscgrp=b-batch,gpu=1,elapse=200:00:00", "Genkai", {"PJM040"}),
        ("rscgrp=b-batch,node=5,elapse=1:00:00", "Genkai", {"PJM030"}),
        ("rscgrp=a-inter,node=1,elapse=1:00:00", "Genkai", {"PJM024"}),
        ("rscgrp=fx700,node=2,elapse=1:00:00", "FX700", set()),
    ],
)
def test_limits_of_other_sites_are_checked_by_their_own_data(directives: str, site: str, expected: Set[str]) -> None:
    text = f"#!/bin/bash\n#PJM -L {directives}\n#PJM -S\nmpiexec ./a\n"
    report = Linter().check(text, "job.sh")
    assert report.limits is not None and site in report.limits.title
    limit_rules = {"PJM024", "PJM030", "PJM040"}
    assert {finding.id for finding in report.findings} & limit_rules == expected
    assert {finding.id for finding in Linter(site=report.limits.site).check(text).findings} & limit_rules == expected
    old = Linter(today=datetime.date(2030, 1, 1)).check(text)
    assert all(finding.severity == "info" for finding in old.findings if finding.id in ("PJM030", "PJM040"))


def test_a_script_without_directives_has_no_findings() -> None:
    assert ids("#!/bin/bash\nmpiexec ./a\n") == []


def test_folders_are_searched_for_scripts(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.sh", "sub/a.pjm", ".git/c.sh", ".hidden.sh"):
        (tmp_path / name).write_text(FT)
    (tmp_path / "generator.sh").write_text("cat <<E\n#PJM -S\nE\n")
    (tmp_path / "notes.md").write_text("Use\n#PJM -S\n")
    (tmp_path / "binary").write_bytes(b"#PJM -S\n\0")
    (tmp_path / "huge.sh").write_text(FT + "#" * (1 << 20))
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path, tmp_path / "sub" / "loop")
    expected = [str(tmp_path / "b.sh"), str(tmp_path / "sub" / "a.pjm")]
    assert list(find_scripts([str(tmp_path)])) == expected
    assert list(find_scripts([str(tmp_path / "notes.md"), "-"])) == [str(tmp_path / "notes.md"), "-"]


scripts = st.one_of(
    st.binary(max_size=400),
    st.binary(max_size=200).map(lambda content: b"#PJM " + content),
    st.lists(st.sampled_from(PIECES), max_size=6).map(lambda pieces: "".join(pieces).encode("utf-8")),
    st.lists(
        st.sampled_from(
            [word.encode("utf-8") for text in PIECES for word in text.split(" ")] + [b"\xff", b"\0", b"\r\n"]
        ),
        max_size=40,
    ).map(b" ".join),
)


@settings(max_examples=300, deadline=None)
@given(scripts, st.booleans(), st.sampled_from(["auto", "fugaku", "any"]))
@pytest.mark.slow
def test_any_bytes_are_linted_and_rendered(content: bytes, strict: bool, site: str) -> None:
    linter = Linter(strict=strict, site=site)
    report = linter.check(content.decode("utf-8", "surrogateescape"), "a b\udcff.sh")
    lines = content.count(b"\n") + 1
    for finding in report.findings:
        assert 1 <= finding.line <= lines and finding.column >= 1 and finding.severity in ("error", "warning", "info")
    for text in (
        as_text([report], linter.limits),
        as_json([report], linter.limits),
        as_sarif([report], all_rules(), linter.limits),
    ):
        text.encode("utf-8")
