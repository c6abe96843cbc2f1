"""``fugaku-gpt env``: list, create and check the environments of the builds of PyTorch, print the jobs that compile
them, and compile the kernels of fugaku_gpt in them."""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Optional, Tuple, TypeVar

import click

from fugaku_gpt.cli.options import PATH, format_option
from fugaku_gpt.cli.output import echo, echo_script, render_rows
from fugaku_gpt.errors import EXIT_FINDINGS, EXIT_OK, UsageError

if TYPE_CHECKING:
    from fugaku_gpt.config.profile import Profile

F = TypeVar("F", bound=Callable[..., object])

_at_option: Callable[[F], F] = click.option(
    "--at",
    metavar="FOLDER",
    type=PATH,
    help="Folder of the environment, in place of its profile's; for a build in a tar file, where it is unpacked.",
)
_settings_option: Callable[[F], F] = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting of the job that builds, such as job.group=hp000000; repeatable.",
)

_package_option: Callable[[F], F] = click.option(
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
    from fugaku_gpt.environments.registry import location_of, profile_files, resolve

    rows = []
    for file in profile_files().values():
        profile = resolve(str(file))
        location = location_of(profile)
        location_text = "in a tar file" if location.state == "by a job" else _relative(location.folder)
        rows.append(
            {
                "name": profile.name,
                "pytorch": profile.expected.torch or None,
                "python": profile.python_version or None,
                "where": location_text,
                "made": location.state,
                "note": profile.note or None,
            }
        )
    echo(render_rows(("name", "pytorch", "python", "where", "made", "note"), rows, form), nl=False)


@env.command()
@click.argument("name")
@_at_option
@click.option("--python", metavar="FILE", help="Python to create it with; default: one of the profile's version.")
@click.option("--pip-args", default="", metavar="ARGUMENTS", help="Further options for pip, such as '--index-url ...'.")
@click.option(
    "--unchecked",
    multiple=True,
    metavar="PACKAGE",
    help="Package whose hash is not checked, where another index has another build of it; or all; repeatable.",
)
@click.option(
    "--again", is_flag=True, help="Install again into an existing environment, which repairs what `env check` finds."
)
@_settings_option
@_package_option
def create(
    name: str,
    at: Optional[Path],
    python: Optional[str],
    pip_args: str,
    unchecked: Tuple[str, ...],
    again: bool,
    settings: Tuple[str, ...],
    package: Optional[str],
) -> None:
    """Create the environment NAME, or finish it; for a build in a tar file, write its job and its activation script.

    An unfinished environment is not used by anything; the same command continues it. For a build that is compiled,
    build.sh, a job for pjsub, and activate.sh, to be sourced on nodes, are written to FOLDER (default: build-NAME).
    """
    from fugaku_gpt.environments.create import create as create_environment
    from fugaku_gpt.environments.registry import DIFFERENT_BUILD_MEND, find_profile, location_of, resolve

    profile = resolve(name)
    if profile.in_tarball:
        if python is not None or pip_args or unchecked or again:
            raise UsageError(
                f"{profile.name}: is compiled by a job: --python, --pip-args, --unchecked and --again are not for it"
            )
        folder = at if at is not None else Path(f"build-{profile.name}")
        _write_recipe(profile, find_profile(name), folder, settings, package)
        return
    if settings or package is not None:
        raise UsageError(f"{profile.name}: is installed by pip, not by a job: --set and --package are not for it")
    if not profile.pins:
        raise UsageError(f"{profile.name}: its profile names no pins: there is nothing to make")
    location = location_of(resolve(name, at.absolute() if at is not None else None))
    if location.state == "other" and not again:
        raise UsageError(
            f"{_relative(location.folder)}: is another build than {profile.name}: {location.differing_pins}; "
            f"{DIFFERENT_BUILD_MEND}"
        )
    if location.state == "yes" and not again:
        echo(f"{profile.name}: is created already, in {_relative(location.folder)}; --again installs into it again")
        return
    try:
        pip_arguments = shlex.split(pip_args)
    except ValueError as error:
        raise UsageError(f"--pip-args {pip_args}: {error}") from None
    seconds = create_environment(
        profile, location.folder, python, pip_arguments, lambda line: echo(line, err=True), unchecked
    )
    echo(f"{profile.name}: made in {seconds:.0f} s, in {_relative(location.folder)}; activate it with")
    echo(f"    . {shlex.quote(str(location.folder / 'bin' / 'activate'))}")
    for limit in profile.limits:
        echo(f"known limit: {limit}")


@env.command()
@click.argument("name")
@_at_option
@format_option()
def check(name: str, at: Optional[Path], form: str) -> int:
    """Compare the contents of the environment NAME with its profile.

    Its Python, started as ranks are, reports versions, BLAS, the instruction set that is really used, threads, fused
    kernels, denormals, the kernels of fugaku_gpt, and MPI.

    Exit codes: 0 all is as expected, 2 usage or no such environment, 3 something differs or is missing.
    """
    from fugaku_gpt.environments.check import check_environment
    from fugaku_gpt.environments.registry import require_created, resolve

    profile = resolve(name, at.absolute() if at is not None else None)
    at_text = f" --at {shlex.quote(str(at))}" if at is not None else ""
    require_created(profile, f"fugaku-gpt env create {name}{at_text}")
    mend = f"fugaku-gpt env recipe {name}" if profile.in_tarball else f"fugaku-gpt env create {name}{at_text} --again"
    if form == "table":
        echo(f"{profile.name}: {_relative(Path(profile.python))}", err=True)
    checks = check_environment(profile, mend)
    rows = [
        {
            "what": row.subject,
            "expected": row.expected,
            "found": row.actual,
            "status": row.status,
            "mend": row.mend or None,
        }
        for row in checks
    ]
    echo(render_rows(("what", "expected", "found", "status", "mend"), rows, form), nl=False)
    if form == "table":
        for limit in profile.limits:
            echo(f"known limit: {limit}", err=True)
    return EXIT_FINDINGS if any(row.is_wrong for row in checks) else EXIT_OK


@env.command()
@click.argument("name")
@_settings_option
@_package_option
@click.option("--out", type=PATH, help="Write the job to this file instead of printing it.")
def recipe(name: str, settings: Tuple[str, ...], package: Optional[str], out: Optional[Path]) -> None:
    """Print the PJM job that compiles the build NAME from source into a tar file; nothing is submitted."""
    from fugaku_gpt.environments.registry import find_profile, resolve
    from fugaku_gpt.jobs.build_recipe import build_job as render

    script = render(resolve(name), find_profile(name), settings, package)
    for note in script.notes:
        echo(f"note: {note}", err=True)
    if out is None:
        echo_script(script.text)
    else:
        _write(out, script.text)


@env.command()
@click.option(
    "--compiler", metavar="COMMAND", help="C compiler; default: cc, gcc, clang and fcc, as far as they are on PATH."
)
@click.option("--again", is_flag=True, help="Compile and measure again, even if that is done already.")
def kernels(compiler: Optional[str], again: bool) -> int:
    """Compile the kernels of fugaku_gpt for this processor, into the environment of this Python, and try each of them.

    They are optional: without them, those of PyTorch are used. To compile them for another environment, use its Python:
    FOLDER/bin/python -m fugaku_gpt env kernels

    Then products of layers are timed in each way that there is (PyTorch's, oneDNN's, our own), and the verdict is
    written beside the library. Runs on this kind of processor use what was faster (node.compiled_products).

    Exit codes: 0 they can be used, or cannot be tried without PyTorch, 2 usage, or they cannot be compiled, 3 they
    can be compiled but not used.
    """
    from fugaku_gpt.kernels import compile_kernels, library_file
    from fugaku_gpt.kernels.check import check_library

    check = check_library if find_spec("torch") is not None else None
    library = library_file()
    problem = check(library) if check is not None and library.exists() and not again else ""
    if library.exists() and not again and not problem:
        echo(f"kernels: are compiled already, in {_relative(library)}; --again compiles them again")
    else:
        if problem:
            echo(f"kernels: those in {_relative(library)} cannot be used: {problem}", err=True)
        echo("compiling kernels for this processor", err=True)
        compiled = compile_kernels(compiler, check=check)
        for line in compiled.refused:
            echo(f"note: the kernels may be slower than they could be; refused: {line}", err=True)
        if compiled.problem:
            echo(f"kernels: PyTorch's own are used in place of these: {compiled.problem}", err=True)
            return EXIT_FINDINGS
        target_text = f" {compiled.target}" if compiled.target else ""
        echo(f"kernels: compiled by {compiled.compiler}{target_text}, in {_relative(compiled.file)}")
    echo(
        "kernels: each computes correct results here"
        if check is not None
        else "kernels: not tried: this Python has no PyTorch, whose threads they use"
    )
    if check is not None:
        _print_products(again)
    return EXIT_OK


def _print_products(again: bool) -> None:
    """Print which products of layers are faster, after measuring those that have not been."""
    from fugaku_gpt.kernels.product_check import measure_products

    measured = measure_products(again=again)
    for verdict in measured.verdicts:
        echo(f"products of layers by {verdict.name_ways()}; {verdict.describe()}")
    if measured.file is not None and not measured.problem:
        echo(f"products of layers: verdicts are in {_relative(measured.file)}")
    elif measured.problem:
        consequence = "runs measure them at their start" if measured.verdicts else "PyTorch's own are used"
        echo(f"note: {consequence}: {measured.problem}", err=True)


def _write_recipe(
    profile: "Profile", profile_file: Path, folder: Path, settings: Tuple[str, ...], package: Optional[str]
) -> None:
    from fugaku_gpt.jobs.build_recipe import activation, tarball_name
    from fugaku_gpt.jobs.build_recipe import build_job as render

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
        echo(f"note: {note}", err=True)
    echo(f"{folder / 'build.sh'}: compiles it: cd {shlex.quote(str(folder))} && pjsub build.sh")
    echo(f"{folder / 'activate.sh'}: unpacks and activates {tarball.name} on a node")
    echo(f"runs use it with job.profile={profile_file} and job.tarball={tarball}")
    for limit in profile.limits:
        echo(f"known limit: {limit}")


def _write(file: Path, text: str) -> None:
    from fugaku_gpt.records.files import write_text_atomically

    try:
        write_text_atomically(file, text)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None


def _relative(path: Path) -> str:
    """A path, relative to the present folder if it is inside of it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
