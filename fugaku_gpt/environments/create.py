"""Making an environment on this machine, by ``env/make_environment.sh``, which the Makefile uses too."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable, List, Optional, Sequence

from fugaku_gpt.config.profile import Profile
from fugaku_gpt.environments.registry import checkout, is_ours
from fugaku_gpt.errors import RunFailed, UsageError
from fugaku_gpt.launch.processes import run_command

_QUIET_SECONDS = 5.0  # without a word from pip, it is told that the work goes on
_TOLD_LINES = 20
# of the work's lines, those that tell how far it is, and what our own command says that compiles kernels
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
)


def find_python(version: str) -> str:
    """A Python of a version, on PATH or in pyenv, by ``env/find_python.sh``.

    Raises:
        UsageError: there is none, or no checkout to look with.
    """
    done = subprocess.run(
        [str(_script("find_python.sh")), version], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        raise UsageError(
            f"no Python {version} on PATH and none in pyenv; install one, such as with `pyenv install {version}`, or "
            "name one with --python"
        )
    return done.stdout.decode("utf-8", "replace").strip()


def create(
    profile: Profile,
    folder: Path,
    python: Optional[str],
    pip_words: Sequence[str],
    tell: Callable[[str], None],
) -> float:
    """Make an environment, or finish one that was begun; returns the seconds it took.

    A folder that is not whole has no mark, so that nothing takes it for an environment; what is in it is used again.

    Args:
        profile: as ``resolve`` gives it.
        folder: the virtual environment.
        python: makes it; default: one of the profile's version.
        pip_words: more words for each `pip install`.
        tell: gets lines about how far it is.

    Raises:
        UsageError: it cannot be begun.
        RunFailed: it was begun and did not end well; its message ends in pip's last words.
    """
    if not profile.pins:
        raise UsageError(f"{profile.name}: its profile names no pins: there is nothing to make")
    if not Path(profile.pins).is_file():
        raise UsageError(f"{profile.pins}: the pins of {profile.name} are not there")
    script = _script("make_environment.sh")
    _refuse_what_is_not_ours(folder)
    interpreter = python or find_python(profile.python_version)
    tell(f"{profile.name}: a virtual environment in {folder} with {interpreter}")
    mark = profile.name.rpartition("-")[2] or profile.name
    argv = [str(script), interpreter, str(folder), profile.pins, mark, "--progress-bar", "off", *pip_words]
    lines = _Lines(tell)
    with lines:
        outcome = run_command(argv, {"MPI": "wheel", "PYTHONUNBUFFERED": "1"}, on_line=lines.hear)
    if outcome.stopped_by is not None:
        raise RunFailed(f"{folder}: stopped; the same command goes on from here")
    if not outcome.ok:
        said = "\n".join(lines.last)
        raise RunFailed(f"{said}\n{folder}: is not whole, and is not used; the same command goes on from here")
    return outcome.seconds


def _refuse_what_is_not_ours(folder: Path) -> None:
    """What is not empty, and was not made here, stays as it is: making an environment may remove what was there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder}: is a file, not a folder; choose a folder with --at")
    try:
        empty = not any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read: {error.strerror}") from None
    if not empty and not is_ours(folder):
        what = "a virtual environment of your own" if (folder / "pyvenv.cfg").exists() else "no virtual environment"
        raise UsageError(f"{folder}: is there and is {what}; choose another folder with --at")


class _Lines:
    """Hears the lines of the work, passes on those that tell how far it is, and tells of long silences."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.last: List[str] = []
        self._tell = tell
        self._started = self._heard = time.monotonic()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._tell_of_silence, daemon=True)

    def __enter__(self) -> "_Lines":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()

    def hear(self, line: str) -> None:
        self._heard = time.monotonic()
        words = line.strip()
        if not words:
            return
        self.last = [*self.last, words][-_TOLD_LINES:]
        if words.startswith(_PROGRESS):
            self._tell(f"{self._heard - self._started:6.1f} s  {words[:200]}")

    def _tell_of_silence(self) -> None:
        while not self._over.wait(0.5):
            now = time.monotonic()
            if now - self._heard > _QUIET_SECONDS:
                self._heard = now
                self._tell(f"{now - self._started:6.1f} s  at work")


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
