"""Exports a checkpoint as a GPT-2 folder of Hugging Face's ``transformers``, and imports such a folder.

A folder holds ``config.json`` and ``model.safetensors`` (or several files and their index), and an exported one the
tokenizer's files (:mod:`fugaku_gpt.checkpoint.hugging_face_tokenizer`). Both directions need NumPy, and neither PyTorch
nor transformers.

Their linear layers hold [inputs, outputs], ours [outputs, inputs]; query, key and value are one matrix in both. The
logits share the weights of the token embedding. Padding of the vocabulary is not converted: checkpoints hold none.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.data_file import Entry, file_name, plan_file
from fugaku_gpt.checkpoint.directory import (
    begin_checkpoint,
    commit_checkpoint,
    discard_temporary,
    list_checkpoints,
    require_room,
    update_tracker,
)
from fugaku_gpt.checkpoint.hugging_face_tokenizer import CorpusTokenizer, tokenizer_files
from fugaku_gpt.checkpoint.manifest import LogicalTensor, Manifest, describe_file
from fugaku_gpt.checkpoint.reader import open_checkpoint
from fugaku_gpt.checkpoint.safetensors import (
    NotSafetensors,
    TensorInfo,
    make_header,
    read_header,
    read_tensor,
    write_tensor,
)
from fugaku_gpt.config import ModelConfig, load_run_config
from fugaku_gpt.errors import CheckpointError, ConfigError, UsageError
from fugaku_gpt.input_files import is_possible_name
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.layout.regions import full_region
from fugaku_gpt.layout.tensors import model_tensors

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PREFIX = "transformer."  # of GPT2LMHeadModel; GPT2Model has none
_GELU = {"erf": "gelu", "tanh": "gelu_new"}
_GELU_FROM = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
_LAYER = (
    ("attention_norm", "ln_1"),
    ("attention.qkv", "attn.c_attn"),
    ("attention.out", "attn.c_proj"),
    ("mlp_norm", "ln_2"),
    ("mlp.up", "mlp.c_fc"),
    ("mlp.down", "mlp.c_proj"),
)


class TensorPair(NamedTuple):
    """One tensor in both formats.

    Attributes:
        ours, shape: our name and shape, without the vocabulary's padding.
        theirs: their name, without the prefix.
        linear: whether it is the weight or bias of a linear layer.
    """

    ours: str
    shape: Tuple[int, ...]
    theirs: str
    linear: bool

    @property
    def their_shape(self) -> Tuple[int, ...]:
        """Shape of the tensor in their file."""
        if not self.linear:
            return self.shape
        if self.ours.endswith(".bias"):
            return (int(np.prod(self.shape)),)
        return (self.shape[-1], int(np.prod(self.shape[:-1])))

    def to_theirs(self, array: "Array") -> "Array":
        """Convert our tensor to their shape."""
        return array.reshape(self.their_shape[::-1]).T if self.linear else array

    def to_ours(self, array: "Array") -> "Array":
        """Convert their tensor to our shape."""
        return array.T.reshape(self.shape) if self.linear else array


class ImportedCheckpoint(NamedTuple):
    """Result of :func:`import_gpt2`: the checkpoint, the model's settings, and notes for the user."""

    checkpoint: Path
    model: ModelConfig
    notes: List[str]


def tensor_pairs(model: ModelConfig) -> List[TensorPair]:
    """List every tensor of a model in both formats.

    Raises:
        UsageError: the model has a layer that GPT-2 has not.
    """
    if model.embedding_layernorm:
        raise UsageError("a GPT-2 has no LayerNorm after the embedding (model.embedding_layernorm): it cannot be one")
    names = {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}
    for layer in range(model.layers):
        names.update({f"blocks.{layer}.{ours}": f"h.{layer}.{theirs}" for ours, theirs in _LAYER})
    pairs = []
    for spec in model_tensors(model, 1):
        part, _, last = spec.name.rpartition(".")
        shape = spec.shape if spec.rows is None else (spec.rows, *spec.shape[1:])
        linear = ".c_" in names[part]
        pairs.append(TensorPair(spec.name, shape, f"{names[part]}.{last}", linear))
    return pairs


def export_gpt2(checkpoint: Path, out: Path, tokenizer: Optional[CorpusTokenizer] = None) -> ModelConfig:
    """Write a checkpoint's weights as a folder for ``AutoModelForCausalLM.from_pretrained``, in float32.

    With the tokenizer of its corpus, ``AutoTokenizer`` loads the folder as well, and generation ends with a document.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no model of ours.
        UsageError: the folder already exists or cannot be written, or the model is not a GPT-2.
    """
    if file_system.exists(out) and not (file_system.is_folder(out) and not file_system.names_in(out)):
        raise UsageError(f"{out}: already exists; choose another folder")
    out = out.absolute()
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    with open_checkpoint(checkpoint) as source:
        model = _model_of_run(checkpoint, source.manifest)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            raise UsageError(
                f"{tokenizer.path}: has {tokenizer.vocab_size} tokens, more than model.vocab_size {model.vocab_size}: "
                "it is not the tokenizer of this checkpoint"
            )
        files = tokenizer_files(tokenizer, model.seq_len) if tokenizer is not None else {}
        pairs = tensor_pairs(model)
        header = make_header([(_PREFIX + pair.theirs, "F32", pair.their_shape) for pair in pairs], {"format": "pt"})
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            require_room(out, header.length)
            file_system.make_folder(temporary)
            with file_system.synced_file(temporary / WEIGHTS) as descriptor:
                file_system.write_all(descriptor, memoryview(header.content), 0)
                for pair, info in zip(pairs, header.tensors):
                    write_tensor(descriptor, info, pair.to_theirs(source.tensor("weights", pair.ours)))
            end = tokenizer.end if tokenizer is not None else None
            text = json.dumps(_their_settings(model, end), indent=2, allow_nan=False) + "\n"
            for name, content in {**files, CONFIG: text.encode("utf-8")}.items():
                file_system.write_file(temporary / name, content)
            file_system.rename(temporary, out)
            file_system.sync_folder(out.parent)
        except OSError as error:
            raise UsageError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
        finally:
            discard_temporary(temporary)
    return model


def import_gpt2(folder: Path, directory: Path) -> ImportedCheckpoint:
    """Make a checkpoint at iteration 0 from a Hugging Face folder: only weights, so that the optimiser starts afresh.

    Args:
        folder: the Hugging Face folder.
        directory: folder of checkpoints, such as that of a run that is to start from it; must hold no checkpoint yet.

    Raises:
        UsageError: the folder is not a GPT-2, or one without a counterpart of ours; or the directory cannot be used.
    """
    if list_checkpoints(directory):
        raise UsageError(f"{directory}: holds checkpoints already; choose another folder")
    settings = _read_json(folder / CONFIG)
    model, notes = _our_settings(folder / CONFIG, settings)
    with contextlib.ExitStack() as stack:
        theirs = _open_weights(folder, stack)
        pairs = tensor_pairs(model)
        if "wte.weight" not in theirs and "lm_head.weight" in theirs:  # tied weights under the name of the other layer
            theirs["wte.weight"] = theirs.pop("lm_head.weight")
        _check_names(folder, pairs, theirs)
        logits = theirs.pop("lm_head.weight", None)
        if logits is not None and not np.array_equal(logits.read(), theirs["wte.weight"].read()):
            raise UsageError(f"{folder}: its logits have weights of their own; ours are the token embedding's")
        checkpoint = _write_checkpoint(directory, model, pairs, theirs, f"Hugging Face folder {folder.name}")
    return ImportedCheckpoint(checkpoint, model, notes)


class _ForeignTensor(NamedTuple):
    """A tensor in one of their files."""

    path: Path
    descriptor: int
    info: TensorInfo

    def read(self) -> "Array":
        try:
            return read_tensor(self.descriptor, self.info)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from None
        except NotSafetensors as error:
            raise UsageError(f"{self.path}: {error}") from None


def _write_checkpoint(
    directory: Path, model: ModelConfig, pairs: List[TensorPair], theirs: Mapping[str, _ForeignTensor], origin: str
) -> Path:
    dtypes = {pair.ours: "F64" if theirs[pair.theirs].info.dtype == "F64" else "F32" for pair in pairs}
    plan = plan_file([Entry("weights", pair.ours, full_region(pair.shape), dtypes[pair.ours]) for pair in pairs])
    require_room(directory, plan.length)
    try:
        directory.absolute().parent.mkdir(parents=True, exist_ok=True)
        temporary = begin_checkpoint(directory, 0)
        try:
            with file_system.synced_file(temporary / file_name(0)) as descriptor:
                file_system.write_all(descriptor, memoryview(plan.header.content), 0)
                checksums = [
                    write_tensor(descriptor, info, pair.to_ours(theirs[pair.theirs].read()))
                    for pair, info in zip(pairs, plan.tensors)
                ]
            logical = {pair.ours: LogicalTensor(pair.shape, {"weights": dtypes[pair.ours]}) for pair in pairs}
            file = describe_file(file_name(0), plan, checksums, sorted(logical))
            config, build = {"model": asdict(model)}, {"imported_from": origin}
            path = commit_checkpoint(temporary, Manifest(0, 0, 0, logical, (file,), config=config, build=build))
            update_tracker(path)
            return path
        finally:
            discard_temporary(temporary)
    except OSError as error:
        raise UsageError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None


def _model_of_run(checkpoint: Path, manifest: Manifest) -> ModelConfig:
    try:
        return ModelConfig(**manifest.config["model"])
    except (KeyError, TypeError):
        raise CheckpointError(f"{checkpoint}: does not say which model it holds (config.model)") from None


def _their_settings(model: ModelConfig, end: Optional[int]) -> Dict[str, Any]:
    """Their config.json; ``end`` is the id of the end-of-document token, if the tokenizer is exported as well."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
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
        "torch_dtype": "float32",
        # documents follow one another, so the token that ends one is also before the next
        "bos_token_id": end,
        "eos_token_id": end,
    }


def _our_settings(path: Path, settings: Mapping[str, Any]) -> Tuple[ModelConfig, List[str]]:
    """Convert their config.json to (model, notes); missing values default to those of transformers' GPT2Config."""
    if settings.get("model_type") != "gpt2":
        raise UsageError(f"{path}: model_type is {settings.get('model_type')!r}; only 'gpt2' can be imported")
    fixed = {
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
        "tie_word_embeddings": True,
    }  # fmt: skip
    for key, needed in fixed.items():
        if settings.get(key, needed) != needed:
            raise UsageError(f"{path}: {key} is {settings[key]!r}; we have no such model, only {needed!r}")
    activation = settings.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _GELU_FROM:
        raise UsageError(f"{path}: activation_function is {activation!r}; known are {', '.join(_GELU_FROM)}")
    dropout, after_embedding = settings.get("resid_pdrop", 0.1), settings.get("embd_pdrop", 0.1)
    notes = []
    if dropout != after_embedding:
        notes.append(
            f"embd_pdrop {after_embedding} is not resid_pdrop {dropout}; model.dropout, one for both, is the latter"
        )
    values = {
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
    }
    overrides = [f"model.{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
    try:
        return load_run_config(overrides=overrides).model, notes
    except ConfigError as error:
        raise UsageError(f"{path}: no model that we can have:\n{error}") from None


def _read_json(path: Path) -> Dict[str, Any]:
    try:
        values = parse_json(file_system.read_file(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path}: missing; a Hugging Face folder holds {CONFIG} and {WEIGHTS}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path}: not JSON") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected a JSON object")
    return values


def _open_weights(folder: Path, stack: contextlib.ExitStack) -> Dict[str, _ForeignTensor]:
    """Open every tensor of the folder: name without prefix → tensor; the files stay open as long as the stack."""
    files = [WEIGHTS]
    if not file_system.exists(folder / WEIGHTS) and file_system.exists(folder / INDEX):
        files = _files_of_index(folder / INDEX)
    tensors: Dict[str, _ForeignTensor] = {}
    for name in files:
        path = folder / Path(name).name
        try:
            descriptor = file_system.open_to_read(path)
            stack.callback(file_system.close, descriptor)
            header = read_header(descriptor, file_system.size_of(path))
        except FileNotFoundError:
            hint = "; pickled files are not read: save it anew with save_pretrained(..., safe_serialization=True)"
            raise UsageError(f"{path}: missing{hint if list(folder.glob('*.bin')) else ''}") from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
        except NotSafetensors as error:
            raise UsageError(f"{path}: {error}") from None
        for info in header.tensors:
            short = info.name[len(_PREFIX) :] if info.name.startswith(_PREFIX) else info.name
            tensors[short] = _ForeignTensor(path, descriptor, info)
    return tensors


def _files_of_index(path: Path) -> List[str]:
    """Return the names of the files over which an index says that the tensors are distributed."""
    weight_map = _read_json(path).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and is_possible_name(name) and Path(name).name for name in names):
        raise UsageError(f"{path}: 'weight_map' does not give the file of each tensor")
    return sorted(set(names))


def _check_names(folder: Path, pairs: List[TensorPair], theirs: Dict[str, _ForeignTensor]) -> None:
    """Compare names and shapes; drops the causal masks of older files from ``theirs``."""
    for name in [name for name in theirs if name.endswith((".attn.bias", ".attn.masked_bias"))]:
        del theirs[name]
    for pair in pairs:
        if pair.theirs not in theirs:
            raise UsageError(f"{folder}: holds no {pair.theirs}")
        shape = theirs[pair.theirs].info.shape
        if shape != pair.their_shape:
            raise UsageError(
                f"{theirs[pair.theirs].path}: {pair.theirs} is {shape}, and by {CONFIG} {pair.their_shape}"
            )
    unknown = sorted(set(theirs) - {pair.theirs for pair in pairs} - {"lm_head.weight"})
    if unknown:
        raise UsageError(f"{folder}: holds {unknown[0]}, which a GPT-2 language model has not (GPT2LMHeadModel)")
