"""Tests of Llama's kind of models to and from Hugging Face; transformers itself computes the expected logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from fugaku_gpt.checkpoint.hugging_face import CONFIG, INDEX, ExportOptions, export_model, import_model
from fugaku_gpt.checkpoint.hugging_face_models import export_notes, model_type_of, our_settings, tensor_pairs
from fugaku_gpt.checkpoint.reader import open_checkpoint
from fugaku_gpt.checkpoint.safetensors import make_header, read_tensor, write_tensor
from fugaku_gpt.config import ModelConfig, load_run_config
from fugaku_gpt.errors import CheckpointError, UsageError
from tests.support import tokenizers
from tests.support.checkpoints import cut_flat, save, save_model, some_arrays

SMALL = [
    "model.layers=2", "model.hidden=48", "model.heads=6", "model.kv_heads=2", "model.ffn_hidden=80", "model.seq_len=32",
    "model.vocab_size=101", "model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rope", "model.biases=none",
]  # fmt: skip
# settings of ours → class and model_type of theirs
FAMILIES: Dict[str, List[str]] = {
    "llama": [],
    "llama, keys of their own": ["model.kv_heads=6", "model.tied_embeddings=false"],
    "llama, stretched": ["model.rope_scaling=linear", "model.rope_factor=4"],
    "llama 3": [
        "model.rope_scaling=llama3", "model.rope_factor=8", "model.rope_original_seq_len=16", "model.rope_theta=500",
        "model.tied_embeddings=false",
    ],
    "qwen2": ["model.biases=qkv", "model.layernorm_eps=1e-6"],
    "qwen3": ["model.qk_norm=true", "model.head_dim=10"],
}  # fmt: skip
TOKENS = np.random.RandomState(0).randint(0, 101, (2, 33))


def a_model(*overrides: str) -> ModelConfig:
    return load_run_config(overrides=[*SMALL, *overrides]).model


def our_logits(model: ModelConfig, checkpoint: Path) -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make install")
    from fugaku_gpt.comm import Communicator
    from fugaku_gpt.config import RunConfig
    from fugaku_gpt.model import build_model

    ours = build_model(RunConfig(model=model), Communicator.alone())
    with open_checkpoint(checkpoint) as reader, torch.no_grad():
        for name, parameter in ours.named_parameters():
            weights = reader.tensor("weights", name)
            parameter[: len(weights)].copy_(torch.from_numpy(weights))  # the rest is padding
        return ours.logits(torch.from_numpy(TOKENS[:, :-1]))[..., :101]


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library, which takes seconds to import."""
    return pytest.importorskip("transformers", reason="transformers is not installed: make dev")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_has_equal_logits_in_transformers(family: str, tmp_path: Path, transformers: Any) -> None:
    import torch

    model = a_model(*FAMILIES[family])
    checkpoint = save_model(tmp_path / "checkpoints", model)
    assert export_model(checkpoint, tmp_path / "out") == (model, family.partition(",")[0].partition(" ")[0])
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(TOKENS[:, :-1])).logits
    logits = our_logits(model, checkpoint)
    assert float(logits.std()) > 0.3
    assert float((logits - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


THEIRS: Dict[str, Dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": None},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 12},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", THEIRS)
def test_a_model_saved_by_transformers_has_equal_logits_after_import_and_comes_back_bit_for_bit(
    kind: str, dtype: str, tmp_path: Path, transformers: Any
) -> None:
    import torch

    torch.manual_seed(1)
    settings = getattr(transformers, kind)(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=32, initializer_range=0.2, rms_norm_eps=1e-3, **THEIRS[kind],
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(settings).eval().to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if dtype == "float32" else "1GB")
    assert (tmp_path / "theirs" / INDEX).exists() == (dtype == "float32")
    checkpoint, model, notes = import_model(tmp_path / "theirs", tmp_path / "run" / "checkpoints")
    assert not notes and (model.kv_head_count, model.layernorm_eps, model.biases) == (
        3, 1e-3, "qkv" if kind == "Qwen2Config" else "none",
    )  # fmt: skip
    with torch.no_grad():
        wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
        expected = wide.eval()(torch.from_numpy(TOKENS[:, :-1])).logits
    logits = our_logits(model, checkpoint)
    assert float((logits - expected).abs().max()) <= 2e-5 * float(expected.abs().max())
    export_model(checkpoint, tmp_path / "back", ExportOptions(shard_mib=1))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert again.dtype == getattr(torch, dtype)
    before = theirs.state_dict()
    assert before.keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())


@pytest.mark.slow
def test_a_large_model_is_exported_in_several_files_with_an_index(tmp_path: Path) -> None:
    model = a_model("model.vocab_size=3000", "model.hidden=192", "model.tied_embeddings=false")
    checkpoint = save_model(tmp_path / "one", model)
    export_model(checkpoint, tmp_path / "out", ExportOptions(shard_mib=1))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    back = import_model(tmp_path / "out", tmp_path / "two")
    assert back.model == model
    with open_checkpoint(checkpoint) as before, open_checkpoint(back.checkpoint) as after:
        assert before.manifest.tensors.keys() == after.manifest.tensors.keys()
        for name in before.manifest.tensors:
            assert np.array_equal(before.tensor("weights", name), after.tensor("weights", name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; we have no such model, only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"model_type": "mixtral"}, "model_type is 'mixtral'; those that can be imported are gpt2, llama, "),
        ({"model_type": "mistral"}, "sliding_window is 4096; we have no such model, only null"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has the type 'yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters has full_attention, which we",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "has partial_rotary_factor, which",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters of the type linear has no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type of rope_scaling and of rope_parameters"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights cannot be imported"),
        ({"tie_word_embeddings": None}, r"holds no lm_head\.weight"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_scaling has the type 'dynamic'"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], not an object"),
        ({"num_key_value_heads": 4}, "model.kv_heads"),
        ({"num_hidden_layers": "many"}, r"config\.json: model\.layers: 'many' is a text, not a number"),
        ({"hidden_size": "48"}, r"config\.json: model\.hidden: '48' is a text, not a number"),
        ({"num_attention_heads": 0}, r"config\.json: model\.heads: '0': outside the limits"),
        ({"rms_norm_eps": float("nan")}, r"config\.json: model\.layernorm_eps: 'NaN': expected a number"),
        ({"hidden_act": "x" * 70000}, r"hidden_act is '?x{50,500}[^x]"),
        ({"intermediate_size": 81}, r"mlp\.gate_proj\.weight is \(80, 48\), and by config\.json \(81, 48\)"),
        ({"tie_word_embeddings": False}, r"holds no lm_head\.weight"),
        ({"model_type": "qwen3"}, r"holds no layers\.0\.self_attn\.q_norm\.weight"),
    ],
)
def test_a_feature_that_the_decoder_lacks_is_refused_by_name(
    changes: Dict[str, Any], message: str, tmp_path: Path
) -> None:
    export_model(save_model(tmp_path / "one", a_model()), tmp_path / "out")
    file = tmp_path / "out" / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UsageError, match=message):
        import_model(tmp_path / "out", tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.norm=layernorm"], "model.norm layernorm: their models beside GPT-2 have rmsnorm"),
        (["model.mlp=gelu"], "model.mlp gelu"),
        (["model.positions=learned"], "model.positions learned"),
        (["model.biases=all"], "model.biases all: llama has none"),
        (["model.qk_norm=true", "model.biases=qkv"], "model.biases qkv: qwen3 has none"),
        (["model.embedding_layernorm=true"], "a norm after the embedding"),
    ],
)
def test_a_model_that_transformers_does_not_have_is_refused(settings: List[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        model_type_of(a_model(*settings))


def test_older_files_have_theta_and_scaling_apart(tmp_path: Path) -> None:
    settings = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}
    export_model(save_model(tmp_path / "one", a_model()), tmp_path / "out")
    file = tmp_path / "out" / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    model = import_model(tmp_path / "out", tmp_path / "two").model
    assert (model.rope_theta, model.rope_scaling, model.rope_factor) == (10000.0, "linear", 2.0)


def test_a_recorded_type_that_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    model = a_model()
    shapes = {pair.ours: pair.shape for pair in tensor_pairs(model, model_type_of(model))}
    arrays = some_arrays(1, shapes, "F32")
    settings = {"config": {"model": {**vars(model)}}, "build": {"imported_dtype": "int8"}}
    checkpoint = save(tmp_path / "one", 12, arrays, cut_flat(arrays, 1), **settings)
    with pytest.raises(CheckpointError, match="imported_dtype is 'int8'; valid: float32, bfloat16, float16"):
        export_model(checkpoint, tmp_path / "out")
    assert export_model(checkpoint, tmp_path / "out", ExportOptions(dtype="float32"))[1] == "llama"


def test_null_settings_of_a_gpt2_are_those_of_transformers(tmp_path: Path) -> None:
    settings = {"model_type": "gpt2", "attn_pdrop": None, "resid_pdrop": None, "n_layer": None}
    model = our_settings(tmp_path, settings)[0]
    assert (model.attention_dropout, model.dropout, model.layers) == (0.1, 0.1, 12)


def test_sizes_beyond_all_bounds_are_refused_with_the_key(tmp_path: Path) -> None:
    export_model(save_model(tmp_path / "one", a_model()), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / CONFIG).read_text())
    settings.pop("head_dim", None)
    for key in ("hidden_size", "num_attention_heads"):
        (tmp_path / "out" / CONFIG).write_text(json.dumps({**settings, key: 10**400}))
        with pytest.raises(UsageError, match="model.h"):
            import_model(tmp_path / "out", tmp_path / "two")


def test_dropout_that_theirs_has_not_is_a_note() -> None:
    assert export_notes(a_model("model.dropout=0.1"), "llama") == [
        "model.dropout 0.1 is not exported: Llama has it on attention alone"
    ]
    assert model_type_of(a_model("model.dropout=0.1")) == "llama" and not export_notes(a_model(), "llama")


def test_a_gpt2_with_written_defaults_stays_a_gpt2() -> None:
    written = ["model.heads=4", "model.kv_heads=4", "model.hidden=32", "model.head_dim=8"]
    assert model_type_of(load_run_config(overrides=written).model) == "gpt2"


def test_float32_is_rounded_to_bfloat16_as_by_hand(tmp_path: Path) -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 3.4e38, np.inf, np.nan, 0.0, -0.0, 1e-40], np.float32)
    header = make_header([("x", "BF16", values.shape)])
    with open(tmp_path / "file", "w+b") as file:
        write_tensor(file.fileno(), header.tensors[0], values)
        back = read_tensor(file.fileno(), header.tensors[0])
    # halves of the last place go to the even neighbour; beyond the largest number is infinity
    assert back[:6].tolist() == [1.0, 1.0, 1.015625, -1.0, np.inf, np.inf] and np.isnan(back[6])
    assert np.signbit(back[8]) and back[7:9].tolist() == [0.0, 0.0] and abs(back[9] - 1e-40) < 1e-40


def test_the_tokenizer_of_a_folder_is_carried(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: make install")
    model = a_model("model.vocab_size=330")
    export_model(save_model(tmp_path / "checkpoints", model), tmp_path / "out")
    tokenizer = tokenizers.make_tokenizer(tokenizers.BYTE_LEVEL, tmp_path / "out" / "tokenizer.json")
    declared = {"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": None}
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(declared), encoding="utf-8")
    (tmp_path / "out" / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    checkpoint = import_model(tmp_path / "out", tmp_path / "imported").checkpoint
    assert (checkpoint / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config == {"eos_token": "</s>", "bos_token": None, "chat_template": "{{ messages[0].content }}"}
    export_model(checkpoint, tmp_path / "again")
    again = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert again["eos_token"] == "</s>" and again["chat_template"] == config["chat_template"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_no_json_is_refused(name: str, tmp_path: Path) -> None:
    export_model(save_model(tmp_path / "checkpoints", a_model()), tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "out" / name).write_text("[1", encoding="utf-8")
    with pytest.raises(UsageError, match=rf"{name}: not a file of a tokenizer"):
        import_model(tmp_path / "out", tmp_path / "imported")
