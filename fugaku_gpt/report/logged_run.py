"""The settings of a run of another trainer: its log's arguments, what the user adds, and what follows from both."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Dict, Mapping, Optional, Sequence

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.config.values import BadValue, parse_bool, parse_int
from fugaku_gpt.errors import UsageError


@dataclass(frozen=True)
class LoggedRun:
    """Settings of a run of another trainer; None if not stated.

    Attributes:
        ranks: number of processes.
        nodes, ranks_per_node: how the processes were spread.
        recompute: whether all activations were recomputed.
        padded_vocab: rows of the embedding.
        status: how the run ended; None to conclude it from the log.
    """

    name: Optional[str] = None
    layers: Optional[int] = None
    hidden: Optional[int] = None
    ffn_hidden: Optional[int] = None
    heads: Optional[int] = None
    seq_len: Optional[int] = None
    vocab_size: Optional[int] = None
    padded_vocab: Optional[int] = None
    ranks: Optional[int] = None
    nodes: Optional[int] = None
    ranks_per_node: Optional[int] = None
    dp: Optional[int] = None
    tp: Optional[int] = None
    pp: Optional[int] = None
    micro_batch: Optional[int] = None
    global_batch: Optional[int] = None
    recompute: Optional[bool] = None
    dtype: Optional[str] = None
    torch: Optional[str] = None
    freq_mhz: Optional[int] = None
    tcmalloc: Optional[bool] = None
    retention_state: Optional[int] = None
    job_id: Optional[str] = None
    date: Optional[str] = None
    status: Optional[str] = None


# Megatron's argument → ours
_ARGUMENTS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn_hidden",
    "num_attention_heads": "heads",
    "seq_length": "seq_len",
    "vocab_size": "vocab_size",
    "padded_vocab_size": "padded_vocab",
    "world_size": "ranks",
    "data_parallel_size": "dp",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "micro_batch_size": "micro_batch",
    "global_batch_size": "global_batch",
}
# GPT-NeoX's argument → ours; it writes 0 for a split that is not made
_NEOX_ARGUMENTS = {
    "global_num_gpus": "ranks",
    "model_parallel_size": "tp",
    "pipe_parallel_size": "pp",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "train_batch_size": "global_batch",
}
# arguments that make the model different from the one that the formulas describe
OTHER_MODELS = ("swiglu", "untie_embeddings_and_output_weights", "group_query_attention", "num_experts")


def parse_settings(settings: Sequence[str]) -> LoggedRun:
    """Parse ``key=value`` settings of the command line.

    Raises:
        UsageError: an unknown key, or a value that is not of its type.
    """
    kinds = {field.name: str(field.type) for field in fields(LoggedRun)}
    values: Dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or key not in kinds:
            close_matches = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {close_matches[0]}?" if close_matches else f"valid: {', '.join(kinds)}"
            raise UsageError(f"--set {text}: {'not KEY=VALUE' if not equals else 'unknown key'}; {hint}")
        try:
            if "int" in kinds[key]:
                values[key] = parse_int(value)
                if key == "retention_state" and values[key] not in (0, 1):
                    raise BadValue("must be 0 or 1")
                if key != "retention_state" and values[key] < 1:
                    raise BadValue("must be at least 1")
            else:
                values[key] = parse_bool(value) if "bool" in kinds[key] else value
        except BadValue as error:
            raise UsageError(f"--set {text}: {error}") from None
    return LoggedRun(**values)


# settings that a row shows, or that its TFLOPs follow from
IN_ROWS = ("nodes", "dp", "tp", "pp", "micro_batch", "global_batch") + (
    *("layers", "hidden", "seq_len", "padded_vocab", "recompute"),
)


def complete_settings(arguments: Mapping[str, str], given: LoggedRun, lines: Sequence[Mapping[str, Any]]) -> LoggedRun:
    """Merge the user's settings with the log's arguments, and derive what follows from both."""
    settings: Dict[str, Any] = {}
    for name, key in _ARGUMENTS.items():
        text = arguments.get(name, "")
        if text.isdecimal() and 0 < int(text) < 2**53:
            settings[key] = int(text)
    for name, key in _NEOX_ARGUMENTS.items():
        text = arguments.get(name, "")
        if key not in settings and text.isdecimal() and int(text) < 2**53:
            settings[key] = max(1, int(text))
    settings["recompute"] = _recompute(arguments)
    settings["dtype"] = _dtype(arguments)
    batches = [line["global_batch"] for line in lines if line.get("global_batch")]
    if batches:
        settings["global_batch"] = batches[-1]  # a schedule of growing batches has other ones at the beginning
    lengths = {line["actual_seq_len"] for line in lines if line.get("actual_seq_len")}
    if len(lengths) == 1:  # several: a schedule of growing sequences, whose end is not known
        settings.setdefault("seq_len", *lengths)
    settings.update({key: value for key, value in asdict(given).items() if value is not None})
    run = LoggedRun(**settings)
    if run.ranks is None and run.dp and run.tp and run.pp:
        run = replace(run, ranks=run.dp * run.tp * run.pp)
    if run.ranks is None and run.nodes and run.ranks_per_node:
        run = replace(run, ranks=run.nodes * run.ranks_per_node)
    if run.dp is None and run.ranks and run.tp and run.pp and run.ranks % (run.tp * run.pp) == 0:
        run = replace(run, dp=run.ranks // (run.tp * run.pp))
    if run.nodes is None and run.ranks and run.ranks_per_node and run.ranks % run.ranks_per_node == 0:
        run = replace(run, nodes=run.ranks // run.ranks_per_node)
    if run.ranks_per_node is None and run.ranks and run.nodes and run.ranks % run.nodes == 0:
        run = replace(run, ranks_per_node=run.ranks // run.nodes)
    multiple = arguments.get("make_vocab_size_divisible_by", "")
    if run.padded_vocab is None and run.vocab_size and run.tp and multiple.isdecimal() and int(multiple) > 0:
        unit = int(multiple) * run.tp
        run = replace(run, padded_vocab=-(-run.vocab_size // unit) * unit)
    if run.vocab_size is None and run.padded_vocab:
        run = replace(run, vocab_size=run.padded_vocab)
    return run


def _recompute(arguments: Mapping[str, str]) -> Optional[bool]:
    """True for full recompute, by Megatron-DeepSpeed's switch or Megatron-LM's granularity; None if not stated."""
    switch, granularity = arguments.get("checkpoint_activations"), arguments.get("recompute_granularity")
    if switch in ("True", "False"):
        return switch == "True"
    return granularity == "full" if granularity is not None else None


def _dtype(arguments: Mapping[str, str]) -> Optional[str]:
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if arguments.get(name) == "True":
            return dtype
    return arguments.get("params_dtype", "").replace("torch.", "") or None


def model_of(run: LoggedRun) -> Optional[ModelConfig]:
    if not (run.layers and run.hidden and run.seq_len):
        return None
    return ModelConfig(
        layers=run.layers,
        hidden=run.hidden,
        heads=run.heads or 1,
        ffn_hidden=run.ffn_hidden,
        seq_len=run.seq_len,
        vocab_size=run.vocab_size or 2,
    )
