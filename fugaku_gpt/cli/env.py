"""``fugaku-gpt env``: the environments of the builds of PyTorch: list, create, check, how they are compiled, and the
kernels of our own in them."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Optional, Tuple, TypeVar

import click

from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import render_rows
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.config.profile import Profile

F = TypeVar("F", bound=Callable[..., object])

_at: Callable[[F], F] = click.option(
    "--at",
    metavar="FOLDER",
    type=PATH,
    help="Folder of the environment, in place of its profile's; for a build in a tar file, where it is unpacked.",
)
_settings: Callable[[F], F] = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting of the job that builds, such as job.group=hp000000; repeatable.",
)

_package: Callable[[F], F] = click.option(
    "--package", metavar="PATH", help="The fugaku_gpt that pip installs into the build; default: this checkout."
)


@click.group()
def env() -> None:
    """List, create and check environments; there is one for each build of PyTorch.

    NAME is a profile in env/, or the path of a profile of your own.
    """


@env.command("list")
@format_option()
def list_(form: str) -> None:
    """List the profiles, where their environments are, and whether they have been created."""
    from fugaku_gpt.environments.registry import place_of, profile_files, resolve

    rows = []
    for file in profile_files().values():
        profile = resolve(str(file))
        place = place_of(profile)
        where = "in a tar file" if place.made == "by a job" else _short(place.folder)
        rows.append(
            {
                "name": profile.name,
                "pytorch": profile.expected.torch or None,
                "python": profile.python_version or None,
                "where": where,
                "made": place.made,
                "note": profile.note or None,
            }
        )
    click.echo(render_rows(("name", "pytorch", "python", "where", "made", "note"), rows, form), nl=False)


@env.command()
@click.argument("name")
@_at
@click.option("--python", metavar="FILE", help="Python to create it with; default: one of the profile's version.")
@click.option("--pip-args", default="", metavar="WORDS", help="Further options for pip, such as '--index-url ...'.")
@click.option(
    "--again", is_flag=True, help="Install again into an existing environment, which repairs what `env check` finds."
)
@_settings
@_package
def create(
    name: str,
    at: Optional[Path],
    python: Optional[str],
    pip_args: str,
    again: bool,
    settings: Tuple[str, ...],
    package: Optional[str],
) -> None:
    """Create the environment NAME, or finish it; for a build in a tar file, write its job and its activation script.

    An unfinished environment is not used by anything; the same command continues it. For a build that is compiled,
    build.sh, a job for pjsub, and activate.sh, to be sourced on nodes, are written to FOLDER (default: build-NAME).
    """
    from fugaku_gpt.environments.create import create as make
    from fugaku_gpt.environments.registry import OTHER_MEND, find_profile, place_of, resolve

    profile = resolve(name)
    if profile.in_tarball:
        if python is not None or pip_args or again:
            raise UsageError(f"{profile.name}: is compiled by a job: --python, --pip-args and --again are not for it")
        folder = at if at is not None else Path(f"build-{profile.name}")
        _write_recipe(profile, find_profile(name), folder, settings, package)
        return
    if settings or package is not None:
        raise UsageError(f"{profile.name}: is installed by pip, not by a job: --set and --package are not for it")
    if not profile.pins:
        raise UsageError(f"{profile.name}: its profile names no pins: there is nothing to make")
    place = place_of(resolve(name, at.absolute() if at is not None else None))
    if place.made == "other" and not again:
        raise UsageError(f"{_short(place.folder)}: is another build than {profile.name}: {place.other}; {OTHER_MEND}")
    if place.made == "yes" and not again:
        click.echo(f"{profile.name}: is made already, in {_short(place.folder)}; --again goes through it again")
        return
    try:
        words = shlex.split(pip_args)
    except ValueError as error:
        raise UsageError(f"--pip-args {pip_args}: {error}") from None
    seconds = make(profile, place.folder, python, words, lambda line: click.echo(line, err=True))
    click.echo(f"{profile.name}: made in {seconds:.0f} s, in {_short(place.folder)}; activate it with")
    click.echo(f"    . {shlex.quote(str(place.folder / 'bin' / 'activate'))}")
    for limit in profile.limits:
        click.echo(f"known limit: {limit}")


@env.command()
@click.argument("name")
@_at
@format_option()
def check(name: str, at: Optional[Path], form: str) -> int:
    """Compare the contents of the environment NAME with its profile.

    Its Python, started as ranks are, reports versions, BLAS, the instruction set that is really used, threads, fused
    kernels, denormals, the kernels of fugaku_gpt, and MPI. The exit code is 3 if something differs or is missing.
    """
    from fugaku_gpt.environments.check import check_environment
    from fugaku_gpt.environments.registry import require_made, resolve

    profile = resolve(name, at.absolute() if at is not None else None)
    where = f" --at {shlex.quote(str(at))}" if at is not None else ""
    require_made(profile, f"fugaku-gpt env create {name}{where}")
    mend = f"fugaku-gpt env recipe {name}" if profile.in_tarball else f"fugaku-gpt env create {name}{where} --again"
    if form == "table":
        click.echo(f"{profile.name}: {_short(Path(profile.python))}", err=True)
    findings = check_environment(profile, mend)
    rows = [{**asdict(finding), "mend": finding.mend or None} for finding in findings]
    click.echo(render_rows(("what", "expected", "found", "status", "mend"), rows, form), nl=False)
    if form == "table":
        for limit in profile.limits:
            click.echo(f"known limit: {limit}", err=True)
    return EXIT_FINDINGS if any(finding.wrong for finding in findings) else EXIT_OK


@env.command()
@click.argument("name")
@_settings
@_package
@click.option("--out", type=PATH, help="Write the job to this file instead of printing it.")
def recipe(name: str, settings: Tuple[str, ...], package: Optional[str], out: Optional[Path]) -> None:
    """Print the PJM job that compiles the build NAME from source into a tar file; nothing is submitted."""
    from fugaku_gpt.environments.registry import find_profile, resolve
    from fugaku_gpt.jobs.build_recipe import recipe as render

    script = render(resolve(name), find_profile(name), settings, package)
    for note in script.notes:
        click.echo(f"note: {note}", err=True)
    if out is None:
        click.echo(script.text, nl=False)
    else:
        _write(out, script.text)


@env.command()
@click.option("--compiler", metavar="COMMAND", help="C compiler; default: the first of cc, gcc and clang on PATH.")
@click.option("--again", is_flag=True, help="Compile again, even if they are compiled already.")
def kernels(compiler: Optional[str], again: bool) -> None:
    """Compile the kernels of fugaku_gpt for this processor, into the environment of this Python.

    They are optional: without them, those of PyTorch are used. To compile them for another environment, use its Python:
    FOLDER/bin/python -m fugaku_gpt env kernels
    """
    from fugaku_gpt.kernels import compile_kernels, library_file

    there = library_file()
    if there.exists() and not again:
        click.echo(f"kernels: are compiled already, in {_short(there)}; --again compiles them again")
        return
    click.echo("compiling kernels for this processor", err=True)
    made = compile_kernels(compiler)
    if made.refused:
        click.echo(f"note: the kernels may be slower than they could be; the compiler refused {made.refused}", err=True)
    how = f"compiled by {made.target}" if made.target else "compiled"
    click.echo(f"kernels: {how}, in {_short(made.file)}")


def _write_recipe(
    profile: "Profile", profile_file: Path, folder: Path, settings: Tuple[str, ...], package: Optional[str]
) -> None:
    from fugaku_gpt.jobs.build_recipe import activation, tarball_name
    from fugaku_gpt.jobs.build_recipe import recipe as render

    script = render(profile, profile_file, settings, package)
    tarball = folder.absolute() / tarball_name(profile)
    lines = activation(profile, tarball)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
    _write(folder / "build.sh", script.text)
    _write(folder / "activate.sh", lines)
    for note in script.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{folder / 'build.sh'}: compiles it: cd {shlex.quote(str(folder))} && pjsub build.sh")
    click.echo(f"{folder / 'activate.sh'}: unpacks and activates {tarball.name} on a node")
    click.echo(f"runs use it with job.profile={profile_file} and job.tarball={tarball}")
    for limit in profile.limits:
        click.echo(f"known limit: {limit}")


def _write(file: Path, text: str) -> None:
    from fugaku_gpt.records.files import write_text_atomically

    try:
        write_text_atomically(file, text)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None


def _short(path: Path) -> str:
    """A path from the present folder, where it is inside of it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
