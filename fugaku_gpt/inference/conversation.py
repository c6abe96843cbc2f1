"""A conversation with a user: its messages, and their token ids in the form of the model's chat template.

The template is rendered in a fork, and MPI must not be forked. So a process is forked before the ranks join MPI, which
makes token ids of messages until its pipe is closed. No PyTorch here.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any, BinaryIO, Callable, Dict, List, Sequence

from fugaku_gpt.errors import UsageError
from fugaku_gpt.inference.text import Message, TextTokenizer


class ChatEncoder:
    """A process that encodes conversations; it ends with this one, or at :meth:`close`."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Fork it; call this before MPI and threads begin."""
        requests, self._requests = os.pipe()
        answers, answers_end = os.pipe()
        self._process = os.fork()
        if not self._process:
            code = 1
            try:
                os.close(self._requests)
                os.close(answers)
                _answer_requests(tokenizer, os.fdopen(requests, "rb"), answers_end)
                code = 0
            finally:
                os._exit(code)
        os.close(requests)
        os.close(answers_end)
        self._answers: BinaryIO = os.fdopen(answers, "rb")

    def encode(self, messages: Sequence[Message]) -> List[int]:
        """Return the ids of a conversation, ready for its answer.

        Raises:
            UsageError: the chat template refuses the conversation, or a message is no text; or the process has ended.
        """
        try:
            _write_line(self._requests, [dict(message) for message in messages])
            line = self._answers.readline()
        except OSError:
            line = b""
        if not line:
            raise UsageError("the process that renders the chat template has ended: was it killed? Begin anew")
        answer = json.loads(line)
        if "error" in answer:
            raise UsageError(answer["error"])
        ids: List[int] = answer["ids"]
        return ids

    def close(self) -> None:
        """End the process."""
        os.close(self._requests)
        self._answers.close()
        os.waitpid(self._process, 0)


def _answer_requests(tokenizer: TextTokenizer, requests: BinaryIO, answers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which ends an answer by it
    for line in requests:
        try:
            _write_line(answers, {"ids": tokenizer.encode_chat(json.loads(line))})
        except UsageError as error:
            _write_line(answers, {"error": str(error)})


def _write_line(descriptor: int, value: Any) -> None:
    content = memoryview(json.dumps(value).encode("ascii") + b"\n")
    while content:
        content = content[os.write(descriptor, content) :]


class Conversation:
    """The messages of a user and the answers to them.

    Attributes:
        turns: number of messages of the user so far, of any conversation.
    """

    def __init__(self, encoder: ChatEncoder, most: int, on_full: Callable[[str], None]) -> None:
        """Begin.

        Args:
            most: tokens that the model can read.
            on_full: called with a text for the user where these do not suffice, and older messages are forgotten.
        """
        self._encoder, self._most, self._on_full = encoder, most, on_full
        self._messages: List[Dict[str, str]] = []
        self.turns = 0

    def say(self, text: str) -> List[int]:
        """Add a message of the user, and return the token ids of the conversation, ready for the answer to it.

        Where the context is full, the conversation begins anew with this message.

        Raises:
            UsageError: it is no text, the template refuses it, or it alone is longer than what the model can read.
        """
        message = {"role": "user", "content": text}
        ids = self._encoder.encode([*self._messages, message])
        if len(ids) > self._most and self._messages:
            self._on_full(
                f"the context is full: the conversation has {len(ids)} tokens, and the model reads {self._most} at "
                "most; it begins anew with this message"
            )
            self._messages = []
            ids = self._encoder.encode([message])
        if not ids or len(ids) > self._most:
            raise UsageError(f"this message has {len(ids)} tokens; valid: 1 to {self._most}, model.seq_len")
        self._messages.append(message)
        self.turns += 1
        return ids

    def hear(self, text: str) -> None:
        """Add the answer to the last message."""
        self._messages.append({"role": "assistant", "content": text})
