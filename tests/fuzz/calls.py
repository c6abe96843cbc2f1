"""Calls a reader with a file, within limits of time and memory, and judges what comes out of it."""

from __future__ import annotations

import resource
import signal
import time
import traceback
from pathlib import Path
from typing import Any, Dict, Tuple

import psutil

from fugaku_gpt.errors import FugakuGptError
from tests.fuzz.readers import Reader

SECONDS, MEMORY = 2.0, 512 * 2**20
WALL_SECONDS = 30.0  # a call that waits for something, such as a pipe


class LimitExceeded(BaseException):
    """A call takes too long. No reader catches it."""


def watch_time() -> None:
    """Have :class:`LimitExceeded` raised where a call takes too long."""
    signal.signal(signal.SIGALRM, _stop)
    signal.signal(signal.SIGPROF, _stop)


def call_reader(reader: Reader, path: Path, content: bytes, limit: float, kinds: Dict[str, Tuple[bytes, str]]) -> None:
    """Call a reader once, and record what is not an error of ours."""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, 2 * limit)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS * limit / SECONDS)
    text = ""
    try:
        reader.read(path)
    except FugakuGptError as error:
        text = _problem_of_message(error)
    except (Exception, LimitExceeded):
        text = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.process_time() - began
    if not text and took > limit:
        text = f"takes {took:.1f} s of processor time"
    if text:
        name = _kind_of(text)
        if name not in kinds or len(content) < len(kinds[name][0]):
            kinds[name] = (content, "\n".join(line[:300] for line in text.splitlines()[-12:]))


def _problem_of_message(error: FugakuGptError) -> str:
    """Judge a message of ours: empty if it is good; else that it is empty, or has text of a file without a bound."""
    message = str(error)
    if not message.strip():
        return f"an empty message of {type(error).__name__}"
    longest = max(map(len, message.splitlines()))
    return f"a message with a long line: {longest} characters: {message[:300]}" if longest > 5000 else ""


def _kind_of(text: str) -> str:
    """Return what tracebacks of one fault have in common: the last line of our code, and the type of the error."""
    lines = text.splitlines()
    if "fugaku_gpt/" not in text:
        return lines[0].partition(":")[0]
    places = [line.strip() for line in lines if "fugaku_gpt/" in line and "File" in line]
    return f"{places[-1] if places else ''} {lines[-1].partition(':')[0]}"


class bounded_memory:
    """Bounds the address space of this process in the block to what it has, and ``MEMORY``."""

    def __enter__(self) -> None:
        size = int(psutil.Process().memory_info().vms)
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


def _stop(number: int, frame: Any) -> None:
    unit = "processor time" if number == signal.SIGPROF else "time"
    raise LimitExceeded(f"takes more than the limit of {unit}")
