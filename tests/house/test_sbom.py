"""Tests of the bill of materials: valid by the schema of CycloneDX, of the same bytes each time, and of the lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict
from urllib.parse import unquote

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import fugaku_gpt
from env import make_sbom
from env.lockfile import read_lock

ROOT = Path(__file__).resolve().parents[2]


def document(name: str, file: Path) -> Dict[str, Any]:
    """The bill of materials of a lock, as the program writes it into a file."""
    assert make_sbom.main([str(ROOT / "env" / f"{name}.lock"), str(file)]) == 0
    contents: Dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return contents


@pytest.mark.parametrize("name", ["torch-2.13", "aarch64-torch-2.10", "torch-1.7"])
def test_it_is_valid_and_has_every_file_of_the_lock(name: str, tmp_path: Path) -> None:
    contents = document(name, tmp_path / "build" / "sbom.cdx.json")
    text = (tmp_path / "build" / "sbom.cdx.json").read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert contents["metadata"]["component"]["version"] == fugaku_gpt.__version__

    listed = {
        (component["name"], component["version"], unquote(file["url"]), file["hashes"][0]["content"])
        for component in contents["components"]
        for file in component["externalReferences"]
    }
    locks = [ROOT / "env" / f"{name}{kind}.lock" for kind in ("", "-cpu", "-cuda")]
    assert listed == {
        (package.name, package.version, file.name, file.sha256)
        for lock in locks
        if lock.is_file()
        for package in read_lock(lock)
        for file in package.files
    }
    references = [component["purl"] for component in contents["components"]]
    assert len(set(references)) == len(references) and references == sorted(references)


def test_the_validator_refuses_a_wrong_hash(tmp_path: Path) -> None:
    contents = document("torch-2.13", tmp_path / "sbom.json")
    contents["components"][0]["externalReferences"][0]["hashes"][0]["content"] = "no hash"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(contents)) is not None


def test_packages_for_cuda_are_optional(tmp_path: Path) -> None:
    components = document("torch-2.13", tmp_path / "sbom.json")["components"]
    scope = {component["purl"]: component["scope"] for component in components}
    cuda = {package.name for package in read_lock(ROOT / "env" / "torch-2.13-cuda.lock")}
    optional = {purl.partition("@")[0] for purl, value in scope.items() if value == "optional"}
    assert optional == {f"pkg:pypi/{name}" for name in cuda | {"torch"}}
    assert scope["pkg:pypi/torch@2.13.0"] == "required" and scope["pkg:pypi/torch@2.13.0%2Bcpu"] == "optional"


def test_it_has_the_same_bytes_elsewhere_and_at_another_time(tmp_path: Path) -> None:
    document("torch-2.13", tmp_path / "first.json")
    subprocess.run(
        [sys.executable, "-m", "env.make_sbom", str(ROOT / "env" / "torch-2.13.lock"), "second.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()


def test_a_file_that_is_no_lock_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.lock").write_text("click\n", encoding="utf-8")
    assert make_sbom.main([str(tmp_path / "bad.lock"), str(tmp_path / "sbom.json")]) == 2
    assert "bad.lock:1: 'click' is no line of a lock file" in capsys.readouterr().err
    assert not (tmp_path / "sbom.json").exists()
