"""The matrix of layouts whose training must equal that of one rank; a case is text that names what is switched on.

``tests/test_matrix.py`` proves that it has every two features that can meet, and the triples that matter most.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Tuple

from fugaku_gpt.config import RunConfig
from tests.support.tiny import tiny_config

Settings = Tuple[str, ...]
BASE = (
    "model.layers=4",
    "training.warmup_iterations=1",
    "training.decay_iterations=5",
    "training.bucket_mib=0.03",  # still several buckets of each stage, the last one short
)
MEANINGS: Dict[str, Settings] = {
    "zero": ("layout.zero=1",),
    "sp": ("layout.sequence_parallel=true",),
    "node-first": ("layout.hierarchical_sum=true",),
    "gpipe": ("layout.schedule=gpipe",),
    "interleaved": ("layout.schedule=interleaved", "layout.chunks=2"),
    "zero-bubble": ("layout.schedule=zero_bubble",),
    "selective": ("training.recompute=selective",),
    "full": ("training.recompute=full",),
    "bfloat16": ("training.dtype=bfloat16",),
    "float16": ("training.dtype=float16", "training.loss_scale=256"),  # the default one overflows now and then
    "sums=bfloat16": ("training.gradient_dtype=bfloat16",),
    "batch-ramp": ("training.ramp_start=4", "training.ramp_increment=4", "training.ramp_samples=8"),
    "length-ramp": ("training.seq_ramp_start=8", "training.seq_ramp_increment=8", "training.seq_ramp_iterations=4"),
    "leave-samples": ("training.skip_samples=[3, 9-12]",),
    "leave-step": ("training.non_finite=skip",),  # the test makes one step not finite
    # the test makes a spike
    "rollback": ("training.rollback_every=1", "training.spike_window=2", "training.spike_ratio=1.05"),
    "linear": ("training.lr_schedule=linear",),
    "constant": ("training.lr_schedule=constant",),
    "wsd": ("training.lr_schedule=wsd", "training.decay_fraction=0.5"),
    "documents": ("data.document_mask=true", "data.reset_positions=true"),
    "no-attention-dropout": ("model.attention_dropout=0",),
    "two-layers": ("model.layers=2",),
    # every field by which a Llama differs from a GPT-2, and the norms of queries and keys of Qwen 3
    "llama": (
        "model.norm=rmsnorm",
        "model.mlp=swiglu",
        "model.positions=rope",
        "model.kv_heads=2",
        "model.tied_embeddings=false",
        "model.biases=none",
        "model.qk_norm=true",
        "model.head_dim=10",
    ),
    "one-key": ("model.kv_heads=1",),  # one head of keys for all (Shazeer 2019, "MQA"), after `llama`
    "qkv-biases": ("model.biases=qkv",),  # as Qwen 2 has them, after `llama`
}
_PREFIXES = {
    "micro": "training.micro_batch",
    "layers": "training.recompute_layers",
    "budget": "training.recompute_budget_mib",
    **{key: f"layout.{key}" for key in ("dp", "tp", "pp", "order", "split", "chunks")},
}
# settings of a layout, which the reference run on one rank does not have
_OF_LAYOUTS = ("layout.", "training.recompute", "training.gradient_dtype", "training.micro_batch")

# Every operator of every micro-batch takes the same time, however small. So layouts whose features show in two layers
# have two, and those that show with fewer micro-batches have micro-batches of 2 or 4 samples; the others have 4 layers
# and micro-batches of one sample.
# cases that are trained in float64 and in float32
WIDE: List[str] = [
    "",
    "selective interleaved chunks=4",
    "full zero",
    "llama",
    "llama qkv-biases full",
    "dp=2",
    "dp=2 zero full two-layers",
    "dp=2 selective constant",
    "tp=2 micro=2",
    "tp=2 selective two-layers micro=2",
    "tp=2 sp two-layers",
    "tp=2 sp selective two-layers micro=2",
    "tp=2 sp full layers=1 no-attention-dropout two-layers micro=2",
    "dp=2 llama zero two-layers micro=2",
    "tp=2 llama two-layers micro=2",
    "tp=2 sp llama qkv-biases selective two-layers micro=2",
    "tp=2 llama one-key two-layers micro=2",
    "tp=4 sp llama qkv-biases selective two-layers micro=2",
    "dp=2 tp=2 zero sp llama one-key full two-layers micro=2",
    "tp=2 pp=2 llama one-key zero-bubble micro=2",
    "pp=2 full micro=2",
    "pp=2 gpipe split=[3,1] full micro=2",
    "pp=2 interleaved selective",
    "pp=2 interleaved split=[1,2,1,0] full layers=1 micro=2",
    "pp=2 zero-bubble documents",
    "pp=2 llama zero-bubble micro=2",
    "pp=2 llama two-layers micro=2",
    "dp=4 two-layers",
    "dp=4 zero node-first",
    "tp=4 two-layers micro=2",
    "tp=4 sp full two-layers micro=4",
    "pp=4",
    "pp=4 gpipe",
    "pp=4 zero-bubble full",
    "dp=2 tp=2 zero sp full two-layers micro=2",
    "dp=2 pp=2 zero interleaved selective order=pp,dp,tp",
    "dp=2 pp=2 zero selective batch-ramp rollback linear",
    "tp=2 pp=2 order=dp,pp,tp micro=2",
    "tp=2 pp=2 sp llama interleaved full micro=2",
    "tp=2 pp=2 sp interleaved full micro=2",
    "tp=2 pp=2 sp gpipe selective micro=2",
    "dp=8 node-first two-layers",
    "dp=2 tp=4 zero sp selective two-layers micro=2",
    "dp=2 pp=4 zero",
    "tp=2 pp=4",
    "tp=4 pp=2 sp full two-layers micro=2",
    "dp=2 tp=2 pp=2 two-layers",
    "dp=2 tp=2 pp=2 order=dp,tp,pp zero sp interleaved selective length-ramp rollback micro=2",
    "dp=2 tp=2 pp=2 order=pp,tp,dp zero sp full layers=1 batch-ramp length-ramp leave-samples leave-step rollback",
    "dp=2 tp=2 pp=2 order=pp,dp,tp zero sp gpipe split=[3,1] selective budget=0.47 batch-ramp rollback wsd",
    "dp=2 tp=2 pp=2 order=pp,tp,dp zero gpipe split=[3,1] selective layers=1 length-ramp leave-samples leave-step "
    "rollback linear micro=2",
    "dp=2 tp=2 pp=2 order=pp,dp,tp zero sp zero-bubble split=[3,1] selective layers=1 batch-ramp leave-samples "
    "leave-step rollback wsd",
    "dp=4 pp=2 zero node-first zero-bubble split=[3,1] full budget=0.45 length-ramp linear",
    "dp=4 pp=2 zero node-first full layers=1 length-ramp leave-samples rollback wsd",
    "dp=4 pp=2 zero node-first split=[3,1] selective budget=0.47 length-ramp leave-samples leave-step constant",
    "dp=4 pp=2 node-first interleaved selective layers=1 batch-ramp length-ramp leave-samples leave-step rollback wsd",
    "dp=4 pp=2 zero node-first gpipe split=[3,1] full budget=0.45 length-ramp leave-samples leave-step rollback",
    "dp=4 pp=2 zero node-first gpipe full layers=1 batch-ramp length-ramp leave-samples rollback constant",
    "dp=4 tp=2 zero sp node-first interleaved split=[3,1] full budget=0.15 batch-ramp length-ramp leave-samples "
    "leave-step linear",
    "dp=4 tp=2 order=tp,dp,pp zero sp node-first interleaved split=[3,1] full budget=0.2 batch-ramp leave-samples "
    "leave-step rollback constant",
    "dp=4 pp=2 order=pp,dp,tp llama zero node-first gpipe split=[3,1] selective layers=1 batch-ramp length-ramp "
    "leave-samples leave-step rollback linear",
    "dp=2 tp=2 pp=2 llama zero sp interleaved full budget=0.15 documents wsd",
    "documents full two-layers",
    "dp=2 documents zero two-layers micro=2",
    "tp=2 sp documents two-layers micro=2",
    "tp=2 llama documents two-layers micro=2",
    "dp=2 tp=4 order=dp,tp,pp llama zero sp two-layers constant micro=2",
    "dp=4 tp=2 llama one-key zero sp node-first interleaved split=[3,1] full budget=0.15 batch-ramp length-ramp "
    "leave-samples leave-step rollback linear documents",
    "dp=2 tp=2 pp=2 llama one-key zero gpipe split=[3,1] full layers=1 wsd micro=2",
    "dp=2 pp=2 llama qkv-biases interleaved full layers=1 constant micro=2",
    "dp=4 pp=2 order=pp,tp,dp llama qkv-biases zero node-first gpipe split=[3,1] full budget=0.35 batch-ramp "
    "length-ramp leave-samples leave-step rollback wsd",
]
# cases that are compared with one rank in the same type, and in float32
NARROW: List[str] = [
    "bfloat16",
    "float16",
    "dp=2 zero bfloat16",
    "dp=2 zero float16 sums=bfloat16",
    "tp=2 sp bfloat16 two-layers micro=2",
    "tp=2 sp float16 two-layers micro=2",
    "llama bfloat16",
    "tp=2 llama one-key bfloat16 two-layers micro=2",
    "dp=2 tp=2 zero llama one-key float16 sums=bfloat16 two-layers micro=2",
    "tp=2 sp llama float16 two-layers micro=2",
    "pp=2 interleaved selective bfloat16",
    "pp=2 interleaved full bfloat16 micro=2",
    "pp=2 interleaved float16 micro=2",
    "pp=2 zero-bubble full bfloat16 micro=2",
    "dp=2 pp=2 float16",
    "dp=2 pp=2 zero bfloat16 sums=bfloat16",
    "dp=2 tp=2 zero sp float16 sums=bfloat16 two-layers micro=2",
    "tp=2 pp=2 gpipe bfloat16 micro=2",
    "tp=2 pp=2 sp interleaved full bfloat16 micro=2",
    "dp=2 tp=2 order=pp,dp,tp interleaved selective layers=1 bfloat16 sums=bfloat16 length-ramp leave-samples "
    "leave-step rollback wsd micro=2",
    "dp=2 tp=2 pp=2 zero sp bfloat16 two-layers",
    "dp=2 tp=2 pp=2 sp zero-bubble bfloat16 sums=bfloat16 two-layers",
    "dp=4 pp=2 zero node-first zero-bubble selective float16 sums=bfloat16 constant",
    "dp=2 tp=2 pp=2 order=pp,tp,dp gpipe split=[3,1] selective layers=1 bfloat16 sums=bfloat16 leave-samples constant "
    "documents micro=2",
    "dp=2 tp=2 pp=2 zero sp gpipe split=[3,1] full budget=0.1 bfloat16 sums=bfloat16 batch-ramp length-ramp "
    "leave-samples",
    "dp=2 tp=2 pp=2 order=tp,dp,pp zero sp interleaved full layers=1 float16 sums=bfloat16 length-ramp leave-samples "
    "leave-step rollback wsd micro=2",
    "dp=4 tp=2 zero sp selective float16 batch-ramp leave-samples leave-step rollback linear",
    "dp=4 pp=2 order=pp,tp,dp zero node-first full budget=0.06 float16 sums=bfloat16 batch-ramp length-ramp",
    "dp=4 pp=2 order=dp,pp,tp zero node-first gpipe split=[3,1] selective layers=1 float16 sums=bfloat16 batch-ramp "
    "length-ramp rollback constant",
    "dp=4 pp=2 order=pp,dp,tp zero node-first split=[3,1] selective layers=1 bfloat16 sums=bfloat16 batch-ramp "
    "length-ramp leave-samples leave-step rollback linear",
    "dp=2 pp=2 llama zero-bubble float16 sums=bfloat16 constant",
    "dp=2 pp=2 llama qkv-biases zero-bubble bfloat16 sums=bfloat16 linear",
    "tp=2 pp=2 sp llama one-key qkv-biases float16 documents two-layers micro=2",
]


def is_long(case: str, dtype: str) -> bool:
    """Whether a case is a long test: four or more ranks in float32, whose kernels one and two ranks try, two in float32
    with more than four words, four with more than six, and eight with more than eight. Each takes several seconds where
    the ranks share two cores."""
    ranks, words = config_of(case).layout.ranks, len(case.split())
    if dtype == "float32" and (ranks >= 4 or (ranks == 2 and words > 4)):
        return True
    return words > {4: 6, 8: 8}.get(ranks, words)


def config_of(case: str, *more: str) -> RunConfig:
    """Returns the configuration of a case's tiny run, with further ``key=value`` settings."""
    return tiny_config(*BASE, *_settings(case), *more)


def training_of(case: str) -> Settings:
    """Returns the settings of a case that one rank has as well, without the type, since several types are compared."""
    return tuple(setting for setting in _settings(case) if not setting.startswith((*_OF_LAYOUTS, "training.dtype")))


def _settings(case: str) -> Iterator[str]:
    for word in case.split():
        key, _, value = word.partition("=")
        if word in MEANINGS:
            yield from MEANINGS[word]
        else:
            yield f"{_PREFIXES[key]}={value}"
