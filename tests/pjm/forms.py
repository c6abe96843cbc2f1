"""Forms of directive lines in public ``#PJM`` scripts, with invented digits, and the expected items of each line."""

from __future__ import annotations

from typing import Optional, Tuple

Item = Tuple[str, Optional[str], Optional[str], bool]  # option as written, key, value, whether pjsub supports it


def _pair(key: str, value: Optional[str], option: str = "-L") -> Tuple[Item, ...]:
    return ((option, key, value, True),)


def _flag(option: str, is_supported: bool = True) -> Tuple[Item, ...]:
    return ((option, None, None, is_supported),)


def _text(option: str, value: str, is_supported: bool = True) -> Tuple[Item, ...]:
    return ((option, None, value, is_supported),)


RESOURCE_VALUES = {
    "eco_state": ("2", "0"),
    "elapse": (
        *("12:34:56", "1:00:00", "${ELAPSE}", "59:59", "10:0", "[MAX_ELAPSE_TIME]", "5:00", "10:0:00", "%(RSCTIME)s"),
        *("100:00:00", "@elapse@"),
    ),
    "ex_pipe_state": ("0",),
    "freq": ("2200", "2000"),
    "gpu": ("1", "2", "4"),
    "issue_state": ("0",),
    "jobenv": ("linux", "linux2", "singularity"),
    "node-mem": ("23Gi",),
    "node": (
        *("12", "2x3x8", "2x3x2:strict", "8x8x8:torus:strict-io", "4x4", "${NODES}", "16:noncont", "48:torus"),
        *("[NUMBER_OF_NODE]", "4x6x16:torus", "4x12:torus", "%(NODE)s", "@nnodes@"),
    ),
    "proc-core": ("unlimited", "48"),
    "proc-crproc": ("16384",),
    "proc-openfd": ("65536",),
    "retention_state": ("0", "1"),
    "rscgrp": (
        *("small", "batch", "large", "small-s1", "$RSCGRP", "small-torus", "fx-small", "dvsys-mck2_and_spack2"),
        *("regular-a", "eap-llio", "ito-g-16-dbg", "huge_2307-4", "%(QUEUE)s", "@rg@", "spot-int", "qc-hpc-a-p-o"),
    ),
    "rscunit": ("rscunit_ft01", "bwmpc", "rscunit_ft02", "fx", "ito-b"),
    "throttling_state": ("0",),
    "vnode-core": ("36",),
    "vnode": ("1", "(core=1)", "2(core=4;mem=1Gi)"),
}
MPI_VALUES = {
    "max-proc-per-node": ("4", "${PPN}"),
    "proc": ("16", "$NPROC", "%(PROC)s", "@nprocs@"),
    "rank-map-bynode": ("YZX", "YX"),
    "rank-map-hostfile": ("machinefile",),
    "shape": ("12", "2x3", "%(SHAPE)s"),
}
LLIO_VALUES = {
    "cn-cache-size": ("1Gi",),
    "localtmp-size": ("30Gi",),
    "sharedtmp-size": ("10Gi",),
    "sio-read-cache": ("off", "on"),
}

GFSCACHE = "PJM_LLIO_GFSCACHE"
FORMS: Tuple[Tuple[str, Tuple[Item, ...]], ...] = (
    *((f"-L {key}={value}", _pair(key, value)) for key, values in RESOURCE_VALUES.items() for value in values),
    *((f'-L "{key}={value}"', _pair(key, value)) for key, values in RESOURCE_VALUES.items() for value in values),
    *((f"--mpi {key}={value}", _pair(key, value, "--mpi")) for key, values in MPI_VALUES.items() for value in values),
    *(
        (f'--llio "{key}={value}"', _pair(key, value, "--llio"))
        for key, values in LLIO_VALUES.items()
        for value in values
    ),
    ("--rsc-list elapse=1:00:00", _pair("elapse", "1:00:00", "--rsc-list")),
    ('--rsc-list "rscgrp=small"', _pair("rscgrp", "small", "--rsc-list")),
    ("-L rg=large,ru=rscunit_ft01", (*_pair("rg", "large"), *_pair("ru", "rscunit_ft01"))),
    ('-L "freq=2200,eco_state=2"', (*_pair("freq", "2200"), *_pair("eco_state", "2"))),
    (
        "-L node=2,rscgrp=small,elapse=10:00",
        (*_pair("node", "2"), *_pair("rscgrp", "small"), *_pair("elapse", "10:00")),
    ),
    ("-L vnode=2(core=4,mem=1Gi),elapse=30", (*_pair("vnode", "2(core=4,mem=1Gi)"), *_pair("elapse", "30"))),
    ("-L a=1),node=2", (*_pair("a", "1)"), *_pair("node", "2"))),
    ("--mpi assign-online-node", _pair("assign-online-node", None, "--mpi")),
    ("--mpi rank-map-bychip", _pair("rank-map-bychip", None, "--mpi")),
    ("--mpi rank-map-bychip:XYZ", _pair("rank-map-bychip", "XYZ", "--mpi")),
    ("--mpi rank-map-bynode", _pair("rank-map-bynode", None, "--mpi")),
    ('--mpi "use-rankdir"', (("--mpi", "use-rankdir", None, False),)),
    (
        '--mpi "shape=2x3,proc=24,rank-map-bynode=YX"',
        (*_pair("shape", "2x3", "--mpi"), *_pair("proc", "24", "--mpi"), *_pair("rank-map-bynode", "YX", "--mpi")),
    ),
    ("-g ra000012", _text("-g", "ra000012")),
    ("--gname groupname", _text("--gname", "groupname")),
    ("-j", _flag("-j")),
    ("-s", _flag("-s")),
    ("-S", _flag("-S")),
    ("-X", _flag("-X")),
    ("-N job_1", _text("-N", "job_1")),
    ("--name job", _text("--name", "job")),
    ('--name="{{.}}"', _text("--name", "{{.}}")),
    ("-o %n.%j.out", _text("-o", "%n.%j.out")),
    ('-e "log/%n.%j.err"', _text("-e", "log/%n.%j.err")),
    ("--spath %n.%j.stats", _text("--spath", "%n.%j.stats")),
    ("-m b", _text("-m", "b")),
    ("-m b,e", _text("-m", "b,e")),
    ("-m b,e,s", _text("-m", "b,e,s")),
    ('--mail-list "someone@example.org"', _text("--mail-list", "someone@example.org")),
    ("--norestart", _flag("--norestart")),
    ('"--norestart"', _flag("--norestart")),
    ("-x PJM_LLIO_GFSCACHE=/vol0004", (("-x", GFSCACHE, "/vol0004", True),)),
    ("-x PJM_LLIO_GFSCACHE=/vol0003:/vol0004", (("-x", GFSCACHE, "/vol0003:/vol0004", True),)),
    (
        "-x PJM_LLIO_GFSCACHE=/vol0004,SINGULARITY_TMPDIR=/tmp",
        (("-x", GFSCACHE, "/vol0004", True), ("-x", "SINGULARITY_TMPDIR", "/tmp", True)),
    ),
    ("-x {{key}}={{value}}", (("-x", "{{key}}", "{{value}}", True),)),
    ("-L {{key}}={{value}}", _pair("{{key}}", "{{value}}")),
    ("--mpi {{key}}={{value}}", (("--mpi", "{{key}}", "{{value}}", False),)),
    ('-P "vn-policy=pack"', _pair("vn-policy", "pack", "-P")),
    ("--omp thread=1", (("--omp", "thread", "1", False),)),
    ("--omp thread=$OMP_NUM_THREADS", (("--omp", "thread", "$OMP_NUM_THREADS", False),)),
    ("--no-stging", _flag("--no-stging", False)),
    ("--no-stging -j", (*_flag("--no-stging", False), *_flag("-j"))),
    ('--rsc-list="rscgrp=small"', _pair("rscgrp", "small", "--rsc-list")),
    ('--mpi "shape=8x8, proc=512"', (*_pair("shape", "8x8", "--mpi"), *_pair("proc", "512", "--mpi"))),
    ('--mpi      "proc=$((NODES*4))"', _pair("proc", "$((NODES*4))", "--mpi")),
    ("--stg-transfiles all", _text("--stg-transfiles", "all", False)),
    ('--stgin "rank=* ./a.out %r:./"', _text("--stgin", "rank=* ./a.out %r:./", False)),
    ('--stgout "./core* ./"', _text("--stgout", "./core* ./", False)),
    ('--stgin-dir "./in ./in"', _text("--stgin-dir", "./in ./in", False)),
    ("--stgout-dir './out ./out'", _text("--stgout-dir", "./out ./out", False)),
    ("--stgin-basedir /data", _text("--stgin-basedir", "/data", False)),
    ("--stgout-basedir /data", _text("--stgout-basedir", "/data", False)),
    ('-L "node=1"                  # Number of nodes', _pair("node", "1")),
    ("-j # join", _flag("-j")),
    ("-j -S", (*_flag("-j"), *_flag("-S"))),
    ("-g group -L node=1", (*_text("-g", "group"), *_pair("node", "1"))),
    ("", ()),
    ("# only a remark", ()),
    ("--bulk --sparam 0-9", (*_flag("--bulk"), *_text("--sparam", "0-9"))),
    (
        '--step --sparam "jid=1,sn=2,sd=ec==0:one:1"',
        (*_flag("--step"), *_text("--sparam", "jid=1,sn=2,sd=ec==0:one:1")),
    ),
    ("-z jid", _text("-z", "jid")),
    ("-z", _flag("-z")),
    ("-z -j", (*_flag("-z"), *_flag("-j"))),
    ("-Lnode=1", _pair("node", "1")),
    ('-L"node=1,elapse=5:00"', (*_pair("node", "1"), *_pair("elapse", "5:00"))),
    ("-js", (*_flag("-j"), *_flag("-s"))),
    # an option that pjsub does not support is kept, with the next word as its likely argument
    ("--L node=1", _text("--L", "node=1", False)),
    ("--node-mem=23Gi", _text("--node-mem", "23Gi", False)),
    ("-q queue -j", (*_text("-q", "queue", False), *_flag("-j"))),
    ("--site-flag -j", (*_flag("--site-flag", False), *_flag("-j"))),
    ("-elapse=1:00", _text("-elapse", "1:00", False)),
    ("\u2013x A=b", _text("\u2013x", "A=b", False)),
    ("-L \u201cfreq=2000\u201d", _pair("\u201cfreq", "2000\u201d")),
)

# line → (kind, text) of its problems, and all items of the line, none of which may be lost
MALFORMED: Tuple[Tuple[str, Tuple[Tuple[str, str], ...], Tuple[Item, ...]], ...] = (
    ("-g $(echo $(id -ng))", (("command-substitution", "$(echo $(id -ng))"),), _text("-g", "$(echo $(id -ng))")),
    ("-g $(a $(b) c) -j", (("command-substitution", "$(a $(b) c)"),), (*_text("-g", "$(a $(b) c)"), *_flag("-j"))),
    (
        "--mpi proc=$((NODES * 4))",
        (("command-substitution", "proc=$((NODES * 4))"),),
        _pair("proc", "$((NODES * 4))", "--mpi"),
    ),
    ("--gname [project name]", (("stray-word", "name]"),), _text("--gname", "[project")),
    ("{{value}}", (("stray-word", "{{value}}"),), ()),
    (
        " FUGAKU / FX100 / FX10",
        tuple(("stray-word", word) for word in ("FUGAKU", "/", "FX100", "/", "FX10")),
        (),
    ),
    ("-N", (("missing-argument", "-N"),), _flag("-N")),
    ("-N -j", (("missing-argument", "-N"),), (*_flag("-N"), *_flag("-j"))),
    ("--norestart=1", (("unexpected-argument", "--norestart=1"),), _text("--norestart", "1")),
    ("-L node=1,", (("empty-item", "node=1,"),), _pair("node", "1")),
    (
        "--mpi rank-map-bychip=XYZ",
        (("wrong-separator", "rank-map-bychip=XYZ"),),
        _pair("rank-map-bychip", "XYZ", "--mpi"),
    ),
    ("--mpi rank-map-bynode:YX", (("wrong-separator", "rank-map-bynode:YX"),), _pair("rank-map-bynode", "YX", "--mpi")),
    ('-L "node=1', (("unbalanced-quotes", '#PJM -L "node=1'),), _pair("node", "1")),
    ("-N it's", (("unbalanced-quotes", "#PJM -N it's"),), _text("-N", "its")),
)
