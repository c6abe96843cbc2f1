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
_LONGEST_ERROR = 300  # characters


class BoundExceeded(Exception):
    """The function gave no text: it needed more than it may, it failed, or its process was ended; the message continues
    a sentence that begins with what the function does, and names the limit, the error or the signal."""


def call_in_child(function: Callable[[], str], *, seconds: int, memory: int, length: int) -> str:
    """Return the text that a function returns in a child of this process.

    The kernel ends it at its limits, whatever it does: no construct of a language can be forgotten. The function must
    not depend on threads of this process.

    Args:
        seconds: processor time.
        memory: bytes that it may need on top of those of this process.
        length: characters of the text, at most.

    Raises:
        BoundExceeded: a limit is exceeded, the function has raised an error, or its process was ended.
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
    _, status, usage = os.wait4(child, 0)
    text = content.decode("utf-8", "surrogatepass") if not is_longer else ""
    if is_longer or len(text) > length:
        raise BoundExceeded(f"makes more than {length:,} characters")
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return text
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _ERROR_EXIT:
        raise BoundExceeded(f"fails: {text[:_LONGEST_ERROR]}")
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _MEMORY_EXIT:
        raise BoundExceeded(f"needs more than {memory // 2**20} MiB of memory")
    if not os.WIFSIGNALED(status):
        raise BoundExceeded(f"has ended the process that ran it (exit code {os.WEXITSTATUS(status)})")
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU or (number == signal.SIGKILL and usage.ru_utime + usage.ru_stime >= seconds):
        raise BoundExceeded(f"takes more than {seconds} s of processor time")
    by_whom = ": by the kernel for want of memory, or by another process" if number == signal.SIGKILL else ""
    raise BoundExceeded(f"is ended by signal {number}, {signal.strsignal(number)}{by_whom}")


def _run_and_exit(function: Callable[[], str], pipe: int, seconds: int, memory: int) -> None:
    code = _ERROR_EXIT
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        limit = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        _write(pipe, function())
        code = 0
    except MemoryError:
        code = _MEMORY_EXIT
    except BaseException as error:
        _write(pipe, f"{type(error).__name__}: {error}"[:_LONGEST_ERROR])
    finally:
        os._exit(code)


def _write(pipe: int, text: str) -> None:
    with open(pipe, "wb") as stream:
        stream.write(text.encode("utf-8", "surrogatepass"))


def _address_space() -> int:
    return int(psutil.Process().memory_info().vms)
