"""One build of PyTorch, as its file in ``env/`` describes it: how it is made, how ranks start in it, what it should be.

::

    name: a64fx-torch-1.10
    note: built on a node, from Fujitsu's fork   # one line, for lists
    python_version: 3.9
    python: torch-1.10/bin/python3               # a relative path with a /: inside job.tarball, or else from this file
    pins: torch-1.7.txt                          # what pip installs into it; from this file
    launcher: mpiexec                            # mpiexec (PJM), srun (Slurm), mpirun
    launcher_options: []                         # more words for it
    srun_mpi: pmi2                               # how srun serves this MPI (`srun --mpi=list`)
    modules: []                                  # for `module load`
    path: []                                     # before PATH; relative as python is
    library_path: []                             # before LD_LIBRARY_PATH; relative as python is
    preload: []                                  # into the ranks, always
    tcmalloc: libtcmalloc.so                     # what node.tcmalloc preloads
    cores: 48                                    # compute cores of a node
    environment: []                              # NAME=value for the ranks
    limits: []                                   # what is known not to work, or not known
    expected: {torch: 1.10.1, blas: [SSL2]}      # what `env check` compares with; see Expected
    build: {repository: ..., branch: ...}        # how it is built where no package of it is; see Build
"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Type, TypeVar, get_type_hints

from fugaku_gpt.config.schema import option
from fugaku_gpt.config.tree import Scalar, Tree, plain_values, read_yaml_file, location_of
from fugaku_gpt.config.values import BadValue, coerce_scalar, element_type, strip_optional, describe_type
from fugaku_gpt.errors import ConfigError

_LINE = (r"[^\x00-\x1f\x7f\ud800-\udfff]+", "one line without control characters")
_LIBRARY = (r"[^\s:\x00-\x1f\x7f\ud800-\udfff]+", "a path without spaces and colons")
_VARIABLE = (r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f\ud800-\udfff]*", "NAME=value on one line")
_VERSION = (r"[0-9]+(\.[0-9]+)*", "a version, such as 1.10 or 1.10.2")
_FILE = (r"[A-Za-z0-9_][A-Za-z0-9._-]*", "a file's name of letters, digits and . _ -")
_WORD = (r"[A-Za-z0-9_/:.@+=-]+", "letters, digits and / : . @ + = _ - without spaces")

T = TypeVar("T")


@dataclass(frozen=True)
class Expected:
    """What ``env check`` should find inside, by the names of ``build_facts()`` and ``mpi_facts()``; what is left out is
    told and not judged."""

    torch: str = option("", "PyTorch's version; 1.10 stands for all of 1.10", form=_VERSION)
    blas: Tuple[str, ...] = option((), "libraries that it multiplies matrices with", form=_LINE)
    instruction_sets: Tuple[str, ...] = option((), "that its kernels are compiled for, best first", form=_LINE)
    fused_adamw: Optional[bool] = option(None, "whether AdamW is one kernel on the CPU")
    flush_denormals: Optional[bool] = option(None, "whether it can have denormal numbers treated as zero")
    bfloat16_without_kernel: Optional[Tuple[str, ...]] = option(
        None, "operations that it cannot compute in bfloat16", form=_LINE
    )
    mpi: str = option("", "the MPI library, as the first words of its version", form=_LINE)
    mpi4py: str = option("", "mpi4py's version", form=_VERSION)


@dataclass(frozen=True)
class Build:
    """How a build is compiled from source in a job; see ``env recipe``. In texts, ``{prefix}`` and ``{compiler}`` stand
    for these folders on the node."""

    repository: str = option("", "that is cloned", form=_WORD)
    branch: str = option("", "of the repository", form=_WORD)
    sources: str = option("sources", "folder that it is cloned into, on the node's own disk", form=_WORD)
    scripts: str = option("", "folder of the build's steps in the repository", form=_WORD)
    settings: str = option("", "file of its settings in that folder", form=_WORD)
    set: Tuple[str, ...] = option((), "NAME=value to be put into the settings", form=_VARIABLE)
    edit: Tuple[str, ...] = option(
        (), "FILE: a sed expression for it", form=(r"[\w.-]+: .+", "FILE: an expression of sed")
    )
    compiler: str = option("", "folder of the compilers on the nodes", form=_LIBRARY)
    prefix: str = option("", "folder that it is installed into, in the tar file", form=_WORD)
    keep: Tuple[str, ...] = option((), "what of the prefix goes into the tar file; default: all", form=_WORD)
    environment: Tuple[str, ...] = option((), "variables for the steps, each NAME=value", form=_VARIABLE)
    steps: Tuple[str, ...] = option((), "commands, in order; words as in a shell", form=_LINE)
    packages: Tuple[str, ...] = option((), "for pip, after the steps; compiled with mpicc", form=_WORD)
    mpicc: str = option("mpicc", "compiles mpi4py for the nodes' MPI", form=_WORD)
    hours: int = option(8, "time limit of the job", unit="h", at_least=1)
    local_tmp: str = option("80Gi", "of the node's own disk", form=(r"[1-9][0-9]*Gi", "a size in Gi"))


@dataclass(frozen=True)
class Profile:
    """One build, as job scripts, comparisons and checks see it."""

    name: str = option("", "of the build", form=_LINE)
    python: str = option("python3", "the interpreter on the nodes", form=_LINE)
    note: str = option("", "one line for lists", form=_LINE)
    python_version: str = option("", "the Python that it is made with", form=_VERSION)
    pins: str = option("", "file of exact versions for pip", form=_LINE)
    launcher: str = option("", "starts the ranks; default: the scheduler's", choices=("", "mpiexec", "srun", "mpirun"))
    launcher_options: Tuple[str, ...] = option((), "more words for the launcher", form=_LINE)
    srun_mpi: str = option("", "for `srun --mpi=`; default: the site's", form=(r"[a-z0-9_]+", "such as pmi2"))
    modules: Tuple[str, ...] = option((), "for `module load`", form=_LINE)
    path: Tuple[str, ...] = option((), "folders before PATH", form=_LIBRARY)
    library_path: Tuple[str, ...] = option((), "folders before LD_LIBRARY_PATH", form=_LIBRARY)
    preload: Tuple[str, ...] = option((), "libraries that the ranks always need preloaded", form=_LIBRARY)
    tcmalloc: str = option("libtcmalloc.so", "the library that node.tcmalloc preloads", form=_LIBRARY)
    cores: Optional[int] = option(None, "compute cores of a node; default: 48 under PJM", at_least=1)
    environment: Tuple[str, ...] = option((), "variables for the ranks, each NAME=value", form=_VARIABLE)
    limits: Tuple[str, ...] = option((), "known limits, one line each", form=_LINE)
    expected: Expected = field(default=Expected())
    build: Build = field(default=Build())

    @property
    def in_tarball(self) -> bool:
        """Whether it is built from source into a tar file that each node unpacks, and not installed by pip."""
        return bool(self.build.repository)


def this_python() -> Profile:
    """The profile of a job that uses the very Python that this program runs in."""
    return Profile(name="", python=sys.executable)


def load_profile(file: Path) -> Profile:
    """A profile from its YAML file, with paths as they are written.

    Raises:
        ConfigError: file, line, key, value, and what would be valid.
    """
    problems: List[str] = []
    values = _values(Profile, read_yaml_file(file), str(file), "", problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return Profile(**values)


def with_absolute_paths(profile: Profile, folder: Path) -> Profile:
    """The profile with relative paths that have a ``/`` made absolute from a folder; links are left as they are."""

    def absolute(path: str) -> str:
        return os.path.abspath(folder / path) if "/" in path else path

    return replace(
        profile,
        python=absolute(profile.python),
        path=tuple(map(absolute, profile.path)),
        library_path=tuple(map(absolute, profile.library_path)),
        preload=tuple(map(absolute, profile.preload)),
        tcmalloc=absolute(profile.tcmalloc),
    )


def _values(kind: Type[T], tree: Mapping[str, Tree], origin: str, prefix: str, problems: List[str]) -> Dict[str, Any]:
    """The arguments for a dataclass from what was written; what is wrong is added to ``problems``."""
    kinds = get_type_hints(kind)
    specs = {spec.name: spec for spec in fields(kind)}  # type: ignore[arg-type]
    found: Dict[str, Any] = {}
    for name, value in tree.items():
        at, key = location_of(value, origin), f"{prefix}{name}"
        if name not in specs:
            near = difflib.get_close_matches(name, specs, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"valid: {', '.join(specs)}"
            problems.append(f"{at}: {key}: unknown key of a profile; {hint}")
        elif is_dataclass(kinds[name]):
            if isinstance(value, dict):
                found[name] = kinds[name](**_values(kinds[name], value, origin, f"{key}.", problems))
            else:
                valid = ", ".join(spec.name for spec in fields(kinds[name]))
                problems.append(f"{at}: {key}: {plain_values(value)!r}: expected a mapping; its keys: {valid}")
        else:
            try:
                found[name] = _coerce(value, kinds[name], specs[name].metadata)
            except BadValue as error:
                valid = describe_type(kinds[name], specs[name].metadata)
                problems.append(f"{at}: {key}: {plain_values(value)!r}: {error}; valid: {valid}")
    return found


def _coerce(value: Tree, kind: Any, metadata: Any) -> Any:
    element = element_type(strip_optional(kind))
    items = [value] if isinstance(value, Scalar) and value.text else value
    if element is None:
        if not isinstance(value, Scalar):
            raise BadValue("expected one value")
        return coerce_scalar(value.text, value.is_quoted, kind, metadata)
    if isinstance(value, Scalar) and not value.text:
        return ()
    if not isinstance(items, list):
        raise BadValue("expected a list")
    texts = []
    for item in items:
        if not isinstance(item, Scalar):
            raise BadValue("expected a list of texts")
        texts.append(coerce_scalar(item.text, item.is_quoted, element, metadata))
    return tuple(texts)
