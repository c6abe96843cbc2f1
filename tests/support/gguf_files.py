"""Makes GGUF files of folders of Hugging Face, as ``convert_hf_to_gguf.py`` of llama.cpp does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional

import numpy as np

from fugaku_gpt.checkpoint.safetensors import read_header, read_tensor

_KEYS = {  # setting of config.json → key, of Llama's kind and of a GPT-2
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}


def tensors_of(folder: Path) -> Dict[str, Any]:
    """The tensors of a folder with one file of weights."""
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        header = read_header(file.fileno(), path.stat().st_size)
        return {info.name: read_tensor(file.fileno(), info) for info in header.tensors}


def permuted(weights: Any, heads: int) -> Any:
    """The rows of q or k in llama.cpp's order, as its ``LlamaModel.permute`` makes it."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def rotary_factors(settings: Mapping[str, Any]) -> Any:
    """``rope_freqs.weight`` of Llama 3's stretching, as ``LlamaModel.generate_extra_tensors`` of llama.cpp makes it."""
    dim, scaling = settings["head_dim"], settings["rope_scaling"]
    wavelengths = 2 * np.pi * settings["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, length = (
        scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for wavelength in wavelengths:
        smooth = (length / wavelength - low) / (high - low)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(scaling["factor"])
        else:
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def write_gguf(
    path: Path,
    folder: Path,
    values: Optional[Mapping[str, Any]] = None,
    change: Optional[Callable[[Dict[str, Any]], None]] = None,
    quantised: Optional[Mapping[str, str]] = None,
) -> Path:
    """Write the model of a folder as a GGUF file.

    Args:
        values: further metadata, or other ones; None leaves a key out.
        change: changes the tensors, by their names in the file.
        quantised: the format of tensors whose names end so.
    """
    import gguf

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = settings["model_type"]
    metadata: Dict[str, Any] = {
        f"{architecture}.{key}": settings[name] for name, key in _KEYS.items() if name in settings
    }
    if architecture == "gpt2":
        metadata["gpt2.feed_forward_length"] = settings["n_inner"] or 4 * settings["n_embd"]
    scaling = settings.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        metadata.update({f"{architecture}.rope.scaling.type": "linear"})
        metadata.update({f"{architecture}.rope.scaling.factor": scaling["factor"]})
    tensors = _converted(tensors_of(folder), settings)
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = rotary_factors(settings)
    if change is not None:
        change(tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata, **(values or {})}.items():
        if value is not None and key != "general.architecture":
            writer.add_key_value(key, value, _type_of(gguf, value))
    for name, array in tensors.items():
        kind = next((kind for end, kind in (quantised or {}).items() if name.endswith(end)), "F32")
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> Dict[str, Any]:
    import gguf

    architecture = settings["model_type"]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, settings.get("num_hidden_layers", settings.get("n_layer")))
    converted = {}
    for name, array in tensors.items():
        if architecture == "llama" and ".q_proj." in name:
            array = permuted(array, settings["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            array = permuted(array, settings["num_key_value_heads"])
        if architecture == "gpt2" and ".c_" in name and name.endswith(".weight"):
            array = array.T
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        converted[theirs] = array
    return converted


def _type_of(gguf: Any, value: Any) -> Any:
    types = gguf.GGUFValueType
    kinds = ((bool, types.BOOL), (int, types.UINT32), (float, types.FLOAT32), (str, types.STRING), (list, types.ARRAY))
    return next(kind for python, kind in kinds if isinstance(value, python))
