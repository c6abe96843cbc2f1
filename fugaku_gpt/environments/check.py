"""Is an environment what its profile says? Its own Python tells, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import fugaku_gpt
from fugaku_gpt.config.profile import Expected, Profile
from fugaku_gpt.environments.registry import read_pins
from fugaku_gpt.launch.launcher import before, profile_variables
from fugaku_gpt.launch.processes import run_command
from fugaku_gpt.machine import local

OK = "ok"
DIFFERS = "differs"
MISSING = "missing"
UNSTATED = "not stated"  # the profile does not say what it should be
OPTIONAL = "optional"  # is not there, and nothing needs it
PROBE_SECONDS = 120.0
_ANSWER = "fugaku_gpt environment: "

# Each part by itself: a build without MPI still tells about its kernels. The package is that of this program, so that
# what it asks is there. Packages are the environment's own: not those of the folders of the caller's PYTHONPATH
# (argument 1), or of the folder that it is called in.
_PROBE = f"""
import json, os, sys
from importlib import metadata
strangers = {{os.path.realpath(path) for path in sys.argv[1].split(os.pathsep)}}
own = [path for path in sys.path if path and os.path.realpath(path) not in strangers]
def version(name):
    for found in metadata.distributions(name=name, path=own):
        return found.version
told = {{"python": "%d.%d.%d" % sys.version_info[:3], "packages": {{name: version(name) for name in sys.argv[2:]}}}}
try:
    from fugaku_gpt import compat, kernels, ops
    import torch
    build = compat.build_facts()
    build["flush_denormals"] = compat.flush_denormals()
    build["bfloat16_without_kernel"] = compat.without_kernel(torch.bfloat16)
    told["build"] = build
    told["kernels"] = {{"compiled": kernels.library_file().exists(), "used": ops.has_compiled()}}
except Exception as error:
    told["build_error"] = "%s: %s" % (type(error).__name__, error)
try:
    from fugaku_gpt.comm import mpi_facts
    told["mpi"] = mpi_facts()
except Exception as error:
    told["mpi_error"] = "%s: %s" % (type(error).__name__, error)
sys.stdout.write("\\n{_ANSWER}" + json.dumps(told) + "\\n")
"""

# instruction set, as builds name it → flags of the processor that its kernels need (ATen's DispatchStub.cpp)
_NEEDS: Dict[str, Sequence[str]] = {
    "AVX512": ("avx512f", "avx2", "fma"),
    "AVX2": ("avx2", "fma"),
    "AVX": ("fma",),  # every processor with it that has a PyTorch now has AVX too
}
_FALLBACKS = ("DEFAULT", "NO AVX")


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what the profile says, what was found, ``ok``, ``differs``, ``missing``, ``not
    stated`` or ``optional``, and how to mend it (empty where there is nothing to mend)."""

    what: str
    expected: str
    found: str
    status: str
    mend: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it is not as it should be."""
        return self.status in (DIFFERS, MISSING)


def check_environment(profile: Profile, mend: str) -> List[Finding]:
    """Start the environment's Python as ranks would be started, and compare what it tells with the profile.

    Args:
        profile: as ``resolve`` gives it, and made.
        mend: the command that makes it anew.
    """
    threads = asked_threads(len(local.usable_cores()))
    pins = read_pins(Path(profile.pins)) if profile.pins else {}
    told, problem = _probe(profile, threads, [*pins, "fugaku_gpt"])
    rows = _before_the_start(profile)
    if told is None:
        return [*rows, Finding("Python", profile.python_version or "-", problem, MISSING, mend)]
    return rows + compare(profile, told, threads, pins, local.vector_flags(), mend)


def asked_threads(cores: int) -> int:
    """A number of threads that no build has by default (all cores, or one thread of each pair of a core's, past
    which MKL does not go either), where there is another than one."""
    return max(1, cores // 2 - 1)


def compare(
    profile: Profile,
    told: Mapping[str, Any],
    threads: int,
    pins: Mapping[str, str],
    flags: Sequence[str],
    mend: str,
) -> List[Finding]:
    """The rows from what an environment has told; a pure function.

    Args:
        threads: what it was started with as OMP_NUM_THREADS.
        pins: package → version.
        flags: vector extensions of this processor.
    """
    expected = profile.expected
    rows = [
        _row(
            "Python", profile.python_version, told["python"], starts_with(profile.python_version, told["python"]), mend
        ),
        _packages(pins, told["packages"], mend),
        _ours(told["packages"].get("fugaku_gpt"), mend),
    ]
    build = told.get("build")
    if build is None:
        rows.append(Finding("PyTorch", expected.torch or "-", str(told.get("build_error")), MISSING, mend))
    else:
        rows += _build(expected, build, threads, flags, mend)
        rows.append(_kernels(told, profile.python))
    mpi = told.get("mpi")
    if mpi is None:
        rows.append(Finding("MPI library", expected.mpi or "-", str(told.get("mpi_error")), MISSING, _MPI_MEND))
    else:
        library = str(mpi["library"])
        same = library.lower().startswith(expected.mpi.lower())
        rows.append(_row("MPI library", expected.mpi, " ".join(library.split()), same, _MPI_MEND))
        rows.append(
            _row("mpi4py", expected.mpi4py, str(mpi["mpi4py"]), starts_with(expected.mpi4py, str(mpi["mpi4py"])), mend)
        )
        rows.append(Finding("MPI threads", "-", str(mpi["thread_level"]), UNSTATED))
    return rows


_MPI_MEND = "compile mpi4py against the MPI that starts the ranks: pip install --no-binary mpi4py mpi4py"


def _build(
    expected: Expected, build: Mapping[str, Any], threads: int, flags: Sequence[str], mend: str
) -> List[Finding]:
    version, blas, used = str(build["torch"]), str(build["blas"]), str(build["instruction_set"])
    libraries = blas.split(" + ")
    lacks = [name for name in expected.blas if name not in libraries]
    has = "has " if 0 < len(expected.blas) < len(libraries) else ""  # more than these are no difference
    best = best_instruction_set(expected.instruction_sets, flags)
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    hint = (
        f"unset ATEN_CPU_CAPABILITY, which is {capability}"
        if capability
        else "the build is another than the profile is for: correct its instruction_sets, or make it anew"
    )
    found_threads = int(build["torch_threads"])
    without = [str(name) for name in build["bfloat16_without_kernel"]]
    stated = expected.bfloat16_without_kernel
    return [
        _row("PyTorch", expected.torch, version, starts_with(expected.torch, version), mend),
        _row("BLAS", has + " + ".join(expected.blas), blas, not lacks, mend),
        _row("instruction set", best, used, used in (best, *(_FALLBACKS if best in _FALLBACKS else ())), hint),
        _row(
            "threads", f"{threads}, as OMP_NUM_THREADS", str(found_threads), found_threads == threads,
            "the build has no OpenMP, or something sets its threads: see environment of the profile",
        ),
        _yes_or_no("fused AdamW", expected.fused_adamw, build["fused_adamw"], mend),
        _yes_or_no("flush denormals", expected.flush_denormals, build["flush_denormals"], mend),
        _row(
            "bfloat16 without kernel", "" if stated is None else _list(stated), _list(without),
            stated is not None and set(without) == set(stated), mend,
        ),
    ]  # fmt: skip


def _kernels(told: Mapping[str, Any], python: str) -> Finding:
    """Kernels of our own. No profile asks for them: without them the build's are used."""
    kernels, mend = told.get("kernels"), f"{shlex.quote(python)} -m fugaku_gpt env kernels"
    if kernels is None:
        return Finding("kernels", "compiled", str(told.get("build_error")), OPTIONAL, f"{mend} --again")
    if kernels["used"]:
        return Finding("kernels", "compiled", "compiled", OK)
    if kernels["compiled"]:
        return Finding(
            "kernels", "compiled", "do not run with this PyTorch: its own are used", OPTIONAL, f"{mend} --again"
        )
    return Finding("kernels", "compiled", "not for this processor: PyTorch's own are used", OPTIONAL, mend)


def _row(what: str, expected: str, found: str, same: bool, mend: str) -> Finding:
    if not expected:
        return Finding(what, "-", found, UNSTATED)
    return Finding(what, expected, found, OK if same else DIFFERS, "" if same else mend)


def _yes_or_no(what: str, expected: Optional[bool], found: object, mend: str) -> Finding:
    words = {True: "yes", False: "no", None: ""}
    return _row(what, words[expected], words[bool(found)], expected is bool(found), mend)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def starts_with(expected: str, found: str) -> bool:
    """Whether a version is an expected one: 1.10 is 1.10.2+cu102 and 1.10.1a0+git, and is not 1.1.

    >>> starts_with("1.10", "1.10.2+cu102"), starts_with("1.1", "1.10.2")
    (True, False)
    """
    numbers = re.match(r"\d+(\.\d+)*", found)
    if numbers is None:
        return False
    parts = expected.split(".")
    return numbers[0].split(".")[: len(parts)] == parts


def best_instruction_set(compiled: Sequence[str], flags: Sequence[str]) -> str:
    """The first instruction set of a list, best first, that this processor has; empty if none is known to be one."""
    for name in compiled:
        if name in _FALLBACKS or (name in _NEEDS and all(flag in flags for flag in _NEEDS[name])):
            return name
    return ""


def _packages(pins: Mapping[str, str], found: Mapping[str, Optional[str]], mend: str) -> Finding:
    if not pins:
        return Finding("packages", "-", "no pins", UNSTATED)
    wrong = [name for name in pins if not starts_with(pins[name], found.get(name) or "")]
    if not wrong:
        return Finding("packages", f"{len(pins)} as pinned", "all", OK)
    status = DIFFERS if all(found.get(name) for name in wrong) else MISSING
    expected = ", ".join(f"{name} {pins[name]}" for name in wrong)
    return Finding("packages", expected, ", ".join(f"{name} {found.get(name) or '-'}" for name in wrong), status, mend)


def _ours(version: Optional[str], mend: str) -> Finding:
    expected = fugaku_gpt.__version__
    if version is None:
        return Finding("fugaku_gpt", expected, "not installed", MISSING, mend)
    return _row("fugaku_gpt", expected, version, version == expected, mend)


def _before_the_start(profile: Profile) -> List[Finding]:
    """What must be there before the ranks start."""
    rows = []
    if profile.modules:
        loaded = os.environ.get("LOADEDMODULES", "").split(":")
        lacks = [name for name in profile.modules if name not in loaded]
        found = ", ".join(name for name in profile.modules if name in loaded) or "none of them is loaded"
        mend = "; ".join(f"module load {name}" for name in lacks)
        rows.append(Finding("modules", ", ".join(profile.modules), found, MISSING if lacks else OK, mend))
    for library in profile.preload:
        if "/" in library:  # others are looked for by the loader
            there = Path(library).is_file()
            mend = "" if there else "it is there on the nodes: check on one of them"
            rows.append(Finding("preload", library, "there" if there else "not there", OK if there else MISSING, mend))
    return rows


def _probe(profile: Profile, threads: int, names: Sequence[str]) -> Tuple[Optional[Dict[str, Any]], str]:
    """(what the environment tells, ""), or (None, why it tells nothing)."""
    lines: List[str] = []
    variables = {**profile_variables(profile), "OMP_NUM_THREADS": str(threads)}
    ours = str(Path(fugaku_gpt.__file__).resolve().parents[1])
    strangers = before([ours], "PYTHONPATH")
    if profile.preload:
        variables["LD_PRELOAD"] = before(profile.preload, "LD_PRELOAD")
    if shutil.which(profile.python) is None:
        return None, f"{profile.python}: is not there"
    outcome = run_command(
        [profile.python, "-c", _PROBE, strangers, *names], variables, timeout=PROBE_SECONDS, on_line=lines.append
    )
    answers = [line[len(_ANSWER) :] for line in lines if line.startswith(_ANSWER)]
    if answers:
        told = json.loads(answers[-1])
        assert isinstance(told, dict)
        return told, ""
    said = " / ".join(line.strip() for line in lines[-3:] if line.strip())[:200]
    how = f"no answer in {PROBE_SECONDS:g} s" if outcome.timed_out else f"exit code {outcome.exit_code}"
    return None, f"{how}: {said}" if said else how
