"""Tests of files that are evaluated during a training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, List, Tuple

import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.comm import ProcessGrid
from fugaku_gpt.data.scored_text import ScoredText
from fugaku_gpt.errors import UsageError
from fugaku_gpt.training.eval_files import EvalFiles, open_eval_files
from tests.support.tiny import tiny_config
from tests.training.trainers import tiny_trainer

pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")

TEXTS = ("def f(x):\n    return x\n", "It's naïve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, another one of its tokenizer and one of its own, a Megatron pair with Megatron's cache, and texts."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    (folder / "empty.jsonl").write_text("\n", encoding="utf-8")
    (folder / "empty.txt").write_text("", encoding="utf-8")
    (folder / "damaged.jsonl").write_text('{"text": "x"}\n{"text":', encoding="utf-8")
    for name, more in (("corpus", []), ("held-out", ["--tokenizer", str(folder / "corpus" / "tokenizer.json")])):
        options = more or ["--vocab-size", "280"]
        assert run(["data", "prepare", str(folder / "b.jsonl"), "--out", str(folder / name), *options]) == 0
    for end in (".bin", ".idx"):
        shutil.copy(folder / "held-out" / f"corpus{end}", folder / f"pair{end}")
    (folder / "pair" / "cache").mkdir(parents=True)
    prepare = ["data", "prepare", str(folder / "a.txt"), "--out", str(folder / "other"), "--vocab-size", "262"]
    assert run(prepare) == 0
    return folder


def opened(folder: Path, *names: str, **settings: str) -> Any:
    paths = json.dumps([str(folder / name) for name in names])
    values = {"data.paths": json.dumps([str(folder / "corpus")]), "model.vocab_size": "300", **settings}
    overrides = [f"{key}={value}" for key, value in values.items()]
    config = tiny_config("training.eval_interval=2", f"training.eval_files={paths}", *overrides)
    return open_eval_files(config, ProcessGrid.alone().world)


def test_losses_are_those_of_the_command_that_evaluates(folder: Path, tmp_path: Path, capsys: Any) -> None:
    trainer = tiny_trainer(
        "training.eval_interval=2", "model.vocab_size=300", f'data.paths=["{folder / "corpus"}"]',
        f'training.eval_files={json.dumps([str(folder / name) for name in ("a.txt", "b.jsonl", "held-out", "pair")])}',
    )  # fmt: skip
    files = open_eval_files(trainer.config, trainer.grid.world)
    assert files is not None
    of_text, of_lines, of_corpus, of_pair = losses = files.losses(trainer)
    assert [loss.name for loss in losses] == ["a", "b", "held-out", "pair"]
    assert of_lines[1:] == pytest.approx(of_corpus[1:]) == of_pair[1:]
    assert of_text.bytes == len(TEXTS[0]) and of_lines.bytes == sum(len(text.encode("utf-8")) for text in TEXTS)

    from fugaku_gpt.training.checkpoint import CheckpointSaver

    CheckpointSaver(trainer, tmp_path).save({}, wait=True)
    capsys.readouterr()
    sources = (("--text", "a.txt"), ("--text", "b.jsonl"), ("--data", "held-out"), ("--data", "pair"))
    for loss, source in zip(losses, sources):
        assert run(["eval", str(tmp_path), source[0], str(folder / source[1]), "--format", "json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["tokens"], row["bytes"], row["loss"]) == (loss.tokens, loss.bytes, round(loss.loss, 6))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("missing.txt", {}, "missing.txt: cannot be read"),
        ("empty.jsonl", {}, "empty.jsonl: holds no document with text"),
        ("empty.txt", {}, "training.eval_files: .*empty.txt: holds no document with text"),
        ("damaged.jsonl", {}, "damaged.jsonl:2: not JSON"),
        ("other", {}, "other: must have the tokenizer of data.paths: .*2 tokenizers"),
        ("a.txt", {"data.paths": "[nowhere]"}, "a.txt: needs the tokenizer of data.paths: nowhere: is not there"),
        ("a.txt", {"model.vocab_size": "64"}, r"a.txt: has token \d+, more than model.vocab_size 64 allows"),
    ],
)
def test_files_that_cannot_be_evaluated_are_refused(folder: Path, name: str, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened(folder, name, **settings)


def test_a_run_without_files_or_without_an_interval_opens_none(folder: Path) -> None:
    assert opened(folder) is None


def test_an_evaluation_changes_nothing_of_the_steps() -> None:
    losses: List[Tuple[float, ...]] = []
    for evaluates in (False, True):
        trainer = tiny_trainer()
        steps = []
        for _ in range(3):
            steps.append(trainer.step().loss)
            if evaluates:
                EvalFiles(("a",), [[ScoredText("", list(range(40)), 1, 40)]]).losses(trainer)
        losses.append(tuple(steps))
    assert losses[0] == losses[1]
