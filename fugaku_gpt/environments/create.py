"""Creates an environment on this machine with ``env/make_environment.sh``, which the Makefile uses too."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable, List, Optional, Sequence

from fugaku_gpt.config.profile import Profile
from fugaku_gpt.environments.registry import is_managed, require_architecture
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.launch.processes import run_command
from fugaku_gpt.machine.checkout import checkout

_QUIET_SECONDS = 5.0  # after this time without output from pip, a line says that it is at work
_QUOTED_LINES = 20
# beginnings of the output lines that show progress, with those of our own command that compiles kernels
_PROGRESS = (
    "Collecting ",
    "Downloading ",
    "Using cached ",
    "Building ",
    "Installing ",
    "Successfully ",
    "installing ",
    "compiling ",
    "kernels: ",
    "fugaku-gpt: ",
    "=== NOT CHECKED ",
)


def find_python(version: str) -> str:
    """A Python of a version, on PATH or in pyenv, by ``env/find_python.sh``.

    Raises:
        UsageError: there is none, or no checkout with that script.
    """
    process = subprocess.run(
        [str(_script("find_python.sh")), version], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
    )
    if process.returncode != 0:
        raise UsageError(
            f"no Python {version} on PATH and none in pyenv; install one, such as with `pyenv install {version}`, or "
            "name one with --python"
        )
    return process.stdout.decode("utf-8", "replace").strip()


def create(
    profile: Profile,
    folder: Path,
    python: Optional[str],
    pip_arguments: Sequence[str],
    on_progress: Callable[[str], None],
    unchecked: Sequence[str] = (),
) -> float:
    """Create an environment, or continue an unfinished one; returns the seconds that it took.

    An unfinished folder has no mark, so that nothing uses it as an environment; what it contains is used again.

    Args:
        profile: the profile, as ``resolve`` returns it.
        folder: the virtual environment.
        python: the Python to create it with; default: one of the profile's version.
        pip_arguments: further arguments of each `pip install`.
        on_progress: called with lines that show how far it is.
        unchecked: packages that are installed without a check of their hashes, or ``all``; default: those that the
            variable UNCHECKED names.

    Raises:
        UsageError: it cannot be started, or its pins are for another architecture.
        RunFailed: it was started and did not end well; the message quotes pip's last lines.
    """
    if not profile.pins:
        raise UsageError(f"{profile.name}: its profile names no pins: there is nothing to make")
    if not Path(profile.pins).is_file():
        raise UsageError(f"{profile.pins}: the pins of {profile.name} are not there")
    require_architecture(profile)
    script = _script("make_environment.sh")
    _refuse_foreign_folder(folder)
    interpreter = python or find_python(profile.python_version)
    on_progress(f"{profile.name}: a virtual environment in {folder} with {interpreter}")
    mark = profile.name.rpartition("-")[2] or profile.name
    argv = [str(script), interpreter, str(folder), profile.pins, mark, "--progress-bar", "off", *pip_arguments]
    variables = {"MPI": "wheel", "PYTHONUNBUFFERED": "1", **({"UNCHECKED": " ".join(unchecked)} if unchecked else {})}
    progress = _ProgressLines(on_progress)
    with progress:
        outcome = run_command(argv, variables, on_line=progress.add)
    if outcome.stopped_by is not None:
        raise RunFailed(f"{folder}: stopped; the same command continues from here")
    if not outcome.ok:
        output = "\n".join(progress.last_lines)
        raise RunFailed(f"{output}\n{folder}: is not complete, and is not used; the same command continues from here")
    return outcome.seconds


def _refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder that is not empty and is not managed by us: creating an environment may remove its contents."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder}: is a file, not a folder; choose a folder with --at")
    try:
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read: {error.strerror}") from None
    if not is_empty and not is_managed(folder):
        description = (
            "a virtual environment of your own" if (folder / "pyvenv.cfg").exists() else "no virtual environment"
        )
        raise UsageError(f"{folder}: exists and is {description}; choose another folder with --at")


class _ProgressLines:
    """Receives the output lines of the work, passes on those that show progress, and reports long silences."""

    def __init__(self, on_progress: Callable[[str], None]) -> None:
        self.last_lines: List[str] = []
        self._on_progress = on_progress
        self._started = self._last_line_at = time.monotonic()
        self._has_ended = threading.Event()
        self._watch = threading.Thread(target=self._report_silence, daemon=True)

    def __enter__(self) -> "_ProgressLines":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._watch.join()

    def add(self, line: str) -> None:
        self._last_line_at = time.monotonic()
        text = line.strip()
        if not text:
            return
        self.last_lines = [*self.last_lines, text][-_QUOTED_LINES:]
        if text.startswith(_PROGRESS):
            self._on_progress(f"{self._last_line_at - self._started:6.1f} s  {text[:200]}")

    def _report_silence(self) -> None:
        while not self._has_ended.wait(0.5):
            seconds = time.monotonic()
            if seconds - self._last_line_at > _QUIET_SECONDS:
                self._last_line_at = seconds
                self._on_progress(f"{seconds - self._started:6.1f} s  at work")


def _script(name: str) -> Path:
    root = checkout()
    if root is None:
        raise UsageError(
            "this fugaku_gpt was installed without its checkout, in which env/make_environment.sh makes environments: "
            "clone the repository, and run it from there"
        )
    script = root / "env" / name
    if not os.access(script, os.X_OK):
        raise UsageError(f"{script}: cannot be run: it is not an executable file")
    return script
