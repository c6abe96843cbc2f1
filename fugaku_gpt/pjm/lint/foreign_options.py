"""Options of other schedulers that scripts for PJM contain, and what pjsub has in their place."""

from __future__ import annotations

from typing import Dict, Tuple

_FOLDER = "remove it: the job starts in the folder where pjsub is called; write `cd DIR` into the script"

_MENDS: Dict[Tuple[str, ...], str] = {
    ("-D", "-d", "-wd", "-cwd", "--chdir", "--workdir", "--working-dir"): _FOLDER,
    ("-A", "-W", "--account"): "-g GROUP names the group that pays",
    ("-t", "--time", "--walltime", "--elapse"): "-L elapse=HH:MM:SS is the time limit",
    ("-q", "--queue", "--partition"): "-L rscgrp=GROUP is the resource group",
    ("-l",): "-L takes the resources, such as -L node=2",
    ("-n", "--ntasks", "--np"): "--mpi proc=N is the number of processes",
    ("--nodes",): "-L node=N is the number of nodes",
    (
        "--ntasks-per-node",
        "--tasks-per-node",
        "--ppn",
    ): "--mpi max-proc-per-node=N is the number of processes on a node",
    ("--cpus-per-task", "-c"): "OMP_NUM_THREADS in the script is the number of threads of a process",
    ("--mem",): "-L node-mem=SIZE is the memory of a node",
    ("-J", "--job-name"): "-N NAME is the name of the job",
    ("--output",): "-o FILE is the file of the output",
    ("--error",): "-e FILE is the file of the errors",
    ("-M", "--mail-user"): "--mail-list ADDRESS, and -m b,e for when",
    ("--mail-type",): "-m b,e, and --mail-list ADDRESS for whom",
    ("-V", "-v", "--export"): "-X gives the job your variables, -x NAME=VALUE one of them",
    ("-a", "--array"): "--bulk --sparam 0-9 makes sub-jobs of the script",
    ("--dependency",): '--step --sparam "jid=ID,sn=1" makes it a step of another job',
}
_MEND_OF_SPELLING: Dict[str, str] = {spelling: mend for spellings, mend in _MENDS.items() for spelling in spellings}

# one public script for Fugaku has `#PJM -D DIR`; neither the manual nor anything else says that pjsub takes it
UNDOCUMENTED = ("-D",)


def mend_of_foreign(spelling: str) -> str:
    """Return the mend for another scheduler's option; empty where it is none."""
    return _MEND_OF_SPELLING.get(spelling, "")
