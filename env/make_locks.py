"""Makes the lock files of env/ from the pins beside them: ``make locks``, or ``python -m env.make_locks [NAME...]``.

uv resolves the pins and all that they need, for every Python and machine of a lock, and reports the files of each
package with their hashes. Wheels for other systems are left out. What another lock has is installed before, and is
not repeated. UV_DEFAULT_INDEX names another package index.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple
from urllib.parse import unquote

import tomllib
from packaging.markers import Marker
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from env.lockfile import LockedFile, LockedPackage, LockError, format_lock, normalized, read_lock

FOLDER = Path(__file__).resolve().parent
# Builds of PyTorch on the public package index need CUDA's libraries, its CPU builds do not: they are locked apart.
_CUDA = re.compile(r"(nvidia|cuda|triton)(-|$)")
# mpi4py is compiled where its wheel does not fit the MPI
_FROM_SOURCE = ("mpi4py",)


@dataclass(frozen=True)
class Lock:
    """What a lock file is made of.

    Attributes:
        name: the file's name without its ending.
        pins: the files of pins, without their ending.
        pythons: the versions of CPython, the oldest first.
        machines: the processors, as `uname -m` prints them.
        beside: the locks that are installed before it, each made before.
        versions_of: the lock whose versions are taken where the pins leave a choice.
        has_dependencies: whether what the pins need is locked, too.
        from_python: the first patch release that the pins need; default: any of the oldest Python.
    """

    name: str
    pins: Tuple[str, ...]
    pythons: Tuple[str, ...]
    machines: Tuple[str, ...]
    beside: Tuple[str, ...] = ()
    versions_of: str = ""
    from_python: str = ""
    has_dependencies: bool = True


_NEW, _OLD, _BOTH = ("3.11", "3.12", "3.13"), ("3.8",), ("x86_64", "aarch64")
LOCKS = (
    Lock("torch-2.13", ("torch-2.13", "build"), _NEW, ("x86_64",)),
    Lock("aarch64-torch-2.10", ("aarch64-torch-2.10", "build"), _NEW, ("aarch64",), versions_of="torch-2.13"),
    Lock("tests", ("tests",), _NEW, _BOTH, beside=("torch-2.13",)),
    Lock("dev", ("dev",), _NEW, _BOTH, beside=("torch-2.13", "tests")),
    Lock("mutants", ("mutants",), _NEW, _BOTH, beside=("dev",), has_dependencies=False),
    Lock("fuzz", ("fuzz",), _NEW, ("x86_64",), beside=("torch-2.13",)),
    Lock("peers", ("peers",), _NEW, ("x86_64",), beside=("torch-2.13",)),
    Lock("build-mpi4py", ("build-mpi4py",), _NEW, _BOTH, beside=("torch-2.13",)),
    Lock("docs", ("docs",), _NEW, _BOTH, from_python="3.11.5"),
    Lock("snakemake", ("snakemake", "integrations"), _NEW, _BOTH),
    Lock("psij", ("psij", "integrations"), _NEW, _BOTH),
    Lock("browser", ("browser", "integrations"), _NEW, _BOTH),
    Lock("torch-1.7", ("torch-1.7", "build-python3.8"), _OLD, ("x86_64",)),
    Lock("torch-1.10", ("torch-1.10", "build-python3.8"), _OLD, ("x86_64",)),
    Lock("torch-1.13", ("torch-1.13", "build-python3.8"), _OLD, ("x86_64",)),
)


def packages_of(resolution: Mapping[str, Any], lock: Lock) -> List[LockedPackage]:
    """The packages of a resolution that a lock's Pythons and machines need, with the files for these.

    Args:
        resolution: the contents of uv's pylock.toml.

    Raises:
        LockError: a package has neither a wheel for one of the Pythons and machines nor its sources.
    """
    targets = list(_targets(lock))
    packages = []
    for entry in resolution["packages"]:
        marker = Marker(entry["marker"]) if "marker" in entry else None
        needing = [target for target in targets if marker is None or marker.evaluate(marker_values(*target))]
        if not needing:
            continue
        files: Dict[str, str] = {}
        is_built = entry["name"] in _FROM_SOURCE
        for python, machine in needing:
            fitting = [wheel for wheel in entry.get("wheels", ()) if fits(_file_name(wheel), python, machine)]
            if not fitting and "sdist" not in entry:
                raise LockError(
                    f"{lock.name}: {entry['name']} {entry['version']} has no file for Python {python} on {machine}; "
                    "pin a version that has one"
                )
            files.update({_file_name(wheel): wheel["hashes"]["sha256"] for wheel in fitting})
            is_built = is_built or not fitting
        if is_built:
            files[_file_name(entry["sdist"])] = entry["sdist"]["hashes"]["sha256"]
        text = "" if len(needing) == len(targets) else _short_marker(needing, lock)
        locked = tuple(LockedFile(name, files[name]) for name in sorted(files))
        packages.append(LockedPackage(normalized(entry["name"]), entry["version"], locked, text))
    return sorted(packages, key=lambda package: (package.name, package.version))


def _targets(lock: Lock) -> Iterator[Tuple[str, str]]:
    return ((python, machine) for python in lock.pythons for machine in lock.machines)


def marker_values(python: str, machine: str) -> Dict[str, str]:
    """The values of markers of requirements for CPython on Linux."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.99",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }


def _short_marker(needing: Sequence[Tuple[str, str]], lock: Lock) -> str:
    """A marker that is true for some targets of a lock only, in words that pip has always known."""
    terms = []
    for python, machine in needing:
        text = f'python_version == "{python}"'
        terms.append(f'{text} and platform_machine == "{machine}"' if len(lock.machines) > 1 else text)
    return " or ".join(terms)


def _file_name(file: Mapping[str, Any]) -> str:
    return unquote(str(file["url"]).rpartition("/")[2])


def fits(file: str, python: str, machine: str) -> bool:
    """True if a wheel can be installed into CPython on Linux with glibc, of any version."""
    try:
        tags = parse_wheel_filename(file)[3]
    except InvalidWheelFilename:  # very old files of other systems
        return False
    return any(_tag_fits(tag, python, machine) for tag in tags)


def _tag_fits(tag: Tag, python: str, machine: str) -> bool:
    minor = int(python.partition(".")[2])
    platform = tag.platform == "any" or re.fullmatch(rf"(manylinux\w+|linux)_{machine}", tag.platform) is not None
    versions = {f"cp3{minor}": ("none", "abi3", f"cp3{minor}"), f"py3{minor}": ("none",), "py3": ("none",)}
    older = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    is_stable = older is not None and tag.abi == "abi3" and int(older[1]) <= minor
    return platform and (tag.abi in versions.get(tag.interpreter, ()) or is_stable)


def _resolve(lock: Lock, made: Mapping[str, Sequence[LockedPackage]]) -> Dict[str, Any]:
    """What uv resolves the pins of a lock to, together with those of the locks beside it."""
    texts = {pin: (FOLDER / f"{pin}.txt").read_text(encoding="utf-8") for pin in lock.pins}
    pinned = {normalized(name) for text in texts.values() for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}
    # versions that the locks beside it have, or the lock that has the first choice of versions
    others = [*lock.beside, *([lock.versions_of] if lock.versions_of else [])]
    versions = {package.name: package.version for other in others for package in made[other]}
    constraints = [
        f"{name}=={version}\n"
        for name, version in sorted(versions.items())
        if name not in pinned and not _CUDA.match(name)
    ]
    pins = [*lock.pins, *(pin for other in LOCKS if other.name in lock.beside for pin in other.pins)]
    with tempfile.TemporaryDirectory() as folder:
        chosen, output = Path(folder, "versions.txt"), Path(folder, "pylock.toml")
        chosen.write_text("".join(constraints), encoding="utf-8")
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-config"),
                *("--universal", "--fork-strategy", "fewest", "--python-version", lock.from_python or lock.pythons[0]),
                *(() if lock.has_dependencies else ("--no-deps",)),
                *("--constraint", str(chosen), "--output-file", str(output)),
                *(str(FOLDER / f"{pin}.txt") for pin in pins),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LockError(f"{lock.name}: uv cannot resolve the pins:\n{done.stderr.strip()}")
        return tomllib.loads(output.read_text(encoding="utf-8"))


def make(lock: Lock, made: Mapping[str, Sequence[LockedPackage]]) -> Dict[str, str]:
    """The texts of a lock's files, by their names.

    Args:
        made: the packages of the locks that were made before it.

    Raises:
        LockError: the pins cannot be resolved, or a package has no file for one of the lock's machines.
    """
    there = {package.name for other in lock.beside for package in made[other]}
    packages = [package for package in packages_of(_resolve(lock, made), lock) if package.name not in there]
    cuda = [package for package in packages if _CUDA.match(package.name)]
    base = [package for package in packages if package not in cuda]
    pins = " and ".join(f"{pin}.txt" for pin in lock.pins)
    besides = "".join(f", beside {other}.lock" for other in lock.beside)
    needed = " with what they need" if lock.has_dependencies else ""
    heading = (
        f"All packages of {pins}{needed}{besides}, by hashes: CPython {', '.join(lock.pythons)} on Linux,\n"
        f"{' and '.join(lock.machines)}. Made by `make locks`; installed by env/install_locked.sh."
    )
    texts = {f"{lock.name}.lock": format_lock(base, heading)}
    if cuda:
        heading = (
            f"What {lock.name}.lock needs besides where its PyTorch is a build for CUDA, as on the public index.\n"
            "Made by `make locks`; installed by env/install_locked.sh where it is needed."
        )
        texts[f"{lock.name}-cuda.lock"] = format_lock(cuda, heading)
    return texts


def main(arguments: Sequence[str]) -> int:
    """Make the named locks, default all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m env.make_locks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(lock.name for lock in LOCKS))
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="where they are written")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {lock.name for lock in LOCKS}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such lock; valid: {', '.join(lock.name for lock in LOCKS)}")
    made: Dict[str, List[LockedPackage]] = {}
    try:
        for lock in LOCKS:
            is_named = not options.names or lock.name in options.names
            folder: Path = options.out if is_named else FOLDER
            for name, text in make(lock, made).items() if is_named else ():
                (folder / name).write_text(text, encoding="utf-8")
                packages = read_lock(folder / name)
                print(f"{name}: {len(packages)} packages, {sum(len(package.files) for package in packages)} hashes")
            files = [folder / f"{lock.name}{ending}" for ending in (".lock", "-cuda.lock")]
            made[lock.name] = [package for file in files if file.is_file() for package in read_lock(file)]
    except LockError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
