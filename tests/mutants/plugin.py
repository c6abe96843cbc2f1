"""A plugin of pytest that says which test runs which line, and runs chosen tests in a chosen order.

``--line-map FILE``: under ``coverage run``, each test is a context of the coverage; results and seconds of processor
time of the tests are written to FILE. ``--chosen-tests FILE``: only tests whose ids are in FILE, in this order.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

_LONGEST = 120.0  # seconds of processor time of a test under coverage: only an endless one takes them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--line-map", type=Path)
    parser.addoption("--chosen-tests", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.line_map is not None:
        config.pluginmanager.register(_Recorder(config.option.line_map))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    if config.option.chosen_tests is not None:
        order = {name: position for position, name in enumerate(json.loads(config.option.chosen_tests.read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def _stop(*_: object) -> None:
    raise TimeoutError(f"more than {_LONGEST:g} s of processor time")


class _Recorder:
    """Switches the context of the coverage for each test, and writes seconds and results of all. Coverage makes a test
    several times as slow; one that never ends fails, and so is never chosen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: Dict[str, float] = {}
        self._failed: List[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import coverage

        running = coverage.Coverage.current()
        if running is not None:
            running.switch_context(item.nodeid)
        start = time.process_time()
        signal.signal(signal.SIGVTALRM, _stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST)
        yield
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self._seconds[item.nodeid] = time.process_time() - start
        if running is not None:
            running.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps({"seconds": self._seconds, "failed": self._failed}), encoding="utf-8")
