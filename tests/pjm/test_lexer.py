"""Tests of reading ``#PJM`` scripts: directive lines, splitting, options in force, and that no text is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.errors import UsageError
from fugaku_gpt.pjm.canonical import script_as_json
from fugaku_gpt.pjm.lexer import MAX_LINE_LENGTH, MAX_LINE_OPTIONS, read_script, read_script_file
from fugaku_gpt.pjm.script import PjmScript
from tests.pjm.forms import FORMS, MALFORMED, Item


def items(script: PjmScript) -> Tuple[Item, ...]:
    return tuple((item.option, item.key, item.value, item.is_supported) for item in script.directives)


def kinds(script: PjmScript) -> List[str]:
    return [problem.kind for problem in script.problems]


@pytest.mark.parametrize(("line", "expected"), FORMS, ids=[line or "nothing" for line, _ in FORMS])
def test_each_form_of_public_scripts_is_read(line: str, expected: Tuple[Item, ...]) -> None:
    script = read_script(f"#!/bin/bash\n#PJM {line}\nls\n")
    assert items(script) == expected
    assert script.problems == ()
    assert all(item.line == 2 for item in script.directives)


@pytest.mark.parametrize(("line", "problems", "expected"), MALFORMED, ids=[line for line, _, _ in MALFORMED])
def test_malformed_lines_are_reported_and_preserved(
    line: str, problems: Tuple[Tuple[str, str], ...], expected: Tuple[Item, ...]
) -> None:
    script = read_script(f"#PJM {line}\n")
    assert items(script) == expected
    assert tuple((problem.kind, problem.text) for problem in script.problems) == problems


@pytest.mark.parametrize(
    "start",
    [
        "##PJM -s",
        "#---#PJM -s",
        "#\tPJM -s",
        "# #PJM --rsc-list a",
        "# PJM -s",
        " #PJM -s",
        "\t#PJM -s",
        "#pjm -s",
        "#PJM-s",
        '#  PJM "-s"',
    ],
)
def test_lines_that_only_look_like_directives_are_disabled(start: str) -> None:
    script = read_script(f"{start}\n#PJM -j\nls\n")
    assert script.disabled_lines == (1,)
    assert items(script) == (("-j", None, None, True),)


@pytest.mark.parametrize("comment", ["# PJM options follow", "# the PJM way", "#PJMX -s", "# submit with pjsub, PJM"])
def test_comments_that_mention_pjm_are_comments(comment: str) -> None:
    script = read_script(f"{comment}\n")
    assert (script.disabled_lines, script.directives, script.problems) == ((), (), ())


def test_reading_ends_at_the_first_command() -> None:
    script = read_script("#!/bin/sh\n\n  \n# remark\n  # indented remark\n#PJM -j\nls\n#PJM -s\n#PJM\n# PJM -S\n")
    assert script.body_line == 7
    assert script.ignored_lines == (8,)
    assert script.disabled_lines == (10,)
    assert list(script.options) == ["join"]


def test_a_script_without_commands_has_no_body() -> None:
    assert read_script("#!/bin/sh\n#PJM -j\n").body_line == 0
    assert read_script("").lines == ()


def test_tab_carriage_return_and_byte_order_mark_do_not_hide_a_directive() -> None:
    script = read_script("\ufeff#PJM\t-j\r\n#PJM -L node=4\r\nls\r\n")
    assert script.options == {"join": True, "resources": {"node": "4"}}
    assert sorted(kinds(script)) == ["byte-order-mark", "carriage-return"]
    assert script.lines[1:] == ("#PJM -L node=4", "ls")


def test_repeated_options_merge_and_the_last_is_in_force() -> None:
    script = read_script(
        "#PJM -L node=1,rg=small\n#PJM -L elapse=10\n#PJM --rsc-list node=2\n#PJM -N a --name b\n#PJM -z jid -z\n"
        "#PJM -x A=1,B=2\n#PJM -x A=3\n#PJM -L rscgrp=large\n"
    )
    assert script.resources == {"elapse": "10", "node": "2", "rscgrp": "large"}
    assert script.options["name"] == "b"
    assert script.options["quiet"] is True
    assert script.options["environment"] == {"B": "2", "A": "3"}
    assert list(script.resources) == ["elapse", "node", "rscgrp"]  # in the order of the lines in force
    assert script.option_lines["name"] == 4
    assert script.option_lines["resources.node"] == 3
    assert script.option_lines["resources.rscgrp"] == 8
    assert script.option_lines["environment.A"] == 7


def test_three_ways_to_give_several_keys_are_equal() -> None:
    ways = [
        "#PJM -L node=2,elapse=10,freq=2000\n",
        "#PJM -L \"node=2\" -L 'elapse=10' -L freq=2000\n",
        "#PJM -L node=2\n#PJM --rsc-list elapse=10\n#PJM -L fr'eq=2'000\n",
    ]
    assert len({json.dumps(read_script(way).options) for way in ways}) == 1


def test_staging_options_add_up() -> None:
    script = read_script('#PJM --stgin "a b"\n#PJM --stgin "c d"\n')
    assert script.options["stgin"] == ("a b", "c d")


def test_shell_quoting() -> None:
    script = read_script('#PJM --comment \'it is "so"\' --appname "a \\"b\\" \\\\c \\d" --fs x\\ y\n')
    assert script.options == {"comment": 'it is "so"', "appname": 'a "b" \\c \\d', "fs": "x y"}


def test_a_hash_inside_a_word_or_quotes_starts_no_comment() -> None:
    assert read_script("#PJM -N a#b --comment 'x # y' #z\n").options == {"name": "a#b", "comment": "x # y"}


def test_only_vset_variables_are_substituted_and_only_in_later_lines() -> None:
    script = read_script("#PJM -L node=${N}\n#PJM --vset N=4\n#PJM --mpi proc=${N} -N ${HOME}\n")
    assert script.resources == {"node": "${N}"}
    assert script.mpi == {"proc": "4"}
    assert script.options["name"] == "${HOME}"
    assert items(script)[2] == ("--mpi", "proc", "${N}", True)


def test_options_past_the_sixty_fourth_of_a_line_are_not_in_force_and_not_lost() -> None:
    line = "#PJM " + " ".join(f"-x V{number}=1" for number in range(MAX_LINE_OPTIONS + 2))
    script = read_script(line + "\n")
    assert len(script.directives) == MAX_LINE_OPTIONS
    assert [(problem.kind, problem.text) for problem in script.problems] == [("too-many-options", "-x V64=1 -x V65=1")]


def test_a_line_that_is_too_long_is_reported_and_read() -> None:
    line = "#PJM --comment " + "a" * MAX_LINE_LENGTH + " -j"
    script = read_script(line)
    assert [(problem.kind, problem.text) for problem in script.problems] == [("line-too-long", line)]
    assert script.options["join"] is True


@pytest.mark.slow
def test_a_line_of_ten_megabytes_is_read() -> None:
    for filling in ("-L a=1,", "'", '"\\"', "$(", "${", "{{", "`", "((", "\\", "-j "):
        line = "#PJM " + filling * (10_000_000 // len(filling))
        script = read_script(line)
        assert kinds(script) == ["line-too-long"]
    for filling in ("-L a=1,", "'", '"\\"', "$(", "${", "{{", "`", "((", "\\", "-j ", "$(a", "[", "=,"):
        assert read_script("#PJM -L " + filling * (60_000 // len(filling))).problems


def test_bytes_of_any_kind_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_bytes(b"#PJM -N \xff\xfe\0x\n\0\x80ls\n")
    script = read_script_file(path)
    assert script.options["name"].encode("utf-8", "surrogateescape") == b"\xff\xfe\0x"
    assert script.body_line == 2
    json.dumps(script_as_json(script)).encode("ascii")


def test_an_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_script_file(tmp_path / "none.sh")


_FRAGMENTS = st.sampled_from(
    [
        *(
            "#PJM ",
            "-L ",
            "--mpi ",
            "-x ",
            '"',
            "'",
            "\\",
            "$(",
            ")",
            "${A}",
            "`",
            "{{",
            "}}",
            ",",
            "=",
            ";",
            "(",
            "\n",
        ),
        *(
            "node=4",
            "elapse=1-",
            "-j",
            "--norestart",
            "#",
            " ",
            "\t",
            "\r",
            "\0",
            "--",
            "-",
            "rank-map-bychip=",
            "\ufeff",
        ),
        *("\u2013x", "\udcff", "--stgin", "-z", "jid", "--vset A=${A}", "&&", "ls"),
    ]
)
any_text = st.one_of(
    st.text(),
    st.lists(_FRAGMENTS, max_size=40).map("".join),
    st.binary().map(lambda content: content.decode("utf-8", "surrogateescape")),
)


@pytest.mark.slow
@given(any_text)
def test_any_text_is_read_and_printed(text: str) -> None:
    script = read_script(text)
    assert json.loads(json.dumps(script_as_json(script), allow_nan=False))["body_line"] == script.body_line
    assert len(script.lines) == text.count("\n") + (not text.endswith("\n") and text != "")


_PLAIN_WORD = st.text("abcXYZ019._/%:=-\u00e9", min_size=1, max_size=8).filter(lambda word: word != "-")


@pytest.mark.slow
@given(st.lists(_PLAIN_WORD, max_size=12))
def test_no_argument_of_a_directive_line_is_lost(arguments: List[str]) -> None:
    script = read_script("#PJM " + " ".join(arguments))
    parsed_text = " ".join(
        [f"{item.option} {item.key or ''} {item.value or ''}" for item in script.directives]
        + [problem.text for problem in script.problems]
    )
    for argument in arguments:  # an argument joined to an option, or joined flags, are split, also at `=` and `:`
        for letter in set(argument) - set("=:-"):
            assert letter in parsed_text
        if not argument.startswith("-"):
            assert all(piece in parsed_text for piece in argument.replace(":", "=").split("=")), argument


_NAME = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,20}", fullmatch=True)
_FREE_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=1, max_size=30).filter(
    lambda text: not text.startswith("-")  # an argument that looks like an option is read as an option
)


def quoted(word: str) -> str:
    """An argument quoted for a shell."""
    return "'" + word.replace("'", "'\\''") + "'"


@given(
    st.dictionaries(st.sampled_from(["node", "elapse", "rscgrp", "freq", "eco_state", "gpu"]), _NAME, max_size=6),
    st.dictionaries(st.sampled_from(["proc", "max-proc-per-node", "shape", "rank-map-hostfile"]), _NAME, max_size=4),
    st.dictionaries(
        st.sampled_from(["comment", "appname", "name", "out", "err", "group", "mail_list"]), _FREE_TEXT, max_size=7
    ),
    st.sets(st.sampled_from(["join", "stats", "export_all", "norestart", "bulk"])),
    st.booleans(),
)
@pytest.mark.slow
def test_a_written_script_is_read_back(
    resources: Dict[str, str], mpi: Dict[str, str], texts: Dict[str, str], flags: Any, on_single_line: bool
) -> None:
    spelling = {
        **{"comment": "--comment", "appname": "--appname", "name": "-N", "out": "--out", "err": "-e", "group": "-g"},
        **{"mail_list": "--mail-list", "join": "-j", "stats": "-s", "export_all": "-X", "norestart": "--norestart"},
        "bulk": "--bulk",
    }
    options = [f"-L {quoted(f'{key}={value}')}" for key, value in resources.items()]
    if mpi:
        options.append("--mpi " + quoted(",".join(f"{key}={value}" for key, value in mpi.items())))
    options += [f"{spelling[name]} {quoted(value)}" for name, value in texts.items()]
    options += [spelling[flag] for flag in sorted(flags)]
    text = (
        "#!/bin/bash\n"
        + "".join(f"#PJM {option}\n" for option in ([" ".join(options)] if on_single_line else options))
        + "ls\n"
    )
    script = read_script(text)
    assert script.resources == resources
    assert script.mpi == mpi
    assert {name: script.options[name] for name in texts} == texts
    assert all(script.options[flag] is True for flag in flags)
    assert script.problems == ()
