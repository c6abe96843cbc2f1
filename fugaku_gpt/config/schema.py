"""What a run is: one frozen dataclass per concern, a meaning and a unit beside every field.

``option()`` carries the meaning, the unit and the limits of a field; the loader coerces and checks by them, so a field
is described in one place only. Cross-field rules are in ``checks.py``.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any, Optional, Sequence, Tuple

from fugaku_gpt.config.knobs import NodeKnob, gigahertz, knobs_of

DTYPES = ("float32", "float64", "bfloat16", "float16")
SIXTEEN_BIT_DTYPES = ("bfloat16", "float16")
GRID_ORDERS = ("tp,pp,dp", "tp,dp,pp", "pp,tp,dp", "pp,dp,tp", "dp,tp,pp", "dp,pp,tp")
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
SCHEDULERS = ("pjm", "slurm", "local")
RECOMPUTE = ("none", "selective", "full")
LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")

# Texts that reach job scripts. Quoting makes any text harmless there; these are refused where they cannot be meant.
_WORD = (r"[A-Za-z0-9_][A-Za-z0-9._-]*", "letters, digits and . _ -")
SIZE = (r"0*[1-9][0-9]*(Ki|Mi|Gi|Ti)", "a size with its unit, such as 23Gi")
_PATH = (r"[^\x00-\x1f\x7f\ud800-\udfff]+", "a path without control characters")
_LIBRARY = (r"[^\s:\x00-\x1f\x7f\ud800-\udfff]+", "a path without spaces and colons, as in LD_PRELOAD")
_VARIABLE = (r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f\ud800-\udfff]*", "NAME=value on one line")
_AXES = "XY|YX|XYZ|XZY|YXZ|YZX|ZXY|ZYX"


def option(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    at_least: Optional[float] = None,
    above: Optional[float] = None,
    below: Optional[float] = None,
    choices: Optional[Sequence[Any]] = None,
    form: Optional[Tuple[str, str]] = None,
) -> Any:
    """A dataclass field with its meaning, unit and limits.

    Args:
        form: what a text, or each of a list of texts, must look like: a regular expression, and the same in words. The
            empty text is always allowed: it means "not set".
    """
    metadata = {
        "meaning": meaning,
        "unit": unit,
        "at_least": at_least,
        "above": above,
        "below": below,
        "choices": tuple(choices) if choices is not None else None,
        "duration": False,
        "form": form,
        "knob": None,
    }
    return field(default=default, metadata=metadata)


def as_knob(described: Any, knob: NodeKnob) -> Any:
    """A dataclass field made by :func:`option` that is also a knob of a node, under the field's name."""
    return field(default=described.default, metadata={**described.metadata, "knob": knob})


def power_knob(
    meaning: str,
    values: Tuple[int, ...],
    *,
    default: int,
    statistics_order: int,
    historical_value: Optional[int] = None,
    alias: str = "",
    row_name: str = "{name}{value}",
) -> Any:
    """A dataclass field for a power knob that PJM alone can set, under the field's name; see :class:`NodeKnob`."""
    knob = NodeKnob(
        values=values,
        default=default,
        statistics_order=statistics_order,
        historical_value=historical_value,
        unsupported_by=("slurm", "local"),
        per_job=True,
        alias=alias,
        row_name=row_name,
    )
    return as_knob(option(None, meaning, choices=values), knob)


def duration(
    default: Optional[float], meaning: str, *, at_least: Optional[float] = None, above: Optional[float] = None
) -> Any:
    """A dataclass field of seconds that may be written as H:MM:SS, with its meaning and limits."""
    metadata = option(default, meaning, unit="s", at_least=at_least, above=above).metadata
    return field(default=default, metadata={**metadata, "duration": True})


def describe(spec: "Field[Any]") -> str:
    """The one-line meaning of a config field, with its unit."""
    unit = spec.metadata["unit"]
    return f"{spec.metadata['meaning']} [{unit}]" if unit else str(spec.metadata["meaning"])


@dataclass(frozen=True)
class ModelConfig:
    """The GPT: pre-LayerNorm, learned positions, GELU, output weights tied to the embedding."""

    name: str = option("", "size as written in tables, such as 124M; empty: made from the parameter count")
    layers: int = option(4, "transformer layers", at_least=1)
    hidden: int = option(128, "hidden size h", at_least=1)
    heads: int = option(4, "attention heads", at_least=1)
    ffn_hidden: Optional[int] = option(None, "width of the MLP; default 4 * hidden", at_least=1)
    seq_len: int = option(128, "sequence length s", unit="tokens", at_least=1)
    vocab_size: int = option(2048, "true vocabulary; padding never takes part in the loss", unit="tokens", at_least=2)
    vocab_multiple: int = option(128, "the embedding is padded to a multiple of this times layout.tp", at_least=1)
    padded_vocab_size: Optional[int] = option(None, "rows of the embedding; default by vocab_multiple", at_least=2)
    dropout: float = option(0.0, "dropout after the embedding and on both residual branches", at_least=0, below=1)
    attention_dropout: float = option(0.0, "dropout on attention probabilities", at_least=0, below=1)
    embedding_layernorm: bool = option(False, "one more LayerNorm after the embedding")
    layernorm_eps: float = option(1e-5, "epsilon of LayerNorm", above=0)
    gelu: str = option(
        "erf", "form of GELU; GPT-2's published weights want tanh, erf is faster", choices=("erf", "tanh")
    )
    init_std: float = option(0.02, "standard deviation of initial weights", above=0)

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden if self.ffn_hidden is not None else 4 * self.hidden

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding when it is cut over ``tp`` ranks."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        multiple = self.vocab_multiple * tp
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True)
class LayoutConfig:
    """How the ranks are arranged; ranks = dp * tp * pp."""

    dp: int = option(1, "data-parallel replicas", at_least=1)
    tp: int = option(1, "tensor-parallel ranks that share each layer", at_least=1)
    pp: int = option(1, "pipeline stages", at_least=1)
    order: str = option(
        "tp,pp,dp", "which ranks are neighbours: the axes of the grid, fastest first", choices=GRID_ORDERS
    )
    schedule: str = option("1f1b", "order of passes in the pipeline", choices=PIPELINE_SCHEDULES)
    chunks: int = option(1, "virtual stages of each pipeline stage; above 1 with the interleaved schedule", at_least=1)
    split: Tuple[int, ...] = option(
        (),
        "layers of each chunk, first to last (the last may have 0 beside the logits); "
        "default: balanced, embedding and logits counted",
        at_least=0,
    )
    sequence_parallel: bool = option(
        False, "cut the activations between tensor-parallel layers along the sequence; with tp 1 it changes nothing"
    )
    hierarchical_sum: bool = option(False, "sum gradients within each node first, then between nodes")
    zero: int = option(0, "1: each replica keeps and steps its share of the optimiser state (ZeRO)", choices=(0, 1))

    @property
    def ranks(self) -> int:
        """MPI processes that this layout needs."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation: batch, schedule, AdamW, validation and logging."""

    micro_batch: int = option(1, "sequences per forward pass and replica", unit="sequences", at_least=1)
    global_batch: int = option(8, "sequences per iteration over all replicas", unit="sequences", at_least=1)
    ramp_start: Optional[int] = option(
        None, "global batch of the first iterations; default: no ramp-up", unit="sequences", at_least=1
    )
    ramp_increment: Optional[int] = option(
        None, "by how much the global batch grows at a time", unit="sequences", at_least=1
    )
    ramp_samples: Optional[int] = option(
        None, "samples consumed when the global batch has its full size", unit="sequences", at_least=1
    )
    seq_ramp_start: Optional[int] = option(
        None, "tokens of each sample in the first iterations; default: all", unit="tokens", at_least=1
    )
    seq_ramp_increment: Optional[int] = option(
        None, "by how much the samples grow at a time", unit="tokens", at_least=1
    )
    seq_ramp_iterations: Optional[int] = option(
        None, "iterations after which samples have their full length", unit="iterations", at_least=1
    )
    skip_samples: Tuple[str, ...] = option(
        (),
        "samples that are left out, by number, as the log counts consumed samples, such as 1000-1999",
        form=(r"[0-9]{1,15}(-[0-9]{1,15})?", "such as 1000-1999, or one number"),
    )
    iterations: int = option(100, "optimiser steps", at_least=1)
    seed: int = option(1234, "seed of weights, sample order and dropout", at_least=0)
    dtype: str = option(
        "float32", "precision of computing; with 16 bits, weights and sums of gradients are float32", choices=DTYPES
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
        1.0, "float16: the loss scale halves at each overflow; one at this scale is a step that is not finite", above=0
    )
    lr: float = option(6e-4, "highest learning rate", above=0)
    min_lr: float = option(6e-5, "learning rate at the end of the schedule, but for the constant one", at_least=0)
    warmup_iterations: int = option(0, "linear warm-up", unit="iterations", at_least=0)
    lr_schedule: str = option(
        "cosine", "learning rate after the warm-up; wsd: warm-up, stable, decay at the end", choices=LR_SCHEDULES
    )
    decay_iterations: Optional[int] = option(
        None, "length of the schedule, warm-up included; default: iterations", unit="iterations", at_least=1
    )
    decay_fraction: float = option(0.1, "share of the wsd schedule's length that decays", above=0)
    weight_decay: float = option(0.1, "AdamW weight decay of matrices; biases and LayerNorm have none", at_least=0)
    beta1: float = option(0.9, "AdamW", at_least=0, below=1)
    beta2: float = option(0.95, "AdamW", at_least=0, below=1)
    eps: float = option(1e-8, "AdamW", above=0)
    clip_grad: float = option(1.0, "largest global gradient norm; 0 leaves gradients as they are", at_least=0)
    non_finite: str = option(
        "stop",
        "what follows a loss or gradient that is not finite: the run stops, or the step is left out",
        choices=("stop", "skip"),
    )
    max_skips: int = option(10, "steps left out in a row, or returns to the same copy, that stop the run", at_least=1)
    rollback_every: Optional[int] = option(
        None,
        "iterations between copies in memory of weights and optimiser state, to which a loss spike returns; "
        "default: never; takes as much memory again as those",
        unit="iterations",
        at_least=1,
    )
    spike_window: int = option(
        100, "losses before it that a loss is judged by, and their standard deviation", unit="iterations", at_least=2
    )
    spike_deviations: Optional[float] = option(
        6.0, "a loss so many standard deviations above their mean is a spike; null: none is", above=0
    )
    spike_ratio: Optional[float] = option(None, "a loss so many times their mean is a spike; default: none is", above=1)
    log_interval: int = option(1, "iterations between log lines", unit="iterations", at_least=1)
    eval_interval: Optional[int] = option(
        None, "iterations between validations, one more at the end; default: never", unit="iterations", at_least=1
    )
    eval_batches: int = option(4, "global batches per validation", at_least=1)
    profile_operators: Optional[int] = option(
        None,
        "iterations done once more after all is written, to see which operators take the time; default: none",
        unit="iterations",
        at_least=1,
    )
    bucket_mib: float = option(32.0, "size of one gradient all-reduce", unit="MiB", above=0)
    buckets_at_once: int = option(4, "gradient all-reduces under way at once; MPI takes memory for each", at_least=1)
    progress_ms: float = option(2.0, "our kernels let MPI get on this often; 0: they do not", unit="ms", at_least=0)

    recompute: str = option(
        "none",
        "what the backward pass computes again in place of keeping it: nothing, flags of attention dropout, or layers",
        choices=RECOMPUTE,
    )
    recompute_layers: Optional[int] = option(
        None, "layers of each chunk that are recomputed, the first ones; default: all", at_least=0
    )
    recompute_budget_mib: Optional[float] = option(
        None,
        "memory of each rank for what forward passes keep; each stage recomputes as little as fits, recompute at most",
        unit="MiB",
        above=0,
    )

    @property
    def decay_length(self) -> int:
        """Iterations until the learning rate has reached ``min_lr``."""
        return self.decay_iterations if self.decay_iterations is not None else self.iterations


@dataclass(frozen=True)
class DataConfig:
    """The corpora and how they are split and blended."""

    paths: Tuple[str, ...] = option((), "folders made by `data prepare`, or prefixes of Megatron .bin/.idx pairs")
    weights: Tuple[float, ...] = option((), "share of samples from each path; default: by their tokens", above=0)
    split: Tuple[float, ...] = option(
        (969.0, 30.0, 1.0), "train, valid, test shares of each corpus's documents", at_least=0
    )


@dataclass(frozen=True)
class NodeConfig:
    """What each node runs, and its toggles. What a machine cannot apply is recorded as not applied.

    The fields that carry a :class:`NodeKnob` are the table of knobs (``NODE_KNOBS``), from which everything else about
    a knob is derived: a new one is a new field. The power knobs are those of the user guide, chapter
    PowerControlFunction; a job script for Fugaku always writes them out, as their defaults have changed over the years.
    """

    ranks_per_node: Optional[int] = option(None, "MPI processes per node; default: ranks / job.nodes", at_least=1)
    threads_per_rank: Optional[int] = option(None, "threads per process; default: usable cores / ranks", at_least=1)
    bind: str = option(
        "none",
        "give each rank cores of its own, or cores and their memory, unless the launcher has",
        choices=("none", "cores", "memory"),
    )
    compiled_kernels: bool = option(
        True, "compute by our own kernels where they are compiled for the processor (fugaku-gpt env kernels)"
    )
    tcmalloc: bool = as_knob(
        option(False, "preload tcmalloc into the ranks with LD_PRELOAD"),
        NodeKnob(short_form=lambda value: "LD_PRELOAD=libtcmalloc.so"),
    )
    preload: Tuple[str, ...] = as_knob(
        option((), "more libraries for LD_PRELOAD of the ranks, after tcmalloc; never exported", form=_LIBRARY),
        NodeKnob(),
    )
    freq_mhz: Optional[int] = as_knob(
        option(None, "core clock; default: as the machine is", unit="MHz", at_least=1),
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
        "power knob: memory requests, 0 all to 9 a tenth", tuple(range(10)), default=0, statistics_order=2
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
        option(None, "XOS_MMM_L_ARENA_LOCK_TYPE: 0 for many threads that allocate, 1", choices=(0, 1)),
        NodeKnob(variable="XOS_MMM_L_ARENA_LOCK_TYPE"),
    )
    open_files: Optional[int] = as_knob(
        option(None, "limit of open files of each process; default: the machine's", at_least=64), NodeKnob(per_job=True)
    )
    memory_check: bool = option(
        True, "refuse, before it starts, a run whose predicted memory is more than its nodes have"
    )
    memory_guard: bool = option(
        True, "end the run, and say what took the memory, before the kernel kills a rank for want of it"
    )
    memory_limit: str = option(
        "",
        "memory that the ranks of a node may use, such as 28Gi; default: the machine's or the control group's",
        form=SIZE,
    )
    flight_recorder: bool = option(True, "keep each rank's progress and last MPI calls in the run directory")
    hang_timeout: Optional[float] = duration(
        1800.0,
        "end the run with a report when no rank has begun an MPI call, a micro-batch or a piece of a checkpoint for so "
        "long (five times that at start-up and in checkpoints); must be longer than the longest of these; null: never; "
        "needs node.flight_recorder; joining MPI and opening the data, before there is a run directory, is not watched",
        above=0,
    )
    check_collectives: bool = option(
        False, "compare operation, shape and type between the ranks before each collective and message: slow, to debug"
    )


NODE_KNOBS = knobs_of(NodeConfig)
POWER_KNOBS = tuple(knob for knob in NODE_KNOBS if knob.is_power_knob)


@dataclass(frozen=True)
class JobConfig:
    """The job around the run, for a batch system or this machine."""

    name: str = option("", "name of the run and the job; default: made from model and layout")
    scheduler: str = option("pjm", "who runs the job script", choices=SCHEDULERS)
    nodes: int = option(1, "nodes; default: the product of job.shape", at_least=1)
    shape: str = option(
        "",
        "torus shape in nodes, such as 24x24x24; default: as the scheduler likes",
        form=(r"[1-9][0-9]*(x[1-9][0-9]*){0,2}", "such as 12, 4x6 or 24x24x24"),
    )
    allocation: str = option("", "how nodes are chosen; default: the group's", choices=("", "torus", "mesh", "noncont"))
    strict: str = option(
        "", "no turned axes (strict), nor shared I/O nodes (strict-io)", choices=("", "strict", "strict-io")
    )
    elapse: Optional[float] = duration(None, "time limit; default: none", above=0)
    elapse_min: Optional[float] = duration(
        None, "lower end of a range of time limits: after it the job may be ended", above=0
    )
    stop_margin: Optional[float] = duration(
        None,
        "before the time limit, the run stops with a checkpoint; default: a tenth of the limit, five minutes at most",
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
    rank_map_file: str = option("", "file of node coordinates, one line a rank", form=_PATH)
    statistics: str = option(
        "job", "statistics file: none, of the job, or with a record for each node", choices=("none", "job", "nodes")
    )
    volumes: Tuple[str, ...] = option(
        (),
        "second-layer volumes that the job touches, such as /vol0004; as few as do",
        form=(r"/[A-Za-z0-9._/-]+", "an absolute path of letters, digits and . _ - /"),
    )
    local_tmp: str = option("", "node-local temporary space, such as 30Gi; default: none", form=SIZE)
    shared_tmp: str = option("", "temporary space shared by the job's nodes, such as 10Gi; default: none", form=SIZE)
    llio: Tuple[str, ...] = option(
        (),
        "more settings of the layered storage, such as async-close=on",
        form=(r"[a-z-]+=[A-Za-z0-9._%/-]+", "such as async-close=on"),
    )
    transfer: Tuple[str, ...] = option(
        (), "files made common to all nodes before the ranks start (llio_transfer)", form=_PATH
    )
    transfer_dirs: Tuple[str, ...] = option((), "folders made common to all nodes (dir_transfer)", form=_PATH)
    tarball: str = option(
        "", "environment as a tar file, unpacked to node-local disk by one rank of each node", form=_PATH
    )
    environment: Tuple[str, ...] = option((), "variables for the ranks, each NAME=value", form=_VARIABLE)
    profile: str = option(
        "",
        "file that describes the PyTorch build, such as env/a64fx-torch-1.10.yaml, looked up from the present folder, "
        "the run file's and the top of its checkout; or the name of a shipped one",
        form=_PATH,
    )
    template: str = option("", "file of a job script template, such as one that overrides blocks", form=_PATH)
    bulk: str = option(
        "",
        "sub-jobs of a bulk job, such as 0-9; each is the same script with another number",
        form=(r"[0-9]{1,6}-[0-9]{1,6}", "such as 0-9"),
    )
    chain: int = option(1, "jobs that follow each other, each resuming where the last has stopped", at_least=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run on disk, from which it, or a run of another layout, goes on."""

    interval: Optional[int] = option(
        None, "iterations between checkpoints; default: only where the run stops early", unit="iterations", at_least=1
    )
    at_end: bool = option(False, "one more after the last iteration")
    keep_last: int = option(2, "the newest checkpoints that are kept", at_least=1)
    keep_every: Optional[int] = option(
        None, "iterations between checkpoints that are kept for good; default: none", unit="iterations", at_least=1
    )
    asynchronous: bool = option(True, "train on while a copy in memory is written; takes that memory")
    ranks_per_file: int = option(1, "neighbouring ranks that write into one file", at_least=1)


@dataclass(frozen=True)
class RunConfig:
    """One run, whole."""

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
    def micro_batches(self) -> int:
        """Micro-batches per iteration and replica (gradient accumulation steps)."""
        return self.training.global_batch // (self.training.micro_batch * self.layout.dp)

    @property
    def ranks_per_node(self) -> int:
        """MPI processes per node."""
        if self.node.ranks_per_node is not None:
            return self.node.ranks_per_node
        return self.layout.ranks // self.job.nodes
