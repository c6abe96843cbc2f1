"""Runs Debian's Slurm on this machine for the duration of a test: munge, a controller and two nodes, on loopback and
free ports; nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Dict, Iterator, List

from fugaku_gpt.launch.processes import MARK, end_marked_processes

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "setpriv")
_SYSTEM_PATH = "/usr/sbin:/sbin"
_START_SECONDS = 60.0
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
SlurmUser=root
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=pmi2
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ReturnToService=2
EnforcePartLimits=ALL
KillWait=3
MinJobAge=3600
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=2 RealMemory=1000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """The reason why Slurm cannot be started on this machine; empty if it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)}; `make slurm` installs them"
    try:
        pwd.getpwnam("munge")
    except KeyError:
        return "no user munge; `make slurm` makes one"
    return ""


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Path]:
    """Two nodes, ``n1`` and ``n2``, with two cores each, in a partition ``all``. The clients of this process find them
    by ``SLURM_CONF``. Yields the folder of the daemons' logs."""
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    root.chmod(0o755)  # munged is another user
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PATH": _path(), MARK: mark}
    daemons: List["subprocess.Popen[bytes]"] = []
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    try:
        for name in ("munge", "state", "log"):
            (root / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        conf = root / "slurm.conf"
        conf.write_text(_CONF.format(host=host, root=root, ports=_free_ports(3)), encoding="utf-8")
        _start_munge(root, daemons, environment)
        os.environ.update(SLURM_CONF=str(conf), PATH=_path())
        _start(["slurmctld", "-D", "-f", str(conf)], root / "log" / "slurmctld.out", daemons, environment)
        for node in ("n1", "n2"):
            argv = ["slurmd", "-D", "-N", node, "-f", str(conf)]
            _start(argv, root / "log" / f"slurmd-{node}.out", daemons, environment)
        _wait_for_nodes(root, daemons)
        yield root / "log"
    finally:
        _end_jobs()
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=15)
        end_marked_processes(mark, grace=5.0)
        for daemon in daemons:
            daemon.wait()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(root, ignore_errors=True)


def _start_munge(root: Path, daemons: List["subprocess.Popen[bytes]"], environment: Dict[str, str]) -> None:
    folder = root / "munge"
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    for path in (folder, folder / "key"):
        shutil.chown(path, "munge", "munge")
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    argv = [
        "setpriv",
        "--reuid=munge",
        "--regid=munge",
        "--clear-groups",
        "munged",
        "--foreground",
        "--force",
        *options,
    ]
    _start(argv, root / "log" / "munged.out", daemons, environment)
    deadline = time.monotonic() + _START_SECONDS
    while not (folder / "socket").exists():
        _check(root, daemons, deadline, "munged made no socket")
        time.sleep(0.05)


def _start(argv: List[str], log: Path, daemons: List["subprocess.Popen[bytes]"], environment: Dict[str, str]) -> None:
    with open(log, "wb") as sink:
        daemons.append(
            subprocess.Popen(
                argv,
                env={**environment, **({"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {})},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )


def _wait_for_nodes(root: Path, daemons: List["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        states = _ask("sinfo", "--noheader", "--Node", "--format=%T").split()
        if states == ["idle", "idle"]:
            return
        _check(root, daemons, deadline, f"the nodes are {states}")
        time.sleep(0.2)


def _check(root: Path, daemons: List["subprocess.Popen[bytes]"], deadline: float, reason: str) -> None:
    ended = [daemon for daemon in daemons if daemon.poll() is not None]
    if ended or time.monotonic() > deadline:
        logs = "".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in root.glob("*/*.*"))
        raise RuntimeError(f"Slurm does not start: {reason}; ended: {[daemon.args for daemon in ended]}\n{logs}")


def _end_jobs() -> None:
    """No job may outlive its node's daemon."""
    if not _ask("squeue", "--noheader", "--format=%i"):
        return
    _ask("scancel", f"--user={os.getuid()}")
    deadline = time.monotonic() + _START_SECONDS
    while _ask("squeue", "--noheader", "--format=%i") and time.monotonic() < deadline:
        time.sleep(0.2)


def _ask(*argv: str) -> str:
    try:
        done = subprocess.run(list(argv), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"


def _free_ports(count: int) -> List[int]:
    listeners = [socket.socket() for _ in range(count)]
    try:
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
