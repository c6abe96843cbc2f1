"""The user's side of ``fugaku-gpt generate --chat`` without prompts: a conversation on a terminal, or over a pipe."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, List, Optional, Protocol

from fugaku_gpt.cli.output import echo
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import CHAT_TEXT

if TYPE_CHECKING:
    from fugaku_gpt.inference.continuation import Continuation
    from fugaku_gpt.inference.conversation import Conversation

_PROMPT = "> "
_HINT = "\n(Ctrl-D ends the conversation)"


class Lines(Protocol):
    """The lines that a user writes."""

    def read(self) -> Optional[bytes]:
        """Return the next one, without its end; None at the end."""

    def is_interrupted(self) -> bool:
        """Whether the user has pressed Ctrl-C since the last line."""

    def note(self, text: str) -> None:
        """Print a text that is no answer."""


class PipeLines:
    """Lines of standard input that no terminal writes; nothing is asked for."""

    def read(self) -> Optional[bytes]:
        """Return the next line, without its end; None at the end."""
        return _line(sys.stdin.buffer.readline(CHAT_TEXT.value))

    def is_interrupted(self) -> bool:
        """Whether the user has pressed Ctrl-C since the last line: there is no user."""
        return False

    def note(self, text: str) -> None:
        """Print a text that is no answer."""
        echo(f"fugaku-gpt: {text}", err=True)


class TerminalLines:
    """Lines that are typed; Ctrl-D ends them."""

    def __init__(self) -> None:
        """Take over SIGINT, which ends this process until the first line has been read."""
        self._is_answering = self._has_interrupt = False
        signal.signal(signal.SIGINT, self._interrupt)

    def read(self) -> Optional[bytes]:
        """Ask for the next line, and return it without its end; None at the end. Ctrl-C asks anew."""
        self._is_answering = False
        while True:
            try:
                line = input(_PROMPT)
            except KeyboardInterrupt:
                echo(_HINT, err=True)
            except EOFError:
                echo()
                return None
            else:
                self._has_interrupt, self._is_answering = False, True
                return line.encode("utf-8", "surrogateescape")

    def is_interrupted(self) -> bool:
        """Whether the user has pressed Ctrl-C since the last line."""
        return self._has_interrupt

    def note(self, text: str) -> None:
        """Print a text that is no answer."""
        echo(f"fugaku-gpt: {text}", err=True)

    def _interrupt(self, number: int, frame: Optional[FrameType]) -> None:
        if not self._is_answering:
            raise KeyboardInterrupt
        self._has_interrupt = True


class RelayedLines:
    """Lines of a terminal that the process which has started the ranks passes on; a line of its own stands for
    Ctrl-C."""

    def __init__(self) -> None:
        """Begin to read, in a thread. Ctrl-C ends this process until the first line is asked for."""
        self._lines: "queue.Queue[Optional[bytes]]" = queue.Queue()
        self._has_begun = self._is_asking = self._has_interrupt = False
        threading.Thread(target=self._read_all, daemon=True).start()

    def read(self) -> Optional[bytes]:
        """Ask for the next line, and return it without its end; None at the end."""
        self._has_begun = self._is_asking = True
        echo(_PROMPT, nl=False)
        line = self._lines.get()
        if line is None:
            echo()
        return line

    def is_interrupted(self) -> bool:
        """Whether the user has pressed Ctrl-C since the last line."""
        return self._has_interrupt

    def note(self, text: str) -> None:
        """Print a text that is no answer, as part of the output: a launcher passes on errors by another way, so that
        they may come behind the next prompt."""
        echo(f"fugaku-gpt: {text}")

    def _read_all(self) -> None:
        from fugaku_gpt.launch.conversation import INTERRUPT_LINE, STANDARD_INPUT, read_lines

        for content in read_lines(STANDARD_INPUT, CHAT_TEXT.value):
            if content != INTERRUPT_LINE:
                # in this thread, or a Ctrl-C right behind the line would count for the line before it
                self._is_asking = self._has_interrupt = False
                self._lines.put(_line(content))
            elif self._is_asking:
                echo(_HINT)
                echo(_PROMPT, nl=False)
            elif self._has_begun:
                self._has_interrupt = True
            else:
                os._exit(128 + signal.SIGINT)
        self._lines.put(None)


def _line(content: bytes) -> Optional[bytes]:
    return content.rstrip(b"\r\n") if content else None


class ChatUser:
    """The user of a conversation, whose lines are messages; prints the answers as they grow."""

    def __init__(self, conversation: "Conversation", lines: Lines) -> None:
        self._conversation, self._lines = conversation, lines
        self._can_ask_again = not isinstance(lines, PipeLines)

    def next_prompt(self) -> Optional[List[int]]:
        """Return the token ids of the conversation with the user's next message; None if it is over.

        Raises:
            UsageError: a message of a pipe cannot be answered.
        """
        for line in iter(self._lines.read, None):
            if not line.strip():
                continue
            try:
                return self._conversation.say(_text_of(line))
            except UsageError as error:
                if not self._can_ask_again:
                    raise
                self._lines.note(str(error))
        return None

    def is_interrupted(self) -> bool:
        """Whether the user wants no more of the answer."""
        return self._lines.is_interrupted()

    def hear(self, piece: str) -> None:
        """Print the next piece of the answer."""
        echo(piece, nl=False)

    def end_answer(self, answer: "Continuation") -> None:
        """End the answer, and say why it ends if that is not its own end."""
        from fugaku_gpt.inference.continuation import CONTEXT, INTERRUPT, LENGTH

        echo()
        self._conversation.hear(answer.text)
        notes = {
            CONTEXT: "the context is full: the answer ends here, and the next message begins a new conversation",
            LENGTH: f"the answer has {len(answer.ids)} tokens and ends here: --max-tokens",
            INTERRUPT: "the answer was stopped",
        }
        if answer.reason in notes:
            self._lines.note(notes[answer.reason])


def _text_of(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"this message is not UTF-8: {error}") from None
