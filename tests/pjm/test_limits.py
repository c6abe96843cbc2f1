"""Tests of the limits that a site's commands print, as numbers."""

from __future__ import annotations

from fugaku_gpt.pjm.limits import INTERACTIVE, parse_acl, parse_limit_usage

ACL = """\
pjsub option parameters
    (-L/--rsc-list)                  lower            upper            default
        (elapse=)                    00:01:00         72:00:00         90
        (node=)                      1                2x3x4:torus      12x2
        (node-mem=)                  1Mi              28Gi             unlimited   # a remark
        (node-quota=)                1                10K
    (--interact -L)                  lower            upper            default
        (elapse=)                    00:00:01         unlimited        some
"""
USAGE = """\
RSCUNIT: rscunit_ft01
  USER: me
    ru-accept          100        3
    ru-run-job         unlimited  0
  GROUP: ours
    ru-accept          200        4 # a remark
  ALL:
    ru-accept          unlimited  5
RSCUNIT: other
    ru-accept          7          6
"""


def test_limits_are_numbers_of_their_kind() -> None:
    limits = parse_acl(ACL)
    assert limits.seconds() == (60, 72 * 3600, 90)
    assert limits.nodes() == (1, 24, 24)
    assert limits.sizes("node-mem") == (2**20, 28 * 2**30, None)
    assert limits.counts("node") == (1, None, None)
    assert limits.seconds(option=INTERACTIVE) == (1, None, None)
    assert limits.nodes(option=INTERACTIVE) is None and limits.counts("no such row") is None
    row = limits.row("node-quota")
    assert row is not None and (row.lower, row.upper, row.default) == ("1", "10K", "")
    assert len(limits.rows) == 5


def test_usage_is_of_a_unit_and_an_owner() -> None:
    rows = [(row.unit, row.scope, row.owner, row.name, row.limit, row.used) for row in parse_limit_usage(USAGE)]
    assert rows == [
        ("rscunit_ft01", "USER", "me", "ru-accept", 100, 3),
        ("rscunit_ft01", "USER", "me", "ru-run-job", None, 0),
        ("rscunit_ft01", "GROUP", "ours", "ru-accept", 200, 4),
        ("rscunit_ft01", "ALL", "", "ru-accept", None, 5),
        ("other", "", "", "ru-accept", 7, 6),
    ]
