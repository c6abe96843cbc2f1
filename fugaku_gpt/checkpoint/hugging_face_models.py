"""The models of Hugging Face's ``transformers`` that ours can be: their configurations, and the names of their tensors.

A family is one or more of their ``model_type``. What a configuration asks for and ours does not compute is refused by
its name, in both directions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from fugaku_gpt.config import ModelConfig, build_run_config, json_layer
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.layout.tensors import TOKEN_EMBEDDING, model_tensors
from fugaku_gpt.limits import cut

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

GPT2 = "gpt2"
# model_type → (class, biases of ours)
_LLAMAS = {
    "llama": ("LlamaForCausalLM", "none"),
    "mistral": ("MistralForCausalLM", "none"),
    "qwen2": ("Qwen2ForCausalLM", "qkv"),
    "qwen3": ("Qwen3ForCausalLM", "none"),
}
MODEL_TYPES = (GPT2, *_LLAMAS)
MODEL_NAMES = {GPT2: "GPT-2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_GELU = {"erf": "gelu", "tanh": "gelu_new"}
_GELU_FROM = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
# our module → theirs; of several, each has one section of our tensor
_GPT2_ENDS = {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}
_GPT2_LAYER = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA_ENDS = {"token_embedding": "embed_tokens", "final_norm": "norm"}
_LLAMA_LAYER: Dict[str, Tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q": ("self_attn.q_proj",),
    "attention.kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


class TensorPair(NamedTuple):
    """One tensor of ours, and theirs of which it consists.

    Attributes:
        ours, shape: our name and shape, without the vocabulary's padding.
        theirs: their names, without the prefix of the model; of several, each is a section of ours, [sections, ...].
        is_transposed: they hold a linear layer's weight as [inputs, outputs], all sections in one.
    """

    ours: str
    shape: Tuple[int, ...]
    theirs: Tuple[str, ...]
    is_transposed: bool = False

    @property
    def their_shape(self) -> Tuple[int, ...]:
        """Shape of each tensor in their file: of one that has all sections of ours, they follow one another."""
        if len(self.theirs) > 1:
            return self.shape[1:]
        if len(self.shape) == 1 or self.ours.endswith(".bias"):
            return (int(np.prod(self.shape)),)
        rows, columns = int(np.prod(self.shape[:-1])), self.shape[-1]
        return (columns, rows) if self.is_transposed else (rows, columns)

    def to_theirs(self, array: "Array") -> Sequence["Array"]:
        """Convert our tensor to theirs."""
        if len(self.theirs) > 1:
            return tuple(array)
        return (array.reshape(self.their_shape[::-1]).T if self.is_transposed else array.reshape(self.their_shape),)

    def to_ours(self, arrays: Sequence["Array"]) -> "Array":
        """Convert their tensors to ours."""
        array: Array = np.stack(arrays) if len(arrays) > 1 else arrays[0]
        return (array.T if self.is_transposed else array).reshape(self.shape)


def model_type_of(model: ModelConfig) -> str:
    """The ``model_type`` of a model of ours.

    Raises:
        UsageError: none of theirs computes what it does; the message names a setting.
    """
    if model.is_grid_classifier:
        raise UsageError(f"model.kind {model.kind}: none of their models classifies grids")
    if model.embedding_layernorm:
        raise UsageError("none of their models has a norm after the embedding (model.embedding_layernorm)")
    if not model.settings_unlike_gpt2:
        return GPT2
    for name, needed in (("norm", "rmsnorm"), ("mlp", "swiglu"), ("positions", "rope")):
        if getattr(model, name) != needed:
            rule = f"their models beside GPT-2 have {needed}, or none of {', '.join(model.settings_unlike_gpt2)}"
            raise UsageError(f"model.{name} {getattr(model, name)}: {rule}")
    if model.qk_norm:
        model_type = "qwen3"
    else:
        model_type = "qwen2" if model.biases == "qkv" else "llama"
    if model.biases != _LLAMAS[model_type][1]:
        raise UsageError(f"model.biases {model.biases}: {model_type} has {_LLAMAS[model_type][1]}")
    return model_type


def prefix_of(model_type: str) -> str:
    """The prefix of the names of tensors, but for the output weights, in a model with a head."""
    return "transformer." if model_type == GPT2 else "model."


def tensor_pairs(model: ModelConfig, model_type: str) -> List[TensorPair]:
    """List every tensor of a model in both formats."""
    if model_type != GPT2:
        return pair_tensors(model, {**_LLAMA_ENDS, "output": "lm_head"}, _LLAMA_LAYER, "layers")
    layer = {ours: (theirs,) for ours, theirs in _GPT2_LAYER.items()}
    pairs = pair_tensors(model, {**_GPT2_ENDS, "output": "lm_head"}, layer, "h")
    return [pair._replace(is_transposed=".c_" in pair.theirs[0]) for pair in pairs]


def pair_tensors(
    model: ModelConfig, ends: Mapping[str, str], layer: Mapping[str, Tuple[str, ...]], layers: str
) -> List[TensorPair]:
    """List every tensor of a model with theirs.

    Args:
        ends: our module → theirs, of those outside the layers.
        layer: our module in a layer → theirs.
        layers: their name of the list of layers.
    """
    names: Dict[str, Tuple[str, ...]] = {ours: (theirs,) for ours, theirs in ends.items()}
    for number in range(model.layers):
        for ours, sections in layer.items():
            names[f"blocks.{number}.{ours}"] = tuple(f"{layers}.{number}.{theirs}" for theirs in sections)
    pairs = []
    for spec in model_tensors(model, 1):
        part, _, last = spec.name.rpartition(".")
        shape = spec.shape if spec.rows is None else (spec.rows, *spec.shape[1:])
        pairs.append(TensorPair(spec.name, shape, tuple(f"{name}.{last}" for name in names[part])))
    return pairs


def embedding_pair(pairs: Sequence[TensorPair]) -> TensorPair:
    """The pair of the token embedding, which tied output weights equal."""
    return next(pair for pair in pairs if pair.ours == TOKEN_EMBEDDING)


def their_settings(model: ModelConfig, model_type: str, dtype: str, end: Optional[int]) -> Dict[str, Any]:
    """Their config.json; ``end`` is the id of the end-of-document token, if the tokenizer is exported as well."""
    settings = _gpt2_settings(model) if model_type == GPT2 else _llama_settings(model, model_type)
    # documents follow one another, so the token that ends one is also before the next
    return {**settings, "torch_dtype": dtype, "bos_token_id": end, "eos_token_id": end}


def _gpt2_settings(model: ModelConfig) -> Dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": GPT2,
        "vocab_size": model.vocab_size,
        "n_positions": model.seq_len,
        "n_ctx": model.seq_len,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn_hidden,
        "activation_function": _GELU[model.gelu],
        "layer_norm_epsilon": model.layernorm_eps,
        "initializer_range": model.init_std,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    }


def _llama_settings(model: ModelConfig, model_type: str) -> Dict[str, Any]:
    scaling: Optional[Dict[str, Any]] = None
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        scaling = {
            **(scaling or {}),
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_seq_len,
        }
    settings: Dict[str, Any] = {
        "architectures": [_LLAMAS[model_type][0]],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_head_count,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_len,
        "rms_norm_eps": model.layernorm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        # version 5 of transformers has both in one
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta},
        "attention_dropout": model.attention_dropout,
    }
    if model_type in ("llama", "qwen3"):
        settings["attention_bias"] = False
    if model_type == "llama":
        settings["mlp_bias"] = False
    return settings


def export_notes(model: ModelConfig, model_type: str) -> List[str]:
    """Notes for the user on settings that an exported model does not have."""
    if model_type == GPT2 or not model.dropout:
        return []
    return [f"model.dropout {model.dropout:g} is not exported: {MODEL_NAMES[model_type]} has it on attention alone"]


def our_settings(path: Path, settings: Mapping[str, Any]) -> Tuple[ModelConfig, str, List[str]]:
    """Convert their config.json to (model, model_type, notes); missing and null values default to those of
    transformers, where these do not depend on the type.

    Raises:
        UsageError: the file describes no model of ours; the message names the setting.
    """
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise UsageError(
            f"{path}: model_type is {cut(repr(model_type))}; those that can be imported are {', '.join(MODEL_TYPES)}"
        )
    if settings.get("quantization_config") is not None:
        raise UsageError(f"{path}: quantization_config: quantised weights cannot be imported")
    present = {key: value for key, value in settings.items() if value is not None}
    values, notes = _from_gpt2(path, present) if model_type == GPT2 else (_from_llama(path, settings, model_type), [])
    return model_of_values(path, values), model_type, notes


def model_of_values(path: Path, values: Mapping[str, Any]) -> ModelConfig:
    """The model with the settings that another project's file describes; those that are None have our defaults.

    Raises:
        UsageError: there can be no such model; each line names the file and our setting.
    """
    written = {key: value for key, value in values.items() if value is not None}
    defaults = ModelConfig()
    numbers = {key for key in written if not isinstance(getattr(defaults, key), str)}
    texts = [key for key, value in written.items() if isinstance(value, str) and key in numbers]
    if texts:
        raise UsageError(f"{path}: model.{texts[0]}: {cut(repr(written[texts[0]]))} is a text, not a number")
    try:
        return build_run_config([json_layer(str(path), {"model": written})]).model
    except ConfigError as error:
        raise UsageError(f"{path}: no model that we can have:\n{error}") from None


def _require(path: Path, settings: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    """Refuse a setting that has another value than the only one that ours computes."""
    for key, value in needed.items():
        if settings.get(key, value) != value:
            raise UsageError(f"{path}: {key} is {cut(repr(settings[key]))}; we have no such model, only {value!r}")


def _from_gpt2(path: Path, settings: Mapping[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    fixed = {
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
        "tie_word_embeddings": True,
    }  # fmt: skip
    _require(path, settings, fixed)
    activation = settings.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _GELU_FROM:
        raise UsageError(f"{path}: activation_function is {cut(repr(activation))}; known are {', '.join(_GELU_FROM)}")
    dropout, after_embedding = settings.get("resid_pdrop", 0.1), settings.get("embd_pdrop", 0.1)
    notes = []
    if dropout != after_embedding:
        notes.append(
            f"embd_pdrop {after_embedding} is not resid_pdrop {dropout}; model.dropout, one for both, is the latter"
        )
    return {
        "layers": settings.get("n_layer", 12),
        "hidden": settings.get("n_embd", 768),
        "heads": settings.get("n_head", 12),
        "ffn_hidden": settings.get("n_inner"),
        "seq_len": settings.get("n_positions", 1024),
        "vocab_size": settings.get("vocab_size", 50257),
        "dropout": dropout,
        "attention_dropout": settings.get("attn_pdrop", 0.1),
        "layernorm_eps": settings.get("layer_norm_epsilon", 1e-5),
        "init_std": settings.get("initializer_range", 0.02),
        "gelu": _GELU_FROM[activation],
    }, notes


def _from_llama(path: Path, written: Mapping[str, Any], model_type: str) -> Dict[str, Any]:
    if model_type == "mistral" and written.get("sliding_window", 4096) is not None:
        raise UsageError(
            f"{path}: sliding_window is {written.get('sliding_window', 4096)!r}; we have no such model, only null"
        )
    settings = {key: value for key, value in written.items() if value is not None}
    _require(path, settings, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1})
    _require(path, settings, {"use_sliding_window": False, "partial_rotary_factor": 1.0})
    needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
              "max_position_embeddings"]  # fmt: skip
    # the default of Llama is the number of heads, that of the others a number
    needed += ["num_key_value_heads"] if model_type != "llama" else []
    missing = [key for key in needed if key not in settings]
    if missing:
        raise UsageError(f"{path}: {missing[0]} is missing")
    heads = settings["num_attention_heads"]
    return {
        "layers": settings["num_hidden_layers"],
        "hidden": settings["hidden_size"],
        "heads": heads,
        "kv_heads": _unless(settings.get("num_key_value_heads"), heads),
        "head_dim": _own_head_dim(settings, model_type),
        "ffn_hidden": settings["intermediate_size"],
        "seq_len": settings["max_position_embeddings"],
        "vocab_size": settings["vocab_size"],
        "attention_dropout": settings.get("attention_dropout", 0.0),
        "layernorm_eps": settings.get("rms_norm_eps", 1e-6),
        "init_std": settings.get("initializer_range", 0.02),
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "positions": "rope",
        "biases": _LLAMAS[model_type][1],
        "qk_norm": model_type == "qwen3",
        "tied_embeddings": settings.get("tie_word_embeddings", False),
        **_rope_from(path, settings),
    }


def _own_head_dim(settings: Mapping[str, Any], model_type: str) -> Any:
    """The width of a head; None where it is hidden / heads."""
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    width = settings.get("head_dim")
    if width is None and model_type == "qwen3":
        width = 128
    are_whole = all(isinstance(value, int) for value in (heads, hidden, width))
    is_usual = are_whole and heads > 0 and width * heads == hidden
    return None if is_usual else width


def _unless(value: Any, usual: Any) -> Any:
    return None if value == usual else value


_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope_from(path: Path, settings: Mapping[str, Any]) -> Dict[str, Any]:
    """The fields of rotary embeddings: of ``rope_parameters``, or of ``rope_theta`` and ``rope_scaling``."""
    scaling: Dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        written = settings.get(name)
        if written is None:
            continue
        if not isinstance(written, dict):
            raise UsageError(f"{path}: {name} is {cut(repr(written))}, not an object")
        values = {key: value for key, value in written.items() if value is not None}
        kind = values.pop("type", None)
        values.setdefault("rope_type", kind if kind is not None else "default")
        _check_rope(path, name, values)
        differing = [key for key in values if key in scaling and scaling[key] != values[key]]
        if differing:
            raise UsageError(f"{path}: {differing[0]} of rope_scaling and of rope_parameters differ")
        scaling.update(values)
    fields = {"rope_theta": scaling.get("rope_theta", settings.get("rope_theta", 10000.0))}
    if scaling.get("rope_type", "default") == "default":
        return fields
    fields.update(rope_scaling=scaling["rope_type"], rope_factor=scaling["factor"])
    if scaling["rope_type"] == "llama3":
        fields.update(
            rope_low_freq_factor=scaling["low_freq_factor"],
            rope_high_freq_factor=scaling["high_freq_factor"],
            rope_original_seq_len=scaling["original_max_position_embeddings"],
        )
    return fields


def _check_rope(path: Path, name: str, values: Mapping[str, Any]) -> None:
    """Refuse a stretching of positions that ours does not compute, or that is incomplete."""
    kind = values["rope_type"]
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise UsageError(
            f"{path}: {name} has the type {cut(repr(kind))}; those that we have are {', '.join(_ROPE_KEYS)}"
        )
    unknown = sorted(set(values) - {"rope_type", "rope_theta", *_ROPE_KEYS[kind]})
    if unknown:
        raise UsageError(f"{path}: {name} has {unknown[0]}, which we do not compute with the type {kind}")
    missing = [key for key in _ROPE_KEYS[kind] if key not in values]
    if missing:
        raise UsageError(f"{path}: {name} of the type {kind} has no {missing[0]}")
