"""Builds the wheel of the package so that two builds of one commit are equal: ``make wheel``.

The sources that git tracks are copied to an empty folder, built there, and the wheel is packed again with the date of
the last commit (SOURCE_DATE_EPOCH states another; without git it is that of the zip format's beginning) and the same
permissions for all files. Folder, time, umask and locale of a build leave no trace. Python's zlib and the version of
setuptools do: they are those of the environment, and its lock pins setuptools.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import List, Sequence

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("fugaku_gpt", "jobscripts", "env", "docs")
PROJECT_FILES = ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
_FIRST_OF_ZIP = 315532800  # 1980-01-01, in seconds since 1970


def source_files(checkout: Path) -> List[Path]:
    """The files that a build needs, relative to the checkout: those that git tracks, or, without git, all."""
    done = subprocess.run(
        ["git", "-C", str(checkout), "ls-files", "-z", "--", *SOURCES, *PROJECT_FILES],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    tracked = [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]
    if done.returncode == 0 and tracked:
        return [file for file in tracked if (checkout / file).is_file()]
    files = [Path(name) for name in PROJECT_FILES]
    for folder in SOURCES:
        files += [path.relative_to(checkout) for path in (checkout / folder).rglob("*") if path.is_file()]
    return [file for file in files if "__pycache__" not in file.parts]


def date_of_build(checkout: Path) -> int:
    """The time that the files of a wheel have, in seconds since 1970."""
    if os.environ.get("SOURCE_DATE_EPOCH"):
        return int(os.environ["SOURCE_DATE_EPOCH"])
    done = subprocess.run(
        ["git", "-C", str(checkout), "log", "-1", "--format=%ct"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip() else _FIRST_OF_ZIP


def pack_again(wheel: Path, target: Path, seconds: int) -> None:
    """Write a wheel's contents in the same order with one time and the permissions rw-r--r-- for each file.

    Args:
        seconds: the time, in seconds since 1970; the zip format begins with 1980.
    """
    date = time.gmtime(max(seconds, _FIRST_OF_ZIP))[:6]
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in source.namelist():
            entry = zipfile.ZipInfo(name, date)
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3  # Unix
            packed.writestr(entry, source.read(name), zipfile.ZIP_DEFLATED)


def build(checkout: Path, folder: Path) -> Path:
    """Build the wheel of a checkout into a folder; returns its file.

    Raises:
        subprocess.CalledProcessError: the build has failed; its output was printed.
    """
    with tempfile.TemporaryDirectory() as work:
        copy, out = Path(work, "checkout"), Path(work, "out")
        for file in source_files(checkout):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(checkout / file), str(copy / file))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout, file=sys.stderr)
            done.check_returncode()
        (wheel,) = out.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{wheel.name}"
        pack_again(wheel, unfinished, date_of_build(checkout))
        unfinished.replace(folder / wheel.name)
        return folder / wheel.name


def main(arguments: Sequence[str]) -> int:
    """Build the wheel of this checkout; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m env.make_wheel", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the wheel is written")
    try:
        print(build(ROOT, parser.parse_args(arguments).folder))
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        print(f"the wheel is not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
