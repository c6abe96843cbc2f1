"""Reads documents out of tables in Parquet files with the optional library pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List

from fugaku_gpt.data.forms import BadText
from fugaku_gpt.data.json_records import OnBad, text_of_record
from fugaku_gpt.errors import DataError

_ROWS = 256  # rows in memory at a time, as one may have a book


def table_rows(stream: BinaryIO, path: Path, text_key: str, on_bad: OnBad) -> Iterator[bytes]:
    """Yield the text of each row; rows without one are given to ``on_bad``.

    Raises:
        BadText: the file is damaged, or has no such column.
        DataError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: a Parquet file, which needs the package pyarrow ({error}); "
            "install it: pip install 'fugaku_gpt[parquet]'"
        ) from None
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(stream)
        column = _column(list(file.schema_arrow.names), text_key, path)
        for batch in file.iter_batches(batch_size=_ROWS, columns=[column], use_threads=False):
            for index in range(batch.num_rows):
                number += 1
                try:
                    row = _row(batch, index, f"{path}: row {number}")
                    text = text_of_record(_as_record(row), text_key, f"{path}: row {number}")
                except BadText as error:
                    on_bad(error)
                    continue
                yield text
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(". ")
        raise BadText(f"{path}: not a complete Parquet file: {reason}; copy it again") from None


def _column(names: List[str], text_key: str, path: Path) -> str:
    """The column that holds the key: the key itself, or the beginning of a dotted one."""
    components = text_key.split(".")
    for count in range(len(components), 0, -1):
        name = ".".join(components[:count])
        if name in names:
            return name
    raise BadText(f"{path}: no column {text_key!r}; columns: {', '.join(names)}; name one with --text-key")


def _row(batch: Any, index: int, location: str) -> Dict[str, Any]:
    """A row of a batch, by column.

    Raises:
        BadText: a text in it is no UTF-8, which pyarrow does not look at before.
    """
    try:
        (row,) = batch.slice(index, 1).to_pylist()
    except UnicodeDecodeError as error:
        raise BadText(f"{location}: no UTF-8: {error.reason}") from None
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
