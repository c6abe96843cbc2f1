"""Tests of ``fugaku-gpt data``."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fugaku_gpt.cli.main import run
from tests.data.files import write_megatron

pytest.importorskip("tokenizers")


def test_prepare_then_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["data", "prepare", textwrap.__file__, "--out", str(out), "--vocab-size", "300", "--workers", "1"]
    assert run(command) == 0
    first = capsys.readouterr()
    assert f"{out}: prepared: " in first.out and "in 1 documents" in first.out
    assert run(command) == 0
    assert "already prepared" in capsys.readouterr().out
    assert run([*command, "--seed", "7"]) == 2
    assert "prepared with seed 1234, not 7" in capsys.readouterr().err
    assert run([*command, "--seed", "7", "--force"]) == 0
    capsys.readouterr()
    assert run(["data", "info", str(out), "--format", "json"]) == 0
    (info,) = json.loads(capsys.readouterr().out)
    assert info["vocab_size"] == 300 and info["documents"] == info["train_sequences"] == 1
    assert info["tokens"] == info["train_tokens"] and len(info["fingerprint"]) == 64
    assert info["unknown_rate"] is None and info["longest_document"] == info["tokens"]
    assert info["lengths"][0]["documents"] == 1 and info["samples"][0]["beginning"].startswith('"""Text wrapping')
    assert run(["data", "info", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Share of tokens" in text and '"""Text wrapping and filling. """' in text and "100.0 %" in text


def test_verify_describes_its_checks_and_names_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["data", "prepare", textwrap.__file__, "--out", str(out), "--vocab-size", "300", "--workers", "1"]) == 0
    write_megatron(tmp_path / "c", [[1, 2], [3]], code=8)
    capsys.readouterr()
    assert run(["data", "verify", str(out)]) == run(["data", "verify", str(tmp_path / "c.bin")]) == 0
    prepared, pair = capsys.readouterr().out.splitlines()
    assert "fit its vocabulary of 300; files and tokenizer are as prepared" in prepared
    assert pair.endswith(": sound: 3 tokens in 2 documents; token ids 1 to 3 are not negative")
    tokens = (out / "corpus.bin").read_bytes()
    (out / "corpus.bin").write_bytes(b"\xff\xff" + tokens[2:])
    assert run(["data", "verify", str(out)]) == 2
    assert "token 0 has id 65535; valid: 0 to 299" in capsys.readouterr().err


def test_info_of_a_megatron_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_megatron(tmp_path / "c", [[1, 2], [3]] * 1000, code=8)
    forms = {}
    for form in ("table", "md", "csv", "json"):
        assert run(["data", "info", str(tmp_path / "c.idx"), "--format", form]) == 0
        forms[form] = capsys.readouterr().out
    (row,) = csv.DictReader(io.StringIO(forms["csv"]))
    expected = {"form": "Megatron pair", "tokens": "3000", "dtype": "uint16", "vocab_size": "", "valid_sequences": "60"}
    assert {key: row[key] for key in expected} == expected
    assert "| train tokens | 2,907 |\n" in forms["md"]
    assert "documents          2,000\n" in forms["table"]
    assert json.loads(forms["json"])[0]["vocab_size"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "{}/gone"], "neither a folder made by `fugaku-gpt data prepare` nor the prefix"),
        (["info", "{}"], "has no manifest.json"),
        (["prepare", "--out", "{}/out"], "nothing to prepare"),
        (["prepare", "--out", "{}/out", "{}/gone"], "gone: no such file or folder"),
        (["prepare", "--out", "{}/out", "--stdlib", "--tokenizer", "{}/t.json"], "t.json: no such file; --tokenizer"),
        (["prepare", "--out", "{}/out", "--stdlib", "--workers", "0"], "--workers"),
        (["prepare", "--stdlib"], "--out"),
    ],
)
def test_mistakes_are_reported_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: "list[str]", message: str
) -> None:
    assert run(["data", *(argument.format(tmp_path) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_small_vocabulary_and_skipped_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("aaaa bbbb")
    (folder / "b.txt").write_bytes(b"\xff")
    assert run(["data", "prepare", str(folder), "--out", str(tmp_path / "out"), "--vocab-size", "900"]) == 0
    err = capsys.readouterr().err
    assert "1 file(s) left out, not UTF-8 text, or with NUL bytes: texts/b.txt" in err
    assert "tokens, not 900" in err


@pytest.mark.slow
def test_files_and_records_that_are_left_out_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.json").write_text('[{"meta": {"body": "aaaa bbbb"}}, {"meta": {}}]')
    (folder / "b.pdf").write_bytes(b"%PDF")
    command = ["data", "prepare", str(folder), "--text-key", "meta.body", "--vocab-size", "257", "--out"]
    assert run([*command, str(tmp_path / "refused")]) == 2
    err = capsys.readouterr().err
    assert "a.json:1: no text under the key 'meta.body'; it has no text" in err and "Traceback" not in err
    assert run([*command, str(tmp_path / "out"), "--skip-bad"]) == 0
    captured = capsys.readouterr()
    assert "in 1 documents" in captured.out
    assert "note: files of folders that are left out, by suffix: 1 .pdf; --suffix names" in captured.err
    assert "warning: 1 bad record(s) or file(s) left out by --skip-bad: " in captured.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["bad_records"], manifest["left_out"]) == (1, {".pdf": 1})
    assert run([*command, str(tmp_path / "out"), "--skip-bad"]) == 0
    again = capsys.readouterr()
    assert "already prepared" in again.out and again.err == captured.err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "marks"), [("a.csv", "commas"), ("a.tsv", "tabs"), ("a.html", "tags")])
def test_a_table_that_is_read_as_prose_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, marks: str
) -> None:
    (tmp_path / name).write_text("id,text\n1,hello\n")
    assert run(["data", "prepare", str(tmp_path / name), "--vocab-size", "257", "--out", str(tmp_path / "out")]) == 0
    assert f"{name}: is read as one document of text, with its {marks}" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fugaku_gpt.cli.main import run; run(['data', 'prepare', '--help']);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'rich', 'mpi4py', 'yaml'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr
    assert "--text-key" in completed.stdout


def test_corpora_are_merged_split_and_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_megatron(tmp_path / "a", [[1, 2], [3]] * 10, code=8)
    pair, out = str(tmp_path / "a"), tmp_path / "out"
    assert run(["data", "merge", pair, pair, "--out", str(out / "both")]) == 0
    assert capsys.readouterr().out == f"{out / 'both'}: 60 tokens in 40 documents\n"
    both = str(out / "both" / "corpus")
    assert run(["data", "split", both, "--out", str(out / "parts"), "--part", "train=3", "--part", "test=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" in ")[2] for line in lines] == ["30 documents", "10 documents"]
    assert run(["data", "sample", both, "--out", str(out / "few"), "--documents", "4"]) == 0
    assert capsys.readouterr().out.endswith(" in 4 documents\n")
    for arguments, message in (
        (["merge", both, "--out", str(out / "few")], "is there already; choose another --out"),
        (["split", both, "--out", str(out / "p"), "--part", "../x=1"], "a name has letters, digits"),
        (["split", both, "--out", str(out / "p"), "--part", "x=-1"], "expected a positive share of 1e9 at most"),
        (["split", both, "--out", str(out / "p"), "--part", "x=1", "--part", "x=2"], "the name x is given twice"),
        (["sample", both, "--out", str(out / "s")], "name either --documents or --tokens"),
        (["sample", both, "--out", str(out / "s"), "--tokens", "61"], "has 60 tokens, not 61"),
    ):
        assert run(["data", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["both", "few", "parts"]
