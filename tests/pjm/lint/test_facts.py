"""Tests of the facts about a script that rules share."""

from __future__ import annotations

import pytest

from fugaku_gpt.pjm.groups import fugaku_limits
from fugaku_gpt.pjm.lexer import read_script
from fugaku_gpt.pjm.lint.facts import Facts
from fugaku_gpt.pjm.lint.sites import FUGAKU


def facts_of(text: str, file: str = "") -> Facts:
    return Facts(read_script(text, skips_template_tags=True), fugaku_limits(), FUGAKU, file)


@pytest.mark.parametrize(
    ("text", "file", "is_template"),
    [
        ("#PJM -L node=1\n{{ body }}", "", True),  # nothing comes after the tag
        ("#PJM -L node=1\n{{ body }}\n", "", True),
        ("{% if a %}\n#PJM -L node=1\n./a\n", "", True),
        ("#PJM -L node=1\n./a\n{{ body }}\n", "", False),  # text of the script, which a shell would refuse
        ("#PJM -L node=1\n./a\n", "job.sh.j2", True),
        ("#PJM -L node=1\n./a\n", "job.sh", False),
    ],
)
def test_a_template_has_tags_above_the_first_command_or_is_called_so(text: str, file: str, is_template: bool) -> None:
    assert facts_of(text, file).is_template == is_template


def test_assignments_say_whether_they_are_those_of_the_directives() -> None:
    facts = facts_of("#PJM -x A=1\nB=2\nexport C=3\nenv D=4 ./a\nE=5 ./a\n")
    assert {setting.name: (setting.value, setting.directive, setting.exported) for setting in facts.assignments} == {
        "A": ("1", True, True),
        "B": ("2", False, False),
        "C": ("3", False, True),
        "D": ("4", False, True),
        "E": ("5", False, True),
    }
