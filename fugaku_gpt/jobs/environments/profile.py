"""How a build of PyTorch is started on the nodes of a job: the part of ``env/*.yaml`` that job scripts need.

::

    name: a64fx-torch-1.10
    python: /home/apps/torch-1.10/bin/python3   # a relative path with a /: inside job.tarball, or else from this file
    launcher: mpiexec                            # mpiexec (PJM), srun (Slurm), mpirun
    launcher_options: []                         # more words for it
    srun_mpi: pmi2                               # how srun serves this MPI (`srun --mpi=list`)
    modules: []                                  # for `module load`
    path: []                                     # before PATH
    library_path: []                             # before LD_LIBRARY_PATH
    tcmalloc: libtcmalloc.so                     # what node.tcmalloc preloads
    cores: 48                                    # compute cores of a node
    environment: []                              # NAME=value for the ranks
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, get_type_hints

from fugaku_gpt.config.schema import option
from fugaku_gpt.config.tree import Scalar, Tree, plain, read_yaml_file, where
from fugaku_gpt.config.values import BadValue, coerce_scalar, element_type, type_words
from fugaku_gpt.errors import ConfigError

_LINE = (r"[^\x00-\x1f\x7f\ud800-\udfff]+", "one line without control characters")
_LIBRARY = (r"[^\s:\x00-\x1f\x7f\ud800-\udfff]+", "a path without spaces and colons")
_VARIABLE = (r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f\ud800-\udfff]*", "NAME=value on one line")


@dataclass(frozen=True)
class Profile:
    """One build, as job scripts see it."""

    name: str = option("", "of the build", form=_LINE)
    python: str = option("python3", "the interpreter on the nodes", form=_LINE)
    launcher: str = option("", "starts the ranks; default: the scheduler's", choices=("", "mpiexec", "srun", "mpirun"))
    launcher_options: Tuple[str, ...] = option((), "more words for the launcher", form=_LINE)
    srun_mpi: str = option("", "for `srun --mpi=`; default: the site's", form=(r"[a-z0-9_]+", "such as pmi2"))
    modules: Tuple[str, ...] = option((), "for `module load`", form=_LINE)
    path: Tuple[str, ...] = option((), "folders before PATH", form=_LIBRARY)
    library_path: Tuple[str, ...] = option((), "folders before LD_LIBRARY_PATH", form=_LIBRARY)
    tcmalloc: str = option("libtcmalloc.so", "the library that node.tcmalloc preloads", form=_LIBRARY)
    cores: Optional[int] = option(None, "compute cores of a node; default: 48 under PJM", at_least=1)
    environment: Tuple[str, ...] = option((), "variables for the ranks, each NAME=value", form=_VARIABLE)


def this_python() -> Profile:
    """The profile of a job that uses the very Python that this program runs in."""
    return Profile(name="", python=sys.executable)


def load_profile(file: Path) -> Profile:
    """A profile from its YAML file.

    Raises:
        ConfigError: file, line, key, value, and what would be valid.
    """
    kinds = get_type_hints(Profile)
    specs = {spec.name: spec for spec in fields(Profile)}
    values: Dict[str, Any] = {}
    problems = []
    for key, value in read_yaml_file(file).items():
        at = where(value, str(file))
        if key not in specs:
            near = difflib.get_close_matches(key, specs, n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(specs)}"
            problems.append(f"{at}: {key}: unknown key of a profile; {hint}")
            continue
        try:
            values[key] = _coerce(value, kinds[key], specs[key].metadata)
        except BadValue as error:
            valid = type_words(kinds[key], specs[key].metadata)
            problems.append(f"{at}: {key}: {plain(value)!r}: {error}; valid: {valid}")
    if problems:
        raise ConfigError("\n".join(problems))
    return Profile(**values)


def _coerce(value: Tree, kind: Any, metadata: Any) -> Any:
    element = element_type(kind)
    items = [value] if isinstance(value, Scalar) and value.text else value
    if element is None:
        if not isinstance(value, Scalar):
            raise BadValue("expected one value")
        return coerce_scalar(value.text, value.quoted, kind, metadata)
    if isinstance(value, Scalar) and not value.text:
        return ()
    if not isinstance(items, list):
        raise BadValue("expected a list")
    texts = []
    for item in items:
        if not isinstance(item, Scalar):
            raise BadValue("expected a list of texts")
        texts.append(coerce_scalar(item.text, item.quoted, element, metadata))
    return tuple(texts)
