"""The constraints of ``plan topology`` as rules that discard layouts while they are generated."""

from __future__ import annotations

from typing import Callable, List, Mapping, Sequence, Tuple

import numpy as np

from fugaku_gpt.config.expression import Expression, parse_expression
from fugaku_gpt.config.expression_tokens import Value
from fugaku_gpt.errors import UsageError
from fugaku_gpt.planner.search.topology import FLAG_COLUMNS, Columns, LayoutRule

NAMES = {
    **{name: name for name in (
        "nodes", "ranks_per_node", "dp", "tp", "pp", "chunks", "micro_batch", "global_batch", "recompute", "zero",
        "sequence_parallel", "ranks", "micro_batches",
    )},
    "NODES": "nodes", "DP": "dp", "TP": "tp", "PP": "pp", "MBS": "micro_batch", "GBS": "global_batch",
}  # fmt: skip
_MOST_BATCHES, _LARGEST_BATCH = 4096, 10**9


def parsed(constraints: Sequence[str]) -> List[Expression]:
    """Parse the texts of ``--constraint``.

    Raises:
        ConfigError: a text is no expression over the names of layouts.
    """
    return [parse_expression(text, "--constraint", list(NAMES)) for text in constraints]


def batches_of(texts: Sequence[str], default_batch: int, expressions: Sequence[Expression]) -> Tuple[int, ...]:
    """The global batches to choose from, without those that constraints on them alone rule out.

    Raises:
        UsageError: there are too many, one is too large, or none is left.
    """
    batches: List[int] = [] if texts else [default_batch]
    for text in texts:
        first, _, last = text.partition("-")
        try:
            low, high = int(first), int(last or first)
        except ValueError:
            raise UsageError(f"--global-batch {text}: must be a number, or two as in 1920-2048") from None
        if not 1 <= low <= high or high - low >= _MOST_BATCHES:
            raise UsageError(f"--global-batch {text}: must go up from 1 or more, over at most {_MOST_BATCHES}")
        batches += range(low, high + 1)
    if max(batches) > _LARGEST_BATCH:
        raise UsageError(f"global batch {max(batches)}: must be at most {_LARGEST_BATCH}")
    batch_rules = [
        expression for expression in expressions if {NAMES[name] for name in expression.names} == {"global_batch"}
    ]
    allowed = [
        batch for batch in dict.fromkeys(batches) if all(_holds(rule, {"global_batch": batch}) for rule in batch_rules)
    ]
    if not allowed:
        rules = " and ".join(rule.text for rule in batch_rules)
        raise UsageError(f"--constraint {rules}: no global batch of {batches[0]} to {batches[-1]} meets it")
    return tuple(allowed)


def rules_of(expressions: Sequence[Expression]) -> List[LayoutRule]:
    """A rule for each part of the constraints that are joined by ``and``.

    A part is evaluated as soon as the columns that it names are there. One that may divide by 0 waits for the parts to
    its left, which may exclude that.
    """
    rules: List[LayoutRule] = []
    for expression in expressions:
        left = frozenset(("global_batch",))  # the column that is there first, for parts without any name
        for part in expression.conjuncts:
            names = frozenset(NAMES[name] for name in part.names)
            left |= names
            rules.append(LayoutRule(left if part.may_divide_by_zero else names or left, _mask(part)))
    return rules


def _mask(part: Expression) -> "Callable[[Columns], np.ndarray]":
    """Return a function that gives the layouts that a part allows, evaluating it once per combination of values."""
    names = list(dict.fromkeys(NAMES[name] for name in part.names)) or ["global_batch"]

    def allows(columns: Columns) -> "np.ndarray":
        values = np.stack([columns[name] for name in names], axis=1)
        combinations, row_of_combination = np.unique(values, axis=0, return_inverse=True)
        allowed = [
            _holds(part, {key: bool(value) if key in FLAG_COLUMNS else value for key, value in zip(names, combination)})
            for combination in combinations.tolist()
        ]
        mask: "np.ndarray" = np.array(allowed)[row_of_combination.reshape(-1)]
        return mask

    return allows


def _holds(rule: Expression, values: Mapping[str, Value]) -> bool:
    return rule.holds(lambda name: values[NAMES[name]])
