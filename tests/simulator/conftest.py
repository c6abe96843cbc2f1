"""A simulator shared by the tests of a file; each test submits from its own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Protocol

import pytest

from fugaku_gpt.simulator.session import Simulator
from tests.support.simulated import simulated


class Write(Protocol):
    """Puts a script into the test's folder; returns its name."""

    def __call__(
        self, body: str, directives: str = "", name: str = "job.sh", interpreter: str = "#!/bin/bash"
    ) -> str: ...


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
