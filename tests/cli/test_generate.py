"""Tests of ``fugaku-gpt generate`` and ``fugaku-gpt eval`` with real files and ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, List, Sequence

import numpy as np
import psutil
import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.harmless import harmless
from fugaku_gpt.inference.text import TextTokenizer
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.launch.rank_supervisor import SUPERVISOR_NAME
from fugaku_gpt.layout.shards import logical_shapes
from tests.support import tokenizers
from tests.support.checkpoints import KINDS, cut_flat, save, save_model, some_arrays
from tests.support.models import model_of_kind

pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")

VOCABULARY = 330
LITTLE_MEMORY = """
from fugaku_gpt.inference.replica import ModelReplica
from fugaku_gpt.machine import local
local.memory_limit = lambda: 2**28
load = ModelReplica.load
ModelReplica.load = lambda *arguments: (print("loading"), load(*arguments))
"""
PROMPTS = ["def f(x)", "It's", "some words"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer beside its weights."""
    folder = tmp_path_factory.mktemp("run")
    path = save_model(folder / "checkpoints", model_of_kind("llama", f"model.vocab_size={VOCABULARY}"))
    tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, path / "tokenizer.json")
    return folder


def command(*arguments: object, text: str = "") -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "fugaku_gpt", *map(str, arguments)]
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=300, check=False)


def run_on_two_ranks(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program, which knows its rank, on two ranks."""
    beginning = """
import os, sys
from fugaku_gpt.cli.main import run
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
"""
    launcher = find_launcher()
    argv = [*launcher.command_prefix(2), sys.executable, "-c", beginning + program]
    environment = {**os.environ, **launcher.environment, "OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)


def prompt_options(prompts: Sequence[str]) -> List[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
def test_texts_are_the_same_on_1_and_4_ranks(model: Path) -> None:
    options = ["--temperature", "1", "--seed", "3", "--max-tokens", "8", "--dtype", "float64", "--format", "jsonl"]
    prompts = PROMPTS * 3  # more than two replicas do in one round, so that one has none in the last round
    outputs = []
    for layout in ((), ("--ranks=4", "--tp", "2", "--batch", "1")):
        done = command("generate", model, *prompt_options(prompts), *options, *layout)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        assert "generated: 63 tokens" in done.stderr and "cache of keys and values" in done.stderr
    rows = [json.loads(line) for line in outputs[0].splitlines()]
    assert [row["prompt"] for row in rows] == prompts and {row["reason"] for row in rows} == {"length"}
    assert outputs[1] == outputs[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_the_text_of_a_single_prompt_is_printed_as_it_grows(model: Path) -> None:
    options = ("--temperature", "1", "--max-tokens", "6")
    row = json.loads(command("generate", model, "--prompt", "It's", *options, "--format", "jsonl").stdout)
    streamed = command("generate", model, "--prompt", "It's", *options).stdout
    assert streamed == harmless(f"{row['text']}\n")
    several = command("generate", model, "--prompt", "It's", "--prompt", "def", *options).stdout
    assert several.startswith("=== prompt 1\n") and "\n=== prompt 2\n" in several


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
def test_losses_are_the_same_on_1_and_4_ranks(model: Path, tmp_path: Path) -> None:
    for name, text in (("a.txt", "def f(x):\n    return x\n" * 4), ("b.txt", "naïve")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = ("--text", tmp_path / "a.txt", "--text", tmp_path / "b.txt")
    options = ("--per-document", "--format", "json", "--dtype", "float64")
    outputs = [
        command("eval", model, *files, *options, *layout).stdout for layout in ((), ("--ranks", "4", "--pp", "2"))
    ]
    rows = json.loads(outputs[0])
    assert [row["text"] for row in rows] == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "all 2"]
    assert all(type(row[name]) is float for row in rows for name in ("loss", "perplexity", "bits per byte"))
    assert [row["bytes"] for row in rows] == [92, 6, 98] and rows[2]["tokens"] == rows[0]["tokens"] + rows[1]["tokens"]
    assert outputs[1] == outputs[0]


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
def test_arguments_reach_the_ranks_unchanged(model: Path) -> None:
    options = ("--prompt", "--ranks=4", "--max-tokens", "2", "--format", "jsonl", "--tp", "2", "--ranks", "2")
    done = command("generate", model, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "--ranks=4"


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
def test_the_standard_input_is_read_once_for_all_ranks(model: Path) -> None:
    options = ("--max-tokens", "2", "--format", "jsonl", "--tp", "2", "--prompts=-")
    done = command("generate", *options, "--ranks", "2", "--", model, text="It's\n\nsome words\n")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["It's", "some words"]


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
def test_a_pipe_is_read_once_for_all_ranks(model: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"  # its name tells its form, whatever that of the copy is
    os.mkfifo(pipe)
    (tmp_path / "a.txt").write_text("def f(x)")
    line = json.dumps({"text": "It is a text"})
    with subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}, 'w').write({line!r})"]):
        files = ("--text", "/dev/stdin", "--text", pipe, "--text", tmp_path / "a.txt", "--per-document")
        done = command("eval", model, *files, "--format", "json", "--ranks", "2", "--tp", "2", text="some words")
    assert done.returncode == 0, done.stderr
    sizes = {row["text"]: row["bytes"] for row in json.loads(done.stdout)}
    assert sizes == {"/dev/stdin": 10, str(pipe): 12, str(tmp_path / "a.txt"): 8, "all 3": 30}


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
def test_messages_about_the_standard_input_name_it(model: Path) -> None:
    for ranks in ((), ("--ranks", "2")):
        done = command("eval", model, "--questions", "-", *ranks, text="{}")
        assert done.returncode == 2 and "fugaku-gpt: -:1: {}: expected question" in done.stderr


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("verb", [("generate", "--prompts", "/dev/stdin"), ("eval", "--text", "-")])
def test_ranks_of_a_launcher_refuse_the_standard_input(model: Path, verb: Sequence[str]) -> None:
    name, *options = verb
    done = run_on_two_ranks(f"sys.exit(run([{name!r}, {str(model)!r}, *{options}, '--tp', '2']))")
    assert done.returncode == 2 and f"{options[0]} {options[1]}: is a stream, which not every rank" in done.stderr


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
def test_a_replica_whose_logits_are_not_finite_ends_all(tmp_path: Path) -> None:
    model = model_of_kind("qwen3-like", f"model.vocab_size={VOCABULARY}")
    arrays = some_arrays(1, logical_shapes(model), kinds=KINDS[:1])
    path = save(tmp_path / "checkpoints", 12, arrays, cut_flat(arrays, 1), config={"model": asdict(model)})
    tokenizer = tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, path / "tokenizer.json")
    (token,) = TextTokenizer(tokenizer).encode("z")
    arrays["weights/token_embedding.weight"][token] = np.nan
    shutil.rmtree(path)
    path = save(tmp_path / "checkpoints", 12, arrays, cut_flat(arrays, 1), config={"model": asdict(model)})
    tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, path / "tokenizer.json")
    done = command("generate", tmp_path, "--prompt", "It's", "--prompt", "z", "--ranks", "2", "--max-tokens", "2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "fugaku-gpt: rank 1: a logit is not finite in float32"


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("verb", [("generate", "--prompt", "It's"), ("eval", "--text", "TEXT")])
def test_a_rank_that_ends_before_it_joins_ends_all(verb: Sequence[str], model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def f(x)")
    name, *options = [word.replace("TEXT", str(tmp_path / "a.txt")) for word in verb]
    done = run_on_two_ranks(
        f"""
if rank == 1:
    from fugaku_gpt.inference import model_source
    model_source.find_model = lambda *_: os._exit(3)
sys.exit(run([{name!r}, {str(model)!r}, *{options}, "--tp", "2"]))
"""
    )
    assert (
        done.returncode == 1 and "rank 1 on " in done.stderr and "ended (exit code 3) before it joined" in done.stderr
    )


@pytest.mark.mpi
@pytest.mark.long
def test_a_rank_that_is_killed_while_texts_grow_is_named(model: Path) -> None:
    argv = [sys.executable, "-m", "fugaku_gpt", "generate", str(model), *prompt_options(["def f(x)"] * 200)]
    options = ["--batch", "1", "--max-tokens", "16", "--format", "jsonl", "--ranks", "2", "--tp", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*argv, *options], text=True, **pipes) as started:
        assert started.stdout is not None and started.stdout.readline().startswith('{"prompt": "def f(x)"')
        processes = psutil.Process(started.pid).children(recursive=True)
        supervisors = [process.pid for process in processes if process.name() == SUPERVISOR_NAME]
        first, second = [process for process in processes if process.ppid() in supervisors]
        second.kill()
        _, errors = started.communicate(timeout=300)
    assert started.returncode in (1, 128 + 9)  # MPICH's launcher passes on the code of one rank alone
    assert re.search(r"^fugaku-gpt: rank [01]: killed by signal 9 \(SIGKILL\)$", errors, re.MULTILINE)
    assert "Traceback" not in errors


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
def test_a_refusal_by_a_single_rank_ends_all(model: Path) -> None:
    done = run_on_two_ranks(
        f"""
from fugaku_gpt.launch import rank_supervisor
rank_supervisor._RANK_0_SECONDS = 1.0
source = "missing" if rank == 1 else {str(model)!r}
sys.exit(run(["generate", source, "--prompt", "It's", "--tp", "2"]))
"""
    )
    assert done.returncode == 1 and "rank 1 on" in done.stderr and "missing: there is no such folder" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_the_documents_of_a_corpus_are_read_as_they_are_stored(model: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name, text in (("a.txt", "def f(x):\n    return x\n"), ("b.txt", "It's a text")):
        (tmp_path / "texts" / name).write_text(text, encoding="utf-8")
    tokenizer = model / "checkpoints" / "step-00000012"
    prepare = ["data", "prepare", str(tmp_path / "texts"), "--out", str(tmp_path / "corpus")]
    assert run([*prepare, "--tokenizer", str(tokenizer / "tokenizer.json"), "--suffix", ".txt"]) == 0
    options = ("--per-document", "--format", "json")
    of_corpus = json.loads(command("eval", model, "--data", tmp_path / "corpus", *options).stdout)
    files = [word for name in ("a.txt", "b.txt") for word in ("--text", tmp_path / "texts" / name)]
    of_files = json.loads(command("eval", model, *files, *options).stdout)
    values = [sorted((row["bytes"], row["loss"]) for row in rows) for rows in (of_corpus, of_files)]
    assert values[0] == values[1] and len(values[0]) == 3
    (first, _) = json.loads(command("eval", model, "--data", tmp_path / "corpus", "--documents", "1", *options).stdout)
    assert first["text"] == "0"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_questions_are_answered_by_the_most_probable_choice(model: Path, tmp_path: Path) -> None:
    # to an untrained model each token is about as probable as any: a short choice is more probable than one of several
    # tokens, and less probable for each of its bytes
    choices = ["z", "\n    return x\n\n    return x\n"]
    path = tmp_path / "questions.jsonl"
    lines = [{"question": "def f(x):", "choices": choices, "answer": n} for n in (0, 0, 1)]
    lines.append({"question": "def f(x):", "choices": choices[::-1], "answer": 1})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (row,) = json.loads(command("eval", model, "--questions", path, "--format", "json").stdout)
    assert (row["questions"], row["right"], row["accuracy"]) == (4, 3, 0.75)
    assert (row["right by byte"], row["accuracy by byte"]) == (1, 0.25)
    table = command("eval", model, "--questions", path).stdout.splitlines()
    assert table[-1].split() == ["4", "3", "0.7500", "1", "0.2500"]


@pytest.mark.mpi
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("verb", [("generate", "--prompt", "It's"), ("eval", "--text", "TEXT")])
def test_ranks_that_do_not_fit_into_memory_are_refused_before_they_load(
    verb: Sequence[str], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("def f(x)")
    name, *options = [text.replace("TEXT", str(tmp_path / "a.txt")) for text in verb]
    done = run_on_two_ranks(LITTLE_MEMORY + f"sys.exit(run([{name!r}, {str(model)!r}, *{options}, '--tp', '2']))")
    assert done.returncode == 2 and "loading" not in done.stdout
    assert re.search(r"needs \d+ MiB of a node for 2 ranks; there are \d+ MiB \(this machine", done.stderr)


@pytest.mark.slow
@pytest.mark.long
def test_the_check_of_memory_can_be_left_out(model: Path) -> None:
    program = "import sys; from fugaku_gpt.cli.main import run" + LITTLE_MEMORY
    program += f"sys.exit(run(['generate', {str(model)!r}, '--prompt', 'x', '--max-tokens', '2', *sys.argv[1:]]))"
    argv = [sys.executable, "-c", program, "--no-memory-check"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "loading" in done.stdout, done.stderr


@pytest.mark.parametrize("verb", [("generate", "--prompt", "x"), ("eval", "--text", "x")])
def test_a_model_of_another_program_is_refused_with_the_import(
    verb: Sequence[str], tmp_path: Path, capsys: "pytest.CaptureFixture[str]"
) -> None:
    folder, file = tmp_path / "a model", tmp_path / "small.gguf"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    file.write_bytes(b"GGUF")
    for path, kind, imported in (
        (folder, "a Hugging Face folder", "'runs/a model"),
        (file, "a GGUF file", "runs/small"),
    ):
        assert run([verb[0], str(path), *verb[1:]]) == 2
        message = capsys.readouterr().err
        assert f"is {kind}; import it" in message and "fugaku-gpt ckpt import" in message and imported in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "MODEL"], "give prompts: --prompt TEXT"),
        (["generate", "MODEL", "--prompt", "x", "--prompts", "y"], "give prompts: --prompt TEXT"),
        (["generate", "MODEL", "--prompt", "x", "--ranks", "3", "--tp", "2"], "--tp 2 . --pp 1 = 2 must divide it"),
        (["generate", "MODEL", "--prompt", "x " * 30], r"prompt 1: has \d+ tokens; valid: 1 to 24, model.seq_len"),
        (["generate", "MODEL", "--prompt", "x", "--chat"], "has no chat_template"),
        (["generate", "MODEL", "--prompt", "x", "--tokenizer", "missing"], "missing: no such file"),
        (["generate", "missing", "--prompt", "x"], "missing: there is no such folder"),
        (["generate", "MODEL", "--prompt", "x", "--stop", ""], "--stop: an empty text"),
        (["generate", "MODEL", "--prompt", "x", "--temperature", "nan"], "nan is not a finite number"),
        (["generate", "MODEL", "--prompt", "a\udcff"], "character 2 is none: expected UTF-8"),
        (["eval", "MODEL"], "give one of --data CORPUS, --text FILE"),
        (["eval", "MODEL", "--text", "x", "--documents", "3"], "--documents: goes with --data"),
        (["eval", "MODEL", "--text", "missing.txt"], "missing.txt: cannot be read"),
        (["eval", "MODEL", "--text", "EMPTY"], "empty.txt: holds no document with text"),
        (["eval", "MODEL", "--questions", "x", "--per-document"], "--per-document: goes with --data or --text"),
        (["eval", "MODEL", "--text", "x", "--stride", "25"], "--stride 25: valid: 1 to 24, model.seq_len"),
        (["eval", "MODEL", "--data", "missing"], "missing: neither a folder made by"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(arguments: List[str], message: str, model: Path, capsys: Any) -> None:
    (model / "empty.txt").write_text("\ufeff\n\n", encoding="utf-8")
    paths = {"MODEL": str(model), "EMPTY": str(model / "empty.txt")}
    assert run([paths.get(word, word) for word in arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model: Path, tmp_path: Path, capsys: Any) -> None:
    save_model(tmp_path, model_of_kind("gpt2"))
    tokenizer = model / "checkpoints" / "step-00000012"
    assert run(["generate", str(tmp_path), "--prompt", "x", "--tokenizer", str(tokenizer)]) == 2
    assert "more than model.vocab_size 101: it is another model's" in capsys.readouterr().err
    (tmp_path / "text").write_text("It's a text", encoding="utf-8")
    assert run(["eval", str(tmp_path), "--text", str(tmp_path / "text"), "--tokenizer", str(tokenizer)]) == 2
    assert "it was encoded by another model's tokenizer" in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path, capsys: Any) -> None:
    save_model(tmp_path, model_of_kind("gpt2"))
    assert run(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
