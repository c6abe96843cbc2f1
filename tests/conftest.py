"""Settings, hooks and fixtures of all tests."""

from __future__ import annotations

import copy
import fcntl
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator, List, Optional

import pytest
from hypothesis import HealthCheck, settings

from fugaku_gpt.launch.launcher import MPICH, find_launcher
from fugaku_gpt.machine.garbage_collection import gc_paused
from tests.support.forks import ForkedPython, starting
from tests.support.imports import needs_training

# A shell starts its background jobs with Ctrl-C ignored, and children inherit that: tests that send it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads that wait for each other sleep soon, instead of spinning on cores that other tests want; read as PyTorch is
# loaded. `fugaku-gpt train` sets the same for ranks that it starts.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# The duration of an example depends on the load of the machine, not on the code.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("suite"), max_examples=30)


@pytest.fixture(autouse=True)
def variables_of_each_test() -> Iterator[None]:
    """Restore the environment: `train` in this process sets the threads of the libraries that it loads."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def pytest_configure(config: pytest.Config) -> None:
    """Without slow tests (`make quick`), a property that does not set its number of examples is tried less often."""
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "suite")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> Optional[bool]:
    """With ``-m "... not torch"``, a file whose every test would be left out is not imported, nor a folder whose
    conftest imports PyTorch: that takes seconds."""
    if "not torch" not in config.option.markexpr:
        return None
    file = collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    is_imported = file.name == "conftest.py" or file.name.startswith("test_")
    return True if is_imported and file.is_file() and needs_training(file) else None


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects tests without collecting garbage: that would traverse all objects of PyTorch and of all tests each time.
    They are never traversed later, either."""
    with gc_paused():
        yield


def _ranks_chain(item: pytest.Item) -> Optional[str]:
    """Tests with real ranks are two chains, of which one test each runs at a time: those of ``test_mpi.py``, which
    start up to eight ranks for minutes, and all others. None for tests without ranks."""
    if item.get_closest_marker("mpi") is None:
        return None
    return "many" if item.path.name == "test_mpi.py" else "few"


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(items: List[pytest.Item]) -> Iterator[None]:
    """Mark as ``torch`` all tests of files that import PyTorch; other markers are written at the tests.

    Tests with real ranks are slow, as long ones are, and begin first: pytest-xdist's ``worksteal`` gives each of its
    processes a stretch of the list, so one chain is at the head of the first stretch, and the other at the head of the
    second.
    """
    for item in items:
        if needs_training(item.path):
            item.add_marker(pytest.mark.torch)
        if item.get_closest_marker("mpi") or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    yield  # `-m` and `-k` select tests
    many, few, others = ([item for item in items if _ranks_chain(item) == chain] for chain in ("many", "few", None))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    stretch = max(0, len(items) // workers - len(many)) if workers > 1 else 0
    items[:] = [*many, *others[:stretch], *few, *others[stretch:]]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let tests of a chain wait for each other, whichever process of pytest-xdist runs them."""
    chain = _ranks_chain(item)
    if chain is None:
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"fugaku_gpt-{chain}-ranks-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def forking_python(shared: Path) -> Iterator[Optional[Path]]:
    """Returns the program that stands for this Python and runs in forks of one process, in which PyTorch is imported;
    None where ranks cannot be such forks: on Open MPI, which passes a rank more than one open file, and before Python
    3.9."""
    if sys.version_info < (3, 9) or find_launcher().family != MPICH:
        yield None
        return
    python = ForkedPython(shared / "forking", Path(sys.executable))
    with python.connect():
        yield python.program


@pytest.fixture
def forked_starts(forking_python: Optional[Path]) -> Iterator[None]:
    """Lets processes that a test starts by ``sys.executable``, and ranks, be forks. Python and PyTorch take seconds to
    start, and the test is about what they do then."""
    with starting(forking_python):
        yield


@pytest.fixture(autouse=True)
def restored_kernel_choices() -> Iterator[None]:
    """Restore the kernel choices (``compat``) that a run in this process has made, for the tests after it."""
    name = "fugaku_gpt.compat.kernel_choices"  # imports PyTorch, which most tests do without
    module: Any = sys.modules.get(name)
    choices = None if module is None else copy.deepcopy(module.RANK_CONSENSUS)
    yield
    module = sys.modules.get(name)
    if module is not None:
        vars(module.RANK_CONSENSUS).update(vars(choices or module.KernelChoices()))
