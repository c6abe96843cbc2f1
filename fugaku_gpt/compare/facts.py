"""Lists the differences between what the two sides really ran with, from the runs' own records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from fugaku_gpt.compare.samples import JobSample
from fugaku_gpt.config import changed_settings

UNKNOWN = "unknown"
# sections that do not change what is computed
_HANDLING_SECTIONS = ("job.", "checkpoint.")
_ENVIRONMENT_KEYS = (
    ("Python", "python"),
    ("NumPy", "numpy"),
    ("fugaku_gpt", "fugaku_gpt"),
    ("commit", "git_commit"),
    ("processor", "processor"),
    ("system", "system"),
    ("memory limit (bytes)", "memory_limit_bytes"),
    ("vector extensions", "vector_extensions"),
)
_BUILD_KEYS = (
    ("torch", "torch"),
    ("BLAS", "blas"),
    ("kernels for", "instruction_set"),
    ("fused AdamW", "fused_adamw"),
)
_MPI_KEYS = (("MPI", "library"), ("MPI standard", "standard"), ("MPI threads", "thread_level"), ("mpi4py", "mpi4py"))
_RANK_KEYS = (
    ("threads of a rank", "threads"),
    ("allocator", "allocator"),
    ("allocator keeps freed pages", "allocator_keeps_pages"),
    ("denormals flushed", "flush_denormals"),
    ("cores of a rank", "affinity"),
    ("bound", "bound"),
    ("host", "host"),
)


@dataclass(frozen=True)
class Difference:
    """A fact that differs between the sides; it has several values where the jobs of a side differ."""

    fact: str
    a: str
    b: str


def facts_of(job: JobSample) -> Dict[str, str]:
    """Every fact of a run that may differ, as texts, in a fixed order."""
    environment = job.environment
    facts: Dict[str, str] = {}
    for name, key in _ENVIRONMENT_KEYS:
        facts[name] = _text(environment.get(key))
    for prefix, names in (("build", _BUILD_KEYS), ("mpi", _MPI_KEYS)):
        values: Mapping[str, Any] = environment.get(prefix) or {}
        for name, key in names:
            facts[name] = _first_line(_text(values.get(key)))
    precision = environment.get("precision") or {}
    facts["in float32 for lack of a kernel"] = _text(precision.get("in_float32"))
    facts["GELU from the error function"] = _text(precision.get("gelu_by_erf"))
    facts["products of layers by oneDNN"] = _text(precision.get("onednn"))
    facts["our own compiled kernels"] = _text(precision.get("compiled"))
    ranks: Sequence[Mapping[str, Any]] = environment.get("ranks") or []
    facts["ranks"] = str(len(ranks)) if ranks else UNKNOWN
    for name, key in _RANK_KEYS:
        texts = list(dict.fromkeys(_text(rank.get(key)) for rank in ranks))
        facts[name] = " / ".join(texts) if texts else UNKNOWN
    for toggle in environment.get("toggles") or []:
        state = "applied" if toggle.get("applied") else "NOT applied"
        facts[f"toggle {toggle.get('name')}={toggle.get('requested')}"] = f"{state} (seen: {toggle.get('seen')})"
    if job.config is not None:
        for key, value in changed_settings(job.config).items():
            if not key.startswith(_HANDLING_SECTIONS):
                facts[key] = _text(value)
    return facts


def differences(a: Sequence[JobSample], b: Sequence[JobSample]) -> List[Difference]:
    """Facts in which the sides differ, or in which the jobs of one side differ among themselves."""
    sides = [_facts_of_jobs(jobs) for jobs in (a, b)]
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    differing = []
    for name in names:
        text_a, text_b = (_joined_values(name, side) for side in sides)
        if text_a != text_b or any(len(side.get(name, ())) > 1 for side in sides):
            differing.append(Difference(name, text_a, text_b))
    return differing


def _facts_of_jobs(jobs: Sequence[JobSample]) -> Dict[str, Tuple[str, ...]]:
    facts = [facts_of(job) for job in jobs if job.environment]
    names = list(dict.fromkeys(name for facts_of_job in facts for name in facts_of_job))
    return {
        name: tuple(dict.fromkeys(facts_of_job.get(name, _absent_text(name)) for facts_of_job in facts))
        for name in names
    }


def _joined_values(name: str, side: Mapping[str, Tuple[str, ...]]) -> str:
    return "; ".join(side.get(name, (_absent_text(name),)))


def _absent_text(name: str) -> str:
    if name.startswith("toggle "):
        return "not asked for"
    return "default" if "." in name else UNKNOWN


def _text(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else text
