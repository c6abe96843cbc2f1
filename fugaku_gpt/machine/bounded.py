"""Calls a function on untrusted input in a child process that may use only so much time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import Callable

import psutil

_MEMORY_EXIT, _ERROR_EXIT = 3, 4


class BoundExceeded(Exception):
    """The function needed more than it may; the message names the limit."""


def call_in_child(function: Callable[[], str], *, seconds: int, memory: int, length: int) -> str:
    """Return the text that a function returns in a child of this process.

    The kernel ends it at its limits, whatever it does: no construct of a language can be forgotten. The function must
    handle its own errors, and must not depend on threads of this process.

    Args:
        seconds: processor time.
        memory: bytes that it may need on top of those of this process.
        length: characters of the text, at most.

    Raises:
        BoundExceeded: a limit is exceeded.
    """
    pipe_read, pipe_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        os.close(pipe_read)
        _run_and_exit(function, pipe_write, seconds, memory)
    os.close(pipe_write)
    content = b""
    with open(pipe_read, "rb") as stream:
        content = stream.read(4 * length + 1)
        is_longer = len(content) > 4 * length
    if is_longer:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    text = content.decode("utf-8", "surrogatepass") if not is_longer else ""
    if is_longer or len(text) > length:
        raise BoundExceeded(f"makes more than {length:,} characters")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        raise BoundExceeded(f"takes more than {seconds} s of processor time")
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return text
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _MEMORY_EXIT:
        raise BoundExceeded(f"needs more than {memory // 2**20} MiB of memory")
    raise BoundExceeded(f"has ended the process that ran it (wait status {status})")


def _run_and_exit(function: Callable[[], str], pipe: int, seconds: int, memory: int) -> None:
    code = _ERROR_EXIT
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        limit = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        content = function().encode("utf-8", "surrogatepass")
        with open(pipe, "wb") as stream:
            stream.write(content)
        code = 0
    except MemoryError:
        code = _MEMORY_EXIT
    finally:
        os._exit(code)


def _address_space() -> int:
    return int(psutil.Process().memory_info().vms)
