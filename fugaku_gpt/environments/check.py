"""Checks whether an environment is what its profile says, from what its own Python reports in a separate process."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import fugaku_gpt
from fugaku_gpt.config.profile import Expected, Profile
from fugaku_gpt.environments.registry import missing_modules, read_pins
from fugaku_gpt.json_text import parse_json
from fugaku_gpt.launch.launcher import profile_variables
from fugaku_gpt.launch.processes import run_command
from fugaku_gpt.launch.rank_variables import prepended
from fugaku_gpt.machine import local

OK = "ok"
DIFFERS = "differs"
MISSING = "missing"
UNSTATED = "not stated"  # the profile does not say what it should be
OPTIONAL = "optional"  # it is missing, and nothing needs it
PROBE_SECONDS = 120.0
_ANSWER = "fugaku_gpt environment: "

# Each part is tried by itself: a build without MPI still reports its kernels. fugaku_gpt is that of this program, so
# that the functions that are called exist. Packages are the environment's own, not those in the folders of the caller's
# PYTHONPATH (argument 1) or in the current folder.
_PROBE = f"""
import json, os, sys
from importlib import metadata
foreign = {{os.path.realpath(path) for path in sys.argv[1].split(os.pathsep)}}
own = [path for path in sys.path if path and os.path.realpath(path) not in foreign]
def version(name):
    for distribution in metadata.distributions(name=name, path=own):
        return distribution.version
facts = {{"python": "%d.%d.%d" % sys.version_info[:3], "packages": {{name: version(name) for name in sys.argv[2:]}}}}
try:
    from fugaku_gpt import compat, kernels, ops
    import torch
    build = compat.build_facts()
    build["flush_denormals"] = compat.flush_denormals()
    build["bfloat16_without_kernel"] = compat.operations_without_kernel(torch.bfloat16)
    facts["build"] = build
    facts["kernels"] = {{"compiled": kernels.library_file().exists(), "problem": ops.native_kernels_problem()}}
except Exception as error:
    facts["build_error"] = "%s: %s" % (type(error).__name__, error)
try:
    from fugaku_gpt.ops.product_choice import describe_recorded
    facts["products"] = describe_recorded()
except Exception as error:
    facts["products"] = [[], "%s: %s" % (type(error).__name__, error)]
try:
    from fugaku_gpt.comm import mpi_facts
    facts["mpi"] = mpi_facts()
except Exception as error:
    facts["mpi_error"] = "%s: %s" % (type(error).__name__, error)
sys.stdout.write("\\n{_ANSWER}" + json.dumps(facts) + "\\n")
"""

# instruction set, as builds name it → flags of the processor that its kernels need (ATen's DispatchStub.cpp)
_REQUIRED_FLAGS: Dict[str, Sequence[str]] = {
    "AVX512": ("avx512f", "avx2", "fma"),
    "AVX2": ("avx2", "fma"),
    "AVX": ("fma",),  # every processor with FMA that PyTorch supports has AVX too
}
_FALLBACKS = ("DEFAULT", "NO AVX")


@dataclass(frozen=True)
class EnvironmentCheck:
    """One row of `env check`.

    Attributes:
        subject: what is compared.
        expected: what the profile says.
        actual: what the environment has.
        status: ``ok``, ``differs``, ``missing``, ``not stated`` or ``optional``.
        mend: how to mend it; empty if there is nothing to mend.
    """

    subject: str
    expected: str
    actual: str
    status: str
    mend: str = ""

    @property
    def is_wrong(self) -> bool:
        """True if the environment is not as it should be."""
        return self.status in (DIFFERS, MISSING)


def check_environment(profile: Profile, mend: str) -> List[EnvironmentCheck]:
    """Start the environment's Python as ranks would be started, and compare what it reports with the profile.

    Args:
        profile: the profile of a created environment, as ``resolve`` returns it.
        mend: the command that creates the environment again.
    """
    threads = unusual_thread_count(len(local.usable_cores()))
    pins = read_pins(Path(profile.pins)) if profile.pins else {}
    facts, problem = _probe(profile, threads, [*pins, "fugaku_gpt"])
    rows = _prerequisite_rows(profile)
    if facts is None:
        return [*rows, EnvironmentCheck("Python", profile.python_version or "-", problem, MISSING, mend)]
    return rows + compare_with_profile(profile, facts, threads, pins, local.vector_flags(), mend)


def unusual_thread_count(cores: int) -> int:
    """A number of threads that no build uses by default; 1 if there is no other.

    Builds use all cores by default, or one hardware thread of each pair, which MKL does not exceed either.
    """
    return max(1, cores // 2 - 1)


def compare_with_profile(
    profile: Profile,
    facts: Mapping[str, Any],
    threads: int,
    pins: Mapping[str, str],
    flags: Sequence[str],
    mend: str,
) -> List[EnvironmentCheck]:
    """Compare what an environment has reported with its profile; a pure function.

    Args:
        facts: the report of the environment's Python.
        threads: the OMP_NUM_THREADS that it was started with.
        pins: package → version.
        flags: vector extensions of this processor.
    """
    expected = profile.expected
    rows = [
        _row(
            "Python",
            profile.python_version,
            facts["python"],
            is_version_of(profile.python_version, facts["python"]),
            mend,
        ),
        _packages_row(pins, facts["packages"], mend),
        _fugaku_gpt_row(facts["packages"].get("fugaku_gpt"), mend),
    ]
    build = facts.get("build")
    if build is None:
        rows.append(EnvironmentCheck("PyTorch", expected.torch or "-", str(facts.get("build_error")), MISSING, mend))
    else:
        rows += _build_rows(expected, build, threads, flags, mend)
        rows.append(_kernels_row(facts, profile.python))
        rows += _product_rows(facts, profile.python)
    mpi = facts.get("mpi")
    if mpi is None:
        rows.append(
            EnvironmentCheck("MPI library", expected.mpi or "-", str(facts.get("mpi_error")), MISSING, _MPI_MEND)
        )
    else:
        library = str(mpi["library"])
        same = library.lower().startswith(expected.mpi.lower())
        rows.append(_row("MPI library", expected.mpi, " ".join(library.split()), same, _MPI_MEND))
        rows.append(
            _row(
                "mpi4py", expected.mpi4py, str(mpi["mpi4py"]), is_version_of(expected.mpi4py, str(mpi["mpi4py"])), mend
            )
        )
        rows.append(EnvironmentCheck("MPI threads", "-", str(mpi["thread_level"]), UNSTATED))
    return rows


_MPI_MEND = "compile mpi4py against the MPI that starts the ranks: pip install --no-binary mpi4py mpi4py"


def _build_rows(
    expected: Expected, build: Mapping[str, Any], threads: int, flags: Sequence[str], mend: str
) -> List[EnvironmentCheck]:
    version, blas, used = str(build["torch"]), str(build["blas"]), str(build["instruction_set"])
    libraries = blas.split(" + ")
    missing = [name for name in expected.blas if name not in libraries]
    prefix = "has " if 0 < len(expected.blas) < len(libraries) else ""  # more than these are no difference
    best = best_instruction_set(expected.instruction_sets, flags)
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    hint = (
        f"unset ATEN_CPU_CAPABILITY, which is {capability}"
        if capability
        else "the build is another than the profile is for: correct its instruction_sets, or make it anew"
    )
    actual_threads = int(build["torch_threads"])
    without_kernel = [str(name) for name in build["bfloat16_without_kernel"]]
    stated = expected.bfloat16_without_kernel
    return [
        _row("PyTorch", expected.torch, version, is_version_of(expected.torch, version), mend),
        _row("BLAS", prefix + " + ".join(expected.blas), blas, not missing, mend),
        _row("instruction set", best, used, used in (best, *(_FALLBACKS if best in _FALLBACKS else ())), hint),
        _row(
            "threads", f"{threads}, as OMP_NUM_THREADS", str(actual_threads), actual_threads == threads,
            "the build has no OpenMP, or something sets its threads: see environment of the profile",
        ),
        _yes_or_no_row("fused AdamW", expected.fused_adamw, build["fused_adamw"], mend),
        _yes_or_no_row("flush denormals", expected.flush_denormals, build["flush_denormals"], mend),
        _row(
            "bfloat16 without kernel", "" if stated is None else _join_names(stated), _join_names(without_kernel),
            stated is not None and set(without_kernel) == set(stated), mend,
        ),
    ]  # fmt: skip


def _kernels_row(facts: Mapping[str, Any], python: str) -> EnvironmentCheck:
    """The row of fugaku_gpt's own kernels; no profile asks for them, as PyTorch's are used without them."""
    kernels, mend = facts.get("kernels"), f"{shlex.quote(python)} -m fugaku_gpt env kernels"
    if kernels is None:
        return EnvironmentCheck("kernels", "compiled", str(facts.get("build_error")), OPTIONAL, f"{mend} --again")
    if not kernels["problem"]:
        return EnvironmentCheck("kernels", "compiled", "compiled", OK)
    mend += " --again" if kernels["compiled"] else ""
    return EnvironmentCheck("kernels", "compiled", f"PyTorch's own are used: {kernels['problem']}", OPTIONAL, mend)


def _product_rows(facts: Mapping[str, Any], python: str) -> List[EnvironmentCheck]:
    """The rows of what was measured about products of layers; no profile says what it should be."""
    lines, reason = facts.get("products") or ((), "")
    rows = [EnvironmentCheck("products of layers", "-", str(line), UNSTATED) for line in lines]
    if reason:
        rows.append(
            EnvironmentCheck(
                "products of layers", "measured", reason, OPTIONAL, f"{shlex.quote(python)} -m fugaku_gpt env kernels"
            )
        )
    return rows


def _row(subject: str, expected: str, actual: str, same: bool, mend: str) -> EnvironmentCheck:
    if not expected:
        return EnvironmentCheck(subject, "-", actual, UNSTATED)
    return EnvironmentCheck(subject, expected, actual, OK if same else DIFFERS, "" if same else mend)


def _yes_or_no_row(subject: str, expected: Optional[bool], actual: object, mend: str) -> EnvironmentCheck:
    text_of = {True: "yes", False: "no", None: ""}
    return _row(subject, text_of[expected], text_of[bool(actual)], expected is bool(actual), mend)


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def is_version_of(expected: str, actual: str) -> bool:
    """True if a version begins with the expected numbers: 1.10 matches 1.10.2+cu102 and 1.10.1a0+git, and 1.1 does not.

    >>> is_version_of("1.10", "1.10.2+cu102"), is_version_of("1.1", "1.10.2")
    (True, False)
    """
    numbers = re.match(r"\d+(\.\d+)*", actual)
    if numbers is None:
        return False
    components = expected.split(".")
    return numbers[0].split(".")[: len(components)] == components


def best_instruction_set(compiled: Sequence[str], flags: Sequence[str]) -> str:
    """The first instruction set of a list, best first, that this processor surely has; empty if there is none."""
    for name in compiled:
        if name in _FALLBACKS or (name in _REQUIRED_FLAGS and all(flag in flags for flag in _REQUIRED_FLAGS[name])):
            return name
    return ""


def _packages_row(pins: Mapping[str, str], installed: Mapping[str, Optional[str]], mend: str) -> EnvironmentCheck:
    if not pins:
        return EnvironmentCheck("packages", "-", "no pins", UNSTATED)
    differing = [name for name in pins if not is_version_of(pins[name], installed.get(name) or "")]
    if not differing:
        return EnvironmentCheck("packages", f"{len(pins)} as pinned", "all", OK)
    status = DIFFERS if all(installed.get(name) for name in differing) else MISSING
    expected = ", ".join(f"{name} {pins[name]}" for name in differing)
    return EnvironmentCheck(
        "packages", expected, ", ".join(f"{name} {installed.get(name) or '-'}" for name in differing), status, mend
    )


def _fugaku_gpt_row(version: Optional[str], mend: str) -> EnvironmentCheck:
    expected = fugaku_gpt.__version__
    if version is None:
        return EnvironmentCheck("fugaku_gpt", expected, "not installed", MISSING, mend)
    return _row("fugaku_gpt", expected, version, version == expected, mend)


def _prerequisite_rows(profile: Profile) -> List[EnvironmentCheck]:
    """Rows for the modules and libraries that must be there before the ranks start."""
    rows = []
    if profile.modules:
        missing = missing_modules(profile)
        loaded_modules = ", ".join(name for name in profile.modules if name not in missing) or "none of them is loaded"
        mend = "; ".join(f"module load {name}" for name in missing)
        rows.append(
            EnvironmentCheck("modules", ", ".join(profile.modules), loaded_modules, MISSING if missing else OK, mend)
        )
    for library in profile.preload:
        if "/" in library:  # the loader finds others
            is_there = Path(library).is_file()
            mend = "" if is_there else "it is there on the nodes: check on one of them"
            rows.append(
                EnvironmentCheck(
                    "preload", library, "there" if is_there else "not there", OK if is_there else MISSING, mend
                )
            )
    return rows


def _probe(profile: Profile, threads: int, names: Sequence[str]) -> Tuple[Optional[Dict[str, Any]], str]:
    """(what the environment reports, ""), or (None, why it reports nothing)."""
    lines: List[str] = []
    variables = {**profile_variables(profile), "OMP_NUM_THREADS": str(threads)}
    checkout = str(Path(fugaku_gpt.__file__).resolve().parents[1])
    foreign_paths = prepended([checkout], "PYTHONPATH")
    if profile.preload:
        variables["LD_PRELOAD"] = prepended(profile.preload, "LD_PRELOAD")
    if shutil.which(profile.python) is None:
        return None, f"{profile.python}: is not there"
    outcome = run_command(
        [profile.python, "-c", _PROBE, foreign_paths, *names], variables, timeout=PROBE_SECONDS, on_line=lines.append
    )
    answers = [line[len(_ANSWER) :] for line in lines if line.startswith(_ANSWER)]
    if answers:
        facts = parse_json(answers[-1])
        assert isinstance(facts, dict)
        return facts, ""
    last_lines = " / ".join(line.strip() for line in lines[-3:] if line.strip())[:200]
    ending = f"no answer in {PROBE_SECONDS:g} s" if outcome.timed_out else f"exit code {outcome.exit_code}"
    return None, f"{ending}: {last_lines}" if last_lines else ending
