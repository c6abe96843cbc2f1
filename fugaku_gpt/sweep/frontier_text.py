"""The results of a search for the largest batches as text: bullets as sheets have them, and one row for each edge.

A bullet is ``global batch size N, recompute=R, DTYPE[, FIELD=VALUE ...]: ~ X samples/s[, ~ Y tokens/s]``, or ends in
the way in which the trial has failed, such as ``OOM``. Marks in parentheses follow: the largest batch, and the fastest.
``report import --form bullets`` reads them (:mod:`fugaku_gpt.report.bullets`).
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from fugaku_gpt.records.bullet_form import pair_text, quoted_pair_text, rate_text, short_name
from fugaku_gpt.records.run import HUNG, OK, OUT_OF_MEMORY
from fugaku_gpt.sweep.frontier import SAMPLES, TOKENS, Edge, Trial
from fugaku_gpt.sweep.frontier_plan import FrontierRow

_DTYPE = "training.dtype"
_SHOWN = ("training.recompute", _DTYPE)  # in each bullet
_FAILURES = {OUT_OF_MEMORY: "OOM", HUNG: "hang"}
_OWN_LIMIT = "(limit: node.memory_limit)"  # as the memory guard calls it
LARGEST, FASTEST = "largest", "fastest"


def setting_text(row: FrontierRow) -> str:
    """The settings of a combination: ``recompute=none, float32``, and those of the matrix."""
    varied = [key for key in row.matrix_texts() if key not in _SHOWN]
    return ", ".join(_setting_text(row, key) for key in (*_SHOWN, *varied))


def _setting_text(row: FrontierRow, key: str) -> str:
    """One setting of a combination; a value that is not of its field's form is in quotes."""
    name = short_name(key)
    if not row.is_of_form(key):
        return quoted_pair_text(name, row.text(key))
    value = row.value(key)
    if key == _DTYPE:
        return str(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return pair_text(name, str(value) if is_number or key in _SHOWN else row.text(key))


def bullets(edges: Sequence[Edge]) -> List[str]:
    """One line for each trial, by combination and batch."""
    return [_bullet(edge, trial) for edge in edges for trial in edge.trials]


def _bullet(edge: Edge, trial: Trial) -> str:
    marks = [name for name, marked in ((LARGEST, edge.largest), (FASTEST, edge.fastest)) if marked is trial]
    sample = next(iter(trial.rates), SAMPLES)
    rates = ", ".join(f"~ {rate_text(rate)} {unit}" for unit, rate in trial.rates.items() if unit in (sample, TOKENS))
    end = (rates or trial.result.status) if trial.result.status == OK else failure_text(trial)
    return f"- global batch size {trial.global_batch}, {setting_text(edge.row)}: {end}" + (
        f" ({', '.join(marks)})" if marks else ""
    )


def failure_text(trial: Trial) -> str:
    """How a trial that did not end well has ended, in a word: OOM, hang, refused, timeout, failed."""
    return _FAILURES.get(trial.result.status, trial.result.status)


def edge_columns(edges: Sequence[Edge]) -> List[str]:
    """The columns of :func:`edge_rows`."""
    units = list(dict.fromkeys(unit for edge in edges for trial in edge.trials for unit in trial.rates))
    return [
        "settings", "planned", "largest", "global_batch", *(units or [SAMPLES]), "above", "fastest", "fastest_rate",
        "trials", "remark",
    ]  # fmt: skip


def edge_rows(edges: Sequence[Edge]) -> List[Dict[str, Any]]:
    """One row for each combination.

    ``planned``, ``largest``, ``above`` and ``fastest`` are micro-batches; the other figures are those of the largest,
    but for ``fastest_rate``, which is the first rate of the fastest.
    """
    rows = []
    for edge in edges:
        largest, fastest = edge.largest, edge.fastest
        row: Dict[str, Any] = {
            "settings": setting_text(edge.row),
            "planned": edge.planned,
            "largest": largest.batch if largest else None,
            "global_batch": largest.global_batch if largest else None,
            "above": f"{edge.above.batch}: {failure_text(edge.above)}" if edge.above else None,
            "fastest": fastest.batch if fastest else None,
            "fastest_rate": _rounded(fastest.samples_per_second or 0.0) if fastest else None,
            "trials": len(edge.trials),
            "remark": "; ".join(_remarks(edge)) or None,
        }
        row.update({unit: _rounded(rate) for unit, rate in (largest.rates.items() if largest else ())})
        rows.append(row)
    return rows


def _remarks(edge: Edge) -> List[str]:
    remarks = [] if edge.is_complete else ["stopped"]
    if edge.largest is None and edge.is_complete:
        remarks.append("nothing fits")
    elif edge.above is None and edge.is_complete:
        remarks.append("everything fits that was allowed: --most")
    remarks += [f"{trial.batch} below it: {failure_text(trial)}" for trial in edge.gaps]
    if edge.above is not None and _OWN_LIMIT not in edge.above.result.reason:  # others may have filled the machine
        remarks.append(edge.above.result.reason)
    return remarks


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
