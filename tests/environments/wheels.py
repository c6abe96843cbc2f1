"""Small wheels in a folder that pip uses as its package index, so that nothing is downloaded."""

from __future__ import annotations

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
