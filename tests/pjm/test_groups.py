"""Tests of the limits of resource groups: the file and updates from pjacl."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.errors import UsageError
from fugaku_gpt.pjm.acl_groups import read_acl_groups
from fugaku_gpt.pjm.groups import format_limits, fugaku_limits, load_limits, other_sites, parse_limits, with_groups

PJACL = """\
pjsub option parameters
    (-L/--rsc-list)                         lower            upper            default
        (node=)                             1                384              1
        (elapse=)                           00:01:00         48:00:00         00:01:00
        (adaptive elapsed time min)         00:01:00         48:00:00         00:01:00  # minLimit for batch jobs
        (adaptive elapsed time max)         00:01:01         120:00:00        144:00:00 # maxLimit for batch jobs
"""
INTERACTIVE = """\
    (--interact -L)                         lower            upper            default
        (elapse=)                           00:00:10         06:00:00         00:00:10
        (adaptive elapsed time max)         2                48:00:00         02:00:00
"""
HEAD = 'date: "2026-01-01"\ngroups:\n'


def test_the_packages_file_has_todays_groups() -> None:
    limits = fugaku_limits()
    small, large = limits.groups["small"], limits.groups["large"]
    assert (small.min_nodes, small.max_nodes, small.max_elapse, small.range_max) == (1, 384, 72 * 3600, 144 * 3600)
    assert (large.min_nodes, large.default_nodes, large.allocations) == (385, 385, ("torus",))
    assert limits.groups["int"].min_elapse == 10 and limits.default_group == "small"
    assert limits.successor("huge_2307") == "large" and limits.successor("small") is None
    assert "lighttransport" in (limits.report_of("small-s2") or "") and limits.report_of("small") is None
    assert (
        limits.successor("small-torus") is None and limits.has_group("eap-llio") and not limits.has_group("regular-o")
    )
    assert limits.has_unit("rscunit_ft01") and not limits.has_unit("rscunit_ft02") and not limits.has_unit("fx")
    assert limits.groups["spot-int"].interactive and not limits.groups["spot-small"].interactive


def test_limits_files_are_read_back() -> None:
    for limits in (fugaku_limits(), *other_sites()):
        assert parse_limits(format_limits(limits), "x") == limits
        assert limits.source and limits.date and "://" not in limits.source


def test_other_sites_have_files_of_their_own() -> None:
    sites = {limits.site: limits for limits in other_sites()}
    assert sorted(sites) == ["flow", "fx700", "genkai", "odyssey"]
    large = sites["flow"].groups["fx-large"]
    assert (large.min_nodes, large.max_nodes, large.max_elapse) == (96, 192, 72 * 3600)
    assert sites["flow"].groups["fx-interactive"].interactive and sites["flow"].nodes == "fx1000"
    batch = sites["genkai"].groups["a-batch"]
    longest = [(batch.longest(nodes) or 0) // 3600 for nodes in (1, 2, 3, 4, 15, 16, 31, 32, 63, 64, 128, None)]
    assert longest == [168, 96, 96, 48, 48, 24, 24, 12, 12, 6, 6, 168] and sites["genkai"].nodes == "any"
    assert sites["genkai"].groups["b-batch"].date == "2024-07-08"
    assert sites["odyssey"].has_group("short-o") and not sites["odyssey"].has_group("short-a")
    assert sites["fx700"].has_unit("fx700-a") and sites["fx700"].groups == {}


def test_pjacl_updates_a_group_and_keeps_unnamed_limits() -> None:
    (small,) = read_acl_groups(PJACL, "2027-05-01", "small.txt", "small")
    limits = with_groups(fugaku_limits(), [small], "pjacl")
    group = limits.groups["small"]
    assert (group.max_elapse, group.range_max, group.date) == (48 * 3600, 120 * 3600, "2027-05-01")
    assert group.allocations == ("noncont", "mesh", "torus") and limits.date == "2027-05-01"
    assert limits.groups["large"] == fugaku_limits().groups["large"]
    assert parse_limits(format_limits(limits), "x") == limits


def test_terminal_output_may_have_several_groups() -> None:
    text = f"$ pjacl -u $USER -g $GROUP --rg small\n{PJACL}$ pjacl --rg int\n{INTERACTIVE}"
    small, interactive = read_acl_groups(text, "2027-05-01", "x")
    assert (small.name, small.max_elapse) == ("small", 48 * 3600)
    assert (interactive.name, interactive.min_elapse, interactive.max_elapse, interactive.max_nodes) == (
        "int",
        10,
        6 * 3600,
        None,
    )


def test_a_group_that_is_not_named_or_has_no_limits_is_refused() -> None:
    with pytest.raises(UsageError, match="write GROUP=FILE, such as small=x.txt"):
        read_acl_groups(PJACL, "2027-05-01", "x.txt")
    with pytest.raises(UsageError, match="no limits of small"):
        read_acl_groups("nothing\n", "2027-05-01", "x.txt", "small")
    assert read_acl_groups("rscgrp: f-pt\n" + PJACL, "2027-05-01", "x.txt")[0].name == "f-pt"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups: [", "not valid YAML"),
        ("- a", "expected `key: value` lines at the top"),
        ("date: yesterday\n", "date: expected a date"),
        ("groups: {}\n", "date: expected a date"),
        ('date: "2026-01-01"\nlimit: 3\n', "unknown key limit"),
        (HEAD + "  small: {node: 1-4}\n", "unknown key groups.small.node"),
        (HEAD + "  small: {nodes: 4-1}\n", "starts above its end"),
        (HEAD + "  small: {nodes: many}\n", "groups.small.nodes"),
        (HEAD + "  small: {elapse: soon}\n", "groups.small.elapse"),
        (HEAD + "  small: {allocations: ring}\n", "ring is none of torus"),
        (HEAD + "  small: {date: 1.1.26}\n", "groups.small.date"),
        (HEAD + "  small: 5\n", "groups.small: expected keys"),
        ('date: "2026-01-01"\nvolumes: /vol0004\n', "expected a list of texts"),
    ],
)
def test_a_bad_limits_file_is_refused_with_the_key(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_limits(text, "my.yaml")
    assert str(caught.value).startswith("my.yaml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_limits(tmp_path / "none.yaml")


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parser in (lambda: parse_limits(text, "x"), lambda: read_acl_groups(text, "2026-01-01", "x")):
        with contextlib.suppress(UsageError):
            parser()
