"""A terminal for tests: a tmux server of its own with one window, whose screen is read."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Callable, List, Optional, Sequence, Type

_DEADLINE = 60.0  # seconds, for a busy machine


def has_tmux() -> bool:
    """Whether tmux is installed."""
    return shutil.which("tmux") is not None


class Terminal:
    """Runs a command in a window, until the block ends.

    Args:
        folder: for the server's socket.
        command: program and arguments.
    """

    def __init__(self, folder: Path, command: Sequence[str], width: int = 80, height: int = 24) -> None:
        self._socket, self._exit_code = folder / "tmux", folder / "exit-code"
        environment = {"LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        variables = [f"{name}={value}" for name, value in environment.items()]
        size = ["-x", str(width), "-y", str(height)]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "cat")
        self._tmux("set-option", "remain-on-exit", "on")
        self._tmux("respawn-window", "-k", "env", "-u", "COLUMNS", "-u", "LINES", *variables, *self._recorded(command))

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._tmux("kill-server")

    def _recorded(self, command: Sequence[str]) -> List[str]:
        """A command that records the exit code of another, which a key may interrupt."""
        return ["sh", "-c", 'trap : INT; "$@"; echo $? > "$0"', str(self._exit_code), *command]

    def screen(self) -> List[str]:
        """The lines of the screen, without spaces at their ends."""
        return self._tmux("capture-pane", "-p").split("\n")[:-1]

    def screen_when(self, is_there: Callable[[str], bool]) -> List[str]:
        """The screen, as soon as its text meets a condition."""
        deadline = time.monotonic() + _DEADLINE
        while True:
            lines = self.screen()
            if is_there("\n".join(lines)):
                return lines
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.1)

    def press(self, key: str) -> None:
        """Press a key, such as ``C-c``."""
        self._tmux("send-keys", key)

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def title(self) -> str:
        """The title of the window, which programs can set by an escape sequence."""
        return self._tmux("display-message", "-p", "#{pane_title}").strip()

    def exit_code(self) -> int:
        """The exit code of the command, once it has ended."""
        deadline = time.monotonic() + _DEADLINE
        while not self._exit_code.exists() or not self._exit_code.read_text():
            assert time.monotonic() < deadline, "\n".join(self.screen())
            time.sleep(0.1)
        return int(self._exit_code.read_text())

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-u", "-S", str(self._socket), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
