"""Small wheels in a folder that pip uses as its package index, so that nothing is downloaded."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Dict

# The build backend of setup.cfg, as far as an editable install asks it.
_BACKEND = """
import os, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "fugaku_gpt-0.1.0-py3-none-any.whl"
    info = "fugaku_gpt-0.1.0.dist-info/"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        wheel.writestr("fugaku_gpt_here.pth", os.getcwd() + "\\n")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: fugaku_gpt\\nVersion: 0.1.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""

# The build backend of an mpi4py that remembers the mpicc which compiled it: under another's mpirun, each rank is alone.
_MPI4PY_BACKEND = """
import os, subprocess, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name, info = "mpi4py-{version}-py3-none-any.whl", "mpi4py-{version}.dist-info/"
    compiled_by = subprocess.check_output(["mpicc", "-show"], text=True)
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        wheel.writestr("mpi4py/__init__.py", "")
        wheel.writestr(
            "mpi4py/MPI.py",
            "import subprocess, types\\n"
            "is_same = subprocess.check_output(['mpicc', '-show'], text=True) == " + repr(compiled_by) + "\\n"
            "COMM_WORLD = types.SimpleNamespace(size=2 if is_same else 1)\\n",
        )
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: mpi4py\\nVersion: {version}\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


def write_mpi4py_source(folder: Path, version: str) -> None:
    """Write a source distribution of an mpi4py that fits only the MPI whose ``mpicc`` has compiled it."""
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: mpi4py\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": _MPI4PY_BACKEND.replace("{version}", version),
    }
    with tarfile.open(folder / f"mpi4py-{version}.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"mpi4py-{version}/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


def write_open_mpi(folder: Path, version: str) -> None:
    """Write an ``mpirun``, which starts one rank whatever it is asked for, and an ``mpicc``, which compiles nothing."""
    folder.mkdir()
    programs = {
        "mpirun": f'if [ "$1" = --version ]; then echo "mpirun (Open MPI) {version}"; exit; fi\n'
        'while [ "${1#*python}" = "$1" ]; do shift; done\nexec "$@"\n',
        "mpicc": f"echo gcc -I/opt/open-mpi-{version}/include\n",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
        (folder / name).chmod(0o755)


def write_wheel(folder: Path, name: str, version: str, files: Dict[str, str]) -> None:
    """Write a wheel of a pure package."""
    info = f"{name}-{version}.dist-info/"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")


def write_backend(folder: Path) -> None:
    """Write the wheel that ``pip install --editable`` of this checkout needs to build it."""
    write_wheel(folder, "setuptools", "99.0", {"setuptools/__init__.py": "", "setuptools/build_meta.py": _BACKEND})
