"""Tests that a command converses with the user of a process, and ends whatever either of them does."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from typing import Iterator, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.launch.conversation import read_lines
from tests.support.waiting import until

PROGRAM = """
import sys
from fugaku_gpt.launch import conversation
conversation.GRACE_SECONDS = 0.5
outcome = conversation.run_conversation([sys.executable, "-c", sys.argv[1]], {})
print("outcome", outcome.exit_code, outcome.signal, outcome.stopped_by, flush=True)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(600)"


class Conversation:
    """A process that runs a command as a conversation, with a terminal or a pipe as its input."""

    def __init__(self, command: str, stdin: int) -> None:
        argv = [sys.executable, "-c", PROGRAM, command]
        self.process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait_for(self, text: str) -> None:
        """Wait until the command prints a line."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().decode().strip() == text

    def end(self) -> Tuple[int, List[str]]:
        """Return the exit code and the last words of the output, once it has ended."""
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output.decode().split() or [errors.decode()]


@pytest.fixture
def terminal() -> Iterator[Tuple[int, int]]:
    """A terminal: the user's end, and the other."""
    user, other = pty.openpty()
    yield user, other
    os.close(user)
    os.close(other)


@pytest.mark.slow
def test_a_command_gets_the_lines_of_a_terminal_and_a_line_for_an_interrupt(terminal: Tuple[int, int]) -> None:
    user, other = terminal
    chat = Conversation("import sys; print(repr(sys.stdin.readline()), repr(sys.stdin.readline()), flush=True)", other)
    os.write(user, b"one\n")
    assert chat.process.stdout is not None
    until(lambda: _has_children(chat.process.pid))
    chat.process.send_signal(signal.SIGINT)
    code, output = chat.end()
    assert code == 0 and output[-4:] == ["outcome", "0", "None", "None"]
    assert sorted(output[:2]) == ["'\\x03\\n'", "'one\\n'"]


@pytest.mark.slow
def test_a_command_that_ends_before_the_input_of_a_terminal_gives_its_code(terminal: Tuple[int, int]) -> None:
    assert Conversation("raise SystemExit(2)", terminal[1]).end() == (0, ["outcome", "2", "None", "None"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_that_reads_a_pipe_though_it_ignores_its_end(number: signal.Signals) -> None:
    chat = Conversation(DEAF, subprocess.PIPE)
    chat.wait_for("begun")
    chat.process.send_signal(number)
    code, output = chat.end()
    assert code == 0 and output == ["outcome", "-9", "9", str(int(number))]


@pytest.mark.slow
def test_a_third_interrupt_ends_a_command_that_does_not_react(terminal: Tuple[int, int]) -> None:
    chat = Conversation(DEAF, terminal[1])
    chat.wait_for("begun")
    for _ in range(2):
        chat.process.send_signal(signal.SIGINT)
        signal.sigtimedwait([], 0.2)  # the kernel makes one of two signals that are pending
        assert chat.process.poll() is None
    chat.process.send_signal(signal.SIGINT)
    code, output = chat.end()
    assert code == 0 and output == ["outcome", "-9", "9", "2"]


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(1, 12))
def test_lines_are_read_whole_or_in_pieces(blocks: List[bytes], longest: int) -> None:
    content = b"".join(blocks)
    read_end, write_end = os.pipe()
    os.write(write_end, content)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        lines = list(read_lines(stream.fileno(), longest))
    assert b"".join(lines) == content and all(0 < len(line) <= longest for line in lines)
    expected = re.findall(rb"[^\n]*\n|[^\n]+", content)
    if all(len(line) <= longest for line in expected):
        assert lines == expected


def _has_children(process: int) -> bool:
    with open(f"/proc/{process}/task/{process}/children", encoding="ascii") as file:
        return bool(file.read().split())
