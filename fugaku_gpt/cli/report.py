"""``fugaku-gpt report``: tables of runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Counter, Dict, List, Optional, Sequence, Tuple

import click

from fugaku_gpt.cli.options import FORMATS, PATH, format_option
from fugaku_gpt.cli.output import echo, json_document, render_rows
from fugaku_gpt.cli.report_export import export
from fugaku_gpt.cli.report_runs import runs
from fugaku_gpt.cli.report_trace import trace
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, UsageError
from fugaku_gpt.input_files import read_bytes
from fugaku_gpt.limits import TABLE_TEXT
from fugaku_gpt.records.files import write_text_atomically
from fugaku_gpt.report.catalogue import MACHINE_NAMES
from fugaku_gpt.report.check import check_tables
from fugaku_gpt.report.collect import collect_rows, holds_runs
from fugaku_gpt.report.html import html_tables
from fugaku_gpt.report.imported import import_logs, understood, unknown_settings
from fugaku_gpt.report.logged_run import parse_settings
from fugaku_gpt.report.notes_table import column_titles, columns_of, notes_tables, row_cells, rows_by_heading
from fugaku_gpt.report.rows import UNREADABLE, ResultRow, values_of_rows

if TYPE_CHECKING:
    from fugaku_gpt.report.reference import ReferenceRow

Rows = Tuple[List[ResultRow], List[ResultRow]]  # one for each configuration, one for each run
CHECK_FORMATS = ("text", "json", "md")
_FINDING_COLUMNS = ("file", "line", "rule", "what", "cause")
TABLE_FORMATS = (*FORMATS, "html")
IMPORT_FORMS = ("log", "bullets")


@click.group()
def report() -> None:
    """Print tables, curves and traces of measured runs, export metrics, and check tables that are kept by hand."""


report.add_command(export)
report.add_command(runs)
report.add_command(trace)


@report.command()
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=PATH)
@format_option(TABLE_FORMATS, "table")
@click.option(
    "--si", is_flag=True, help="Compute aggregate PFLOP/s as TFLOPs * nodes / 1000; the notes divide by 1024."
)
@click.option(
    "--energy", is_flag=True, help="Show watts per node, and joules per iteration and per token (see `job collect`)."
)
@click.option(
    "--beside",
    metavar="ROWS",
    help="Print the runs next to rows of reference: ROWS.csv with the columns of "
    "benchmarks/reference/measurements.csv, with conditions after a colon as in `compare`, or a folder of "
    "`report import --form bullets`.",
)
def table(directories: Tuple[Path, ...], form: str, si: bool, energy: bool, beside: Optional[str]) -> None:
    """Print the table of the runs in DIR: a run directory, or a folder of them such as a sweep's.

    The format md is that of the notes; html is a self-contained page; csv and json contain raw values with units,
    formulas and origin, and json contains every repeat.

    With --beside, each row of reference stands next to the runs that have all the settings that it states: the ratio
    of their seconds per iteration, and whether the reference is outside of the spread of the repeats. The cells of what
    has not been run are empty; the folder of its runs need not be there.
    """
    if beside is None:
        print_table(collect_rows(directories), form, si, energy)
        return
    if si or energy:
        raise UsageError("--beside: has neither aggregates nor energy; leave out --si and --energy")
    print_beside(directories, beside, form)


def print_beside(directories: Sequence[Path], reference: str, form: str) -> None:
    """Print runs next to rows of reference in one of ``TABLE_FORMATS``; a folder without a run is named in a note.

    Runs that are damaged are named in warnings.

    Raises:
        UsageError: the reference cannot be read, or the only run is damaged.
    """
    from fugaku_gpt.report.beside import TITLES, cells_of, pairs_by_heading, put_beside, values_of
    from fugaku_gpt.report.beside_tables import beside_page, beside_tables

    references, notes = _references(reference)
    with_rows = [path for path in directories if holds_runs(path)]
    merged, runs = collect_rows(with_rows) if with_rows else ([], [])
    pairs = put_beside(references, merged, runs)
    if form == "md":
        echo(beside_tables(pairs), nl=False)
    elif form == "html":
        echo(beside_page(pairs), nl=False)
    elif form == "table":
        groups = pairs_by_heading(pairs)
        shown = ((title, [dict(zip(TITLES, cells_of(pair))) for pair in members]) for title, members in groups)
        echo("\n".join(f"{title.lstrip('# ')}\n{render_rows(TITLES, rows, form)}" for title, rows in shown), nl=False)
    else:
        values = [values_of(pair) for pair in pairs]
        echo(render_rows(list(values[0]), values, form), nl=False)
    for path in directories:
        if path not in with_rows:
            echo(f"note: {path}: {'no run is in it' if path.is_dir() else 'no such folder'}: nothing was run", err=True)
    for note in notes:
        echo(f"note: {note}", err=True)
    _warn_of_damage(runs)


def _references(text: str) -> "Tuple[List[ReferenceRow], Tuple[str, ...]]":
    """The rows of reference that an option names, and notes on those that are left out.

    Raises:
        UsageError: it is neither a CSV nor a folder, or cannot be read.
    """
    from fugaku_gpt.compare.sides import RecordedSide, parse_side
    from fugaku_gpt.report.reference import read_reference

    if Path(text).is_dir():
        return read_reference(Path(text))
    side = parse_side(text, lambda _: False) if text.partition(":")[0].endswith(".csv") else None
    if not isinstance(side, RecordedSide):
        raise UsageError(
            f"--beside {text}: neither a CSV nor a folder; valid: ROWS.csv, ROWS.csv:torch=1.7,nodes<=64, or a folder "
            "of `report import --form bullets`"
        )
    conditions = side.conditions
    return read_reference(
        side.path,
        lambda row: all(condition.is_met_by(getattr(row, condition.key)) for condition in conditions),
    )


def print_table(rows: Rows, form: str, si: bool = False, energy: bool = False) -> None:
    """Print rows to standard output in one of ``TABLE_FORMATS``, and what is damaged to standard error."""
    echo(render_table(rows, form, si, energy), nl=False)
    _warn_of_damage(rows[1])


def _warn_of_damage(runs: Sequence[ResultRow]) -> None:
    for row in runs:
        if row.status == UNREADABLE:
            echo(f"warning: {row.reason}; its run has an empty row", err=True)


def write_tables(directories: Sequence[Path], out: Path, forms: Sequence[str] = ("md", "csv", "json")) -> Rows:
    """Write ``table.md`` and the other formats of the runs' table into a folder; returns the rows.

    Raises:
        UsageError: a path holds no run, or the folder cannot be written.
    """
    rows = collect_rows(directories)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for form in forms:
            write_text_atomically(out / f"table.{form}", render_table(rows, form))
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}; choose another --out") from None
    return rows


def render_table(rows: Rows, form: str, si: bool = False, energy: bool = False) -> str:
    """Render rows in one of ``TABLE_FORMATS``; the text ends in a newline."""
    merged, runs = rows
    if form == "md":
        return notes_tables(merged, si, energy)
    if form == "html":
        return html_tables(merged, si, energy)
    if form == "table":
        return "\n".join(_terminal_table(heading, members, si, energy) for heading, members in rows_by_heading(merged))
    values = values_of_rows(merged)
    if form == "csv":
        return render_rows(list(dict.fromkeys(key for row in values for key in row)), values, "csv")
    singles = values_of_rows(runs)
    for row, value in zip(merged, values):
        value["repeats"] = [single for run, single in zip(runs, singles) if run.runs[0] in row.runs]
        value["runs"] = list(row.runs)
    return json_document(values)


def _terminal_table(heading: str, rows: Sequence[ResultRow], si: bool, energy: bool) -> str:
    """The notes' columns, rates of other units and the validation loss; the widest column comes last."""
    columns = columns_of(rows, energy)._replace(validation=True)
    titles = column_titles(columns)
    displayed = [dict(zip(titles, row_cells(row, columns, si))) for row in rows]
    return heading.lstrip("# ") + "\n" + render_rows(titles, displayed, "table")


@report.command("import")
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=PATH)
@click.option("--out", required=True, type=PATH, help="Folder for the record, which `report table` reads.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Value that the log lacks, such as nodes=4; repeatable.",
)
@click.option(
    "--form",
    type=click.Choice(IMPORT_FORMS),
    default="log",
    show_default=True,
    help="Form of the files: logs of one run, or sheets of bullets, each of which is a row.",
)
def import_(logs: Tuple[Path, ...], out: Path, settings: Tuple[str, ...], form: str) -> None:
    """Import a training LOG of Megatron-DeepSpeed, Megatron-LM, GPT-NeoX, NeMo or fugaku_gpt as a row; several files
    are one run. With --form bullets, import sheets of rates as rows of reference.

    Values that neither the log nor --set gives stay unknown. Keys: name, layers, hidden, heads, seq_len, padded_vocab,
    nodes, ranks, ranks_per_node, dp, tp, pp, micro_batch, global_batch, recompute, dtype, torch, job_id, date, status
    and more; the error for a wrong key lists them all.

    A bullet is such as `- global batch size 64, recompute=full, bf16, seq_len=1024: ~ 50 samples/s`, or ends with OOM;
    a title above, such as `## 124M on 4x L4`, names model and hardware, as do --set model=124M and hardware=L4.
    """
    if form == "bullets":
        from fugaku_gpt.report.sheet import import_bullets

        rows = import_bullets(logs, out, settings)
        print_table((rows, rows), "table")
        echo(f"rows of reference: {len(rows)}", err=True)
        return
    row = import_logs(logs, out, parse_settings(settings))
    unknown = unknown_settings(out)
    print_table(([row], [row]), "table")
    echo(understood(out), err=True)
    if unknown:
        value = 1 if unknown[0] in ("nodes", "dp", "tp", "pp") else "VALUE"
        echo(
            f"not in the log: {', '.join(unknown)}; give them with --set, such as --set {unknown[0]}={value}", err=True
        )


@report.command()
@click.argument("tables", nargs=-1, required=True, metavar="TABLE.md...", type=PATH)
@format_option(CHECK_FORMATS, "findings")
@click.option(
    "--machine",
    type=click.Choice(MACHINE_NAMES),
    help="Machine of the rows; default: that in the heading, else a64fx for tables in its form, else an unknown one.",
)
@click.option("--si", is_flag=True, help="Expect aggregates of TFLOPs * nodes / 1000; the notes divide by 1024.")
def check(tables: Tuple[Path, ...], form: str, machine: Optional[str], si: bool) -> int:
    """Check tables that are kept by hand, and report the rows that cannot be right.

    TFLOPs and aggregates are recomputed from Sec/it with the formula of the notes, within the rounding of the printed
    figures. Shifted cells, swapped columns, duplicates, wrong units, impossible layouts and failures without a cause
    are reported with their line and the likely mistake. A rule that needs what neither a row nor the text above it says
    is left out, and counted. Nothing is rewritten.

    Exit codes: 0 no finding, 2 usage or a file without such a table, 3 findings.
    """
    findings: List[Dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    rows = 0
    for path in tables:
        text = _read_table_file(path)
        checked = check_tables(text, machine, si)
        if not checked.rows:
            raise UsageError(f"{path}: no table of configurations (columns Nodes, DP, ..., Sec/it, TFLOPs) in it")
        rows += checked.rows
        findings += [{"file": str(path), **asdict(finding)} for finding in checked.findings]
        skipped.update(checked.skipped)
        unread.update(checked.unread)
    if form == "json":
        echo(json_document({"rows": rows, "findings": findings, "skipped": skipped, "unread": unread}), nl=False)
    elif form == "md":
        echo(render_rows(_FINDING_COLUMNS, findings, "md"), nl=False)
    else:
        for finding in findings:
            cause = f" ({finding['cause']})" if finding["cause"] else ""
            echo(f"{finding['file']}:{finding['line']}: [{finding['rule']}] {finding['what']}{cause}")
        echo(f"{_counted(rows, 'row')}, {_counted(len(findings), 'finding')}", err=True)
        for rule, count in skipped.items():
            echo(f"not checked in {_counted(count, 'row')}: {rule}", err=True)
        if unread:
            echo(f"columns that no rule reads: {', '.join(unread)}", err=True)
    return EXIT_FINDINGS if findings else EXIT_OK


def _read_table_file(path: Path) -> str:
    try:
        return read_bytes(path, TABLE_TEXT).decode("utf-8-sig", "replace")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
