"""Which model a row of a hand-written table is of: by its own cells, by what the text states, or by its size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, Optional, Tuple

from fugaku_gpt.config import ModelConfig
from fugaku_gpt.report.catalogue import named_shape, shapes_of
from fugaku_gpt.report.figures import Interval
from fugaku_gpt.report.headings import Heading, StatedModel

_LARGEST_VOCABULARY = 260_000  # of a model whose size counts an embedding that the text does not state
_LONGEST_SEQUENCE = 4096
_UNKNOWN_VOCABULARY = 2  # stands for an unknown one where a lower bound is wanted


@dataclass(frozen=True)
class RowModels:
    """The models that a row may be of.

    Attributes:
        shapes: with one head where the number of heads does not matter; empty if layers or hidden size are unknown.
        heads: numbers of heads that the model may have; empty if unknown.
        has_vocabulary: whether the vocabulary of the shapes is known.
    """

    shapes: Tuple[ModelConfig, ...] = ()
    heads: Tuple[int, ...] = ()
    has_vocabulary: bool = False


def models_of(size: str, heading: Heading, cells: Mapping[str, Optional[int]]) -> RowModels:
    """Find the models of a row.

    Args:
        size: label of the model, such as 13B; empty if there is none.
        cells: the row's own layers, hidden, heads and vocab; None where it has none.
    """
    vocab = cells["vocab"] or heading.vocab
    stated = _stated_model(size, heading, cells)
    if stated is not None and stated.layers and stated.hidden:
        named = named_shape(stated.layers, stated.hidden)
        known = vocab or (named.vocab_size if named is not None else None)
        shape = ModelConfig(
            layers=stated.layers, hidden=stated.hidden, heads=1, vocab_size=known or _UNKNOWN_VOCABULARY
        )
        heads = cells["heads"] or stated.heads
        return RowModels((shape,), (heads,) if heads else (), known is not None)
    shapes = shapes_of(size)
    if not shapes:
        return RowModels(heads=(cells["heads"],) if cells["heads"] else ())
    if vocab:
        shapes = tuple(replace(shape, vocab_size=vocab) for shape in shapes)
    heads_of_shapes = tuple(dict.fromkeys(shape.heads for shape in shapes))
    return RowModels(shapes, (cells["heads"],) if cells["heads"] else heads_of_shapes, True)


def _stated_model(size: str, heading: Heading, cells: Mapping[str, Optional[int]]) -> Optional[StatedModel]:
    """The row's own shape, completed by the nearest statement; else the nearest statement that the size fits."""
    own = StatedModel(cells["layers"], cells["hidden"], cells["heads"])
    if own.layers or own.hidden:
        for model in heading.models:
            merged = StatedModel(own.layers or model.layers, own.hidden or model.hidden, own.heads or model.heads)
            if merged.layers and merged.hidden and (own.layers or _is_size_of(size, merged)):
                return merged
        return own
    return next((model for model in heading.models if model.layers and model.hidden and _is_size_of(size, model)), None)


def _is_size_of(size: str, model: StatedModel) -> bool:
    """True if a label such as 13B can be the number of a model's parameters, with or without its embeddings."""
    label = parameters_of_label(size)
    if label is None:
        return True
    return Interval(*parameters_of_shape(model.layers or 0, model.hidden or 0)).overlaps(label)


def parameters_of_shape(layers: int, hidden: int) -> Tuple[float, float]:
    """(least, most) parameters of GPTs of this shape: without embeddings, and with those of a large vocabulary."""
    matrices = 12.0 * layers * hidden**2
    return matrices, matrices + 13.0 * layers * hidden + (_LARGEST_VOCABULARY + _LONGEST_SEQUENCE) * hidden


def parameters_of_label(size: str) -> Optional[Interval]:
    """Range of the number of parameters that a label such as 1.3B stands for; None for another text."""
    number, letter = size[:-1].strip(), size[-1:].upper()
    if letter not in ("M", "B", "T") or not number.replace(".", "", 1).isdecimal():
        return None
    unit = {"M": 1e6, "B": 1e9, "T": 1e12}[letter]
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    return Interval(max(0.0, float(number) - half) * unit, (float(number) + half) * unit)
