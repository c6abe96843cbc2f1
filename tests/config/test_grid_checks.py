"""Tests of the rules between the fields of a run that classifies grids."""

from __future__ import annotations

from typing import Sequence

import pytest

from fugaku_gpt.config import load_run_config
from fugaku_gpt.config.grid_checks import require_decoder
from fugaku_gpt.errors import ConfigError, UsageError


@pytest.mark.parametrize("preset", ["arc-nano", "arc-small"])
def test_presets_have_the_layers_and_heads_of_published_models(preset: str) -> None:
    model = load_run_config(preset=preset).model
    assert model.is_grid_classifier and model.layers == 8 and model.classes == 400 and model.grid_side == 30
    if preset == "arc-nano":
        assert (model.heads, model.query_width, model.ffn_size) == (2, 48, 2 * model.hidden)
    else:
        assert (model.heads, model.kv_head_count, model.mlp, model.positions) == (8, 2, "swiglu", "rope")
        assert model.ffn_size == pytest.approx(8 / 3 * model.hidden, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("tiny", ["data.kind=arc"], "data.kind: arc: is not what model.kind decoder learns from; valid: corpus"),
        ("arc-nano", ["data.kind=corpus"], "corpus: is not what model.kind grid_classifier learns from; valid: arc"),
        ("arc-nano", ["data.buckets=[15]"], "model.seq_len: 900: must be the cells of the largest grid, 15 x 15"),
        (
            "arc-nano",
            ["data.buckets=[8, 15]"],
            "must be the cells of the largest grid, 15 x 15 by data.buckets; valid: 225",
        ),
        ("arc-nano", ["data.buckets=[30, 16]"], "must be sides of grids, each larger than the one before"),
        ("arc-nano", ["data.buckets=[]"], "must be sides of grids"),
        ("arc-nano", ["data.buckets=[31]", "model.seq_len=961"], "at least 1 and at most 30"),
        ("arc-nano", ["model.vocab_size=9"], "a grid has 10 colors; valid: 10 or more"),
        ("arc-nano", ["data.paths=[a.json, b.json]"], "has more than one file"),
        ("arc-nano", ["model.tied_embeddings=true"], "model.tied_embeddings: True: is not supported"),
        (
            "arc-nano",
            ["layout.sequence_parallel=true", "layout.tp=2", "data.buckets=[15, 30]"],
            "layout.tp: 2: must divide the cells of each bucket, 15 x 15",
        ),
        ("arc-nano", ["training.skip_samples=[3]"], "training.skip_samples: ['3']: is not supported"),
        ("arc-nano", ["training.eval_files=[a.txt]"], "training.eval_files: ['a.txt']: is not supported"),
        ("arc-nano", ["model.padded_vocab_size=16"], "valid: null"),
        ("arc-nano", ["data.document_mask=true"], "data.document_mask: True: is not supported"),
        (
            "arc-nano",
            ["training.seq_ramp_start=100", "training.seq_ramp_increment=100", "training.seq_ramp_iterations=5"],
            "training.seq_ramp_start: 100: is not supported",
        ),
        ("arc-nano", ["model.positions=rope", "model.head_dim=22"], "needs heads of a width that 4 divides"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_with_a_valid_value(
    preset: str, settings: Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(preset=preset, overrides=settings)
    assert message in str(caught.value)


def test_padding_of_colors_and_of_classes_follows_the_layout() -> None:
    config = load_run_config(preset="arc-nano", overrides=["layout.tp=2", "model.classes=399"])
    assert (config.padded_vocab, config.padded_outputs) == (12, 400)
    decoder = load_run_config(preset="tiny", overrides=["layout.tp=2"])
    assert decoder.padded_outputs == decoder.padded_vocab


def test_only_a_decoder_passes_where_a_decoder_is_required() -> None:
    require_decoder(load_run_config(preset="tiny"), "the time")
    with pytest.raises(UsageError, match="model.kind: grid_classifier: the time is not computed for this model"):
        require_decoder(load_run_config(preset="arc-nano"), "the time")
