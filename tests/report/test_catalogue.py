"""Tests of the shapes that tables mean by the size of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fugaku_gpt.config import load_run_config, preset_names
from fugaku_gpt.formulas.parameters import size_name
from fugaku_gpt.report.catalogue import named_shape, shapes_of, size_label
from fugaku_gpt.report.row_models import parameters_of_label, parameters_of_shape

PLAIN = [
    model for model in (load_run_config(preset=name).model for name in preset_names()) if not model.settings_unlike_gpt2
]
SIZES = sorted({"1.3B", "13B", "30B", *map(size_name, PLAIN)})


@pytest.mark.parametrize("size", SIZES)
def test_heads_divide_the_width_and_parameters_are_those_of_the_size(size: str) -> None:
    assert shapes_of(size)
    label = parameters_of_label(size)
    for model in shapes_of(size):
        assert model.hidden % model.heads == 0
        least, most = parameters_of_shape(model.layers, model.hidden)
        assert label is None or (least <= label.high and label.low <= most)
        same = named_shape(model.layers, model.hidden)
        assert same is not None and (same.layers, same.hidden) == (model.layers, model.hidden)


def test_presets_have_the_label_of_their_size() -> None:
    assert [size_label(model) for model in PLAIN] == [size_name(model) for model in PLAIN]


def test_an_unknown_size_has_no_shapes_and_an_unknown_shape_no_size() -> None:
    assert shapes_of("7B") == () and named_shape(7, 2048) is None and named_shape(24, 70) is None
    model = shapes_of("30B")[-1]
    assert size_label(model) == "30B" and size_label(replace(model, layers=7)) == ""
