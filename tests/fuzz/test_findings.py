"""Each fault that fuzzing has shown, in a file as small as possible: a message says what is wrong and where."""

from __future__ import annotations

import json
import re
import struct
import time
from pathlib import Path
from typing import Any, Dict

import pytest

from fugaku_gpt.errors import FugakuGptError
from fugaku_gpt.records import flight
from tests.fuzz import registry
from tests.fuzz.readers import Reader, prepare, sealed_manifest

READERS: Dict[str, Reader] = {reader.name: reader for reader in registry.all_readers()}


def error_of(folder: Path, name: str, content: bytes) -> str:
    """The message by which a reader refuses a file; empty if it takes it."""
    reader = READERS[name]
    path = folder / reader.file
    prepare(reader, folder)
    path.write_bytes(content)
    try:
        reader.read(path)
    except FugakuGptError as error:
        return str(error)
    return ""


def changed(name: str, **values: Any) -> bytes:
    return json.dumps({**json.loads(READERS[name].seeds[0]), **values}).encode()


RUN = "run directory: "
RESULT, ENVIRONMENT, METRICS, IMPORTED = (
    f"{RUN}{name}" for name in ("result.json", "environment.json", "metrics.jsonl", "imported.json")
)
MANIFEST = "checkpoint: manifest with its checksum"
COMPARISON, CONFIG, TOKENIZER = "comparison: comparison.json", "Hugging Face: config.json", "tokenizer.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (ENVIRONMENT, changed(ENVIRONMENT, toggles=["x"]), r"environment\.json: .*toggles"),
        (ENVIRONMENT, changed(ENVIRONMENT, build=[]), r"environment\.json: .*build is \[\]"),
        (RESULT, changed(RESULT, started="x"), r"result\.json: .*started is 'x', not a number"),
        (RESULT, changed(RESULT, ended=1e30), r"result\.json: .*ended is 1e\+30, not a time"),
        (RESULT, changed(RESULT, summary={"last_loss": "x"}), r"summary\.last_loss is 'x'"),
        (METRICS, b'{"kind": "iteration"}\n', r"metrics\.jsonl:1: iteration None"),
        (METRICS, b'{"kind": "iteration", "iteration": 1, "loss": []}\n', r"metrics\.jsonl:1: loss \[\]: not"),
        (METRICS, b'{"kind": "iteration", "iteration": 1}\nx\n{}\n', r"metrics\.jsonl:2: not JSON lines"),
        (IMPORTED, changed(IMPORTED, iterations_planned=[]), "iterations_planned is"),
        (IMPORTED, changed(IMPORTED, arguments={"num_layers": 1}), "arguments.num_layers is 1"),
        (IMPORTED, changed(IMPORTED, given={"nodes": "4"}), "nodes is '4', not a whole number"),
        (RUN + "accounting.json", b'{"version": 1, "jobs": [{"scheduler": "pjm", "job_id": 1}]}', "job_id is 1"),
        (RUN + "sweep.json", changed(RUN + "sweep.json", order="1"), "order is '1', not a whole number"),
        ("exit record", changed("exit record", ended=10**18), r"9\.json: .*ended is 1e\+18, not a time"),
        ("run file", b"x" * 300 + b": 1\n", r"run\.yaml:1: a key of 300 characters; at most 200 characters"),
        ("run file", b"training.lr: " + b"x" * 9999 + b"\n", r"run\.yaml:1: training\.lr: 'x{198}…: expected a number"),
        ("run file", b"- " * 3000 + b"1\n", r"run\.yaml:1: more than 50 levels"),
        ("run file", b"a: [" + b"1, " * 100_000 + b"]\n", r"run\.yaml:1: more than 100,000 values"),
        ("sweep file", b"matrix: {layout.dp: [" + b"x" * 999 + b"]}\nwhere: -layout.dp == 1\n", r"the text 'x{198}… "),
        ("sweep directory: plan", changed("sweep directory: plan", file="9" * 5000), "file has 5000 characters"),
        ("machine file", b"format: 2024-99-99\n", r"m\.yaml: not a machine file: month must be in 1\.\.12"),
        ("machine file", b"[" * 5000, r"m\.yaml:1: more than 50 levels"),
        ("machine file", b"- 1\n", "expected `key: value` lines at the top"),
        ("machine file", registry.BOMB, "not a machine file"),
        ("template", b"x" * (2**20 + 1), r"cannot be read: it is longer than 1 MiB, the limit of a template"),
        ("template", b"{% for i in range(9**9) %}{% endfor %}", r"own\.sh\.j2"),
        ("table in CSV", b"x" * 9999 + b",id\n", r"table\.csv: columns are missing: .*; found: x{199}…$"),
        ("Hugging Face: index", b'{"weight_map": {"a": "\\ud800"}}', "'weight_map' does not give the file"),
        (COMPARISON, changed(COMPARISON, tolerance=-1), r"comparison\.json: .*tolerance -1: valid: more than 0"),
        (COMPARISON, changed(COMPARISON, warm_up=-1), r"comparison\.json: .*warm_up -1: valid: at least 0"),
        (CONFIG, changed(CONFIG, vocab_size="9" * 5000), r"config\.json: model\.vocab_size: '9{100,5000}'?…?"),
        (TOKENIZER, changed(TOKENIZER, truncation="9" * 5000), r"not a tokenizer\.json .*: invalid type: .{99,190}…$"),
        ("simulator: settings", b'{"nodes": "4"}', r"settings\.json: not a simulator's settings"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_with_file_and_fault(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    error = error_of(tmp_path, name, content)
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [10**15]}, "its tensors are larger than its files"),
        ({"shape": [-1, -1]}, "a size is below 0"),
        ({"shape": []}, "is not of a tensor of manifest.json"),
        ({"shape": [float("inf")]}, "its fields are not those of this version|not JSON|is it no"),
    ],
)
def test_a_manifest_whose_checksum_is_right_is_not_believed(tmp_path: Path, change: Any, message: str) -> None:
    values = json.loads(READERS[MANIFEST].seeds[0])
    name = sorted(values["tensors"])[0]
    values["tensors"][name].update(change)
    error = error_of(tmp_path, MANIFEST, sealed_manifest(json.dumps(values).encode()))
    assert re.search(message, error) if change != {"shape": [float("inf")]} else error, error


@pytest.mark.parametrize("members", [b"0+1*99999999999;", b"0+0*9;", b"-5+1*3;", b"0+1*x;", b"\xff;", b"0+1*1048577;"])
def test_a_flight_record_lists_no_more_ranks_than_a_run_can_have(tmp_path: Path, members: bytes) -> None:
    content = bytearray(READERS["flight record"].seeds[0])
    slots = struct.unpack_from("<I", content, 12)[0]
    number = next(
        struct.unpack_from("<H", content, flight.groups_at(slots) + index * flight.GROUP.size + 18)[0]
        for index in range(flight.GROUPS)
    )
    assert number
    at = flight.names_at(slots) + number * flight.NAME_SIZE
    content[at : at + len(members)] = members
    (tmp_path / "a").write_bytes(content)
    assert flight.read_flight(tmp_path / "a").groups[0].members == ()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, -1.0])
def test_a_flight_record_of_no_time_is_damaged(tmp_path: Path, seconds: float) -> None:
    """The doctor prints the time of the last progress."""
    content = bytearray(READERS["flight record"].seeds[0])
    struct.pack_into("<d", content, flight.PROGRESS_OFFSET + 8, seconds)
    assert "a damaged flight recorder file: progress is " in error_of(tmp_path, "flight record", bytes(content))


def test_a_setting_of_a_later_version_of_an_imported_log_is_left_out(tmp_path: Path) -> None:
    assert error_of(tmp_path, IMPORTED, changed(IMPORTED, given={"nodes": 4, "later": 1})) == ""


def test_a_bulk_job_has_no_more_sub_jobs_than_a_scheduler_takes(tmp_path: Path) -> None:
    job = {"kind": "submitted", "time": 1.0, "scheduler": "pjm", "job_id": "1", "tag": "", "link": 1, "chain": 1}
    content = json.dumps({**job, "bulk": "0-999999999"}).encode() + b"\n"
    assert "more than 1,000,000 sub-jobs" in error_of(tmp_path, "jobs of a run", content)


@pytest.mark.parametrize("line", ['"' * 19_000, "- " * 9_000, "`" * 19_000, "w/o " * 4_000, "GBS " * 4_000])
def test_the_work_for_a_long_line_of_prose_is_linear(tmp_path: Path, line: str) -> None:
    began = time.process_time()
    error_of(tmp_path, "table in Markdown", f"{line}\n".encode())
    assert time.process_time() - began < 2.0, "seconds: the limit of a reader, of which this takes a thousandth"


@pytest.mark.slow
def test_slips_are_searched_for_in_a_hundred_rows(tmp_path: Path) -> None:
    from fugaku_gpt.report.check import check_tables

    head, row = (
        registry.TABLE.decode().partition("| 4 (2.2GHz)")[0],
        "| 4 | 1.3B | 1 | 4 | 2 | 1 | 1024 | - | 3231 | 9 | 1 | |\n",
    )
    checked = check_tables(head + row * 300)
    assert checked.rows == 300 and len({finding.line for finding in checked.findings}) == 300


def test_a_panic_of_the_tokenizers_library_is_a_refusal(tmp_path: Path) -> None:
    """A panic of Rust code is no ``Exception``, and went through every handler."""
    values = json.loads(READERS[TOKENIZER].seeds[0])
    values["model"]["continuing_subword_prefix"] = "9" * 50  # longer than a token of the merges
    error = error_of(tmp_path, TOKENIZER, json.dumps(values).encode())
    assert re.search(r"tokenizer\.json: not a tokenizer\.json of Hugging Face tokenizers: range end index", error), (
        error
    )
