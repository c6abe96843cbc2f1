"""The models of GGUF files that ours can be: their metadata as our settings, and the names of their tensors.

A key of the metadata that is not in the tables below is refused by its name, since it may ask for what ours does not
compute. So is an architecture: llama.cpp computes Mistral, SmolLM and others as ``llama``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from fugaku_gpt.checkpoint.gguf_file import QUANTISATION_VERSION, GgufHeader
from fugaku_gpt.checkpoint.hugging_face_models import TensorPair, model_of_values, pair_tensors
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.formulas.rotary import rotary_frequencies
from fugaku_gpt.limits import cut

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

EMBEDDING, LOGITS = "token_embd.weight", "output.weight"
ROTARY_FACTORS = "rope_freqs.weight"
GPT2 = "gpt2"
# architecture → settings that follow from it
_LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}
_SETTINGS: Dict[str, Dict[str, Any]] = {
    "llama": {**_LLAMA, "biases": "none"},
    "qwen2": {**_LLAMA, "biases": "qkv"},
    "qwen3": {**_LLAMA, "biases": "none", "qk_norm": True},
    GPT2: {"gelu": "tanh"},
}
_SHOWN = 20  # elements of a list in a message
_TOLERANCE = 1e-5  # relative, of factors in float32
_PERMUTED = ("llama",)  # the others' q and k have the order of Hugging Face
_REQUIRED = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "heads": "attention.head_count",
    "ffn_hidden": "feed_forward_length",
    "seq_len": "context_length",
}
# keys that have a meaning for ours with one value only
_NEUTRAL: Dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "use_parallel_residual": False,
    "pooling_type": 0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
}
# llama.cpp reads it for `yarn` alone, or not at all
_WITHOUT_EFFECT = ("rope.scaling.original_context_length", "rope.scaling.finetuned")
# our module → theirs; of several, each has one section of our tensor
_ENDS = {"token_embedding": "token_embd", "position_embedding": "position_embd", "final_norm": "output_norm"}
_LAYER: Dict[str, Tuple[str, ...]] = {
    "attention_norm": ("attn_norm",),
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.q": ("attn_q",),
    "attention.kv": ("attn_k", "attn_v"),
    "attention.q_norm": ("attn_q_norm",),
    "attention.k_norm": ("attn_k_norm",),
    "attention.out": ("attn_output",),
    "mlp_norm": ("ffn_norm",),
    "mlp.up": ("ffn_gate", "ffn_up"),
    "mlp.down": ("ffn_down",),
}
_GPT2_LAYER = {**_LAYER, "attention.qkv": ("attn_qkv",), "mlp.up": ("ffn_up",)}


class GgufModel(NamedTuple):
    """A model of a file.

    Attributes:
        pairs: every tensor of ours, with theirs.
        permuted: the number of heads of each of their tensors whose rows are in llama.cpp's order.
    """

    architecture: str
    model: ModelConfig
    pairs: List[TensorPair]
    permuted: Dict[str, int]


def model_of_gguf(path: Path, header: GgufHeader, is_tied: bool) -> GgufModel:
    """Read the model of a file.

    Args:
        is_tied: whether the output weights are the token embedding.

    Raises:
        UsageError: the file describes no model of ours; the message names the key or tensor.
    """
    values = header.values
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _SETTINGS:
        raise UsageError(
            f"{path}: general.architecture is {_shown(architecture)}; those that can be imported are "
            f"{', '.join(_SETTINGS)}"
        )
    _check_general(path, header)
    keys = {key[len(architecture) + 1 :]: value for key, value in values.items() if key.startswith(f"{architecture}.")}
    reader = _Keys(path, architecture, keys)
    epsilon = "attention.layer_norm_epsilon" if architecture == GPT2 else "attention.layer_norm_rms_epsilon"
    settings: Dict[str, Any] = {**_SETTINGS[architecture], "tied_embeddings": is_tied}
    settings.update(_sizes(reader, header, epsilon))
    if architecture != GPT2:
        settings.update(_rotary_settings(reader, header, settings))
    reader.check_rest()
    model = model_of_values(path, settings)
    pairs = _pairs(model, architecture)
    return GgufModel(architecture, model, pairs, _permuted(model, architecture))


def unpermuted(rows: "Array", heads: int) -> "Array":
    """Undo llama.cpp's order of the rows of q or k [heads * d, ...]: neighbours there, they are the halves of a head.

    ``convert_hf_to_gguf.py`` of llama.cpp (``LlamaModel.permute``) makes pairs that are rotated together neighbours.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    ordered: Array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
    return ordered


class _Keys:
    """The keys of an architecture, of which each is used once; what is left is refused."""

    def __init__(self, path: Path, architecture: str, values: Dict[str, Any]) -> None:
        self.path, self._architecture, self._left = path, architecture, dict(values)

    def number(self, key: str, default: Optional[Any] = None, is_whole: bool = True) -> Any:
        """Return a number; the default if there is none.

        Raises:
            UsageError: it is missing and has no default, or is something else, such as a list with one for each layer.
        """
        value = self._left.pop(key, default)
        if value is None:
            raise self.refusal(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
            kind = "a whole number" if is_whole else "a number"
            raise self.refusal(key, f"is {_shown(value)}, not {kind}; one for each layer is not read")
        return value if is_whole else _decimal(value)

    def text(self, key: str, default: str) -> str:
        """Return a text, or the default."""
        value = self._left.pop(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, f"is {_shown(value)}, not a text")
        return value

    def refusal(self, key: str, problem: str) -> UsageError:
        """An error that names a key."""
        return UsageError(f"{self.path}: {self._architecture}.{key} {problem}")

    def check_rest(self) -> None:
        """Check that all other keys have values without an effect.

        Raises:
            UsageError: one has another.
        """
        for key, value in self._left.items():
            if key in _WITHOUT_EFFECT:
                continue
            if key not in _NEUTRAL:
                raise self.refusal(key, f"is {_shown(value)}; we have no such setting")
            if not isinstance(value, (bool, int, float)) or value != _NEUTRAL[key]:
                raise self.refusal(key, f"is {_shown(value)}; we have no such model, only {_NEUTRAL[key]}")


def _check_general(path: Path, header: GgufHeader) -> None:
    values = header.values
    kind = values.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UsageError(f"{path}: general.type is {_shown(kind)}; only a whole model can be imported")
    parts = values.get("split.count", 0)
    if not isinstance(parts, int) or parts > 1:
        raise UsageError(
            f"{path}: split.count is {_shown(parts)}: it is one of several files; make one of them with "
            "`llama-gguf-split --merge FIRST OUT`"
        )
    version = values.get("general.quantization_version", QUANTISATION_VERSION)
    is_read = isinstance(version, int) and version == QUANTISATION_VERSION
    if not is_read and any(tensor.block[0] > 1 for tensor in header.tensors.values()):
        raise UsageError(
            f"{path}: general.quantization_version is {_shown(version)}; only {QUANTISATION_VERSION} is read"
        )


def _sizes(keys: _Keys, header: GgufHeader, epsilon: str) -> Dict[str, Any]:
    """The sizes of a model; ``epsilon`` is the key of that of its norms."""
    settings: Dict[str, Any] = {ours: keys.number(key) for ours, key in _REQUIRED.items()}
    settings["layernorm_eps"] = keys.number(epsilon, is_whole=False)
    heads, hidden = settings["heads"], settings["hidden"]
    settings["kv_heads"] = keys.number("attention.head_count_kv", heads)
    width = keys.number("attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        value = keys.number(key, width)
        if value != width:
            raise keys.refusal(key, f"is {value}, and heads are {width} wide; we have no such model, only as wide")
    settings["head_dim"] = width if width * heads != hidden else None
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise UsageError(f"{keys.path}: holds no matrix {EMBEDDING}")
    rows = embedding.shape[0]
    settings["vocab_size"] = keys.number("vocab_size", rows)
    if settings["vocab_size"] != rows:
        raise keys.refusal("vocab_size", f"is {settings['vocab_size']}, and {EMBEDDING} has {rows} rows")
    return settings


def _rotary_settings(keys: _Keys, header: GgufHeader, settings: Mapping[str, Any]) -> Dict[str, Any]:
    """The rotation of queries and keys: its base, and the stretching of its wavelengths."""
    theta = keys.number("rope.freq_base", 10000.0, is_whole=False)
    kind = keys.text("rope.scaling.type", "linear")  # as llama.cpp has it, with a factor of 1
    if kind not in ("none", "linear"):
        raise keys.refusal(
            "rope.scaling.type",
            f"is {_shown(kind)}; those that we have are none, linear, and that of Llama 3, in {ROTARY_FACTORS}",
        )
    older = keys.number("rope.scale_linear", 0.0, is_whole=False)
    factor = keys.number("rope.scaling.factor", older, is_whole=False)
    stretching: Dict[str, Any] = {}
    if kind == "linear" and factor not in (0.0, 1.0):
        stretching = {"rope_scaling": "linear", "rope_factor": factor}
    factors = header.tensors.get(ROTARY_FACTORS)
    if factors is not None:
        model = model_of_values(keys.path, {**settings, "rope_theta": theta})
        if factors.shape != (model.head_size // 2,):
            raise UsageError(f"{keys.path}: {ROTARY_FACTORS} is {factors.shape}, and heads are {model.head_size} wide")
        found = _llama3_settings(model, factors.read().astype(np.float64))
        if found is None or (found and stretching):
            raise UsageError(
                f"{keys.path}: {ROTARY_FACTORS} stretches wavelengths in another way than Llama 3, which we do not "
                "compute"
            )
        stretching.update(found)
    return {"rope_theta": theta, **stretching}


def _llama3_settings(model: ModelConfig, factors: "Array") -> Optional[Dict[str, Any]]:
    """The settings of Llama 3's stretching that has these factors of wavelengths; None if there are none.

    The factors depend on the ratios of the two frequency factors and the original length alone: 1 is taken for the
    lower one. Those of Llama 3 itself are tried first.
    """
    if not np.all(np.isfinite(factors)) or factors.min() < 1.0 - _TOLERANCE:
        return None
    factor = _decimal(factors.max())
    if factor <= 1.0 + _TOLERANCE:
        return {}
    base = rotary_frequencies(model)
    tried = [(4.0, 8192)]
    is_blend = (factors > 1.0 + _TOLERANCE) & (factors < factor * (1.0 - _TOLERANCE))
    if np.count_nonzero(is_blend) >= 2:
        # what is left out of the stretching is a line over the turns of one position, of which two points are enough
        left_out = (1.0 / factors[is_blend] - 1.0 / factor) / (1.0 - 1.0 / factor)
        slope, offset = np.polyfit(base[is_blend] / (2.0 * np.pi), left_out, 1)
        if slope > 0.0 > offset:
            tried.append((round(1.0 - 1.0 / float(offset), 3), round(-float(slope) / float(offset))))
    for high, length in tried:
        settings: Dict[str, Any] = {
            "rope_scaling": "llama3",
            "rope_factor": factor,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": high,
            "rope_original_seq_len": length,
        }
        if length >= 1 and high > 1.0:
            computed = base / rotary_frequencies(dataclasses.replace(model, **settings))
            if np.allclose(computed, factors, rtol=_TOLERANCE, atol=0.0):
                return settings
    return None


def _decimal(value: Any) -> float:
    """The shortest decimal number that is this one in float32, the type of the file: 1e-5, not 9.99999974e-06."""
    with np.errstate(over="ignore"):  # a double beyond float32 is refused as infinite
        return float(str(np.float32(value)))


def _pairs(model: ModelConfig, architecture: str) -> List[TensorPair]:
    layer = _GPT2_LAYER if architecture == GPT2 else _LAYER
    return pair_tensors(model, {**_ENDS, "output": "output"}, layer, "blk")


def _permuted(model: ModelConfig, architecture: str) -> Dict[str, int]:
    if architecture not in _PERMUTED:
        return {}
    heads = (("attn_q", model.heads), ("attn_k", model.kv_head_count))
    return {f"blk.{layer}.{name}.weight": count for layer in range(model.layers) for name, count in heads}


def _shown(value: Any) -> str:
    """A value as a message quotes it."""
    if isinstance(value, (list, np.ndarray)):
        values = list(value) if isinstance(value, list) else value.tolist()
        return cut(repr(values)) if len(values) <= _SHOWN else f"a list of {len(values):,}"
    return cut(repr(value))
