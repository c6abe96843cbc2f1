"""Exports a checkpoint as a folder of Hugging Face's ``transformers``, and imports such a folder.

A folder holds ``config.json`` and ``model.safetensors`` (or several files and their index), and an exported one the
tokenizer's files (:mod:`fugaku_gpt.checkpoint.hugging_face_tokenizer`). Both directions need NumPy, and neither PyTorch
nor transformers. Which models these are, and how their tensors are called: see
:mod:`fugaku_gpt.checkpoint.hugging_face_models`.

GPT-2's linear layers hold [inputs, outputs], ours [outputs, inputs]; Llama's are several of our one. Padding of the
vocabulary is not converted: checkpoints hold none.
"""

from __future__ import annotations

import contextlib
import json
import math
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from fugaku_gpt.checkpoint import file_system
from fugaku_gpt.checkpoint.directory import discard_temporary, list_checkpoints, require_room
from fugaku_gpt.checkpoint.hugging_face_models import (
    TensorPair,
    embedding_pair,
    model_type_of,
    our_settings,
    prefix_of,
    tensor_pairs,
    their_settings,
)
from fugaku_gpt.checkpoint.hugging_face_tokenizer import (
    CorpusTokenizer,
    imported_tokenizer_files,
    own_tokenizer,
    tokenizer_files,
)
from fugaku_gpt.checkpoint.imported import DTYPES, IMPORTED_DTYPE, ImportedCheckpoint, check_tensors, write_imported
from fugaku_gpt.checkpoint.reader import Checkpoint, open_checkpoint
from fugaku_gpt.checkpoint.recorded_model import recorded_model
from fugaku_gpt.checkpoint.safetensors import (
    ITEM_BYTES,
    Header,
    NotSafetensors,
    TensorInfo,
    make_header,
    read_header,
    read_tensor,
    write_tensor,
)
from fugaku_gpt.config import ModelConfig
from fugaku_gpt.errors import CheckpointError, UsageError
from fugaku_gpt.input_files import is_possible_name
from fugaku_gpt.json_text import parse_json

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LOGITS = "lm_head.weight"
_DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
SHARD_MIB = 4096  # of data in one file of an export


class ExportOptions(NamedTuple):
    """Choices of an export.

    Attributes:
        tokenizer: of the corpus; None: that which an imported checkpoint has, if any.
        dtype: a key of ``DTYPES``; None: the type in which the weights were imported, else float32.
        shard_mib: data of one file at most, unless a tensor alone is larger.
    """

    tokenizer: Optional[CorpusTokenizer] = None
    dtype: Optional[str] = None
    shard_mib: int = SHARD_MIB


_USUAL = ExportOptions()


def export_model(checkpoint: Path, out: Path, options: ExportOptions = _USUAL) -> Tuple[ModelConfig, str]:
    """Write a checkpoint's weights as a folder for ``AutoModelForCausalLM.from_pretrained``; return the model and its
    ``model_type``.

    With the tokenizer of its corpus, ``AutoTokenizer`` loads the folder as well, and generation ends with a document.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no model of ours.
        UsageError: the folder already exists or cannot be written, or ``transformers`` has no such model.
    """
    if file_system.exists(out) and not (file_system.is_folder(out) and not file_system.names_in(out)):
        raise UsageError(f"{out}: already exists; choose another folder")
    out, tokenizer = out.absolute(), options.tokenizer
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    with open_checkpoint(checkpoint) as source:
        model = recorded_model(checkpoint, source.manifest)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            raise UsageError(
                f"{tokenizer.path}: has {tokenizer.vocab_size} tokens, more than model.vocab_size {model.vocab_size}: "
                "it is not the tokenizer of this checkpoint"
            )
        own = own_tokenizer(checkpoint) if tokenizer is None else None
        files = tokenizer_files(tokenizer, model.seq_len) if tokenizer is not None else dict(own.files if own else {})
        model_type = model_type_of(model)
        dtype = options.dtype or str(source.manifest.build.get(IMPORTED_DTYPE, "float32"))
        if dtype not in DTYPES:
            raise CheckpointError(f"{checkpoint}: {IMPORTED_DTYPE} is {dtype!r}; valid: {', '.join(DTYPES)}")
        shards = _shards(tensor_pairs(model, model_type), prefix_of(model_type), DTYPES[dtype], options.shard_mib)
        settings = their_settings(model, model_type, dtype, tokenizer.end if tokenizer is not None else None)
        if own is not None:
            settings.update(bos_token_id=own.start, eos_token_id=own.end)
        files.update({CONFIG: _json_bytes(settings), **_index_file(shards)})
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            require_room(out, sum(shard.header.length for shard in shards))
            file_system.make_folder(temporary)
            for shard in shards:
                _write_shard(temporary, shard, source)
            for name, content in files.items():
                file_system.write_file(temporary / name, content)
            file_system.rename(temporary, out)
            file_system.sync_folder(out.parent)
        except OSError as error:
            raise UsageError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
        finally:
            discard_temporary(temporary)
    return model, model_type


class _Shard(NamedTuple):
    """A file of an export, and the pairs whose tensors it holds in the order of its header."""

    name: str
    pairs: List[TensorPair]
    header: Header


def _shards(pairs: List[TensorPair], prefix: str, dtype: str, shard_mib: int) -> List[_Shard]:
    """Distribute tensors over files; all sections of one of ours are in the same."""
    groups: List[List[TensorPair]] = []
    room = 0
    for pair in pairs:
        size = len(pair.theirs) * math.prod(pair.their_shape) * ITEM_BYTES[dtype]
        if not groups or size > room:
            groups.append([])
            room = shard_mib * 2**20
        groups[-1].append(pair)
        room -= size
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, 1):
        name = WEIGHTS if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        entries = [(_full_name(prefix, theirs), dtype, pair.their_shape) for pair in group for theirs in pair.theirs]
        shards.append(_Shard(name, group, make_header(entries, {"format": "pt"})))
    return shards


def _full_name(prefix: str, theirs: str) -> str:
    """A name as in a model with a head, whose output weights have no prefix."""
    return theirs if theirs == _LOGITS else prefix + theirs


def _write_shard(folder: Path, shard: _Shard, source: Checkpoint) -> None:
    with file_system.synced_file(folder / shard.name) as descriptor:
        file_system.write_all(descriptor, memoryview(shard.header.content), 0)
        infos = iter(shard.header.tensors)
        for pair in shard.pairs:
            for array in pair.to_theirs(source.tensor("weights", pair.ours)):
                write_tensor(descriptor, next(infos), array)


def _index_file(shards: List[_Shard]) -> Dict[str, bytes]:
    """The index of several files; a single one needs none."""
    if len(shards) == 1:
        return {}
    infos = [(info, shard.name) for shard in shards for info in shard.header.tensors]
    index = {
        "metadata": {"total_size": sum(info.length for info, _ in infos)},
        "weight_map": {info.name: name for info, name in infos},
    }
    return {INDEX: _json_bytes(index)}


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode("utf-8")


def import_model(folder: Path, directory: Path) -> ImportedCheckpoint:
    """Make a checkpoint at iteration 0 from a Hugging Face folder: only weights, so that the optimiser starts afresh.

    Args:
        folder: the Hugging Face folder.
        directory: folder of checkpoints, such as that of a run that is to start from it; must hold no checkpoint yet.

    Raises:
        UsageError: the folder holds no model with a counterpart of ours; or the directory cannot be used.
    """
    if list_checkpoints(directory):
        raise UsageError(f"{directory}: holds checkpoints already; choose another folder")
    settings = _read_json(folder / CONFIG)
    model, model_type, notes = our_settings(folder / CONFIG, settings)
    with contextlib.ExitStack() as stack:
        theirs = _open_weights(folder, prefix_of(model_type), stack)
        pairs = tensor_pairs(model, model_type)
        (embedding,) = embedding_pair(pairs).theirs
        if model.tied_embeddings and embedding not in theirs and _LOGITS in theirs:  # the name of the other layer
            theirs[embedding] = theirs.pop(_LOGITS)
        for name in [name for name in theirs if name.endswith(_DERIVED)]:
            del theirs[name]  # masks and rotary frequencies of older files follow from the settings
        logits = theirs.pop(_LOGITS, None) if model.tied_embeddings else None
        check_tensors(folder, pairs, theirs, CONFIG)
        if logits is not None and not np.array_equal(logits.read(), theirs[embedding].read()):
            raise UsageError(f"{folder}: its logits have weights of their own, and {CONFIG} says that they have not")
        origin, files = f"Hugging Face folder {folder.name}", imported_tokenizer_files(folder)
        checkpoint = write_imported(directory, model, pairs, theirs, origin, files)
    return ImportedCheckpoint(checkpoint, model, notes)


class _ForeignTensor(NamedTuple):
    """A tensor in one of their files."""

    path: Path
    descriptor: int
    info: TensorInfo

    @property
    def dtype(self) -> str:
        """As the file calls it."""
        return self.info.dtype

    @property
    def shape(self) -> Tuple[int, ...]:
        """As the file has it."""
        return self.info.shape

    def read(self) -> "Array":
        """Read it.

        Raises:
            UsageError: it cannot be read.
        """
        try:
            return read_tensor(self.descriptor, self.info)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from None
        except NotSafetensors as error:
            raise UsageError(f"{self.path}: {error}") from None


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


def _open_weights(folder: Path, prefix: str, stack: contextlib.ExitStack) -> Dict[str, _ForeignTensor]:
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
            short = info.name[len(prefix) :] if info.name.startswith(prefix) else info.name
            tensors[short] = _ForeignTensor(path, descriptor, info)
    return tensors


def _files_of_index(path: Path) -> List[str]:
    """Return the names of the files over which an index says that the tensors are distributed."""
    weight_map = _read_json(path).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and is_possible_name(name) and Path(name).name for name in names):
        raise UsageError(f"{path}: 'weight_map' does not give the file of each tensor")
    return sorted(set(names))
