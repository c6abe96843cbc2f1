"""Writes the bill of materials of a lock: ``make sbom``, or ``python -m env.make_sbom LOCK FILE``.

It is CycloneDX 1.6 in JSON. Each package of the lock is a component, with the files that may be installed and their
SHA-256; the CPU build of PyTorch, which takes the place of the other, and what only builds for CUDA need are of the
scope "optional". The same lock gives the same bytes: there is no time in it, and its serial number follows from its
contents. Licences of the packages are not in locks, so not here either.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any, Dict, List, Sequence
from urllib.parse import quote

from env.lockfile import LockedPackage, LockError, normalized, read_lock

ROOT = Path(__file__).resolve().parents[1]


def bill_of_materials(
    base: Sequence[LockedPackage], cpu: Sequence[LockedPackage], cuda: Sequence[LockedPackage], version: str
) -> Dict[str, Any]:
    """The document, as JSON has it.

    Args:
        base: the packages of the lock.
        cpu: builds that may be installed in place of packages of the same name.
        cuda: what other builds need besides.
        version: that of fugaku_gpt.
    """
    name = _reference("fugaku-gpt", version)
    root = {
        "type": "application",
        "bom-ref": name,
        "name": "fugaku_gpt",
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "purl": name,
    }
    components = sorted(
        [*(_component(package, "required") for package in base), *(_component(package, "optional") for package in cuda)]
        + [_component(package, "optional") for package in cpu],
        key=lambda component: str(component["purl"]),
    )
    document: Dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        # which package needs which is not in a lock
        "compositions": [
            {"aggregate": "complete", "assemblies": [name]},
            {"aggregate": "unknown", "dependencies": [name]},
        ],
    }
    contents = json.dumps(document, sort_keys=True)
    return {**document, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, contents)}"}


def _component(package: LockedPackage, scope: str) -> Dict[str, Any]:
    reference = _reference(package.name, package.version)
    files: List[Dict[str, Any]] = [
        {"type": "distribution", "url": quote(file.name), "hashes": [{"alg": "SHA-256", "content": file.sha256}]}
        for file in package.files
    ]
    return {
        "type": "library",
        "bom-ref": reference,
        "name": package.name,
        "version": package.version,
        "scope": scope,
        "purl": reference,
        "externalReferences": files,
    }


def _reference(name: str, version: str) -> str:
    return f"pkg:pypi/{normalized(name)}@{quote(version)}"


def _own_version() -> str:
    text = (ROOT / "fugaku_gpt" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if version is None:
        raise LockError("fugaku_gpt/__init__.py: no __version__ there")
    return version[1]


def main(arguments: Sequence[str]) -> int:
    """Write the document of a lock; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m env.make_sbom", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lock", type=Path)
    parser.add_argument("file", type=Path, help="where the document is written")
    options = parser.parse_args(arguments)
    lock: Path = options.lock
    try:
        variants = {
            kind: read_lock(file) if (file := lock.with_name(f"{lock.stem}-{kind}.lock")).is_file() else []
            for kind in ("cpu", "cuda")
        }
        document = bill_of_materials(read_lock(lock), variants["cpu"], variants["cuda"], _own_version())
        options.file.parent.mkdir(parents=True, exist_ok=True)
        options.file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (LockError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.file}: {len(document['components'])} packages of {lock}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
