"""A rule on a table's models: layers and hidden size must be of a model of the size that the row or its title names.

A size says little: embeddings count or not, and MLPs differ. So a shape contradicts it only if a model of the shape has
another number of parameters with any common vocabulary, and either the shape is another model's that tables have a name
for, or the number is off by more than layers that are unlike GPT's explain.
"""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from fugaku_gpt.report.catalogue import named_shape, shapes_of, size_label
from fugaku_gpt.report.facts import Context, Facts, is_size
from fugaku_gpt.report.figures import Interval
from fugaku_gpt.report.findings import RowFinding
from fugaku_gpt.report.headings import StatedModel, models_in, sizes_in
from fugaku_gpt.report.row_models import parameters_of_label, parameters_of_shape

_TITLED = re.compile(r"#{1,6}\s*(\d{1,4}(?:\.\d{1,3})?)\s?([MBT]) model\b", re.IGNORECASE)
_EXPERTS = re.compile(r"\bmoe\b|\bexperts?\b", re.IGNORECASE)
_OTHER_LAYERS = 1.4  # factor by which gated MLPs and shared heads change the parameters of a layer


def check_sizes(rows: Sequence[Facts], context: Context) -> Iterator[RowFinding]:
    """Find shapes that contradict the size of their model, each once in a table, at its first row."""
    lines: Dict[Tuple[str, str, StatedModel], List[int]] = {}
    for facts in rows:
        model = _shape_of(facts, context)
        if model is None or _EXPERTS.search(context.table.heading.text + facts.row.cell("notes")):
            continue
        for size, source in _sizes_of(facts, context):
            if _is_contradicted(size, model):
                lines.setdefault((size, source, model), []).append(facts.row.line)
    for (size, source, model), numbers in lines.items():
        count = f" in {len(numbers)} rows" if len(numbers) > 1 else ""
        yield RowFinding(numbers[0], "size", f"{source} {size}, but {_text_of(model)}{count}", _cause(size, model))


def _shape_of(facts: Facts, context: Context) -> Optional[StatedModel]:
    """The shape by the row's own cells, else by its title; None if neither states one."""
    own = {name: facts.figures[name].as_count for name in ("layers", "hidden")}
    stated = {name: count for name, count in own.items() if count}
    if not stated:
        in_title = models_in(context.table.heading.text)
        stated = {name: count for name, count in in_title[0].items() if name in own} if len(in_title) == 1 else {}
    return StatedModel(**stated) if stated else None


def _sizes_of(facts: Facts, context: Context) -> Iterator[Tuple[str, str]]:
    """Yield (size, where it is): that of the row, and that of a title which is of a single model."""
    is_in_row = facts.row.cell("size").upper() == facts.size
    in_title = sizes_in(context.table.heading.text)
    if is_size(facts.size) and (is_in_row or in_title in ([], [facts.size])):  # of several, nobody knows which
        yield facts.size, "Size" if is_in_row else "the title says" if in_title else "the text says"
    titled = _TITLED.match(context.table.heading.text) if len(in_title) == 1 else None
    if titled is not None and titled[1] + titled[2].upper() != facts.size:
        yield titled[1] + titled[2].upper(), "the title says"


def _is_contradicted(size: str, model: StatedModel) -> bool:
    label = parameters_of_label(size)
    if label is None:
        return False
    if not (model.layers and model.hidden):
        named = shapes_of(size)
        return bool(named) and not any(_has_part(shape.layers, shape.hidden, model) for shape in named)
    least, most = parameters_of_shape(model.layers, model.hidden)
    if Interval(least, most).overlaps(label):
        return False
    is_named = named_shape(model.layers, model.hidden) is not None
    return is_named or not Interval(least / _OTHER_LAYERS, most * _OTHER_LAYERS).overlaps(label)


def _has_part(layers: int, hidden: int, model: StatedModel) -> bool:
    return model.layers in (None, layers) and model.hidden in (None, hidden)


def _text_of(model: StatedModel) -> str:
    texts = [f"{model.layers} layers"] if model.layers else []
    return " of ".join([*texts, *([f"hidden size {model.hidden}"] if model.hidden else [])])


def _cause(size: str, model: StatedModel) -> str:
    named = named_shape(model.layers, model.hidden) if model.layers and model.hidden else None
    if named is not None:
        return f"these are those of {size_label(named)}"
    shapes = dict.fromkeys(_text_of(StatedModel(shape.layers, shape.hidden)) for shape in shapes_of(size))
    return f"{size} has {' or '.join(shapes)}" if shapes else "another size was meant, or another shape"
