"""Tests of importing GGUF files, which llama.cpp's own package writes from folders of Hugging Face."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest

from fugaku_gpt.checkpoint.directory import list_checkpoints
from fugaku_gpt.checkpoint.gguf_import import import_gguf
from fugaku_gpt.checkpoint.gguf_models import unpermuted
from fugaku_gpt.checkpoint.hugging_face import export_model
from fugaku_gpt.checkpoint.hugging_face_models import model_type_of, tensor_pairs
from fugaku_gpt.checkpoint.reader import open_checkpoint
from fugaku_gpt.checkpoint.retention import verify_checkpoint
from fugaku_gpt.config import ModelConfig, load_run_config
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import GGUF_KEYS, GGUF_TENSORS, GGUF_VALUES
from tests.support.checkpoints import cut_flat, save, some_arrays
from tests.support.gguf_files import permuted, write_gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: make dev")

LLAMA = [
    "model.layers=2", "model.hidden=48", "model.heads=6", "model.kv_heads=2", "model.ffn_hidden=80", "model.seq_len=32",
    "model.vocab_size=101", "model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rope", "model.biases=none",
    "model.layernorm_eps=1e-5",
]  # fmt: skip
WIDE = [*LLAMA, "model.head_dim=64", "model.rope_theta=500000", "model.rope_scaling=llama3", "model.rope_factor=32"]
GPT2 = ["model.layers=2", "model.hidden=48", "model.heads=6", "model.seq_len=32", "model.vocab_size=101"]
GPT2 += ["model.gelu=tanh"]
MODELS: Dict[str, List[str]] = {
    "llama": LLAMA,
    "llama, keys of their own": [*LLAMA, "model.kv_heads=6", "model.tied_embeddings=false"],
    "llama, wide heads": [*LLAMA, "model.head_dim=10"],
    "llama, stretched": [*LLAMA, "model.rope_scaling=linear", "model.rope_factor=4"],
    "llama 3.2": [*WIDE, "model.rope_original_seq_len=8192"],
    "llama 3, another length": [
        *WIDE, "model.rope_original_seq_len=3000", "model.rope_high_freq_factor=6.5", "model.rope_factor=3.7",
    ],
    "qwen2": [*LLAMA, "model.biases=qkv", "model.layernorm_eps=1e-6"],
    "qwen3": [*LLAMA, "model.qk_norm=true", "model.head_dim=10"],
    "gpt2": [*GPT2, "model.ffn_hidden=100"],
}  # fmt: skip


def a_folder(folder: Path, settings: List[str]) -> Tuple[ModelConfig, Path]:
    """A folder of Hugging Face with random weights, and the checkpoint that was exported to it."""
    model = load_run_config(overrides=settings).model
    shapes = {pair.ours: pair.shape for pair in tensor_pairs(model, model_type_of(model))}
    arrays = some_arrays(1, shapes, "F32", ("weights",))
    checkpoint = save(folder / "one", 12, arrays, cut_flat(arrays, 1), config={"model": {**vars(model)}})
    export_model(checkpoint, folder / "hf")
    return model, checkpoint


def weights_of(checkpoint: Path) -> Dict[str, Any]:
    with open_checkpoint(checkpoint) as reader:
        return {name: reader.tensor("weights", name) for name in reader.manifest.tensors}


def assert_equal(ours: Dict[str, Any], expected: Dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    for name, array in ours.items():
        assert array.dtype == np.float32 and np.array_equal(array, expected[name]), name


@pytest.mark.parametrize("family", MODELS)
def test_an_imported_model_equals_the_converted_model(family: str, tmp_path: Path) -> None:
    model, before = a_folder(tmp_path, MODELS[family])
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    checkpoint, back, notes = import_gguf(file, tmp_path / "run" / "checkpoints")
    assert back == load_run_config(overrides=MODELS[family] + [f"model.kv_heads={model.kv_head_count}"]).model
    assert notes == ["its tokenizer is not carried: the file has none"]
    assert verify_checkpoint(checkpoint) == []
    assert_equal(weights_of(checkpoint), weights_of(before))


def test_rows_of_a_head_are_halves_for_us_and_neighbours_for_llama_cpp() -> None:
    rows = np.arange(12)[:, None] * np.ones((1, 2))
    assert permuted(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert unpermuted(permuted(rows, 2), 2).tolist() == rows.tolist()


def test_a_gpt2_may_have_its_embedding_twice_or_quantised_apart(tmp_path: Path) -> None:
    model, before = a_folder(tmp_path, [*GPT2, "model.hidden=96"])

    def twice(tensors: Dict[str, Any]) -> None:
        tensors["output.weight"] = tensors["token_embd.weight"]

    same = import_gguf(write_gguf(tmp_path / "same.gguf", tmp_path / "hf", change=twice), tmp_path / "same")
    assert same.model.tied_embeddings and "output.weight" not in weights_of(same.checkpoint)
    formats = {"output.weight": "Q8_0"}
    untied_file = write_gguf(tmp_path / "apart.gguf", tmp_path / "hf", change=twice, quantised=formats)
    untied = import_gguf(untied_file, tmp_path / "apart")
    assert not untied.model.tied_embeddings and "differ by their quantisation" in untied.notes[0]
    weights, expected = weights_of(untied.checkpoint), weights_of(before)["token_embedding.weight"]
    assert np.array_equal(weights["token_embedding.weight"], expected)
    assert 0 < np.abs(weights["output.weight"] - expected).max() < np.abs(expected).max() / 100


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_weights_become_float32_by_their_package(kind: str, tmp_path: Path) -> None:
    _, before = a_folder(tmp_path, [*LLAMA, "model.hidden=96", "model.ffn_hidden=64"])
    formats = dict.fromkeys(("ffn_down.weight", "attn_v.weight", "token_embd.weight"), kind)
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", quantised=formats)
    ours, expected = weights_of(import_gguf(file, tmp_path / "run").checkpoint), weights_of(before)
    number = gguf.GGMLQuantizationType[kind]
    for name in ("blocks.1.mlp.down.weight", "token_embedding.weight"):
        expected[name] = gguf.dequantize(gguf.quantize(expected[name], number), number)
    for layer in range(2):
        keys, values = expected[f"blocks.{layer}.attention.kv.weight"]
        values = gguf.dequantize(gguf.quantize(values, number), number)
        expected[f"blocks.{layer}.attention.kv.weight"] = np.stack([keys, values])
    expected["blocks.0.mlp.down.weight"] = gguf.dequantize(
        gguf.quantize(expected["blocks.0.mlp.down.weight"], number), number
    )
    assert_equal(ours, expected)


def test_older_formats_of_blocks_are_refused_where_there_are_any(tmp_path: Path) -> None:
    a_folder(tmp_path, [*LLAMA, "model.hidden=96"])
    older = {"general.quantization_version": 1}
    plain = write_gguf(tmp_path / "plain.gguf", tmp_path / "hf", older)
    assert import_gguf(plain, tmp_path / "one-more").model.hidden == 96
    packed = write_gguf(tmp_path / "packed.gguf", tmp_path / "hf", older, quantised={"attn_v.weight": "Q8_0"})
    with pytest.raises(UsageError, match="general.quantization_version is 1; only 2 is read"):
        import_gguf(packed, tmp_path / "two")


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_formats_of_large_blocks_are_read_piece_by_piece(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The package does not quantise to these: the blocks are random bytes, with scales that are numbers."""
    monkeypatch.setattr("fugaku_gpt.checkpoint.gguf_file._DEQUANTISED_AT_ONCE", 1000)
    settings = [*LLAMA, "model.layers=1", "model.ffn_hidden=512"]
    a_folder(tmp_path, settings)
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.RandomState(0).randint(0, 60, (48, 512 // elements * size)).astype(np.uint8)
    file = write_gguf(
        tmp_path / "plain.gguf", tmp_path / "hf", change=lambda tensors: tensors.pop("blk.0.ffn_down.weight")
    )
    _append_tensor(gguf, file, tmp_path / "model.gguf", "blk.0.ffn_down.weight", blocks, number)
    ours = weights_of(import_gguf(tmp_path / "model.gguf", tmp_path / "run").checkpoint)
    assert np.array_equal(ours["blocks.0.mlp.down.weight"], gguf.dequantize(blocks, number))
    assert ours["blocks.0.mlp.down.weight"].std() > 0


def _append_tensor(package: Any, source: Path, out: Path, name: str, data: Any, number: Any) -> None:
    """Copy a file, with one more tensor of a quantised format."""
    reader, writer = package.GGUFReader(source), package.GGUFWriter(out, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renamed(old: str, new: str) -> Callable[[Dict[str, Any]], None]:
    def change(tensors: Dict[str, Any]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def with_factors(values: Any) -> Callable[[Dict[str, Any]], None]:
    def change(tensors: Dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = np.array(values, np.float32)

    return change


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        ({"llama.expert_count": 8}, None, r"llama\.expert_count is 8; we have no such model, only 0"),
        ({"llama.attention.sliding_window": 4096}, None, r"llama\.attention\.sliding_window is 4096; we have no such"),
        ({"llama.logit_scale": 0.5}, None, r"llama\.logit_scale is 0\.5; we have no such model, only 1"),
        ({"llama.attention.q_lora_rank": 8}, None, r"llama\.attention\.q_lora_rank is 8; we have no such setting"),
        ({"llama.rope.scaling.type": "yarn"}, None, r"llama\.rope\.scaling\.type is 'yarn'; those that we have are no"),
        ({"llama.rope.dimension_count": 4}, None, r"llama\.rope\.dimension_count is 4, and heads are 8 wide"),
        ({"llama.attention.value_length": 16}, None, r"llama\.attention\.value_length is 16, and heads are 8 wide"),
        ({"llama.attention.head_count": [6, 6]}, None, r"head_count is \[6, 6\], not a whole number; one for each"),
        ({"llama.attention.head_count": 0}, None, r"model\.heads"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, None, r"layer_norm_rms_epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, None, r"model\.layernorm_eps"),
        ({"llama.block_count": None}, None, r"llama\.block_count is missing"),
        ({"llama.block_count": "2"}, None, r"llama\.block_count is '2', not a whole number"),
        ({"llama.block_count": 3}, None, r"holds no blk\.2\.attn_norm\.weight"),
        ({"llama.block_count": 1}, None, r"holds blk\.1\.attn_k\.weight, which the model of its metadata has not"),
        ({"llama.block_count": 2**31}, None, r"model\.layers"),
        ({"llama.feed_forward_length": 81}, None, r"ffn_gate\.weight is \(80, 48\), and by its metadata \(81, 48\)"),
        ({"llama.vocab_size": 100}, None, r"llama\.vocab_size is 100, and token_embd\.weight has 101 rows"),
        ({"general.type": "adapter"}, None, r"general\.type is 'adapter'; only a whole model"),
        ({"general.type": [1, 2]}, None, r"general\.type is \[1, 2\]; only a whole model"),
        ({"split.count": [1, 2]}, None, r"split\.count is \[1, 2\]"),
        ({"llama.block_count": [1] * 30}, None, r"llama\.block_count is a list of 30, not a whole number"),
        ({"llama.rope.freq_base": float("inf")}, None, r"model\.rope_theta"),
        ({"split.count": 2}, None, r"split\.count is 2: it is one of several files; make one of them with"),
        ({}, renamed("token_embd.weight", "token_types.weight"), r"holds no matrix token_embd\.weight"),
        ({}, renamed("blk.0.attn_q.weight", "blk.0.attn_q.bias"), r"holds no blk\.0\.attn_q\.weight"),
        ({}, with_factors([1.0, 2.0, 3.0, 1.5]), "rope_freqs.weight stretches wavelengths in another way than Llama 3"),
        ({}, with_factors([1.0, 2.0]), r"rope_freqs\.weight is \(2,\), and heads are 8 wide"),
        ({}, with_factors([1.0, float("nan"), 8.0, 8.0]), "in another way than Llama 3"),
    ],
)  # fmt: skip
def test_unsupported_metadata_are_refused_by_name(
    values: Dict[str, Any], change: Optional[Callable[[Dict[str, Any]], None]], message: str, tmp_path: Path
) -> None:
    a_folder(tmp_path, LLAMA)
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", values, change)
    with pytest.raises(UsageError, match=message) as refused:
        import_gguf(file, tmp_path / "two")
    assert str(refused.value).startswith(str(file)) and not (tmp_path / "two").exists()


def test_settings_without_an_effect_are_taken(tmp_path: Path) -> None:
    model, _ = a_folder(tmp_path, LLAMA)
    harmless = {
        "llama.expert_count": 0, "llama.rope.scaling.type": "none", "llama.rope.scaling.finetuned": False,
        "llama.vocab_size": 101, "llama.attention.value_length": 8, "llama.rope.dimension_count": 8,
        "general.name": "x", "other.key": [1, 2],
    }  # fmt: skip
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", harmless, with_factors([1.0] * 4))
    assert import_gguf(file, tmp_path / "two").model == model


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match="general.architecture is 'mamba'; those that can be imported are llama, "):
        import_gguf(tmp_path / "model.gguf", tmp_path / "two")


def test_an_architecture_that_is_no_text_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt2")
    writer.kv_data[0].clear()
    writer.add_array("general.architecture", [1, 2])
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.add_tensor("output.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match="general.architecture is "):
        import_gguf(tmp_path / "model.gguf", tmp_path / "two")


def test_a_file_that_is_cut_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    a_folder(tmp_path, LLAMA)
    content = write_gguf(tmp_path / "whole.gguf", tmp_path / "hf").read_bytes()
    file = tmp_path / "model.gguf"
    lengths = [*range(0, 200, 3), *range(200, 4000, 97), len(content) // 2, len(content) - 33]
    for length in lengths:
        file.write_bytes(content[:length])
        with pytest.raises(UsageError, match="^[^\n]*(cut short|not a GGUF file)[^\n]*$"):
            import_gguf(file, tmp_path / "two")
    assert list_checkpoints(tmp_path / "two") == []


def a_header(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def a_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def a_tensor(name: bytes, shape: Tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return a_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(40), "not a GGUF file; `ckpt import` takes those"),
        (a_header(version=1), "version 1 of GGUF; those that are read are 2, 3"),
        (a_header(version=3 << 24), "big-endian; convert it with gguf-convert-endian"),
        (a_header(tensors=2**60), f"claims {2**60:,} tensors, more than {GGUF_TENSORS}"),
        (a_header(keys=2**64 - 1), f"claims {2**64 - 1:,} values, more than {GGUF_KEYS}"),
        (a_header(keys=1, rest=struct.pack("<Q", 2**63)), "a key of the metadata has .* bytes, more than 256"),
        (a_header(keys=1, rest=a_string(b"\xff\xff")), "a key of the metadata is .*, which no name is"),
        (
            a_header(tensors=1, rest=a_tensor(b"a\n\x1b[2J", (4,))),
            r"the name of a tensor is 'a\\n\\x1b\[2J', which no name",
        ),
        (a_header(keys=1, rest=a_string(b"x") + struct.pack("<I", 99)), "x is of type 99"),
        (a_header(keys=1, rest=a_string(b"x") + struct.pack("<IQ", 8, 2**40)), "cut short or damaged"),
        (a_header(keys=1, rest=a_string(b"x") + struct.pack("<IIQ", 9, 4, 2**60)), f"more than {GGUF_VALUES} in"),
        (a_header(keys=1, rest=a_string(b"x") + struct.pack("<IIQ", 9, 9, 5)), "x is a list of type 9"),
        (a_header(keys=2, rest=(a_string(b"x") + struct.pack("<II", 4, 5)) * 2), "has the key 'x' twice"),
        (a_header(tensors=1, rest=a_tensor(b"a", ())), "a has 0 dimensions, not 1 to 4"),
        (a_header(tensors=1, rest=a_tensor(b"a", (1,) * 5)), "a has 5 dimensions"),
        (a_header(tensors=1, rest=a_tensor(b"a", (4, 0))), "a size of a is 0"),
        (a_header(tensors=1, rest=a_tensor(b"a", (2**63, 2**63))), "cut short: .* a ends at"),
        (a_header(tensors=1, rest=a_tensor(b"a", (4,), 999)), "a is of type 999, which the installed package gguf"),
        (a_header(tensors=1, rest=a_tensor(b"a", (33,), 8)), "rows of 33 elements are no whole blocks of Q8_0, of 32"),
        (a_header(tensors=2, rest=a_tensor(b"a", (1,)) * 2) + bytes(99), "has the tensor 'a' twice"),
        (a_header(tensors=2, rest=a_tensor(b"a", (9,)) + a_tensor(b"b", (9,))) + bytes(999), "gives b a wrong place"),
        (a_header(keys=1, rest=a_string(b"general.alignment") + struct.pack("<II", 4, 3)), "general.alignment is 3"),
        (a_header(), "general.architecture is None"),
    ],
)
def test_a_damaged_header_is_refused_before_anything_is_allocated(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as refused:
        import_gguf(file, tmp_path / "two")
    assert "\n" not in str(refused.value) and str(refused.value).startswith(f"{file}: ")


def test_without_the_package_plain_weights_are_read_and_quantised_ones_refused(
    tmp_path: Path, monkeypatch: Any
) -> None:
    _, before = a_folder(tmp_path, [*LLAMA, "model.hidden=96"])
    plain = write_gguf(tmp_path / "plain.gguf", tmp_path / "hf")
    packed = write_gguf(tmp_path / "packed.gguf", tmp_path / "hf", quantised={"attn_v.weight": "Q8_0"})
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_equal(weights_of(import_gguf(plain, tmp_path / "one-more").checkpoint), weights_of(before))
    with pytest.raises(UsageError, match=r"attn_v\.weight is quantised, which .*pip install 'fugaku_gpt\[gguf\]'"):
        import_gguf(packed, tmp_path / "two")


def test_existing_checkpoints_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    _, before = a_folder(tmp_path, LLAMA)
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    with pytest.raises(UsageError, match="holds checkpoints already"):
        import_gguf(file, before.parent)
    with pytest.raises(UsageError, match="none.gguf: cannot be read: No such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "two")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        import_gguf(tmp_path, tmp_path / "two")
