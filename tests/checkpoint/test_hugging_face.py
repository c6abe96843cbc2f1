"""Tests of exporting and importing GPT-2 folders of Hugging Face; transformers itself computes the expected logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.hugging_face import CONFIG, INDEX, WEIGHTS, ExportOptions, export_model, import_model
from fugaku_gpt.checkpoint.hugging_face_tokenizer import CorpusTokenizer
from fugaku_gpt.checkpoint.reader import open_checkpoint
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.config import ModelConfig, load_run_config
from fugaku_gpt.errors import CheckpointError, UsageError
from tests.support.checkpoints import cut_flat, save, save_model, some_arrays
from tests.support.numpy_gpt import NumpyGPT
from tests.support.tokenizers import BYTE_LEVEL, edit, ids_of_library, make_tokenizer

SMALL = ["model.layers=3", "model.hidden=24", "model.heads=3", "model.seq_len=16", "model.vocab_size=101"]
TOKENS = np.random.RandomState(0).randint(0, 101, (2, 17))


def a_model(*overrides: str) -> ModelConfig:
    return load_run_config(overrides=[*SMALL, *overrides]).model


def weights_of(checkpoint: Path) -> Dict[str, Any]:
    with open_checkpoint(checkpoint) as reader:
        return {name: reader.tensor("weights", name).astype(np.float64) for name in reader.manifest.tensors}


def our_loss(model: ModelConfig, checkpoint: Path) -> float:
    """Mean cross-entropy by the NumPy model."""
    judge = NumpyGPT(model, weights_of(checkpoint))
    return judge.loss_and_gradients(TOKENS[:, :-1], TOKENS[:, 1:])[0] / TOKENS[:, 1:].size


@pytest.mark.parametrize("settings", [["model.gelu=tanh"], ["model.gelu=erf", "model.ffn_hidden=40"]])
@pytest.mark.slow
def test_an_exported_model_has_equal_logits_in_transformers(tmp_path: Path, settings: Any) -> None:
    torch, theirs, ours = _both_models(tmp_path, settings)
    tokens = torch.from_numpy(TOKENS[:, :16])
    with torch.no_grad():
        their_logits, our_logits = theirs(tokens).logits, ours.logits(tokens)[..., :101]
    assert float(our_logits.std()) > 0.5
    assert float((our_logits - their_logits).abs().max()) <= 1e-5 * float(their_logits.abs().max())


def _both_models(folder: Path, settings: Any) -> Any:
    """(torch, GPT2LMHeadModel of an exported checkpoint, our model with the checkpoint's weights)."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make install")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make dev")
    from fugaku_gpt.comm import Communicator
    from fugaku_gpt.model import build_model

    config = load_run_config(overrides=[*SMALL, *settings])
    checkpoint = save_model(folder / "checkpoints", config.model)
    assert export_model(checkpoint, folder / "gpt2") == (config.model, "gpt2")
    theirs, loading = transformers.GPT2LMHeadModel.from_pretrained(folder / "gpt2", output_loading_info=True)
    assert not any(loading.values()), loading
    ours = build_model(config, Communicator.alone())
    weights = weights_of(checkpoint)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter[: len(weights[name])].copy_(torch.from_numpy(weights[name]))  # the rest is padding
    return torch, theirs.eval(), ours


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "gelu_fast", "gelu_python"])
def test_a_model_saved_by_transformers_has_an_equal_loss_after_import(
    tmp_path: Path, dtype: str, activation: str
) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make install")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make dev")
    torch.manual_seed(1)
    settings = transformers.GPT2Config(
        vocab_size=101, n_positions=16, n_embd=24, n_layer=2, n_head=3, initializer_range=0.3,
        activation_function=activation, layer_norm_epsilon=1e-3, n_inner=40 if dtype == "float16" else None,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(settings).eval().to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "gpt2", max_shard_size="10KB" if dtype == "float32" else "1GB")
    assert (tmp_path / "gpt2" / INDEX).exists() == (dtype == "float32")
    checkpoint, model, notes = import_model(tmp_path / "gpt2", tmp_path / "run" / "checkpoints")
    assert (
        checkpoint == tmp_path / "run" / "checkpoints" / "step-00000000"
        and verify_checkpoint(checkpoint) == []
        and not notes
    )
    assert (model.vocab_size, model.seq_len, model.layers, model.heads, model.layernorm_eps) == (101, 16, 2, 3, 1e-3)
    tokens = torch.from_numpy(TOKENS)
    with torch.no_grad():
        logits = theirs.double()(tokens[:, :-1]).logits
        loss = float(torch.nn.functional.cross_entropy(logits.reshape(-1, 101), tokens[:, 1:].reshape(-1)))
    assert loss > 1 and our_loss(model, checkpoint) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_weights_are_unchanged_by_export_and_import(tmp_path: Path, dtype: str) -> None:
    model = a_model("model.gelu=tanh", "model.dropout=0.1", "model.ffn_hidden=31")
    checkpoint = save_model(tmp_path / "one", model, dtype=dtype)
    export_model(checkpoint, tmp_path / "gpt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "one"]
    back, same, notes = import_model(tmp_path / "gpt2", tmp_path / "two")
    assert same == model and not notes
    with open_checkpoint(checkpoint) as before, open_checkpoint(back) as after:
        assert after.manifest.tensors.keys() == before.manifest.tensors.keys()
        assert (after.manifest.iteration, after.manifest.consumed_samples, after.manifest.state) == (0, 0, {})
        for name in before.manifest.tensors:
            original, imported = before.tensor("weights", name), after.tensor("weights", name)
            assert imported.dtype == np.float32 and np.array_equal(original.astype(np.float32), imported)
            assert dict(after.manifest.tensors[name].kinds) == {"weights": "F32"}


def test_a_model_that_is_no_gpt_2_is_refused(tmp_path: Path) -> None:
    arrays = some_arrays(0)
    with_norm = {"model": {**vars(load_run_config(overrides=["model.embedding_layernorm=true"]).model)}}
    checkpoint = save(tmp_path / "a", 1, arrays, cut_flat(arrays, 1), config=with_norm)
    with pytest.raises(UsageError, match="a norm after the embedding"):
        export_model(checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError, match="does not say which model"):
        export_model(save(tmp_path / "b", 1, arrays, cut_flat(arrays, 1)), tmp_path / "out")
    config = {"model": {**vars(a_model())}}
    with pytest.raises(CheckpointError, match=r"holds no weights of token_embedding\.weight"):
        export_model(save(tmp_path / "c", 1, arrays, cut_flat(arrays, 1), config=config), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(UsageError, match="out: already exists"):
        export_model(checkpoint, tmp_path / "out")


def changed(folder: Path, **values: Any) -> None:
    settings = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**settings, **values}))


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def cut_short(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def rename_a_tensor(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content.replace(b"transformer.h.1.ln_1.bias", b"transformer.h.1.ln_3.bias"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: changed(folder, model_type="bert"),
            "model_type is 'bert'; those that can be imported are gpt2, ",
        ),
        (lambda folder: changed(folder, activation_function="relu"), "'relu'; known are gelu, gelu_python, gelu_new"),
        (
            lambda folder: changed(folder, scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx is True",
        ),
        (lambda folder: changed(folder, tie_word_embeddings=False), "tie_word_embeddings is False"),
        (lambda folder: changed(folder, n_head=5), "model.heads"),
        (lambda folder: changed(folder, n_layer=4), "holds no h.3.ln_1.weight"),
        (lambda folder: changed(folder, n_layer=2), "holds h.2.attn.c_attn.bias, which"),
        (lambda folder: changed(folder, n_positions=8), r"wpe.weight is \(16, 24\), and by config.json \(8, 24\)"),
        (lambda folder: (folder / CONFIG).write_text("{"), "config.json: not JSON"),
        (lambda folder: (folder / CONFIG).unlink(), "config.json: missing"),
        (without_weights, "pickled files are not read"),
        (cut_short, "bytes long, and its header says"),
        (rename_a_tensor, "holds no h.1.ln_1.bias"),
    ],
)
def test_an_unsupported_gpt_2_folder_is_refused_and_nothing_is_written(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    export_model(save_model(tmp_path / "one", a_model()), tmp_path / "gpt2")
    spoil(tmp_path / "gpt2")
    with pytest.raises(UsageError, match=message):
        import_model(tmp_path / "gpt2", tmp_path / "two")
    assert list_checkpoints(tmp_path / "two") == [] and not (tmp_path / "two").exists()


def test_tied_weights_may_have_the_name_of_the_other_layer(tmp_path: Path) -> None:
    model = a_model()
    checkpoint = save_model(tmp_path / "one", model)
    export_model(checkpoint, tmp_path / "gpt2")
    content = (tmp_path / "gpt2" / WEIGHTS).read_bytes()
    renamed = b'lm_head.weight"'  # as long as the old name with the blanks after it, where JSON allows blanks
    old = b'transformer.wte.weight"'
    assert content.count(old) == 1
    (tmp_path / "gpt2" / WEIGHTS).write_bytes(content.replace(old, renamed + b" " * (len(old) - len(renamed))))
    back = import_model(tmp_path / "gpt2", tmp_path / "two").checkpoint
    assert our_loss(model, back) == pytest.approx(our_loss(model, checkpoint), rel=1e-12)
    (tmp_path / "gpt2" / WEIGHTS).write_bytes(content.replace(b"transformer.wte.weight", b"transformer.wtx.weight"))
    with pytest.raises(UsageError, match=r"holds no wte\.weight"):
        import_model(tmp_path / "gpt2", tmp_path / "three")


def a_tokenizer(folder: Path, post_processor: Any = None) -> CorpusTokenizer:
    """A byte-level tokenizer whose token 1 ends documents."""
    pytest.importorskip("tokenizers")
    path = make_tokenizer(BYTE_LEVEL, folder / "corpus-tokenizer.json", ["<|end|>", "</s>"])
    edit(path, post_processor=post_processor)
    return CorpusTokenizer(path, 330, 1, "<|end|>")


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
}
BYTE_LEVEL_OFFSETS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (None, None),
        (BYTE_LEVEL_OFFSETS, BYTE_LEVEL_OFFSETS),
        (TEMPLATE, None),
        (
            {"type": "Sequence", "processors": [BYTE_LEVEL_OFFSETS, TEMPLATE]},
            {"type": "Sequence", "processors": [BYTE_LEVEL_OFFSETS]},
        ),
    ],
)
def test_the_tokenizer_of_the_corpus_is_exported(tmp_path: Path, processor: Any, expected: Any) -> None:
    model = a_model("model.vocab_size=330")
    tokenizer = a_tokenizer(tmp_path, processor)
    export_model(save_model(tmp_path / "one", model), tmp_path / "gpt2", ExportOptions(tokenizer))
    settings = json.loads((tmp_path / "gpt2" / CONFIG).read_text())
    assert (settings["eos_token_id"], settings["bos_token_id"]) == (1, 1)
    declared = json.loads((tmp_path / "gpt2" / "tokenizer_config.json").read_text())
    assert (declared["eos_token"], declared["bos_token"], declared["model_max_length"]) == ("<|end|>", "<|end|>", 16)
    original = json.loads(tokenizer.path.read_text())
    exported = json.loads((tmp_path / "gpt2" / "tokenizer.json").read_text())
    assert exported == {**original, "post_processor": expected, "truncation": None, "padding": None}
    assert import_model(tmp_path / "gpt2", tmp_path / "two").model == model
    assert sorted(path.name for path in (tmp_path / "gpt2").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"corpus-tokenizer\.json: has 330 tokens, more than model\.vocab_size 101"):
        export_model(save_model(tmp_path / "small", a_model()), tmp_path / "other", ExportOptions(tokenizer))
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_transformers_loads_the_folder_and_generates(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make install")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make dev")
    tokenizer = a_tokenizer(tmp_path, TEMPLATE)
    export_model(
        save_model(tmp_path / "one", a_model("model.vocab_size=330")), tmp_path / "gpt2", ExportOptions(tokenizer)
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    text = "It's a text of some words"
    ids = theirs(text)["input_ids"]
    assert ids == ids_of_library(tokenizer.path, text) and theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.bos_token_id) == (1, 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    generated = model.generate(torch.tensor([ids[:4]]), max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > 4 and generated[0, :4].tolist() == ids[:4]


def test_existing_checkpoints_are_not_overwritten(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "one", a_model())
    export_model(checkpoint, tmp_path / "gpt2")
    with pytest.raises(UsageError, match="holds checkpoints already"):
        import_model(tmp_path / "gpt2", tmp_path / "one")
    changed(tmp_path / "gpt2", embd_pdrop=0.2)
    assert "embd_pdrop 0.2 is not resid_pdrop 0.0" in import_model(tmp_path / "gpt2", tmp_path / "two").notes[0]
