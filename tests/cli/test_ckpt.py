"""Tests of ``fugaku-gpt ckpt``: list, inspect, verify, export and import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List

import pytest

from fugaku_gpt.checkpoint.hugging_face_models import GPT2, tensor_pairs
from fugaku_gpt.cli.main import run
from fugaku_gpt.config import load_run_config
from tests.support.checkpoints import cut_flat, save, some_arrays


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    arrays = some_arrays(3)
    for iteration in (10, 20):
        save(
            tmp_path / "run" / "checkpoints", iteration, arrays, cut_flat(arrays, 2),
            state={"loss_scale": 0.5}, config={"model": {"layers": 2}}, data_fingerprint="abc",
        )  # fmt: skip
    return tmp_path / "run"


def ckpt(capsys: pytest.CaptureFixture[str], code: int, *arguments: Any) -> str:
    assert run(["ckpt", *map(str, arguments)]) == code
    return capsys.readouterr().out


def test_ls_shows_the_best_and_survives_a_damaged_record(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_directory / "checkpoints" / "best.json"
    values = {"version": 1, "name": "step-00000010", "loss": "news", "value": 1.5, "iteration": 10}
    record.write_text(json.dumps(values), encoding="utf-8")
    rows = json.loads(ckpt(capsys, 0, "ls", run_directory, "--format", "json"))
    assert [row["best"] for row in rows] == [None, "news 1.500000"]
    record.write_text("{", encoding="utf-8")
    assert run(["ckpt", "ls", str(run_directory), "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert [(row["iteration"], row["problem"]) for row in json.loads(printed.out)] == [(20, None), (10, None)]
    assert "best.json: " in printed.err and "remove it" in printed.err


def test_ls_in_every_format(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: List[Any] = json.loads(ckpt(capsys, 0, "ls", run_directory, "--format", "json"))
    assert [(row["checkpoint"], row["iteration"], row["latest"], row["problem"]) for row in rows] == [
        ("step-00000020", 20, "yes", None),
        ("step-00000010", 10, None, None),
    ]
    newest = run_directory / "checkpoints" / "step-00000020"
    assert rows[0]["files"] == 2 and rows[0]["bytes"] == sum(file.stat().st_size for file in newest.glob("data-*"))
    assert ckpt(capsys, 0, "ls", newest.parent).splitlines()[2].startswith("step-00000020  20         160      1280")
    assert ckpt(capsys, 0, "ls", newest, "--format", "csv").splitlines()[1].startswith("step-00000020,20,160,1280,2,")
    (newest / "data-000001.safetensors").unlink()
    assert "data-000001.safetensors: missing" in ckpt(capsys, 0, "ls", run_directory)
    (newest / "manifest.json").unlink()
    assert "it holds no manifest.json" in ckpt(capsys, 0, "ls", run_directory)


def test_inspect_reports_the_newest_checkpoint(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = json.loads(ckpt(capsys, 0, "inspect", run_directory, "--format", "json"))
    assert info["iteration"] == 20 and info["parameters"] == 60 + 7 + 48 + 1 and info["data_fingerprint"] == "abc"
    assert info["state"] == {"loss_scale": 0.5} and info["config"] == {"model": {"layers": 2}}
    table = ckpt(capsys, 0, "inspect", run_directory / "checkpoints" / "step-00000010")
    assert "\nconfig.model.layers  2\n" in table and "\niteration            10\n" in table
    tensors = json.loads(ckpt(capsys, 0, "inspect", run_directory, "--tensors", "--format", "json"))
    assert tensors[1] == {
        "tensor": "a.weight",
        "shape": "3x4x5",
        "elements": 60,
        "kinds": "first_moment:F32 second_moment:F32 weights:F32",
        "files": 2,
    }


def test_verify_names_the_damage_and_is_exit_code_3(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt(capsys, 0, "verify", run_directory).count("  whole") == 2
    path = run_directory / "checkpoints" / "step-00000020" / "data-000000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(bytes(content))
    rows = json.loads(ckpt(capsys, 3, "verify", run_directory, "--format", "json"))
    assert [row["verdict"] for row in rows] == ["damaged", "whole"]
    assert rows[0]["problem"] == f"{path}: damaged: second_moment of b.weight[0:3, 0:8]: its CRC-32 is another"
    assert "right" in ckpt(capsys, 0, "verify", "--fast", run_directory)


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_a_folder_without_checkpoints_is_exit_code_2(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, message in ((tmp_path, "holds no checkpoint"), (tmp_path / "nowhere", "no such folder")):
        assert run(["ckpt", verb, str(path)]) == 2
        assert message in capsys.readouterr().err


def test_export_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_run_config(overrides=["model.layers=1", "model.hidden=8", "model.heads=2", "model.gelu=tanh"]).model
    arrays = some_arrays(1, {pair.ours: pair.shape for pair in tensor_pairs(model, GPT2)})
    (tmp_path / "run").mkdir()
    for iteration in (10, 20):
        path = save(
            tmp_path / "run" / "checkpoints", iteration, arrays, cut_flat(arrays, 2), config={"model": vars(model)}
        )
    (path / "data-000000.safetensors").unlink()
    assert run(["ckpt", "export", str(tmp_path / "run"), str(tmp_path / "gpt2")]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith(f"parameters from {path.parent / 'step-00000010'}\n")
    assert "warning: step-00000020 is left out: " in captured.err and "data-000000.safetensors: missing" in captured.err
    output = ckpt(capsys, 0, "import", tmp_path / "gpt2", tmp_path / "new" / "checkpoints")
    (tmp_path / "run.yaml").write_text(output)  # the output is a run file
    assert load_run_config(tmp_path / "run.yaml").model == model
    assert ckpt(capsys, 0, "verify", tmp_path / "new").count("  whole") == 1
    assert run(["ckpt", "export", str(path), str(tmp_path / "other")]) == 2
    assert "none of its checkpoints is complete" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_export_takes_the_tokenizer_of_the_run_or_of_the_named_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_run_config(overrides=["model.layers=1", "model.hidden=8", "model.heads=2"]).model
    arrays = some_arrays(1, {pair.ours: pair.shape for pair in tensor_pairs(model, GPT2)})
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    for folder, digest in ((corpus, "a"), (other, "b")):
        folder.mkdir()
        (folder / "tokenizer.json").write_text('{"model": {}}')
        end = {"id": 7, "token": f"<{folder.name}>"}
        facts = {"version": 1, "tokens": 1, "documents": 1, "vocab_size": 9, "fingerprint": "x"}
        (folder / "manifest.json").write_text(json.dumps({**facts, "end_of_document": end, "tokenizer_sha256": digest}))

    def export(number: int, paths: List[str], *arguments: Any) -> Any:
        config = {"model": vars(model), "data": {"paths": paths}}
        (tmp_path / f"run{number}").mkdir()
        path = save(tmp_path / f"run{number}" / "checkpoints", 1, arrays, cut_flat(arrays, 1), config=config)
        assert run(["ckpt", "export", str(path), str(tmp_path / f"gpt2-{number}"), *map(str, arguments)]) == 0
        settings = json.loads((tmp_path / f"gpt2-{number}" / "config.json").read_text())
        has_tokenizer = (tmp_path / f"gpt2-{number}" / "tokenizer.json").exists()
        return settings["eos_token_id"], has_tokenizer, capsys.readouterr()

    end, has_tokenizer, captured = export(1, [str(corpus)])
    assert (end, has_tokenizer, captured.err) == (7, True, "") and "whose <corpus> ends a text" in captured.out
    end, has_tokenizer, captured = export(2, [str(tmp_path / "gone")])
    assert (end, has_tokenizer) == (None, False)
    assert "warning: no tokenizer is exported: " in captured.err and "name the corpus with --data DIR" in captured.err
    assert "gone: is not there" in captured.err
    assert "2 tokenizers; an exported folder has one" in export(3, [str(corpus), str(other)])[2].err
    assert "whose <other> ends a text" in export(4, [str(corpus)], "--data", other)[2].out
    (tmp_path / "pair.of.2026.idx").write_bytes(b"")
    assert "a Megatron pair has no tokenizer" in export(5, [str(tmp_path / "pair.of.2026")])[2].err
    path = tmp_path / "run1" / "checkpoints"
    assert run(["ckpt", "export", str(path), str(tmp_path / "last"), "--data", str(tmp_path / "gone")]) == 2
    assert not (tmp_path / "last").exists()
