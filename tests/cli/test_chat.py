"""Tests of conversations by ``fugaku-gpt generate --chat``, over a pipe and on a terminal, with one rank and two."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

import pytest

from fugaku_gpt.cli.main import run
from tests.support import tokenizers
from tests.support.checkpoints import save_model
from tests.support.models import model_of_kind

pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}<s>"
TIMEOUT = 200.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Dict[int, Path]:
    """Models for chat, by the length of their context."""
    folders = {}
    for seq_len in (64, 4000):
        folder = tmp_path_factory.mktemp(f"chat-{seq_len}")
        model = model_of_kind("llama", "model.vocab_size=332", f"model.seq_len={seq_len}")
        path = save_model(folder / "checkpoints", model)
        tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, path / "tokenizer.json", ["</s>", "<s>"])
        declared = {"chat_template": TEMPLATE, "eos_token": "</s>"}
        (path / "tokenizer_config.json").write_text(json.dumps(declared), encoding="utf-8")
        folders[seq_len] = folder
    return folders


def command(*arguments: object, text: Optional[str] = None) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "fugaku_gpt", *map(str, arguments)]
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_each_line_of_a_pipe_is_a_message_with_those_before_it(models: Dict[int, Path], tmp_path: Path) -> None:
    options = ("--max-tokens", "6", "--dtype", "float64", "--chat")
    spoken, answers = ["It's a text", "", "some words"], []
    messages: List[Dict[str, str]] = []
    for text in filter(None, spoken):
        messages.append({"role": "user", "content": text})
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")
        done = command("generate", models[64], *options, "--prompts", tmp_path / "prompts.jsonl", "--format", "jsonl")
        answers.append(json.loads(done.stdout)["text"])
        messages.append({"role": "assistant", "content": answers[-1]})
    for ranks in ((), ("--ranks", "2", "--tp", "2")):
        done = command("generate", models[64], *options, *ranks, text="\n".join(spoken) + "\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "".join(f"{answer}\n" for answer in answers)
        assert done.stderr.count("the answer has 6 tokens and ends here: --max-tokens") == 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_a_full_context_is_reported_and_the_conversation_begins_anew(models: Dict[int, Path]) -> None:
    text = "some words " * 6
    done = command("generate", models[64], "--chat", "--max-tokens", "80", text=f"{text}\n{text}\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the context is full: the answer ends here") == 2
    assert "and the model reads 64 at most; it begins anew with this message" in done.stderr
    first, second = done.stdout.split("\n")[:2]
    assert first == second != ""  # nothing of the first conversation is left in the second
    done = command("generate", models[64], "--chat", text="some words " * 50 + "\n")
    assert done.returncode == 2 and "this message has" in done.stderr and "valid: 1 to 64" in done.stderr


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        argv = [sys.executable, "-m", "fugaku_gpt", *map(str, arguments)]
        self._pid, self._descriptor = pty.fork()
        if not self._pid:
            os.execv(argv[0], argv)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode("utf-8"))

    def read_until(self, text: str, start: int = 0) -> int:
        """Read until a text has come behind a position; return the position behind it."""
        deadline = time.monotonic() + TIMEOUT
        while text not in self.text[start:]:
            assert time.monotonic() < deadline, self.text
            self._read(deadline - time.monotonic())
        return self.text.index(text, start) + len(text)

    def read_characters(self, count: int) -> None:
        """Read until ``count`` characters have come since the beginning."""
        deadline = time.monotonic() + TIMEOUT
        while len(self.text) < count:
            assert time.monotonic() < deadline, self.text
            self._read(deadline - time.monotonic())

    def end(self) -> int:
        """Read to the end, and return the exit code."""
        try:
            while True:
                self._read(TIMEOUT)
        except OSError:  # the terminal is closed
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self, seconds: float) -> None:
        if select.select([self._descriptor], [], [], seconds)[0]:
            content = os.read(self._descriptor, 1 << 16)
            if not content:
                raise OSError("closed")
            self.text += content.decode("utf-8", "reposition")


@pytest.fixture(params=[(), ("--ranks", "2", "--pp", "2")], ids=["alone", "two ranks"])
def terminal(models: Dict[int, Path], request: pytest.FixtureRequest) -> Iterator[Tuple[Terminal, int]]:
    """A conversation whose answers take longer than a user's patience, and the position behind its first prompt."""
    chat = Terminal("generate", models[4000], "--chat", "--max-tokens", "3900", "--threads", "1", *request.param)
    yield chat, chat.read_until("> ")
    chat.close()


@pytest.mark.mpi
def test_a_user_types_stops_an_answer_and_ends(terminal: Tuple[Terminal, int]) -> None:
    chat, position = terminal
    chat.type("It's a text\n")
    position = chat.read_until("It's a text\r\n", position)  # the terminal's echo
    chat.read_characters(position + 20)
    chat.type("\x03")
    position = chat.read_until("the answer was stopped", position)
    position = chat.read_until("> ", position)
    chat.type("words\n")
    position = chat.read_until("words\r\n", position)
    chat.read_characters(position + 20)
    chat.type("\x03")
    position = chat.read_until("the answer was stopped", position)
    chat.read_until("> ", position)
    chat.type("\x04")
    assert chat.end() == 0, chat.text
    assert "prompts read: " in chat.text


def test_a_conversation_needs_a_chat_template_and_text(tmp_path: Path, capsys: "pytest.CaptureFixture[str]") -> None:
    path = save_model(tmp_path, model_of_kind("llama", "model.vocab_size=332"))
    tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, path / "tokenizer.json")
    assert run(["generate", str(tmp_path), "--chat"]) == 2
    assert "has no chat_template" in capsys.readouterr().err
    assert run(["generate", str(tmp_path), "--chat", "--format", "jsonl"]) == 2
    assert "--format jsonl: goes with --prompt or --prompts, not with a conversation" in capsys.readouterr().err
