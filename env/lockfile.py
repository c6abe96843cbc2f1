"""Lock files: packages with exact versions and the SHA-256 of each wheel that may be installed, for pip.

A lock file is a requirements file in the form that ``pip install --require-hashes --no-deps -r`` reads. The comments
above a requirement name the files of its hashes, in the same order::

    # click-8.5.1-py3-none-any.whl
    click==8.5.1 \\
        --hash=sha256:8bb5376d...

``make locks`` writes them, ``env/install_locked.sh`` installs them, ``make sbom`` lists what is in them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import List, Tuple

_REQUIREMENT = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[^\s;\\]+)(?: ; (?P<marker>[^\\]+?))? \\")
_HASH = re.compile(r"    --hash=sha256:(?P<sha256>[0-9a-f]{64})(?P<more> \\)?")
_FILE = re.compile(r"# (?P<file>\S+\.(?:whl|tar\.gz))")


@dataclass(frozen=True)
class LockedFile:
    """A file of a package: its name, and its SHA-256 in hexadecimal digits."""

    name: str
    sha256: str


@dataclass(frozen=True)
class LockedPackage:
    """A package of a lock.

    Attributes:
        name: the name in the form that package indexes compare: lower case, with hyphens.
        version: the exact version.
        files: the files that may be installed; at least one.
        marker: for which Pythons and machines it is installed; empty for all.
    """

    name: str
    version: str
    files: Tuple[LockedFile, ...]
    marker: str = ""


class LockError(Exception):
    """A lock cannot be read or made; the message says where, why and how to mend it."""


def normalized(name: str) -> str:
    """A package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def format_lock(packages: List[LockedPackage], heading: str) -> str:
    """The text of a lock file.

    Args:
        packages: the packages, in the order in which they are to stand.
        heading: lines of a comment at the top, without the signs of a comment.
    """
    lines = [f"# {line}" for line in heading.splitlines()]
    for package in packages:
        marker = f" ; {package.marker}" if package.marker else ""
        lines += [f"# {file.name}" for file in package.files]
        lines.append(f"{package.name}=={package.version}{marker} \\")
        lines += [f"    --hash=sha256:{file.sha256} \\" for file in package.files]
        lines[-1] = lines[-1][: -len(" \\")]
    return "\n".join(lines) + "\n"


def parse_lock(text: str, source: str) -> List[LockedPackage]:
    """The packages of a lock file's text.

    Args:
        source: what messages call it.

    Raises:
        LockError: a line is none of a lock, a package stands twice for the same machines, or the files named above a
            requirement are not as many as its hashes.
    """
    packages: List[LockedPackage] = []
    names: List[str] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        file, requirement = _FILE.fullmatch(line), _REQUIREMENT.fullmatch(line)
        if file:
            names.append(file["file"])
        elif requirement:
            hashes: List[str] = []
            is_open = True
            while is_open:
                number, line = next(lines, (number + 1, ""))
                digest = _HASH.fullmatch(line)
                if digest is None:
                    raise LockError(f"{source}:{number}: no hash where one must be; make it anew: make locks")
                hashes.append(digest["sha256"])
                is_open = digest["more"] is not None
            if len(hashes) != len(names):
                raise LockError(
                    f"{source}:{number}: {requirement['name']} has {len(hashes)} hashes and {len(names)} files; make "
                    "it anew: make locks"
                )
            files = tuple(LockedFile(name, sha256) for name, sha256 in zip(names, hashes))
            packages.append(
                LockedPackage(requirement["name"], requirement["version"], files, requirement["marker"] or "")
            )
            names = []
        elif line and not line.startswith("#"):
            raise LockError(f"{source}:{number}: {line!r} is no line of a lock file; make it anew: make locks")
    keys = [(package.name, package.marker) for package in packages]
    for name, marker in keys:
        if keys.count((name, marker)) > 1 or (marker and (name, "") in keys):
            raise LockError(f"{source}: {name} stands there twice; make it anew: make locks")
    return packages


def read_lock(file: Path) -> List[LockedPackage]:
    """The packages of a lock file.

    Raises:
        LockError: it cannot be read, or is none.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{file}: cannot be read: {error}") from None
    return parse_lock(text, str(file))
