"""Reads JSON files that carry a ``version``, and reports in one place whatever can be wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Type, TypeVar

from fugaku_gpt.errors import FugakuGptError, UsageError
from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.limits import RECORD, cut

T = TypeVar("T")


def read_versioned_json(
    path: Path,
    kind: str,
    versions: Sequence[int],
    parse: Callable[[Dict[str, Any]], T],
    *,
    mend: str,
    error: Type[FugakuGptError] = UsageError,
    is_missing_if_empty: bool = False,
) -> Optional[T]:
    """Read a JSON object whose ``version`` this program knows.

    Args:
        kind: what the file should be, with its article, such as ``an exit record``; for messages.
        versions: the values of ``version`` that can be read, the present one first.
        parse: makes the result from the file's values; a KeyError, TypeError, ValueError, AttributeError or
            OverflowError in it means that the file is not of this kind. Other errors pass through.
        mend: what the user can do about a file that cannot be used, as an imperative.
        error: type of the error that is raised.
        is_missing_if_empty: an empty file counts as missing: where a file system has no hard links, a writer that was
            killed may leave one (see :func:`fugaku_gpt.records.files.create_text_atomically`).

    Returns:
        What ``parse`` returns, or None where there is no such file.

    Raises:
        FugakuGptError: of type ``error``: the file cannot be read, is not of this kind, or is of another version. Its
            cause is the ``OSError`` where the system refused to read it.
    """
    try:
        content = read_bytes(path, RECORD)
    except FileNotFoundError:
        return None
    except OSError as refused:
        raise error(f"{path}: cannot be read: {refused.strerror}; {mend}") from refused
    if not content and is_missing_if_empty:
        return None
    return parse_versioned_json(content, path, kind, versions, parse, mend=mend, error=error)


def parse_versioned_json(
    content: bytes,
    path: Path,
    kind: str,
    versions: Sequence[int],
    parse: Callable[[Dict[str, Any]], T],
    *,
    mend: str,
    error: Type[FugakuGptError] = UsageError,
) -> T:
    """Parse the content of such a file; the arguments and errors are those of :func:`read_versioned_json`.

    Args:
        content: UTF-8.
        path: names the file in messages.
    """

    def refusal(reason: str) -> FugakuGptError:
        return error(f"{path}: not {kind}: {reason}; {mend}")

    try:
        values = parse_json(content.decode("utf-8"))
    except ValueError:
        raise refusal("it is not JSON") from None
    if not isinstance(values, dict):
        raise refusal("it is not a JSON object")
    if "version" not in values:
        raise refusal("it has no 'version'")
    version = values["version"]
    if not isinstance(version, int) or version not in versions:
        readable = " and ".join(map(str, versions))
        raise error(
            f"{path}: version {cut(repr(version))} of this format; this program reads version {readable}; {mend}"
        )
    try:
        return parse(values)
    except KeyError as missing:
        raise refusal(f"it has no {missing.args[0]!r}") from None
    except ValueError as wrong:
        raise refusal(cut(str(wrong))) from None
    except (TypeError, AttributeError, OverflowError):  # the last: of a number that is infinite, or past a float
        raise refusal("its fields are not those of this version") from None
