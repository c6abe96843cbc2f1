"""Functions that read an untrusted file as a command would; ``registry.py`` has their files."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        name: what is read.
        file: name of the file, in a folder of its own.
        form: one of the forms of ``mutations.py``.
        read: reads the file of this path; whatever it returns is ignored.
        seeds: contents from which mutations are made.
        around: further files of the folder, by their paths in it.
        seal: makes a changed content pass a checksum; None if there is none.
        is_payload: whether its content is what a run computes on, which has no limit.
        commands: number of commands for which it stands, each of which may take the limit of time.
        is_file: whether it is read from a file, and not given on a command line.
        cost: how many times the work of a cheap reader one call takes: the number of calls is divided by it.
    """

    name: str
    file: str
    form: str
    read: Callable[[Path], object]
    seeds: Tuple[bytes, ...]
    around: Mapping[str, bytes] = field(default_factory=dict)
    seal: Optional[Callable[[bytes], bytes]] = None
    cost: int = 1
    is_file: bool = True
    is_payload: bool = False
    commands: int = 1


def prepare(reader: Reader, folder: Path) -> None:
    """Make the files around a reader's file in a folder, and the folder of the file."""
    for name in (*reader.around, reader.file):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name, content in reader.around.items():
        (folder / name).write_bytes(content)


def run_file(path: Path) -> object:
    from fugaku_gpt.config import dump_run_config, load_run_config

    return dump_run_config(load_run_config(path))


def sweep(path: Path) -> object:
    from fugaku_gpt.sweep.plan import plan_of

    return plan_of(path).sweep()


def sweep_plan(path: Path) -> object:
    from fugaku_gpt.sweep.plan import read_plan

    plan = read_plan(path.parent)
    return plan.sweep() if plan is not None else None


def profile(path: Path) -> object:
    from fugaku_gpt.config import load_run_config
    from fugaku_gpt.config.profile import load_profile, with_absolute_paths
    from fugaku_gpt.jobs.render import render_job

    return render_job(load_run_config(preset="tiny"), with_absolute_paths(load_profile(path), path.parent))


def site(path: Path) -> object:
    from fugaku_gpt.pjm.groups import load_limits

    return load_limits(path)


def template(path: Path) -> object:
    from fugaku_gpt.config import load_run_config
    from fugaku_gpt.jobs.render import render_from_files

    return render_from_files(load_run_config(preset="tiny", overrides=[f"job.template={path}"]))


def script(path: Path) -> object:
    from fugaku_gpt.jobs.plain_script import is_plain_script, read_plain_script
    from fugaku_gpt.jobs.render import settings_of
    from fugaku_gpt.pjm.lint.engine import Linter, find_scripts

    with contextlib.suppress(OSError):  # `job lint` reports it
        Linter().check_file(str(path))
    list(find_scripts([str(path.parent)]))
    if is_plain_script(path):
        settings_of(read_plain_script(path).text)


def markdown(path: Path) -> object:
    from fugaku_gpt.cli.report import _read_table_file
    from fugaku_gpt.report.check import check_tables

    return check_tables(_read_table_file(path))


def csv(path: Path) -> object:
    from fugaku_gpt.planner.tables.rows import parse_measured_rows, read_table

    return parse_measured_rows(read_table(path))


def reference(path: Path) -> object:
    """Rows of reference as `report table --beside` reads and shows them."""
    from fugaku_gpt.report.reference import read_reference

    return _beside(read_reference(path)[0])


def bullets(path: Path) -> object:
    from fugaku_gpt.report.bullets import bullet_text, read_bullets
    from fugaku_gpt.report.reference import read_reference
    from fugaku_gpt.report.sheet import import_bullets

    out = path.parent / "sheet"
    rows = import_bullets([path], out)
    texts = [bullet_text(bullet) for bullet in read_bullets(path.read_text("utf-8", "replace"), str(path))]
    return texts, _rendered(rows), _beside(read_reference(out)[0])


def sheet(path: Path) -> object:
    from fugaku_gpt.report.reference import read_reference
    from fugaku_gpt.report.sheet import sheet_rows

    return _rendered(sheet_rows(path.parent)), _beside(read_reference(path.parent)[0])


def _beside(references: List[Any]) -> object:
    from fugaku_gpt.report.beside import put_beside, values_of
    from fugaku_gpt.report.beside_tables import beside_page, beside_tables

    pairs = put_beside(references, [], [])
    return beside_tables(pairs), beside_page(pairs), [values_of(pair) for pair in pairs]


def log(path: Path) -> object:
    from fugaku_gpt.report.imported import import_logs, understood, unknown_settings
    from fugaku_gpt.report.logged_run import LoggedRun

    out = path.parent / "imported"
    shutil.rmtree(out, ignore_errors=True)
    row = import_logs([path], out, LoggedRun())
    understood(out), unknown_settings(out)
    return _rendered([row])


def _rendered(rows: List[Any]) -> object:
    from fugaku_gpt.cli.report import TABLE_FORMATS, render_table

    return [render_table((rows, rows), form, energy=True) for form in TABLE_FORMATS]


def run_directory(path: Path) -> object:
    """A run directory as `report table`, `report runs`, `runs ls` and `runs show` read it."""
    from fugaku_gpt.cli.runs import _job_and_environment_facts
    from fugaku_gpt.errors import FugakuGptError
    from fugaku_gpt.jobs.store import list_runs
    from fugaku_gpt.records.operators import read_operators
    from fugaku_gpt.records.run import RunDirectory, failure_lines
    from fugaku_gpt.report.collect import collect_rows
    from fugaku_gpt.report.page_runs import named_runs
    from fugaku_gpt.report.run_page import page_data, render_page

    directory = RunDirectory(path.parent)
    render_page(page_data(named_runs([path.parent], lambda _: None))[0])
    _job_and_environment_facts(path.parent)
    list_runs(path.parent, use_index=False)
    directory.last_iteration(), directory.last_checkpoint()
    with contextlib.suppress(FugakuGptError):
        read_operators(path.parent)
    with contextlib.suppress(FugakuGptError):
        result = directory.result()
        failure_lines(result) if result is not None else None
    rows, runs = collect_rows([path.parent])
    return _rendered(rows)


def store_index(path: Path) -> object:
    """The index of a store as `runs ls` reads and prints it; its entries count as those of unchanged runs."""
    from fugaku_gpt.cli.runs import _cell_of
    from fugaku_gpt.jobs.run_table import RANKS, RUN_COLUMNS, RunValues, chosen_runs
    from fugaku_gpt.jobs.store import _record_of_line, _schema
    from fugaku_gpt.records.index import read_index

    records = [entry.record for entry in read_index(path.parent, _schema(), _record_of_line, None).values()]
    shown = [*RUN_COLUMNS, RANKS, "layout.dp", "data.paths", "job.elapse"]
    values = RunValues(records, shown)
    return [
        [_cell_of(name, form)(values.of(name)(record)) for record in chosen_runs(records, None, [name], shown)]
        for name in shown
        for form in ("table", "json")
    ]


def sealed_index(content: bytes) -> bytes:
    from fugaku_gpt.jobs.store import _schema
    from fugaku_gpt.records.index import _head

    body = content.partition(b"\n")[2]
    return json.dumps(_head(_schema(), 0, body)).encode("ascii") + b"\n" + body


def job(path: Path) -> object:
    from fugaku_gpt.jobs.outcome import job_outcome
    from fugaku_gpt.records.job import exit_records, read_history

    directory = path.parent.parent if path.parent.name == "exit" else path.parent
    read_history(directory), exit_records(directory)
    return job_outcome(directory)


def comparison(path: Path) -> object:
    """A comparison's folder as `compare DIR` reads it."""
    from fugaku_gpt.cli.compare.printing import REPORT_FORMATS, report_text
    from fugaku_gpt.compare.pairs import read_comparison
    from fugaku_gpt.compare.report import report_live

    folder = next(parent for parent in path.parents if (parent / "top").exists())
    report = report_live(read_comparison(folder))
    return [report_text(report, form) for form in REPORT_FORMATS]


def manifest(path: Path) -> object:
    from fugaku_gpt.checkpoint.reader import open_checkpoint
    from fugaku_gpt.checkpoint.retention import verify_checkpoint

    verify_checkpoint(path.parent)
    with open_checkpoint(path.parent) as checkpoint:
        for name, tensor in checkpoint.manifest.tensors.items():
            for kind in tensor.kinds:
                checkpoint.tensor(kind, name)


def sealed_manifest(content: bytes) -> bytes:
    from fugaku_gpt.checkpoint.manifest import _canonical, _digest

    try:
        values = json.loads(content)
        values.pop("digest", None)
        return _canonical({**values, "digest": _digest(values)})
    except (ValueError, AttributeError, TypeError, RecursionError):
        return content


def tracker(path: Path) -> object:
    from fugaku_gpt.checkpoint.directory import list_checkpoints, tracked_checkpoint

    return tracked_checkpoint(path.parent), list_checkpoints(path.parent)


def hugging_face(path: Path) -> object:
    from fugaku_gpt.checkpoint.hugging_face import import_model

    out = path.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    return import_model(path.parent, out)


def gguf_file(path: Path) -> object:
    from fugaku_gpt.checkpoint.gguf_import import import_gguf

    out = path.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    return import_gguf(path, out)


def flight(path: Path) -> object:
    from fugaku_gpt.records.flight import read_flight, read_head

    read_head(path)
    flight = read_flight(path)
    for call in flight.calls:
        flight.call_at(call.group, call.sequence)
        flight.messages(call.group, call.peer, "send")
    return flight.outstanding, flight.waiting, flight.last, flight.groups


def trace(path: Path) -> object:
    from fugaku_gpt.report.gantt import gantt
    from fugaku_gpt.report.timeline import timeline_of_run
    from fugaku_gpt.report.trace_events import trace_document

    timeline = timeline_of_run(path.parent.parent)
    return gantt(timeline), trace_document(timeline), [row.communication_seconds() for row in timeline.rows]


def corpus(path: Path) -> object:
    from fugaku_gpt.data.corpus import count_of_sequences, open_corpus

    count_of_sequences(str(path.parent))
    corpus = open_corpus(str(path.parent))
    return [corpus.index.document(number).sum() for number in range(min(9, corpus.index.documents))]


def pair(path: Path) -> object:
    from fugaku_gpt.data.corpus import count_of_sequences, open_corpus

    count_of_sequences(str(path.with_suffix("")))
    corpus = open_corpus(str(path.with_suffix("")))
    return [corpus.index.document(number).sum() for number in range(min(9, corpus.index.documents))]


def grids(path: Path) -> object:
    from fugaku_gpt.data.grids import check_split, grids_up_to, open_grids, split_grids

    tasks = open_grids([str(path)])
    shares = (60.0, 20.0, 20.0)
    check_split(tasks, shares)
    return [[grid.colors.sum() for grid in part] for part in split_grids(grids_up_to(tasks, 16), shares)]


def tokenizer(path: Path) -> object:
    from fugaku_gpt.checkpoint.hugging_face_tokenizer import CorpusTokenizer, tokenizer_files
    from fugaku_gpt.data.tokenizer import Encoder

    encoder = Encoder(path)
    encoder.encode(b"A text, and\nan end.")
    return tokenizer_files(CorpusTokenizer(path, encoder.vocab_size, encoder.end, encoder.end_name), 128)


def machine(path: Path) -> object:
    from fugaku_gpt.machine.constants import load_machine, machine_yaml

    return machine_yaml(load_machine(str(path)))


def texts(path: Path) -> object:
    from fugaku_gpt.data.sources import ReadOptions, SourceCounts, find_files, read_documents

    files = find_files([path], False, (".jsonl",), 1).files
    return sum(map(len, read_documents(files, ReadOptions(skip_bad=True), None, SourceCounts())))


def statistics(path: Path) -> object:
    from fugaku_gpt.pjm.messages import parse_messages, parse_refusals, submitted_ids
    from fugaku_gpt.pjm.pjstat import parse_data, parse_table, statuses_of
    from fugaku_gpt.pjm.stats import read_stats_file

    jobs = read_stats_file(path)
    text = path.read_bytes()[:100_000].decode("utf-8", "replace")
    statuses_of(parse_data(text)), statuses_of(parse_table(text))
    parse_messages(text), parse_refusals(text), submitted_ids(text)
    return jobs


def expression(path: Path) -> object:
    from fugaku_gpt.config.expression import parse_expression
    from fugaku_gpt.errors import ConfigError

    text = path.read_bytes().decode("utf-8", "surrogateescape")
    names = ("layout.dp", "layout.tp", "node.tcmalloc", "status")
    values: Dict[str, Any] = {"layout.dp": 4, "layout.tp": None, "node.tcmalloc": True, "status": "ok"}
    with contextlib.suppress(ConfigError):
        parse_expression(text, "--where", names).holds(values.__getitem__, "a row")


def queue(path: Path) -> object:
    from fugaku_gpt.simulator.session import Spool
    from fugaku_gpt.simulator.table import JobTable

    table = JobTable(Spool(path.parent.parent))
    return [(job.id, job.is_active, job.request.shape()) for job in table]


def settings_of_simulator(path: Path) -> object:
    from fugaku_gpt.simulator.settings import read_settings

    return read_settings(path)


def local_queue(path: Path) -> object:
    from fugaku_gpt.jobs.schedulers.local_store import LocalStore

    store = LocalStore(path.parent.parent)
    return [(job.subs[:9], store.state(job, ""), job.output("")) for job in store.jobs()]
