"""Scripts for a PyTorch build in a tar file: the job that compiles it, and the lines that activate it on a node."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.config.profile import Build, Profile
from fugaku_gpt.errors import ConfigError, UsageError
from fugaku_gpt.jobs.missing import missing_needs
from fugaku_gpt.jobs.render import JobScript, render_job
from fugaku_gpt.machine.checkout import checkout

_FOLDERS = re.compile(r"\{(prefix|compiler)\}")


def build_job(
    profile: Profile, profile_file: Path, settings: Sequence[str] = (), package: Optional[str] = None
) -> JobScript:
    """Render the PJM job that compiles a build and leaves its tar file in the job's folder.

    Args:
        profile: profile as ``resolve`` returns it.
        profile_file: file of the profile, by which the job checks the build.
        settings: settings of the sections ``job`` and ``node``, such as ``job.group=hp000000``.
        package: requirement that pip installs as fugaku_gpt; default: this checkout.

    Raises:
        UsageError: the profile is not compiled, or there is no checkout to install from.
        ConfigError: a setting is not valid.
    """
    build = _compiled_build(profile)
    root = package if package is not None else checkout()
    if root is None:
        raise UsageError(
            "this fugaku_gpt was installed without its checkout, which is to be installed into the build: name the "
            "checkout, or a wheel of it, with --package"
        )
    config = _build_config(profile, settings)
    # pip finds a package that is not a file, such as an address
    files = [str(Path(root) / "setup.cfg")] if package is None else [package] if Path(package).is_absolute() else []
    context = {
        "build": build,
        "profile": profile,
        "profile_file": str(profile_file.absolute()),
        "settings_values": _shell_pairs(build.set),
        "edits": [tuple(text.split(": ", 1)) for text in build.edit],
        "build_variables": _shell_pairs(build.environment),
        "steps": [_command(step) for step in build.steps],
        "package": str(root),
        "readable": [*files, str(profile_file.absolute())],
        "tarball": tarball_name(profile),
        "incomplete": f"{profile.name}.incomplete.tar",
        "tarred": [f"{build.prefix}/{name}" for name in build.keep] or [build.prefix],
    }
    bare_profile = replace(profile, path=(), library_path=(), preload=(), environment=())
    notes = missing_needs(config, trains=False)
    script = render_job(config, bare_profile, name="build_torch.sh.j2", extra_values=context, notes=notes)
    if config.job.volumes:
        return script
    note = f"no job.volumes: {root} and the profile must be on a volume that every node has, or be named there"
    return replace(script, notes=(*script.notes, note))


def activation(profile: Profile, tarball: Path) -> str:
    """Render the lines to source on a node: they load modules, unpack the tar file and set search paths."""
    _compiled_build(profile)
    config = _build_config(profile, [f"job.tarball={tarball}"])
    variables = dict(setting.split("=", 1) for setting in profile.environment)
    context = {"profile": profile, "variables": variables, "mark": f".{tarball_name(profile)}.unpacked"}
    return render_job(config, profile, name="activate.sh.j2", extra_values=context).text


def tarball_name(profile: Profile) -> str:
    """Return the name of a build's tar file."""
    return f"{profile.name}.tar"


def _compiled_build(profile: Profile) -> Build:
    build = profile.build
    if not profile.in_tarball:
        raise UsageError(f"{profile.name}: is installed by pip, not compiled: fugaku-gpt env create {profile.name}")
    for key in ("branch", "scripts", "compiler", "prefix", "steps"):
        if not getattr(build, key):
            raise ConfigError(f"{profile.name}: build.{key}: is not set, and the build's job needs it")
    if build.set and not build.settings:
        raise ConfigError(f"{profile.name}: build.set: changes lines of build.settings, which is not set")
    return build


def _build_config(profile: Profile, settings: Sequence[str]) -> RunConfig:
    """Return the configuration of the build's job: one node, with one process on all of its cores."""
    for text in settings:
        if not text.strip().startswith(("job.", "node.")):
            raise ConfigError(f"--set {text}: a build's job takes keys of job and node, such as job.group=hp000000")
    defaults = [
        "job.scheduler=pjm",
        f"job.name=build-{profile.name}",
        f"job.elapse={profile.build.hours}:00:00",
        f"job.local_tmp={profile.build.local_tmp}",
    ]
    config = load_run_config(overrides=[*defaults, *settings])
    if config.job.scheduler != "pjm" or config.job.nodes != 1 or config.job.chain != 1 or config.job.bulk:
        raise ConfigError("a build's job is one job of one node under PJM: leave out job.scheduler, nodes, chain, bulk")
    return config


def _shell_pairs(texts: Sequence[str]) -> List[Tuple[str, str]]:
    """Split each ``NAME=value`` into the name and a quoted value for the shell."""
    values: Dict[str, str] = dict(text.split("=", 1) for text in texts)
    return [(name, _shell_word(value)) for name, value in values.items()]


def _command(text: str) -> str:
    try:
        return " ".join(_shell_word(word) for word in shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"build.steps: {text!r}: {error}") from None


def _shell_word(text: str) -> str:
    """Quote a word for the shell; ``{prefix}`` and ``{compiler}`` become shell variables.

    >>> _shell_word("{compiler}/bin/fcc -Kfast")
    '"$compiler"\\'/bin/fcc -Kfast\\''
    """
    pieces = _FOLDERS.split(text)  # every second piece is the name of a folder
    quoted = [f'"${piece}"' if index % 2 else shlex.quote(piece) for index, piece in enumerate(pieces) if piece]
    return "".join(quoted) or "''"
