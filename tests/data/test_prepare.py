"""Tests of ``data prepare`` from end to end, on real text."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

pytest.importorskip("tokenizers")

from fugaku_gpt.config import load_run_config
from fugaku_gpt.data.corpus import open_corpus
from fugaku_gpt.data.prepare import CorpusRequest, prepare
from fugaku_gpt.data.samples import open_samples
from fugaku_gpt.data.sources import TEXT_SUFFIXES
from fugaku_gpt.errors import DataError
from tests.support.tokenizers import LLAMA, make_tokenizer
from tests.support.waiting import until

NAMES = ["corpus.bin", "corpus.idx", "manifest.json", "tokenizer.json"]


@pytest.fixture()
def texts(tmp_path: Path) -> Path:
    """A folder with a text file, a .gz, JSON lines and a file that is not UTF-8."""
    folder = tmp_path / "texts"
    folder.mkdir()
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    (folder / "a.py").write_text(source, encoding="utf-8")
    (folder / "b.txt.gz").write_bytes(gzip.compress(source[::-1].encode()))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in source.splitlines()))
    (folder / "d.txt").write_bytes(b"\xff\xfe\x00")
    return folder


def request(out: Path, *sources: Path, **changes: Any) -> CorpusRequest:
    fields: Dict[str, Any] = {
        "stdlib": False,
        "suffixes": TEXT_SUFFIXES,
        "text_keys": ("text",),
        "tokenizer": None,
        "vocab_size": 300,
        "seed": 1,
        "limit_mib": None,
        "workers": 1,
        "force": False,
    }
    return CorpusRequest(out=out, sources=sources, **{**fields, **changes})


def content(folder: Path) -> Tuple[bytes, ...]:
    return tuple((folder / name).read_bytes() for name in NAMES)


def test_text_becomes_samples(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "deep" / "out"
    manifest, present = prepare(request(out, texts))
    assert not present and sorted(os.listdir(out)) == NAMES and os.listdir(out.parent) == ["out"]
    lines = Path(textwrap.__file__).read_text(encoding="utf-8").splitlines()
    filled = [line for line in lines if line.strip()]
    assert manifest["documents"] == len(filled) + 2
    assert manifest["empty_documents"] == len(lines) - len(filled)
    assert manifest["undecodable_files"] == 1 and manifest["undecodable_examples"] == ["texts/d.txt"]
    assert manifest["vocab_size"] == 300 and manifest["dtype"] == "uint16"
    assert str(tmp_path) not in (out / "manifest.json").read_text(), "no path of this machine"
    corpus = open_corpus(str(out))
    assert (corpus.index.tokens, corpus.fingerprint) == (manifest["tokens"], manifest["fingerprint"])
    ends = [corpus.index.document(number)[-1] for number in range(corpus.index.documents)]
    assert set(ends) == {manifest["end_of_document"]["id"]}
    config = load_run_config(overrides=[f"data.paths=[{out}]", "model.vocab_size=300", "model.seq_len=64"])
    assert open_samples(config, "train").batch(0, 4).shape == (4, 65)


@pytest.mark.slow
def test_workers_do_not_change_a_byte(tmp_path: Path, texts: Path) -> None:
    prepare(request(tmp_path / "one", texts))
    prepare(request(tmp_path / "three", texts, workers=3))
    assert content(tmp_path / "one") == content(tmp_path / "three")


@pytest.mark.slow
def test_the_standard_library_is_prepared(tmp_path: Path) -> None:
    manifest, _ = prepare(request(tmp_path / "out", stdlib=True, limit_mib=0.1))
    assert 0.1 <= manifest["text_bytes"] / 2**20 < 0.5
    assert manifest["sources"]["stdlib"] == "Python {}.{}.{}".format(*sys.version_info[:3])


@pytest.mark.slow
def test_a_given_tokenizer_is_used(tmp_path: Path, texts: Path) -> None:
    prepare(request(tmp_path / "a", texts))
    given = tmp_path / "a" / "tokenizer.json"
    manifest, _ = prepare(request(tmp_path / "b", texts, tokenizer=given))
    assert content(tmp_path / "b")[:2] == content(tmp_path / "a")[:2]
    assert manifest["options"]["tokenizer"]["sha256"] == manifest["tokenizer_sha256"]


@pytest.mark.slow
def test_documents_end_with_the_named_token(tmp_path: Path, texts: Path) -> None:
    (texts / "g.jsonl").write_text('{"text": "He said <s>old</s> new. end"}\n{"text": "second"}\n')
    given = make_tokenizer(LLAMA, tmp_path / "given.json", ["<s>", "</s>", "<eos>"])
    with pytest.raises(DataError, match="several special tokens may end a document; candidates: '</s>', '<eos>'"):
        prepare(request(tmp_path / "out", texts / "g.jsonl", tokenizer=given))
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="--end-token </s>: is a token of --tokenizer"):
        prepare(request(tmp_path / "out", texts / "g.jsonl", end_token="</s>"))
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        manifest, _ = prepare(request(out, texts / "g.jsonl", tokenizer=given, end_token="</s>", workers=workers))
        assert manifest["end_of_document"] == {"id": 2, "token": "</s>"} and manifest["documents"] == 2
        corpus = open_corpus(str(out)).index
        documents = [corpus.document(number).tolist() for number in range(2)]
        assert [document.index(2) for document in documents] == [len(document) - 1 for document in documents]
    with pytest.raises(DataError, match="prepared with .*the end of documents '</s>', not '<eos>'"):
        prepare(request(tmp_path / "out1", texts / "g.jsonl", tokenizer=given, end_token="<eos>"))


@pytest.mark.slow
def test_an_existing_corpus_is_reused_or_refused(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    first, _ = prepare(request(out, texts))
    state = os.stat(out).st_mtime_ns
    assert prepare(request(out, texts, workers=2)) == (first, True)
    assert os.stat(out).st_mtime_ns == state
    with pytest.raises(DataError, match=r"prepared with vocab_size 300, not 310; choose another --out.*--force"):
        prepare(request(out, texts, vocab_size=310))
    (texts / "a.py").write_text("changed")
    with pytest.raises(DataError, match="files that have changed since"):
        prepare(request(out, texts))
    assert open_corpus(str(out)).fingerprint == first["fingerprint"]
    second, present = prepare(request(out, texts, force=True))
    assert not present and second["fingerprint"] != first["fingerprint"]
    assert sorted(os.listdir(tmp_path)) == ["out", "texts"]


def test_a_corpus_of_an_older_version_is_not_prepared_again(tmp_path: Path, texts: Path) -> None:
    """Older versions had fewer suffixes and options; the same files then give the same corpus."""
    out = tmp_path / "out"
    prepare(request(out, texts))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["options"]["suffixes"] = [".txt", ".py", ".jsonl"]
    del manifest["options"]["skip_bad"], manifest["options"]["end_token"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert prepare(request(out, texts)) == (manifest, True)
    with pytest.raises(DataError, match="prepared with skip_bad None, not True"):
        prepare(request(out, texts, skip_bad=True))


@pytest.mark.slow
def test_a_damaged_corpus_is_replaced_by_force(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    prepare(request(out, texts))
    (out / "corpus.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"corpus\.bin"):
        prepare(request(out, texts))
    prepare(request(out, texts, force=True))
    assert open_corpus(str(out)).index.tokens > 0


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_corpus_is_left_alone(tmp_path: Path, texts: Path, force: bool) -> None:
    with pytest.raises(DataError, match="is not a prepared corpus, so it is left alone"):
        prepare(request(texts, texts, force=force))
    assert (texts / "a.py").exists()
    with pytest.raises(DataError, match="left alone"):
        prepare(request(texts / "a.py", texts, force=force))


def test_an_empty_folder_is_filled(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "out").mkdir()
    prepare(request(tmp_path / "out", texts))
    assert sorted(os.listdir(tmp_path)) == ["out", "texts"]


@pytest.mark.slow
def test_a_link_and_the_current_folder_are_accepted(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path / "here")
    prepare(request(Path(), texts))
    prepare(request(tmp_path / "link", texts))
    assert content(tmp_path / "here") == content(tmp_path / "there")
    assert sorted(os.listdir(tmp_path)) == ["here", "link", "texts", "there"]


def test_bad_input_leaves_no_file(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="nothing to prepare: name files or folders, or --stdlib"):
        prepare(request(out))
    with pytest.raises(DataError, match="--vocab-size 200: .* at least 257"):
        prepare(request(out, texts, vocab_size=200))
    with pytest.raises(
        DataError, match=r"no text in 1 file\(s\), 1 of them not UTF-8 text, or with NUL bytes: .*d\.txt"
    ):
        prepare(request(out, texts / "d.txt"))
    (texts / "e.jsonl").write_text('{"text": "good"}\nbad\n')
    with pytest.raises(DataError, match=r"e\.jsonl:2: not JSON"):
        prepare(request(out, texts, workers=2))
    with pytest.raises(DataError, match="cannot be made"):
        prepare(request(texts / "a.py" / "out", texts))
    assert os.listdir(tmp_path) == ["texts"]


# `fugaku-gpt data prepare` that touches a file and sleeps once it has written four documents, its workers still alive
STALLING = """
import pathlib, signal, sys, time
from fugaku_gpt.cli.main import run
from fugaku_gpt.data import workers
from fugaku_gpt.data.indexed import IndexedWriter
workers.BATCH_BYTES = 1000
signal.signal(signal.SIGINT, signal.default_int_handler)
add_document = IndexedWriter.add_document
def stall(self, tokens):
    add_document(self, tokens)
    if len(self._lengths) == 4:
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
IndexedWriter.add_document = stall
sys.exit(run(["data", "prepare", *sys.argv[2:]]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_a_killed_prepare_leaves_no_visible_file(tmp_path: Path, texts: Path, signal_number: int) -> None:
    """No folder and no process is left; files left by SIGKILL are hidden, and removed by the next prepare."""
    out, marker = tmp_path / "out", tmp_path / "stalled"
    options = [str(texts), "--out", str(out), "--vocab-size", "300", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", STALLING, str(marker), *options], stderr=subprocess.PIPE, universal_newlines=True
    )
    until(lambda: marker.exists() or process.poll() is not None)
    assert marker.exists() and len(_processes_of(out)) == 3
    process.send_signal(signal_number)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == (-9 if signal_number == signal.SIGKILL else 1)
    assert "Traceback" not in stderr
    until(lambda: not _processes_of(out))
    marker.unlink()
    left = [name for name in os.listdir(tmp_path) if name != "texts"]
    assert len(left) == (signal_number == signal.SIGKILL) and all(name.startswith(".out.") for name in left)
    prepare(request(out, texts))
    assert sorted(os.listdir(tmp_path)) == ["out", "texts"]


def _processes_of(out: Path) -> List[str]:
    """Process ids of `data prepare` for this folder and of its workers, which name its parent in their arguments."""
    process_ids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(out.parent).encode() in (process / "cmdline").read_bytes():
                process_ids.append(process.name)
    return process_ids


def test_equal_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("a b", "c", "a b", "a b "))
    )
    (tmp_path / "b.txt").write_text("c")
    sources = (tmp_path / "a.jsonl", tmp_path / "b.txt")
    manifest, _ = prepare(request(tmp_path / "once", *sources, deduplicate=True))
    assert (manifest["documents"], manifest["duplicate_documents"]) == (3, 2)
    every, _ = prepare(request(tmp_path / "all", *sources))
    assert (every["documents"], every["duplicate_documents"]) == (5, 0)
    with pytest.raises(DataError, match="prepared with deduplicate True, not None"):
        prepare(request(tmp_path / "once", *sources))
    assert prepare(request(tmp_path / "once", *sources, deduplicate=True)) == (manifest, True)


def test_texts_under_several_keys_are_joined(tmp_path: Path) -> None:
    records = [{"title": "T", "body": {"text": "B"}}, {"title": None, "body": {"text": "C"}}, {"title": "D"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    changes = {"text_keys": ("title", "body.text"), "vocab_size": 257}
    manifest, _ = prepare(request(tmp_path / "out", tmp_path / "a.jsonl", **changes))
    corpus = open_corpus(str(tmp_path / "out"))
    assert [len(corpus.index.document(number)) - 1 for number in range(3)] == [len("T\n\nB"), 1, 1]
    assert manifest["options"]["text_key"] == ["title", "body.text"]
    assert manifest["text_keys_never_met"] == []
    mistyped = {**changes, "text_keys": ("title", "boddy")}
    manifest, _ = prepare(request(tmp_path / "mistyped", tmp_path / "a.jsonl", **mistyped, skip_bad=True))
    assert manifest["text_keys_never_met"] == ["boddy"]
    limited = request(tmp_path / "limited", tmp_path / "a.jsonl", **mistyped, limit_mib=1 / 2**20)
    assert prepare(limited)[0]["text_keys_never_met"] == ["boddy"]
    with pytest.raises(DataError, match="--text-key text --text-key text: a key is given twice"):
        prepare(request(tmp_path / "none", tmp_path / "a.jsonl", text_keys=("text", "text")))
    (tmp_path / "a.jsonl").write_text('{"other": "x"}\n')
    with pytest.raises(DataError, match="no text under the key 'title' or 'body.text'; texts of this record: other"):
        prepare(request(tmp_path / "none", tmp_path / "a.jsonl", **changes))
