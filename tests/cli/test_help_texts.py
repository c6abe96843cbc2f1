"""Tests of the help texts of all commands: complete sentences in terms of the field."""

from __future__ import annotations

import re
from typing import Iterator, List, Tuple

import click
import pytest

from fugaku_gpt.cli.main import cli

NO_SENTENCE = re.compile(r"(Of|That|So|Such|With|Who|Whom|Which|To|From|\.\.\.)\b")  # beginnings of fragments
DIALECT = re.compile(r"\bhand(s|ed|ing)? in\b|\bgoe?s? on\b|\bgoing on\b|\bwhole\b(?! training)", re.IGNORECASE)


def commands_below(command: click.Command, path: Tuple[str, ...] = ()) -> "Iterator[Tuple[str, click.Command]]":
    yield " ".join(path) or "fugaku-gpt", command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from commands_below(subcommand, (*path, name))


COMMANDS = dict(commands_below(cli))


def help_texts(command: click.Command) -> List[Tuple[str, str]]:
    """Each option of a command with its help text, without the remarks that click adds."""
    return [
        (option.opts[0], re.sub(r"\s+\[default: \w+\]$", "", option.help or ""))
        for option in command.params
        if isinstance(option, click.Option)
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described_by_a_sentence(name: str) -> None:
    for option, text in help_texts(COMMANDS[name]):
        assert re.match(r"[A-Z]", text) and text.endswith("."), f"{option}: {text!r} is no sentence"
        assert not NO_SENTENCE.match(text), f"{option}: {text!r} is a fragment"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_described_by_sentences(name: str) -> None:
    text = (COMMANDS[name].help or "").strip()
    first = text.partition("\n\n")[0].strip()
    assert re.match(r"[A-Z]", first) and first[-1] in ".:", first
    assert not NO_SENTENCE.match(first), first


@pytest.mark.parametrize("name", COMMANDS)
def test_help_uses_terms_of_the_field(name: str) -> None:
    texts = [COMMANDS[name].help or "", *(text for _, text in help_texts(COMMANDS[name]))]
    assert [text for text in texts if DIALECT.search(text)] == []
