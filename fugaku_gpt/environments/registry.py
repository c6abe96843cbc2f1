"""Finds profiles by name, and the environments that belong to them."""

from __future__ import annotations

import difflib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional

from fugaku_gpt.config import RunConfig
from fugaku_gpt.config.profile import Profile, load_profile, with_absolute_paths
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.input_files import read_text, resolved
from fugaku_gpt.limits import YAML_TEXT
from fugaku_gpt.machine.checkout import shipped_folder
from fugaku_gpt.machine.system import this_system

INSTALLED_MARKS = ".installed-*"  # env/make_environment.sh leaves it in an environment's folder once it is complete
OWNER_MARK = ".fugaku_gpt"  # the first file that it writes there
DIFFERENT_BUILD_MEND = "choose another folder with --at, or make it anew: env create with --again"


@dataclass(frozen=True)
class EnvironmentLocation:
    """Where an environment is, or would be.

    Attributes:
        folder: the virtual environment; for a build in a tar file, the folder that it is unpacked to.
        state: ``yes``, ``no``, ``half`` (to be finished by `env create`), ``other`` (created with other pins), ``by a
            job``, or ``not here`` (its pins are for another architecture).
        differing_pins: for ``other``, the packages that differ, and how.
    """

    folder: Path
    state: str
    differing_pins: str = ""


def profile_files(folder: Optional[Path] = None) -> Dict[str, Path]:
    """Profile name → its file, in the checkout's ``env/`` or among what an installation brought.

    Args:
        folder: read this folder instead.

    Raises:
        UsageError: there is no such folder.
    """
    profile_folder = folder or shipped_folder("env")
    if not profile_folder.is_dir():
        raise UsageError(
            f"{profile_folder}: there is no folder of profiles: this fugaku_gpt was installed without them; name a "
            "profile by its path, such as ./env/torch-1.7.yaml, or run from a checkout"
        )
    return _profiles_in(profile_folder)


def _profiles_in(folder: Path) -> Dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.yaml"), key=_by_version)}


def find_profile(name_or_path: str) -> Path:
    """The file of a profile that is given by its name or its path.

    Raises:
        UsageError: there is none; the message lists the names.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        file = Path(name_or_path)
        if not file.is_file():
            raise UsageError(f"{file}: there is no such profile")
        return file
    files = profile_files()
    if name_or_path in files:
        return files[name_or_path]
    close_matches = difflib.get_close_matches(name_or_path, files, n=1)
    hint = f"did you mean {close_matches[0]}? " if close_matches else ""
    raise UsageError(
        f"{name_or_path}: no profile has this name; {hint}valid: {', '.join(files)}, or the path of a file"
    )


def with_profile_file(config: RunConfig, run_file: Optional[Path] = None, base: Optional[Path] = None) -> RunConfig:
    """The run with ``job.profile`` as the path of a file that exists.

    A relative path that the run file names is looked up from the folder of that file, then from the top of the checkout
    that it is in, then from ``base``; one that the command line names, from ``base`` first. If it is none of these,
    ``NAME`` and ``env/NAME.yaml`` stand for the shipped profile of that name, so that a run file of the checkout works
    where fugaku_gpt was installed without one.

    Args:
        run_file: the run or sweep file; None where the run has none.
        base: the folder that the run's other paths are relative to; default: the present folder.

    Raises:
        ConfigError: no such file exists; the message lists the folders and the shipped names.
    """
    named = config.job.profile
    start = base if base is not None else Path.cwd()
    if not named:
        return config
    folders = []
    if run_file is not None:
        beside = Path(os.path.abspath(start / run_file)).parent
        folders += [folder for folder in (beside, _top_of_checkout(beside)) if folder is not None]
    folders = [*folders, start] if _names(run_file, named, start) else [start, *folders]
    if folders[0] == start and (start / named).is_file():
        return config
    profiles = _profiles_in(shipped_folder("env"))
    candidates = [folder / named for folder in folders]
    name = named[len("env/") : -len(".yaml")] if named.startswith("env/") and named.endswith(".yaml") else named
    if name in profiles:
        candidates.append(profiles[name])
    for file in candidates:
        if file.is_file():
            return replace(config, job=replace(config.job, profile=os.path.abspath(file)))
    searched = "" if Path(named).is_absolute() else f" in {', '.join(map(str, dict.fromkeys(folders)))}"
    shipped = f", or one of {', '.join(profiles)}" if profiles else ""
    raise ConfigError(f"job.profile: {named}: no such file{searched}; valid: the path of a file{shipped}")


def _names(run_file: Optional[Path], value: str, start: Path) -> bool:
    """True if a run or sweep file has a value, so that it did not come from the command line."""
    if run_file is None:
        return False
    try:
        return value in read_text(start / run_file, YAML_TEXT)
    except (OSError, UnicodeDecodeError):  # a sweep's file that was moved away since
        return False


def _top_of_checkout(folder: Path) -> Optional[Path]:
    """The nearest folder, from this one upwards, that is the top of a checkout; None outside of any."""
    for top in (folder, *folder.parents):
        if (top / ".git").exists() or (top / "setup.cfg").is_file():
            return top
    return None


def is_profile(name_or_path: str) -> bool:
    """True if a text is a profile's name, or the path of a profile's file."""
    if name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path).is_file()
    folder = shipped_folder("env")
    return folder.is_dir() and name_or_path in _profiles_in(folder)


def resolve(name_or_path: str, at: Optional[Path] = None, unpacked: Optional[Path] = None) -> Profile:
    """A profile by its name or path, with its paths made absolute.

    Args:
        at: the environment's folder if it is not the profile's own: the virtual environment, or, for a build in a tar
            file, the folder that it was unpacked to.
        unpacked: in a job with a tar file, the folder that it was unpacked to; relative paths start there.

    Raises:
        UsageError: there is no such profile.
        ConfigError: it is not valid.
    """
    file = find_profile(name_or_path)
    profile = load_profile(file)
    pins = str(resolved(file.parent / profile.pins)) if profile.pins else ""
    if unpacked is not None or profile.in_tarball:
        folder = unpacked if unpacked is not None else at
        profile = with_absolute_paths(profile, folder) if folder is not None else profile
    elif at is not None:
        inside = Path("bin", Path(profile.python).name)
        profile = with_absolute_paths(replace(profile, python=str(at / inside)), file.parent)
    else:
        profile = with_absolute_paths(profile, file.parent)
    return replace(profile, name=profile.name or file.stem, pins=pins)


def location_of(profile: Profile) -> EnvironmentLocation:
    """Where a resolved profile's environment is, and whether it is complete."""
    if profile.in_tarball and not Path(profile.python).is_absolute():
        return EnvironmentLocation(Path(profile.python), "by a job")
    if profile.architecture not in ("", this_system().architecture()):
        return EnvironmentLocation(Path(profile.python).parent.parent, "not here")
    if "/" not in profile.python:
        program = shutil.which(profile.python)
        return EnvironmentLocation(Path(program or profile.python), "yes" if program else "no")
    python = Path(profile.python)
    folder = python.parent.parent
    if not folder.is_dir():
        return EnvironmentLocation(folder, "no")
    if profile.pins and not any(folder.glob(INSTALLED_MARKS)):
        return EnvironmentLocation(folder, "half")
    if not python.exists():
        return EnvironmentLocation(folder, "half")
    differing_pins = _differing_pins(profile, folder)
    return EnvironmentLocation(folder, "other" if differing_pins else "yes", differing_pins)


def is_managed(folder: Path) -> bool:
    """True if ``env/make_environment.sh`` made the folder, so that it may be changed and created again."""
    if (folder / OWNER_MARK).is_file():
        return True
    # older versions did not write that file
    has_old_marks = (folder / "pins.txt").is_file() or (folder / ".mpi").is_file() or any(folder.glob(INSTALLED_MARKS))
    return has_old_marks and (folder / "pyvenv.cfg").is_file()


def read_pins(file: Path) -> Dict[str, str]:
    """Package → version, from a file of ``name==version`` lines."""
    lines = read_text(file, YAML_TEXT).splitlines()
    return dict(line.split("==", 1) for line in map(str.strip, lines) if "==" in line and not line.startswith("#"))


def _differing_pins(profile: Profile, folder: Path) -> str:
    """The pins of an environment that differ from the profile's; empty if they agree, or cannot be compared."""
    installed, pins = folder / "pins.txt", Path(profile.pins)
    if not profile.pins or not installed.is_file() or not pins.is_file():
        return ""
    actual, expected = read_pins(installed), read_pins(pins)
    mpi = folder / ".mpi"
    uses_system_mpi = mpi.is_file() and mpi.read_text(encoding="utf-8").strip() == "system"
    if uses_system_mpi or (folder / ".installed-system").exists():
        expected.pop("mpich", None)
    names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    differences = [
        f"{name} {actual.get(name, '-')} where the profile has {expected.get(name, '-')}" for name in names[:2]
    ]
    more = [f"{len(names) - 2} more"] if len(names) > 2 else []
    return ", ".join(differences + more)


def require_architecture(profile: Profile) -> None:
    """Refuse a profile whose pins are for another architecture than this machine's.

    Raises:
        UsageError: they are; the message lists the profiles for this one.
    """
    machine = this_system().architecture()
    if profile.architecture in ("", machine):
        return
    others = [load_profile(file) for file in profile_files().values()]
    fitting = [other.name for other in others if other.pins and other.architecture in ("", machine)]
    raise UsageError(
        f"{profile.name}: its pins are for {profile.architecture}, and this machine is {machine}; valid: "
        f"{', '.join(fitting)}"
    )


def require_created(profile: Profile, command: str = "") -> None:
    """Refuse an environment that is not complete on this machine.

    Args:
        command: the command that creates it; default: the one for the profile's own folder.

    Raises:
        UsageError: it is not created, half created, for another architecture, or in a tar file that was not unpacked
            here.
    """
    require_architecture(profile)
    location = location_of(profile)
    if location.state == "by a job":
        raise UsageError(
            f"{profile.name}: it is built by a job into a tar file (`fugaku-gpt env create {profile.name}`); on a node "
            "that has unpacked it, name the folder with --at FOLDER"
        )
    if location.state == "other":
        raise UsageError(
            f"{location.folder}: is another build than {profile.name}: {location.differing_pins}; "
            f"{DIFFERENT_BUILD_MEND}"
        )
    if location.state != "yes":
        problem = "is not made" if location.state == "no" else "was not finished"
        raise UsageError(
            f"{location.folder}: the environment {problem}: {command or f'fugaku-gpt env create {profile.name}'}"
        )


def missing_modules(profile: Profile) -> List[str]:
    """Return the modules of a profile that are not loaded, in the order of the profile.

    ``foo`` is loaded in any version, ``foo/1.2`` in that version only, as `module load` understands the names.
    """
    loaded = os.environ.get("LOADEDMODULES", "").split(":")
    return [
        name
        for name in profile.modules
        if not any(module == name or module.startswith(f"{name}/") for module in loaded)
    ]


def _by_version(file: Path) -> List[object]:
    """Sort key of profile files by version: torch-1.7 comes before torch-1.10."""
    family, _, version = file.stem.rpartition("-")
    return [family != "torch", family, [int(part) if part.isdecimal() else 0 for part in version.split(".")], file.stem]
