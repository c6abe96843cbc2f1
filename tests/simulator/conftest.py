"""A simulator shared by the tests of a file; each test submits from its own folder. And what its scripts need."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Protocol

import pytest

from fugaku_gpt.simulator.session import Simulator
from tests.support.simulated import simulated

GO = "while ! test -e go; do sleep 0.02; done"  # the script waits for the test


class Write(Protocol):
    """Puts a script into the test's folder; returns its name."""

    def __call__(
        self, body: str, directives: str = "", name: str = "job.sh", interpreter: str = "#!/bin/bash"
    ) -> str: ...


def alive(pid_file: Path) -> bool:
    """Whether the process that wrote its id into a file still runs."""
    pid = int(pid_file.read_text())
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with simulated(tmp_path_factory.mktemp("sim") / "spool") as running:
        yield running


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(body: str, directives: str = "", name: str = "job.sh", interpreter: str = "#!/bin/bash") -> str:
        lines = [interpreter] if interpreter else []
        lines += [f"#PJM {line}" for line in directives.splitlines()]
        (tmp_path / name).write_text("\n".join([*lines, body]) + "\n", encoding="utf-8")
        return name

    return write
