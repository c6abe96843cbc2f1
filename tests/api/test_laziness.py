"""Tests that the interface imports little: nothing before a name is used, and PyTorch and MPI never."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fugaku_gpt import api

WALL = """
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "mpi4py"):
            raise SystemExit("imports " + name)

sys.meta_path.insert(0, Wall())
"""


def output_of(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_nothing_is_imported_before_a_name_is_used() -> None:
    program = "import sys; import fugaku_gpt.api as api; print(*(m for m in sys.modules if m.startswith('fugaku')));"
    assert output_of(program + "assert 'yaml' not in sys.modules") == "fugaku_gpt fugaku_gpt.api\n"


@pytest.mark.slow
def test_calls_without_ranks_need_neither_pytorch_nor_mpi() -> None:
    program = """
from fugaku_gpt import api
for name in api.__all__:
    getattr(api, name)
run = api.load_run(preset="tiny", settings={"job.group": "hp000000", "job.elapse": "1:00:00"})
script = api.render_job(run, scheduler="pjm")
assert api.parse_script(script.text)["settings"]
api.lint(script.text)
assert api.plan_memory(run, machine="a64fx").does_fit
api.plan_time(run)
"""
    output_of(WALL + program)


def test_each_promised_name_is_there_and_typed_as_it_is_imported() -> None:
    for name in api.__all__:
        value = getattr(api, name)
        assert value is not None and name in dir(api), name
    assert sorted(api.__all__) == sorted(api._MODULES)
    with pytest.raises(AttributeError, match="module 'fugaku_gpt.api' has no attribute 'fly'"):
        _ = api.fly  # type: ignore[attr-defined]


def test_each_promised_function_and_class_has_a_description() -> None:
    for name in api.__all__:
        if name != "SCHEMA_NAMES":
            assert (getattr(api, name).__doc__ or "").strip(), name
