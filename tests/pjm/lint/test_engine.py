"""Tests of noqa comments, site detection, folders and arbitrary bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.pjm.groups import fugaku_limits
from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.pjm.lint.engine import Linter, find_scripts
from fugaku_gpt.pjm.lint.formats import as_json, as_sarif, as_text
from fugaku_gpt.pjm.lint.registry import all_rules
from fugaku_gpt.pjm.lint.sites import looks_like_fugaku
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
    ("directives", "fugaku"),
    [
        ("-L rscunit=rscunit_ft01,rscgrp=ppu2023", True),
        ("-L rscunit=rscunit_ft02,rscgrp=dvall", True),
        ("-L rscgrp=small", True),
        ("-L rscgrp=eap-small", True),
        ("-L freq=2000,rscgrp=unheard-of", True),
        ("-L rscgrp=qc-hpc-ibm-a -x PJM_LLIO_GFSCACHE=/vol0004", True),
        ("-L node=2", True),
        ("-L rscgrp=${QUEUE}", True),
        ("-L rscunit=fx,rscgrp=fx-small", False),
        ("-L rscgrp=regular-o", False),
        ("-L rscgrp=a-batch", False),
        ("-L rscunit=bwmpc,rscgrp=batch,vnode=1", False),
        ("-L rscunit=ito-b,rscgrp=ito-g-4,vnode=1", False),
        ("-L rscgrp=small --stg-transfiles all", False),
        ("-L node=2 --mpi use-rankdir", False),
        ("-L gpu=1,elapse=1:00:00", False),
        ("-L node=1 --omp thread=16", False),
    ],
)
def test_the_site_is_detected_from_the_directives(directives: str, fugaku: bool) -> None:
    script = read_script(f"#!/bin/bash\n#PJM {directives}\n")
    assert looks_like_fugaku(script, fugaku_limits()) is fugaku


def test_a_script_of_another_site_is_not_checked_by_rules_of_fugaku() -> None:
    text = ANY + "#PJM -L rscgrp=regular-o,node=2000,elapse=48:00:00 --mpi proc=3000\nmpiexec -of o ./a\n"
    assert ids(text) == []
    assert "PJM020" in [finding.id for finding in Linter(site="fugaku").check(text, "").findings]
    assert [finding.id for finding in Linter(site="any").check(FT + "#PJM -L freq=1\n", "").findings] == []


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
