"""The metrics of runs as a table for other tools.

It has one row for each line of ``metrics.jsonl`` of the kinds ``iteration``, ``validation`` and ``evaluation``, without
lines that a resumed run has superseded, in the order of the files.

A cell is empty in CSV, and null in Parquet, where a line has no such figure, and where it was not finite. Texts are
escaped as in all tables: no control characters, and in CSV an apostrophe before what a spreadsheet would compute.
Numbers in CSV are the shortest texts that are read back as the same float64. Rows are written as lines are read, so
that the memory does not grow with the files.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, List, Mapping, NamedTuple

from fugaku_gpt.errors import UsageError
from fugaku_gpt.harmless import csv_cell, harmless
from fugaku_gpt.limits import cut
from fugaku_gpt.records.files import written_atomically
from fugaku_gpt.records.metrics import EVALUATION, ITERATION, VALIDATION, read_valid_lines
from fugaku_gpt.records.run import RunDirectory
from fugaku_gpt.typed_json import is_number

TEXT, INTEGER, NUMBER = "text", "int64", "float64"
_KINDS = (ITERATION, VALIDATION, EVALUATION)
_BATCH_ROWS = 8192  # of a row group of Parquet, and of a piece of CSV


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        kind: its type in Parquet; ``text`` is a string.
        meaning: meaning and unit.
    """

    kind: str
    meaning: str


COLUMNS: Mapping[str, Column] = {
    "run": Column(TEXT, "folder of the run, below the folder that holds all that was exported"),
    "kind": Column(TEXT, "`iteration`, `validation` or `evaluation`"),
    "iteration": Column(INTEGER, "number of the iteration, from 1; 0 before the first"),
    "name": Column(TEXT, "file of `training.eval_files` that was evaluated"),
    "loss": Column(NUMBER, "mean loss of a token, or of a grid"),
    "lr": Column(NUMBER, "learning rate"),
    "grad_norm": Column(NUMBER, "norm of the gradient, before it is clipped"),
    "loss_scale": Column(NUMBER, "scale of the loss, with float16"),
    "params_norm": Column(NUMBER, "norm of the parameters, in imported logs"),
    "accuracy": Column(NUMBER, "share of grids whose class had the largest logit"),
    "bits_per_byte": Column(NUMBER, "loss of an evaluated text in bits for each byte"),
    "tokens": Column(INTEGER, "tokens that were validated or evaluated"),
    "global_batch": Column(INTEGER, "samples of the iteration"),
    "actual_seq_len": Column(INTEGER, "tokens of a sample, or cells of a grid, where they vary"),
    "consumed_samples": Column(INTEGER, "samples consumed by the training so far"),
    "consumed_tokens": Column(INTEGER, "tokens consumed by the training so far"),
    "skipped_iterations": Column(INTEGER, "iterations so far without a step of the optimiser"),
    "seconds": Column(NUMBER, "seconds of an iteration, since the line before"),
    "samples_per_second": Column(NUMBER, "samples in a second, since the line before"),
    "tokens_per_second": Column(NUMBER, "tokens in a second, since the line before"),
    "images_per_second": Column(NUMBER, "grids in a second, since the line before"),
    "tflops_notes": Column(NUMBER, "TFLOP/s of a node by the formula of the notes"),
    "tflops_exact": Column(NUMBER, "TFLOP/s of a node, of all matrix products"),
    "tflops_logged": Column(NUMBER, "TFLOP/s as an imported log states them"),
    "rss_max_bytes": Column(INTEGER, "memory of the largest rank, in bytes"),
    "node_used_bytes": Column(INTEGER, "memory in use on the fullest node, in bytes"),
    "bubble": Column(NUMBER, "idle over busy time in the pipeline, mean over the stages"),
    "bubble_max": Column(NUMBER, "the same of the stage that idles most"),
    "bubble_predicted": Column(NUMBER, "`bubble` by the schedule and the work of each stage"),
    "bubble_ideal": Column(NUMBER, "`bubble` by the schedule, if all stages were equal"),
    "hidden_communication": Column(NUMBER, "share of the replicas' communication that overlaps with computation"),
    "compute_max": Column(NUMBER, "seconds of an iteration in which the slowest rank computes"),
    "compute_max_rank": Column(INTEGER, "that rank"),
    "compute_max_node": Column(TEXT, "its node"),
    "compute_min": Column(NUMBER, "seconds of an iteration in which the fastest rank computes"),
    "compute_min_rank": Column(INTEGER, "that rank"),
    "compute_min_node": Column(TEXT, "its node"),
    "buckets": Column(TEXT, "figures by the side of grids, as JSON"),
}

_PLACES = {name: place for place, name in enumerate(COLUMNS)}
Row = List[Any]


def exported_rows(runs: Mapping[Path, str]) -> Iterator[Row]:
    """Yield a row for each line of runs, with a cell for each of ``COLUMNS``; None is no value.

    Args:
        runs: the name of each run directory.

    Raises:
        UsageError: a file of metrics cannot be read, or a line is damaged.
    """
    for path, name in runs.items():
        file = RunDirectory(path).metrics_file
        for line in read_valid_lines(file):
            if line.get("kind") in _KINDS:
                values = {"iteration": 0, **line, "run": name}
                row: Row = [None] * len(COLUMNS)
                for column, value in values.items():
                    if column in _PLACES and value is not None:
                        row[_PLACES[column]] = _checked(column, value, file, values)
                yield row


def write_csv(rows: Iterator[Row], write: Callable[[str], Any]) -> None:
    """Write rows as CSV, piece by piece.

    Args:
        write: called with each piece of the text, which ends in a newline.
    """
    batch: List[Row] = [list(COLUMNS)]
    while batch:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(
            [csv_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in batch
        )
        write(buffer.getvalue())
        batch = _next_rows(rows)


def write_csv_file(rows: Iterator[Row], path: Path) -> None:
    """Write rows as a file of CSV, which is complete or absent.

    Raises:
        UsageError: it cannot be written; or reading a row has failed.
    """
    with _writable(path) as stream:
        write_csv(rows, lambda text: stream.write(text.encode("utf-8")))


def write_parquet_file(rows: Iterator[Row], path: Path) -> None:
    """Write rows as a Parquet file, which is complete or absent.

    Raises:
        UsageError: it cannot be written; or reading a row has failed.
        ModuleNotFoundError: pyarrow is not installed.
    """
    import pyarrow  # the optional extra `parquet`
    import pyarrow.parquet

    types = {TEXT: pyarrow.string(), INTEGER: pyarrow.int64(), NUMBER: pyarrow.float64()}
    fields = [
        pyarrow.field(name, types[column.kind], metadata={"description": column.meaning})
        for name, column in COLUMNS.items()
    ]
    schema = pyarrow.schema(fields)
    with _writable(path) as stream, pyarrow.parquet.ParquetWriter(stream, schema) as writer:
        while True:
            batch = [[harmless(cell) if isinstance(cell, str) else cell for cell in row] for row in _next_rows(rows)]
            if not batch:
                return
            arrays = [pyarrow.array(cells, field.type) for cells, field in zip(zip(*batch), fields)]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))


def _next_rows(rows: Iterator[Row]) -> List[Row]:
    return list(islice(rows, _BATCH_ROWS))


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is complete or absent.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        with written_atomically(path) as stream:
            yield stream
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def _checked(name: str, value: Any, file: Path, line: Mapping[str, Any]) -> Any:
    """A value as its column holds it.

    Raises:
        UsageError: it is of another type.
    """
    kind = COLUMNS[name].kind
    if kind == TEXT:
        return value if isinstance(value, str) else json.dumps(value)
    if is_number(value):
        if kind == NUMBER:
            return float(value)
        if value == int(value) and abs(value) < 2**63:
            return int(value)
    expected = "a whole number" if kind == INTEGER else "a number"
    raise UsageError(f"{file}: iteration {line['iteration']}: {name} {cut(repr(value))}: not {expected}")
