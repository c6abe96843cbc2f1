"""Rules between the fields of a run that classifies grids."""

from __future__ import annotations

from typing import Callable

from fugaku_gpt.config.schema import ARC, COLORS, CORPUS, DECODER, GRID_CLASSIFIER, OUR_ORDER, RunConfig
from fugaku_gpt.errors import UsageError
from fugaku_gpt.limits import cut

ReportProblem = Callable[[str, object, str], None]


def check_grids(config: RunConfig, report_problem: ReportProblem) -> None:
    """Check that model and data are of the same kind, and that a grid classifier has only what it supports."""
    model, data = config.model, config.data
    kind_of_data = ARC if model.is_grid_classifier else CORPUS
    if data.kind != kind_of_data:
        kind_of_model = GRID_CLASSIFIER if data.kind == ARC else DECODER
        rule = f"is not what model.kind {model.kind} learns from; valid: {kind_of_data}, or model.kind {kind_of_model}"
        report_problem("data.kind", data.kind, rule)
    if not model.is_grid_classifier:
        return
    _check_sizes(config, report_problem)
    if len(data.paths) > 1:
        report_problem("data.paths", list(data.paths), "has more than one file; valid with data.kind arc: one, or none")
    # settings that only sequences of tokens have, and what is not built for grids
    for key, value, valid, shown in (
        ("model.tied_embeddings", model.tied_embeddings, False, "false"),
        ("model.rope_scaling", model.rope_scaling, "none", "none"),
        ("model.padded_vocab_size", model.padded_vocab_size, None, "null"),
        ("training.ramp_start", config.training.ramp_start, None, "null"),
        ("training.seq_ramp_start", config.training.seq_ramp_start, None, "null"),
        ("training.skip_samples", list(config.training.skip_samples), [], "[]"),
        ("training.eval_files", list(config.training.eval_files), [], "[]"),
        ("data.weights", list(data.weights), [], "[]"),
        ("data.document_mask", data.document_mask, False, "false"),
        ("data.order", data.order, OUR_ORDER, OUR_ORDER),
    ):
        if value != valid:
            report_problem(key, value, f"is not supported with model.kind grid_classifier; valid: {shown}")


def _check_sizes(config: RunConfig, report_problem: ReportProblem) -> None:
    model, buckets = config.model, config.data.buckets
    if not buckets or list(buckets) != sorted(set(buckets)):
        report_problem("data.buckets", list(buckets), "must be sides of grids, each larger than the one before")
        return
    cells = buckets[-1] ** 2
    if model.seq_len != cells:
        rule = f"must be the cells of the largest grid, {buckets[-1]} x {buckets[-1]} by data.buckets; valid: {cells}"
        report_problem("model.seq_len", model.seq_len, rule)
    tp = config.layout.tp if config.layout.sequence_parallel else 1
    odd = [side for side in buckets if side * side % tp]
    if odd:
        rule = f"must divide the cells of each bucket, {odd[0]} x {odd[0]}, with layout.sequence_parallel"
        report_problem("layout.tp", tp, rule)
    if model.vocab_size < COLORS:
        report_problem("model.vocab_size", model.vocab_size, f"a grid has {COLORS} colors; valid: {COLORS} or more")


def require_decoder(config: RunConfig, purpose: str) -> None:
    """Refuse a run of another model than a decoder for something that only decoders have.

    Args:
        purpose: a noun that names it, such as "the prediction of times".

    Raises:
        UsageError: the model is no decoder.
    """
    if config.model.kind != DECODER:
        kind = cut(config.model.kind)
        raise UsageError(f"model.kind: {kind}: {purpose} is not computed for this model; valid: {DECODER}")
