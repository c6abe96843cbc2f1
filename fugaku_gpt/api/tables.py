"""Rows for other programs: as pandas has them, where it is installed."""

from __future__ import annotations

from typing import Any, Dict, Sequence

from fugaku_gpt.errors import missing_package


def data_frame(rows: Sequence[Dict[str, Any]], columns: Sequence[str]) -> Any:
    """Rows as a ``pandas.DataFrame`` with these columns.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from None
    return pandas.DataFrame(list(rows), columns=list(columns))
