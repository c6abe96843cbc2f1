"""The promised Python interface: what the commands do, as functions and classes that return values and raise errors.

Names are imported when they are first used, so ``import fugaku_gpt.api`` costs nothing on a login node. Ranks, which
import PyTorch and MPI, are always processes of their own: nothing here imports either. What a command prints as
``fugaku-gpt: TEXT`` is raised as an error with that text, a ``FugakuGptError``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from fugaku_gpt.api.checkpoints import Checkpoint
    from fugaku_gpt.api.comparisons import LiveSettings, Report, compare, earlier_comparison
    from fugaku_gpt.api.jobs import FileReport, Job, JobScript, Outcome, lint, parse_script, render_job, submit
    from fugaku_gpt.api.pages import WrittenPage, write_run_page
    from fugaku_gpt.api.plans import (
        MemoryPlan,
        TimePlan,
        TopologyPlan,
        TopologyRequest,
        plan_memory,
        plan_time,
        plan_topology,
    )
    from fugaku_gpt.api.runs import RecordedRun, Result, Run, load_run, train
    from fugaku_gpt.api.schemas import SCHEMA_NAMES, json_schema
    from fugaku_gpt.api.stores import Runs
    from fugaku_gpt.api.sweeps import Sweep, Table
    from fugaku_gpt.api.texts import GeneratedText, GenerationSettings, generate
    from fugaku_gpt.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        FugakuGptError,
        RunFailed,
        Uncertain,
        UsageError,
    )

_MODULES = {
    "Checkpoint": "fugaku_gpt.api.checkpoints",
    "CheckpointError": "fugaku_gpt.errors",
    "ConfigError": "fugaku_gpt.errors",
    "DataError": "fugaku_gpt.errors",
    "FileReport": "fugaku_gpt.api.jobs",
    "FugakuGptError": "fugaku_gpt.errors",
    "GeneratedText": "fugaku_gpt.api.texts",
    "GenerationSettings": "fugaku_gpt.api.texts",
    "Job": "fugaku_gpt.api.jobs",
    "JobScript": "fugaku_gpt.api.jobs",
    "LiveSettings": "fugaku_gpt.api.comparisons",
    "MemoryPlan": "fugaku_gpt.api.plans",
    "Outcome": "fugaku_gpt.api.jobs",
    "RecordedRun": "fugaku_gpt.api.runs",
    "Report": "fugaku_gpt.api.comparisons",
    "Result": "fugaku_gpt.api.runs",
    "Run": "fugaku_gpt.api.runs",
    "RunFailed": "fugaku_gpt.errors",
    "Runs": "fugaku_gpt.api.stores",
    "SCHEMA_NAMES": "fugaku_gpt.api.schemas",
    "Sweep": "fugaku_gpt.api.sweeps",
    "Table": "fugaku_gpt.api.sweeps",
    "TimePlan": "fugaku_gpt.api.plans",
    "TopologyPlan": "fugaku_gpt.api.plans",
    "TopologyRequest": "fugaku_gpt.api.plans",
    "Uncertain": "fugaku_gpt.errors",
    "UsageError": "fugaku_gpt.errors",
    "WrittenPage": "fugaku_gpt.api.pages",
    "compare": "fugaku_gpt.api.comparisons",
    "earlier_comparison": "fugaku_gpt.api.comparisons",
    "generate": "fugaku_gpt.api.texts",
    "json_schema": "fugaku_gpt.api.schemas",
    "lint": "fugaku_gpt.api.jobs",
    "load_run": "fugaku_gpt.api.runs",
    "parse_script": "fugaku_gpt.api.jobs",
    "plan_memory": "fugaku_gpt.api.plans",
    "plan_time": "fugaku_gpt.api.plans",
    "plan_topology": "fugaku_gpt.api.plans",
    "render_job": "fugaku_gpt.api.jobs",
    "submit": "fugaku_gpt.api.jobs",
    "train": "fugaku_gpt.api.runs",
    "write_run_page": "fugaku_gpt.api.pages",
}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FileReport",
    "FugakuGptError",
    "GeneratedText",
    "GenerationSettings",
    "Job",
    "JobScript",
    "LiveSettings",
    "MemoryPlan",
    "Outcome",
    "RecordedRun",
    "Report",
    "Result",
    "Run",
    "RunFailed",
    "Runs",
    "SCHEMA_NAMES",
    "Sweep",
    "Table",
    "TimePlan",
    "TopologyPlan",
    "TopologyRequest",
    "Uncertain",
    "UsageError",
    "WrittenPage",
    "compare",
    "earlier_comparison",
    "generate",
    "json_schema",
    "lint",
    "load_run",
    "parse_script",
    "plan_memory",
    "plan_time",
    "plan_topology",
    "render_job",
    "submit",
    "train",
    "write_run_page",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
