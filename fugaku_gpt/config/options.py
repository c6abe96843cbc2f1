"""Dataclass fields that describe a setting: its meaning, unit, limits and, for a knob of a node, where it applies."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Optional, Sequence, Tuple

from fugaku_gpt.config.knobs import NodeKnob


def option(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    at_least: Optional[float] = None,
    at_most: Optional[float] = None,
    above: Optional[float] = None,
    below: Optional[float] = None,
    choices: Optional[Sequence[Any]] = None,
    form: Optional[Tuple[str, str]] = None,
) -> Any:
    """A dataclass field with its meaning, unit and limits.

    Args:
        form: required form of a text, or of each text of a list: a regular expression and a description. The empty
            text is always allowed and means "not set".
    """
    metadata = {
        "meaning": meaning,
        "unit": unit,
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
        "below": below,
        "choices": tuple(choices) if choices is not None else None,
        "duration": False,
        "form": form,
        "knob": None,
    }
    return field(default=default, metadata=metadata)


def as_knob(described: Any, knob: NodeKnob) -> Any:
    """The dataclass field ``described``, made by :func:`option`, as a knob of a node under the field's name."""
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
    """A dataclass field for a power knob that only PJM can set, under the field's name; see :class:`NodeKnob`."""
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
    """A dataclass field for seconds, which may be written as H:MM:SS, with its meaning and limits."""
    metadata = option(default, meaning, unit="s", at_least=at_least, above=above).metadata
    return field(default=default, metadata={**metadata, "duration": True})
