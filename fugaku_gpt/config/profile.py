"""One build of PyTorch, as its file in ``env/`` describes it: how to make it, how ranks start in it, what it contains.

::

    name: a64fx-torch-1.10
    note: built on a node, from Fujitsu's fork   # one line, for lists
    python_version: 3.9
    python: torch-1.10/bin/python3               # a relative path with a / is inside job.tarball, else from this file
    pins: torch-1.7.txt                          # requirements file for pip; relative to this file
    architecture: aarch64                        # processors that the pins are for, as `uname -m` prints it
    launcher: mpiexec                            # mpiexec (PJM), srun (Slurm), mpirun
    launcher_options: []                         # further arguments for it
    srun_mpi: pmi2                               # MPI type for srun (see `srun --mpi=list`)
    modules: []                                  # for `module load`
    path: []                                     # folders before PATH; relative as for python
    library_path: []                             # folders before LD_LIBRARY_PATH; relative as for python
    preload: []                                  # libraries that ranks always preload
    tcmalloc: libtcmalloc.so                     # library that node.tcmalloc preloads
    cores: 48                                    # compute cores of a node
    environment: []                              # NAME=value for the ranks
    limits: []                                   # known limitations
    expected: {torch: 1.10.1, blas: [SSL2]}      # facts that `env check` compares with; see Expected
    build: {repository: ..., branch: ...}        # how to build it from source; see Build
"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Type, TypeVar, get_type_hints

from fugaku_gpt.config.options import option
from fugaku_gpt.config.tree import Scalar, Tree, location_of, quoted, read_yaml_file
from fugaku_gpt.config.values import BadValue, coerce_scalar, describe_type, element_type, strip_optional
from fugaku_gpt.errors import ConfigError
from fugaku_gpt.limits import MESSAGE_LINES

_LINE = (r"[^\x00-\x1f\x7f\ud800-\udfff]+", "one line without control characters")
_LIBRARY = (r"[^\s:\x00-\x1f\x7f\ud800-\udfff]+", "a path without spaces and colons")
_VARIABLE = (r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f\ud800-\udfff]*", "NAME=value on one line")
_VERSION = (r"[0-9]+(\.[0-9]+)*", "a version, such as 1.10 or 1.10.2")
_FILE = (r"[A-Za-z0-9_][A-Za-z0-9._-]*", "a file's name of letters, digits and . _ -")
_WORD = (r"[A-Za-z0-9_/:.@+=-]+", "letters, digits and / : . @ + = _ - without spaces")

T = TypeVar("T")


@dataclass(frozen=True)
class Expected:
    """Facts that ``env check`` expects, under the names of ``build_facts()`` and ``mpi_facts()``.

    Facts that are left out are reported but not checked.
    """

    torch: str = option("", "PyTorch's version; 1.10 stands for every 1.10.x", form=_VERSION)
    blas: Tuple[str, ...] = option((), "libraries of its matrix products", form=_LINE)
    instruction_sets: Tuple[str, ...] = option(
        (), "instruction sets for which its kernels are compiled, best first", form=_LINE
    )
    fused_adamw: Optional[bool] = option(None, "whether it has a fused AdamW on the CPU")
    flush_denormals: Optional[bool] = option(None, "whether it can treat denormal numbers as zero")
    bfloat16_without_kernel: Optional[Tuple[str, ...]] = option(
        None, "operations that it cannot compute in bfloat16", form=_LINE
    )
    mpi: str = option("", "MPI library, as its version text begins", form=_LINE)
    mpi4py: str = option("", "mpi4py's version", form=_VERSION)


@dataclass(frozen=True)
class Build:
    """How a job compiles a build from source; see ``env recipe``.

    In texts, ``{prefix}`` and ``{compiler}`` stand for these folders on the node.
    """

    repository: str = option("", "repository to clone", form=_WORD)
    branch: str = option("", "branch or tag of the repository", form=_WORD)
    sources: str = option("sources", "folder of the clone on the node-local disk", form=_WORD)
    scripts: str = option("", "folder in the repository in which the steps are run", form=_WORD)
    settings: str = option("", "settings file in that folder, which the steps are run with; default: none", form=_WORD)
    set: Tuple[str, ...] = option((), "settings to change, each NAME=value", form=_VARIABLE)
    edit: Tuple[str, ...] = option(
        (), "edits, each FILE: a sed expression", form=(r"[\w.-]+: .+", "FILE: an expression of sed")
    )
    compiler: str = option("", "folder of the compilers on the nodes", form=_LIBRARY)
    prefix: str = option("", "folder of the installation in the tar file", form=_WORD)
    keep: Tuple[str, ...] = option((), "paths below the prefix that go into the tar file; default: all", form=_WORD)
    environment: Tuple[str, ...] = option((), "environment variables for the steps, each NAME=value", form=_VARIABLE)
    steps: Tuple[str, ...] = option((), "commands in their order, quoted as in a shell", form=_LINE)
    packages: Tuple[str, ...] = option(
        (), "packages that pip installs after the steps; compiled with mpicc", form=_WORD
    )
    mpicc: str = option("mpicc", "compiler command of the nodes' MPI, for mpi4py", form=_WORD)
    hours: int = option(8, "time limit of the job", unit="h", at_least=1)
    local_tmp: str = option("80Gi", "size of the node-local disk", form=(r"[1-9][0-9]*Gi", "a size in Gi"))


@dataclass(frozen=True)
class Profile:
    """One build of PyTorch, as job scripts, comparisons and checks use it."""

    name: str = option("", "name of the build", form=_LINE)
    python: str = option("python3", "Python interpreter on the nodes", form=_LINE)
    note: str = option("", "one line for lists", form=_LINE)
    python_version: str = option("", "version of its Python", form=_VERSION)
    pins: str = option("", "requirements file with exact versions, for pip", form=_LINE)
    architecture: str = option(
        "", "processors that the pins are for, as `uname -m` prints it; default: any", form=(r"\w+", "such as aarch64")
    )
    launcher: str = option(
        "", "command that starts the ranks; default: the scheduler's", choices=("", "mpiexec", "srun", "mpirun")
    )
    launcher_options: Tuple[str, ...] = option((), "further arguments for the launcher", form=_LINE)
    srun_mpi: str = option("", "MPI type for `srun --mpi=`; default: the site's", form=(r"[a-z0-9_]+", "such as pmi2"))
    modules: Tuple[str, ...] = option((), "modules for `module load`", form=_LINE)
    path: Tuple[str, ...] = option((), "folders before PATH", form=_LIBRARY)
    library_path: Tuple[str, ...] = option((), "folders before LD_LIBRARY_PATH", form=_LIBRARY)
    preload: Tuple[str, ...] = option((), "libraries that the ranks always preload", form=_LIBRARY)
    tcmalloc: str = option("libtcmalloc.so", "library that node.tcmalloc preloads", form=_LIBRARY)
    cores: Optional[int] = option(None, "number of compute cores of a node; default: 48 under PJM", at_least=1)
    environment: Tuple[str, ...] = option((), "environment variables for the ranks, each NAME=value", form=_VARIABLE)
    limits: Tuple[str, ...] = option((), "known limitations, one line each", form=_LINE)
    expected: Expected = field(default=Expected())
    build: Build = field(default=Build())

    @property
    def in_tarball(self) -> bool:
        """Whether the build is compiled from source to a tar file that each node unpacks, not installed by pip."""
        return bool(self.build.repository)


def this_python() -> Profile:
    """The profile of a job that uses the Python of this process."""
    return Profile(name="", python=sys.executable)


def load_profile(file: Path) -> Profile:
    """Load a profile from its YAML file, with paths as written.

    Raises:
        ConfigError: the file is invalid; it has file, line, key, value, and valid values.
    """
    problems: List[str] = []
    values = _values(Profile, read_yaml_file(file), str(file), "", problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return Profile(**values)


def with_absolute_paths(profile: Profile, folder: Path) -> Profile:
    """The profile with relative paths that have a ``/`` made absolute from a folder; links are not resolved."""

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
    """The arguments for a dataclass from a tree of settings; errors are appended to ``problems``."""
    kinds = get_type_hints(kind)
    fields_by_name = {spec.name: spec for spec in fields(kind)}  # type: ignore[arg-type]
    arguments: Dict[str, Any] = {}
    for name, value in tree.items():
        if len(problems) > MESSAGE_LINES.value:  # more are not shown
            break
        location, key = location_of(value, origin), f"{prefix}{name}"
        if name not in fields_by_name:
            similar_names = difflib.get_close_matches(name, fields_by_name, n=1)
            hint = (
                f"did you mean {prefix}{similar_names[0]}?" if similar_names else f"valid: {', '.join(fields_by_name)}"
            )
            problems.append(f"{location}: {key}: unknown key of a profile; {hint}")
        elif is_dataclass(kinds[name]):
            if isinstance(value, dict):
                arguments[name] = kinds[name](**_values(kinds[name], value, origin, f"{key}.", problems))
            else:
                valid = ", ".join(spec.name for spec in fields(kinds[name]))
                problems.append(f"{location}: {key}: {quoted(value)}: expected a mapping; its keys: {valid}")
        else:
            try:
                arguments[name] = _coerce(value, kinds[name], fields_by_name[name].metadata)
            except BadValue as error:
                valid = describe_type(kinds[name], fields_by_name[name].metadata)
                problems.append(f"{location}: {key}: {quoted(value)}: {error}; valid: {valid}")
    return arguments


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
