"""Tests of the checks of the machine: the verdict of each and its remedy."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Tuple

import pytest

from fugaku_gpt.doctor import machine
from fugaku_gpt.doctor.machine import FAIL, OK, WARN
from fugaku_gpt.launch.launcher import find_launcher
from fugaku_gpt.machine.system import use_system
from tests.support.recorded import a64fx_node


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
def test_this_machine_can_train() -> None:
    """The test environment is one in which training works, so no check may fail."""
    checks = machine.check_machine()
    assert [check for check in checks if check.status == FAIL] == []
    by_name = {check.name: check for check in checks}
    assert "all-reduce of 1 and 2 is 3" in by_name["two ranks"].seen
    assert by_name["PyTorch"].seen and by_name["MPI library"].seen
    assert all(check.mend for check in checks if check.status != OK)


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.mpi
@pytest.mark.parametrize("variables", [(), ("PMIX_RANK=0", "PLE_RANK_ON_NODE=0")])  # of Fujitsu's mpiexec
def test_a_rank_that_examines_its_machine_finds_its_mpi_library(variables: Tuple[str, ...]) -> None:
    launcher = find_launcher()
    command = [*launcher.command_prefix(1), "env", *variables, sys.executable, "-m", "fugaku_gpt", "doctor"]
    done = subprocess.run(
        [*command, "machine", "--format", "json"],
        env={**os.environ, **launcher.environment},
        stdout=subprocess.PIPE,
        timeout=300,
        check=False,
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["MPI library"]["status"] == checks["two ranks"]["status"] == OK, checks
    assert launcher.family in checks["MPI library"]["seen"] and done.returncode == 0


def test_missing_pieces_are_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setenv("PATH", str(tmp_path))
    torch, mpi, launcher, ranks = (
        check() for check in (machine.check_torch, machine.check_mpi, machine.check_launcher, machine.check_ranks)
    )
    assert (torch.status, torch.seen) == (FAIL, "ModuleNotFoundError: No module named 'torch'")
    assert (mpi.status, launcher.status, ranks.status) == (FAIL, FAIL, FAIL)
    assert "pip install mpich" in launcher.mend and "pip install torch" in torch.mend
    assert machine.check_package("no-such-package", WARN, "pip install it").mend == "pip install it"


def test_a_launcher_of_another_mpi_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It starts each rank alone: the classic sign that mpirun and the library do not belong together."""
    foreign = tmp_path / "mpirun"
    python = sys.executable
    foreign.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.8"; exit 0; fi\n'
        f"echo sum 1 size 1\nexit 1 # would run {python}\n"
    )
    foreign.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    check = machine.check_ranks()
    assert check.status == FAIL and "each rank is alone" in check.seen and "one family" in check.mend


def test_the_mpiexec_of_a_pjm_job_is_no_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is neither MPICH's nor Open MPI's, and starts the ranks of its job only."""
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho unknown option >&2\nexit 1\n")
    mpiexec.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PJM_JOBID", raising=False)
    assert [check().status for check in (machine.check_launcher, machine.check_ranks)] == [FAIL, FAIL]
    monkeypatch.setenv("PJM_JOBID", "7")
    launcher, ranks = machine.check_launcher(), machine.check_ranks()
    assert (launcher.status, ranks.status) == (OK, OK)
    assert "the mpiexec of this PJM job" in launcher.seen and "doctor node --job pjm" in ranks.seen


@pytest.mark.parametrize(
    ("cores", "assistants", "status"),
    [
        (range(12, 60), 2, OK),
        (range(12, 60), 4, OK),  # on nodes that serve files
        (range(12, 24), 2, WARN),
    ],
)
def test_assistant_cores_of_a64fx_are_no_lack(tmp_path: Path, cores: range, assistants: int, status: str) -> None:
    with use_system(a64fx_node(tmp_path, cores, assistants)):
        check = machine.check_cores()
    assert check.status == status
    assert check.seen.startswith(f"{len(cores)} of {48 + assistants} usable, Fujitsu A64FX (sve asimd)")


def test_cores_that_an_affinity_mask_excludes_are_a_lack(tmp_path: Path) -> None:
    """On any other processor every core that is switched on is for jobs."""
    system = a64fx_node(tmp_path)
    (tmp_path / "proc" / "cpuinfo").write_text("model name\t: AMD EPYC\nflags\t: avx2 fma\n")
    with use_system(system):
        check = machine.check_cores()
    assert check.status == WARN and check.seen.startswith("48 of 50 usable, AMD EPYC")


def test_limits() -> None:
    assert machine.check_open_files(256).status == WARN
    assert machine.check_open_files(65536).seen == "65536"
    assert machine.check_open_files(resource.RLIM_INFINITY).status == OK
    assert machine.check_memory(2**28).status == WARN
    assert machine.check_shared_memory(Path("/no/such/place")).status == WARN
    assert machine.cpu_share("max 100000") is None and machine.cpu_share("") is None
    assert machine.cpu_share("150000 100000") == 1.5


def test_controls_that_are_absent_are_normal() -> None:
    assert machine.check_clock(None).status == OK and "not applied" in machine.check_clock(None).seen
    assert machine.check_clock(2200).seen == "fixed to 2200 MHz"
    assert machine.check_retention({}).status == OK
    assert machine.check_retention({"retention_state": "0"}).seen == "0, as granted to this job"
    assert machine.check_tcmalloc(None).status == WARN
    assert machine.check_tcmalloc(Path("/usr/lib/libtcmalloc.so.4")).status == OK


@pytest.mark.parametrize("control_groups", ["version 1", "version 2", "none"])
def test_nothing_is_wrong_with_a_healthy_a64fx_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_groups: str
) -> None:
    """Neither tcmalloc nor tokenizers belong to its system, and no run there needs them."""
    monkeypatch.setattr(machine.metadata, "version", _not_installed)
    monkeypatch.setenv("PJM_CUSTOM_RESOURCES", "freq=2000,eco_state=0,retention_state=1")
    with use_system(a64fx_node(tmp_path, control_groups=control_groups)):
        checks = {check.name: check for check in machine.check_node()}
    assert [check for check in checks.values() if check.status != OK] == []
    assert checks["clock"].seen == "fixed to 2000 MHz" and checks["memory"].seen.endswith(" in use")
    assert checks["tokenizers"].seen == "not installed"


def _not_installed(name: str) -> str:
    raise machine.metadata.PackageNotFoundError(name)
