"""Reads documents out of tables in Parquet and Arrow files with the optional library pyarrow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Tuple

from fugaku_gpt.data.forms import ARROW_FILE, PARQUET, BadText
from fugaku_gpt.data.json_records import OnBad, TextKeys, text_of_record
from fugaku_gpt.errors import DataError

_ROWS = 256  # rows in memory at a time, as one may have a book
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # Arrow's "IPC streaming format": a message of length 0


def table_rows(stream: BinaryIO, form: str, path: Path, keys: TextKeys, on_bad: OnBad) -> Iterator[bytes]:
    """Yield the text of each row; rows without one are given to ``on_bad``.

    Args:
        form: ``PARQUET``, ``ARROW_FILE`` or ``ARROW_STREAM`` of :mod:`fugaku_gpt.data.forms`.

    Raises:
        BadText: the file is damaged, or has none of the columns.
        DataError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: {'a' if form == PARQUET else 'an'} {form}, which needs the package pyarrow ({error}); "
            "install it: pip install 'fugaku_gpt[parquet]'"
        ) from None
    number = 0
    try:
        batches = _parquet_batches(stream, path, keys) if form == PARQUET else _arrow_batches(stream, form, path, keys)
        for batch, is_sound in batches:
            for index in range(batch.num_rows):
                number += 1
                try:
                    row = _row(batch.slice(index, 1), is_sound, f"{path}: row {number}")
                    text = text_of_record(_as_record(row), keys, f"{path}: row {number}")
                except BadText as error:
                    on_bad(error)
                    continue
                yield text
    except MemoryError:  # pyarrow's own is one, too
        raise BadText(
            f"{path}: after row {number} a batch needs more memory than there is; copy the {form} again, or write "
            "it in smaller batches"
        ) from None
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for names of columns
        reason = " ".join(str(error).split()).rstrip(". ")
        raise BadText(f"{path}: not a complete {form}: {reason}; copy it again") from None


def _parquet_batches(stream: BinaryIO, path: Path, keys: TextKeys) -> "Iterator[Tuple[Any, bool]]":
    """Yield the rows of the text's columns in batches, and that their structure is sound."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(stream)
    columns = _columns(list(file.schema_arrow.names), keys, path)
    for batch in file.iter_batches(batch_size=_ROWS, columns=columns, use_threads=False):
        yield batch, True


def _arrow_batches(stream: BinaryIO, form: str, path: Path, keys: TextKeys) -> "Iterator[Tuple[Any, bool]]":
    """Yield the record batches of an Arrow file with the text's columns alone, and whether their structure is sound:
    buffers are in memory as they are in the file."""
    import pyarrow
    import pyarrow.ipc

    names = list(
        (pyarrow.ipc.open_file(stream) if form == ARROW_FILE else pyarrow.ipc.open_stream(stream)).schema.names
    )
    columns = sorted(map(names.index, _columns(names, keys, path)))
    options = pyarrow.ipc.IpcReadOptions(included_fields=columns, use_threads=False)
    stream.seek(0)
    if form == ARROW_FILE:
        file = pyarrow.ipc.open_file(stream, options=options)
        batches = (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        batches = iter(pyarrow.ipc.open_stream(stream, options=options))
    for batch in batches:
        yield batch, _is_sound(batch)
    if form != ARROW_FILE and not _has_end_of_stream(stream):
        raise BadText(f"{path}: not a complete {form}: it has no mark of its end; copy it again")


def _is_sound(batch: Any) -> bool:
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid:
        return False
    return True


def _has_end_of_stream(stream: BinaryIO) -> bool:
    """Whether a file ends as a stream of Arrow does. The library takes one that is cut between two messages for
    complete."""
    stream.seek(-len(_END_OF_STREAM), os.SEEK_END)
    return stream.read() == _END_OF_STREAM


def _columns(names: List[str], keys: TextKeys, path: Path) -> List[str]:
    """The columns that hold the keys, each once: the key itself, or the beginning of a dotted one.

    Raises:
        BadText: the table has none of them.
    """
    columns = {}
    for text_key in keys.keys:
        components = text_key.split(".")
        beginnings = (".".join(components[:count]) for count in range(len(components), 0, -1))
        columns.update(dict.fromkeys([name for name in beginnings if name in names][:1]))
    if not columns:
        named = " or ".join(map(repr, keys.keys))
        raise BadText(f"{path}: no column {named}; columns: {', '.join(names)}; name one with --text-key")
    return list(columns)


def _row(batch: Any, is_sound: bool, location: str) -> Dict[str, Any]:
    """The row of a batch of one, by column.

    Raises:
        BadText: its offsets lie outside its data, or a text in it is no UTF-8, which pyarrow does not look at before.
    """
    import pyarrow

    try:
        if not is_sound:
            batch.validate(full=True)
        (row,) = batch.to_pylist()
    except UnicodeDecodeError as error:
        raise BadText(f"{location}: no UTF-8: {error.reason}") from None
    except pyarrow.ArrowInvalid as error:
        raise BadText(f"{location}: damaged: {' '.join(str(error).split())}") from None
    return dict(row)


def _as_record(row: Dict[str, Any]) -> Dict[str, Any]:
    """A row with binary values as text where they are UTF-8, as older writers store text."""
    record = {}
    for key, value in row.items():
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError:
                value = None
        record[key] = value
    return record
