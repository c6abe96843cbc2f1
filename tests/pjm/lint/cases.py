"""Scripts with findings of each rule, and similar scripts without. ``FT`` begins a script for Fugaku."""

from __future__ import annotations

from typing import Dict, List, Tuple

FT = "#!/bin/bash\n#PJM -L rscunit=rscunit_ft01\n"
ANY = "#!/bin/bash\n"
LONG = "#PJM --comment " + "x" * 4100 + "\n"

# id → (scripts with a finding, scripts without)
CASES: Dict[str, Tuple[List[str], List[str]]] = {
    "PJM001": (
        [FT + "cd x\n#PJM -S\n", ANY + "export A=1\n#PJM --mpi proc=4\n"],
        [
            FT + "# comment\n\n#PJM -S\n",
            FT + "cat <<EOT > job.sh\n#PJM -S\nEOT\n",
            FT + "echo '\n#PJM -S\n'\n",
            FT + "cd x\n#PJM options are above\n",
            "#!/usr/bin/env python3\nimport os\ntext = '''\n#PJM -S\n'''\n",
        ],
    ),
    "PJM002": (
        [FT + "# PJM -S\n", FT + " #PJM -S\n", FT + "##PJM -L node=2\n", FT + '#\tPJM -L "node=3"\n'],
        [FT + "# PJM is Fugaku's scheduler\n", FT + "#PJM -S\n", FT + "cd x\n# PJM -S\n"],
    ),
    "PJM003": (
        [
            FT + "#PJM \u2013x PJM_LLIO_GFSCACHE=/vol0004\n",
            FT + "#PJM -L \u201cnode=1\u201d\n",
            FT + "#PJM \u2013L node=1\n",
        ],
        [FT + '#PJM -L "node=1" # \u201cone\u201d\n', FT + "# \u2013x is wrong\n", FT + "#PJM --comment caf\u00e9\n"],
    ),
    "PJM004": (
        [FT + '#PJM -L "node=1\n', FT + "#PJM -N 'a\n"],
        [FT + "#PJM -L node=1 # don't\n", FT + '#PJM -N "a"\n'],
    ),
    "PJM005": (
        [
            FT + "#PJM --L node=1\n",
            FT + "#PJM --node-mem=20Gi\n",
            FT + "#PJM --mpi procc=4\n",
            FT + "#PJM -L rscqrp=small\n",
            FT + "#PJM --llio localtmpsize=4Gi\n",
            FT + "#PJM -g\n",
            FT + "#PJM -g one two\n",
        ],
        [
            FT + "#PJM -L estimated-power=100\n",
            FT + "#PJM -L our-own-resource=1\n",
            FT + "#PJM -L rg=small,ru=rscunit_ft01\n",
            FT + "#PJM --mpi rank-map-bychip:XYZ,assign-online-node\n",
            FT + "#PJM -g [project name]\n",
            FT + '#PJM "--norestart"\n',
            FT + "#PJM --mpi use-rankdir\n",
            FT + "#PJM -x procc=4\n",
        ],
    ),
    "PJM006": (
        [FT + "#PJM --stgin 'a b'\n", FT + "#PJM --mpi use-rankdir\n", ANY + "#PJM --stg-transfiles all\n"],
        [FT + "#PJM --llio localtmp-size=1Gi\n"],
    ),
    "PJM007": (
        [FT + "#SBATCH --nodes=2\n", FT + "#PBS -l select=1\n"],
        [FT + "# SBATCH has other options\n", FT + "cd x\n#SBATCH --nodes=2\n", FT + "#SBATCHES\n"],
    ),
    "PJM008": ([FT + LONG, FT + "#PJM" + " -j" * 65 + "\n"], [FT + "#PJM" + " -j" * 64 + "\n"]),
    "PJM009": (["#PJM -L node=1\n", "# a job\n#PJM -L node=1\n"], ["#! /bin/sh\n#PJM -L node=1\n", ""]),
    "PJM010": (
        [FT + "#PJM -s\n#PJM -S\n", FT + "#PJM --spath a.stats\n", FT + "#PJM -s -S\n"],
        [FT + "#PJM -S\n#PJM --spath a.stats\n", FT + "#PJM -s\n"],
    ),
    "PJM011": ([FT], [FT + "#PJM -s\n", FT + "#PJM --STATS\n", ANY + "#PJM -L rscgrp=regular-o\n"]),
    "PJM012": (
        [FT + "#PJM --no-check-directory\n", FT + "#PJM --verbose\n"],
        [FT + "# pjsub --no-check-directory job.sh\n#PJM -S\n"],
    ),
    "PJM013": (
        [FT + "#PJM -N 13b\n", FT + "#PJM -N a/b\n", FT + f"#PJM -N {'a' * 64}\n", FT + '#PJM --name "a b"\n'],
        [
            FT + "#PJM -N gpt-1.3B_x\n",
            FT + f"#PJM -N {'a' * 63}\n",
            FT + "#PJM -N ${NAME}\n",
            FT + '#PJM --name="{{.}}"\n',
        ],
    ),
    "PJM014": (
        [FT + "#PJM --bulk --sparam 0-9\n#PJM -o out.txt\n", FT + "#PJM --step\n#PJM -e err.%j\n"],
        [FT + "#PJM --bulk --sparam 0-9\n#PJM -o out.%b\n", FT + "#PJM -o out.txt\n", FT + "#PJM --bulk -o %n.%J\n"],
    ),
    "PJM015": (
        [
            FT + "#PJM --bulk --step --sparam 0-1\n",
            FT + "#PJM --restart\n#PJM --norestart\n",
            FT + '#PJM --step --sparam "jid=1,jnam=a"\n',
            FT + "#PJM --mpi rank-map-bychip\n#PJM --mpi rank-map-bynode\n",
            FT + "#PJM --bulk\n",
            FT + "#PJM --bulk --sparam 9-0\n",
        ],
        [
            FT + "#PJM --bulk --sparam 0-9\n",
            FT + '#PJM --step --sparam "jid=1,sn=2,sd=ec!=0:after:1"\n',
            FT + "#PJM --bulk --sparam ${RANGE}\n",
            FT + "#PJM --mpi rank-map-bychip,rank-map-hostfile=h\n",
        ],
    ),
    "PJM016": (
        [FT + "#PJM --sparam wait-time=600\n"],
        [FT + "#PJM --interact --sparam wait-time=600\n", FT + "#PJM --bulk --sparam 0-9\n"],
    ),
    "PJM017": (
        ["#!/bin/bash\r\n#PJM -L node=1\r\n./a.out\r\n", FT + "./a.out\r\n"],
        [FT + "./a.out\n", FT + "printf 'a\\r\\n'\n"],
    ),
    "PJM018": (
        [FT + "#PJM -m b,e\n", ANY + "#PJM -L rscgrp=regular-o\n#PJM -m e\n"],
        [FT + "#PJM -m b,e --mail-list a@b.jp\n", FT + "#PJM --mail-list a@b.jp\n"],
    ),
    "PJM019": (
        [
            FT + "#PJM -p 999\n",
            FT + "#PJM -m b,e,x --mail-list a@b.jp\n",
            FT + "#PJM --at 20261345\n",
            FT + "#PJM --at 2026-12-01\n",
            FT + "#PJM -L proc-core=48x\n",
            FT + "#PJM -L proc-openfd=64Ki\n",
            FT + "#PJM --mpi proc=4.5\n",
            FT + "#PJM --mpi max-proc-per-node=-1\n",
        ],
        [
            FT + "#PJM -p 255\n",
            FT + "#PJM -m b,e,s --mail-list a@b.jp\n",
            FT + "#PJM --at 202612312359\n",
            FT + "#PJM -L proc-core=unlimited,proc-openfd=65536,node-mem=28Gi\n",
            FT + "#PJM --mpi proc=NPROC\n",
            FT + "#PJM -p ${PRIORITY}\n",
            FT + "#PJM --llio sio-read-cache=on\n",
        ],
    ),
    "PJM020": (
        [FT, ANY + "#PJM -L rscgrp=small,node=1\n", ANY + "#PJM -L freq=2000\n"],
        [
            FT + "#PJM -g hp1\n",
            FT + "#PJM --gname hp1\n",
            ANY + "#PJM -L rscgrp=regular-o\n",
            ANY + "#PJM -L vnode=1\n",
        ],
    ),
    "PJM021": (
        [FT + "#PJM -g fugaku\n", FT + "#PJM -g trial -L rscgrp=small\n", FT + "#PJM -g trial\n"],
        [FT + "#PJM -g hp1\n", FT + "#PJM -g trial -L rscgrp=spot-small\n", FT + "#PJM -g trial -L rscgrp=${Q}\n"],
    ),
    "PJM022": (
        [
            FT,
            FT + "#PJM -x PJM_LLIO_GFSCACHE=vol0004\n",
            FT + "#PJM -x PJM_LLIO_GFSCACHE=/vol0001\n",
            FT + "#PJM -x PJM_LLIO_GFSCACHE=/vol0003\n. /vol0004/apps/oss/spack/share/spack/setup-env.sh\n",
        ],
        [
            FT + "#PJM -x PJM_LLIO_GFSCACHE=/vol0004:/vol0003\nspack load x\n",
            FT + "#PJM -x PJM_LLIO_GFSCACHE=/vol000N\n",
            FT + "#PJM -x PJM_LLIO_GFSCACHE=/vol0003\n# . /vol0004/apps/oss/spack/share/spack/setup-env.sh\n",
            FT + "#PJM -X\n",
        ],
    ),
    "PJM023": (
        [FT + "#PJM -x PJM_LLIO_GFSCACHE=/vol0002:/vol0003:/vol0004:/vol0005:/vol0006\n"],
        [FT + "#PJM -x PJM_LLIO_GFSCACHE=/vol0002:/vol0003:/vol0004:/vol0005\n"],
    ),
    "PJM024": (
        [
            FT + "#PJM -L rscgrp=int\n",
            FT + "#PJM -L rscgrp=spot-int\n",
            ANY + "#PJM -L rscgrp=interactive-o\n",
            ANY + "#PJM -L rscunit=fx,rscgrp=fx-interactive\n",
        ],
        [
            FT + "#PJM -L rscgrp=int\n#PJM --interact\n",
            FT + "#PJM -L rscgrp=small\n",
            ANY + "#PJM -L rscgrp=interactive-a\n",
        ],
    ),
    "PJM030": (
        [FT + "#PJM -L node=64x64,rscgrp=small\n", FT + "#PJM -L node=384,rscgrp=large\n", FT + "#PJM -L node=385\n"],
        [
            FT + "#PJM -L node=384,rscgrp=small\n",
            FT + "#PJM -L node=385,rscgrp=large\n",
            FT + "#PJM -L node=9999,rscgrp=ppu2023\n",
            FT + "#PJM -L node=${N},rscgrp=large\n",
            ANY + "#PJM -L node=2000,rscgrp=regular-o\n",
        ],
    ),
    "PJM031": (
        [
            FT + "#PJM -L node=4x4:strict\n",
            FT + "#PJM -L node=4x4x4:mesh:strict\n",
            FT + "#PJM -L node=400:noncont,rscgrp=large\n",
            FT + "#PJM -L node=4x4x4x4\n",
            FT + "#PJM -L node=12:mesh,rscgrp=small-torus\n",
            FT + "#PJM -L node=1.5\n",
        ],
        [
            FT + "#PJM -L node=4x4x4:strict\n",
            FT + "#PJM -L node=8x8x8:torus:strict-io\n",
            FT + "#PJM -L node=384:noncont\n",
            FT + "#PJM -L node=[NUMBER_OF_NODE]\n",
            FT + "#PJM -L node=%(NODE)s\n",
            FT + "#PJM -L node=@nnodes@\n",
            FT + "#PJM -L node=NODES\n",
        ],
    ),
    "PJM032": (
        [
            FT + "#PJM -L node=400,rscgrp=large\n",
            FT + "#PJM -L node=10:torus\n",
            FT + "#PJM -L node=8,rscgrp=small-torus\n",
            FT + "#PJM -L node=4x4x4:torus\n",
            FT + "#PJM -L node=4x4x4:strict\n",
        ],
        [
            FT + "#PJM -L node=2x4x6:torus\n",
            FT + "#PJM -L node=480,rscgrp=large\n",
            FT + "#PJM -L node=24:torus\n",
            FT + "#PJM -L node=10\n",
        ],
    ),
    "PJM033": ([FT, FT + "#PJM -L rscgrp=large\n"], [FT + "#PJM -L node=1\n", FT + "#PJM -L node=${N}\n"]),
    "PJM034": (
        [
            FT + "#PJM -L vnode=1\n",
            FT + "#PJM -P vn-policy=pack\n",
            FT + "#PJM -L gpu=1\n",
            FT + "#PJM --omp thread=12\n",
            ANY + "#PJM -L rscgrp=small,vnode=1\n",
            ANY + "#PJM -L rscunit=fx,gpu=1\n",
        ],
        [
            FT + "#PJM -L node=1\n",
            ANY + "#PJM -L rscunit=fx --omp thread=12\n",
            ANY + "#PJM -L gpu=1\n",
            ANY + "#PJM -L rscunit=ito-b,vnode=1,vnode-core=9\n",
        ],
    ),
    "PJM035": (
        [
            FT + "#PJM -L node=4 --mpi proc=16\ncd x\n./octotiger --config=x\n",
            ANY + "#PJM -L rscunit=fx,node=2\nexport A=1\n./a.out | tee log\n",
            FT + "#PJM -L node=4\n# mpiexec ./a.out\n./a.out\n",
            FT + "#PJM -L node=4\n. ~/venv/bin/activate\nsource /vol0004/spack/setup-env.sh\n./a.out\n",
            FT + "#PJM -L node=4\nsource ~/.zshrc\npython3 train.py\n",
            ANY + "#PJM -L rscgrp=regular-o,node=4\ntorchrun --nproc-per-node 4 train.py\n",
        ],
        [
            FT + "#PJM -L node=4 --mpi proc=16\nmpiexec ./a.out\n",
            FT + "#PJM -L node=1\n./a.out\n",
            FT + "#PJM -L node=4\n./run.sh\n",
            FT + "#PJM -L node=4\n$MPIRUN ./a.out\n",
            FT + "#PJM -L node=4\n. ./settings\n./a.out\n",
            FT + "#PJM -L node=4\nmpi4py_start ./a.out; bash -c 'mpiexec ./b.out'\n",
            FT + "#PJM -L node=4\necho nothing to do\n",
            FT + "#PJM -L node=4\nout=$(mpiexec ./a)\n./show\n",
            FT + "#PJM -L node=4\n./drive <<E\nmpiexec ./a\nE\n",
            FT + "#PJM -L node=${N}\n./a.out\n",
        ],
    ),
    "PJM040": (
        [
            FT,
            FT + "#PJM -L elapse=30\n",
            FT + "#PJM -L elapse=73:00:00\n",
            FT + "#PJM -L rscgrp=large,elapse=25:00:00\n",
            FT + "#PJM -L elapse=1:00:00-145:00:00\n",
            ANY + "#PJM -L elapse=1.5h\n",
        ],
        [
            FT + "#PJM -L elapse=72:00:00\n",
            FT + "#PJM -L elapse=1:00:00-\n",
            FT + "#PJM -L elapse=[MAX_ELAPSE_TIME]\n",
            FT + "#PJM -L elapse=%(RSCTIME)s\n",
            FT + "#PJM -L rscgrp=rt,elapse=150:00:00\n",
            FT + "#PJM -L rscgrp=int,elapse=30\n",
            ANY + "#PJM -L rscgrp=regular-o\n",
        ],
    ),
    "PJM041": (
        [FT + "#PJM -L elapse=30\n", FT + "#PJM -L elapse=10:00\n", ANY + "#PJM -L elapse=5:00-1:00:00\n"],
        [FT + "#PJM -L elapse=3600\n", FT + "#PJM -L elapse=0:30:00\n", FT + "#PJM -L elapse=120:00\n", FT],
    ),
    "PJM042": (
        [
            FT + "#PJM -L rscgrp=spot-small,elapse=5:00:00\n",
            FT + "#PJM -L rscgrp=spot-small,elapse=6:00:00-12:00:00\n",
            FT + "#PJM -L rscgrp=spot-large,elapse=4:00:00-24:00:00\n",
            FT + "#PJM -L rscgrp=spot-int,elapse=4:00:00-7:00:00\n",
        ],
        [
            FT + "#PJM -L rscgrp=spot-small,elapse=4:00:00\n",
            FT + "#PJM -L rscgrp=spot-small,elapse=4:00:00-12:00:00\n",
            FT + "#PJM -L rscgrp=small,elapse=5:00:00\n",
        ],
    ),
    "PJM043": (
        [FT + "#PJM -L elapse=1:00:00-2:00:00\n./a.out\n", FT + "#PJM -L elapse=1:00:00-\n# trap x TERM\n./a\n"],
        [
            FT + "#PJM -L elapse=1:00:00-2:00:00\ntrap 'touch stop' TERM\n./a.out\n",
            FT + "#PJM -L elapse=1:00:00-2:00:00\ntrap cleanup EXIT 15\n",
            FT + "#PJM -L elapse=1:00:00\n./a.out\n",
        ],
    ),
    "PJM044": (
        [
            FT + "#PJM -L elapse=1-00:00:00\n",
            FT + "#PJM -L elapse=1-12:00:00\n",
            ANY + "#PJM -L elapse=2:00:00-1:00:00\n",
        ],
        [FT + "#PJM -L elapse=24:00:00\n", FT + "#PJM -L elapse=1:00:00-2:00:00\n", FT + "#PJM -L elapse=60-\n"],
    ),
    "PJM050": (
        [
            FT + "#PJM -L freq=2200,eco_state=0\n",
            FT + "#PJM -L freq=2200,eco_state=1\n",
            FT + "#PJM -L freq=1800\n",
            FT + '#PJM -L "freq=2.2"\n',
        ],
        [
            FT + "#PJM -L freq=2200,eco_state=2\n",
            FT + "#PJM -L freq=2000,eco_state=0\n",
            FT + "#PJM -L freq=2200\n",
            FT + "#PJM -L freq=${FREQ},eco_state=0\n",
        ],
    ),
    "PJM051": (
        [FT + "#PJM -L freq=2000\n", FT + "#PJM -L eco_state=2\n"],
        [FT + '#PJM -L "freq=2200, eco_state=2"\n', FT],
    ),
    "PJM052": ([FT], [FT + "#PJM -L retention_state=0\n", ANY + "#PJM -L rscgrp=regular-o\n"]),
    "PJM053": (
        [FT + "#PJM -L node=24x24x24,retention_state=1\n"],
        [FT + "#PJM -L node=9216,retention_state=1\n", FT + "#PJM -L node=24x24x24,retention_state=0\n"],
    ),
    "PJM054": (
        [FT + "#PJM -L eco_state=3\n", FT + "#PJM -L throttling_state=10\n", FT + "#PJM -L issue_state=-1\n"],
        [FT + "#PJM -L eco_state=1,throttling_state=9,ex_pipe_state=1\n", FT + "#PJM -L eco_state=@eco@\n"],
    ),
    "PJM055": (
        [FT + "#PJM -L retention_state=1\nexport OMP_NUM_THREADS=12\n"],
        [
            FT + "#PJM -L retention_state=1\nexport OMP_NUM_THREADS=12 OMP_WAIT_POLICY=ACTIVE\n",
            FT + "#PJM -L retention_state=0\nexport OMP_NUM_THREADS=12\n",
            FT + "#PJM -L retention_state=1\nexport OMP_NUM_THREADS=1\n",
        ],
    ),
    "PJM060": (
        [
            FT + "#PJM -L node=2 --mpi proc=97\n",
            FT + "#PJM --mpi max-proc-per-node=49\n",
            FT + "#PJM -L node=2 --mpi proc=10,max-proc-per-node=4\n",
            FT + "#PJM --mpi proc=1.5\n",
        ],
        [
            FT + "#PJM -L node=2 --mpi proc=96\n",
            FT + "#PJM -L node=2 --mpi proc=8,max-proc-per-node=4\n",
            FT + "#PJM -L node=${N} --mpi proc=1000\n",
            FT + "#PJM --mpi proc=NPROCS\n",
            ANY + "#PJM -L rscunit=bwmpc,node=1 --mpi proc=100\n",
        ],
    ),
    "PJM061": (
        [
            ANY + "#PJM -L rscgrp=regular-o,node=3 --mpi proc=4\n",
            FT + "#PJM -L node=3 --mpi proc=4\n",
            FT + "#PJM -L node=3 --mpi proc=1\n",
        ],
        [FT + "#PJM -L node=3 --mpi proc=6\n", FT + "#PJM --mpi proc=7\n", FT + "#PJM -L node=1 --mpi proc=7\n"],
    ),
    "PJM062": (
        [
            FT + "#PJM -L node=2 --mpi max-proc-per-node=4\nexport OMP_NUM_THREADS=24\nmpiexec ./a\n",
            FT + "#PJM -L node=2 --mpi proc=8\nexport OMP_NUM_THREADS=4\nmpiexec ./a\n",
            FT + "#PJM -L node=1 --mpi proc=4\nT=6\nexport OMP_NUM_THREADS=${T}\nmpiexec -n 4 ./a\n",
            FT + "#PJM -L node=1 --mpi proc=4 -x OMP_NUM_THREADS=6\nmpiexec ./a\n",
        ],
        [
            FT + "#PJM -L node=2 --mpi max-proc-per-node=4\nexport OMP_NUM_THREADS=12\nmpiexec ./a\n",
            FT + "#PJM -L node=2 --mpi proc=${P}\nexport OMP_NUM_THREADS=5\nmpiexec ./a\n",
            FT + "#PJM -L node=1 --mpi proc=4\nfor t in 1 12; do\nexport OMP_NUM_THREADS=$t\nmpiexec ./a\ndone\n",
            FT + "#PJM -L node=1 --mpi proc=4\nexport OMP_NUM_THREADS=$((48/5))\nmpiexec ./a\n",
            FT + "#PJM -L node=1 --mpi proc=4\n# export OMP_NUM_THREADS=5\nmpiexec ./a\n",
        ],
    ),
    "PJM063": (
        [FT + "#PJM -L node=2 --mpi max-proc-per-node=3\n", FT + "#PJM -L node=2 --mpi proc=12\n"],
        [FT + "#PJM --mpi max-proc-per-node=2\n", FT + "#PJM --mpi max-proc-per-node=12\n", FT + "#PJM -L node=3\n"],
    ),
    "PJM064": (
        [
            FT + "#PJM -L node=4x4 --mpi shape=16\n",
            FT + "#PJM -L node=4x4 --mpi rank-map-bynode=XYZ\n",
            FT + "#PJM -L node=4x4x4 --mpi rank-map-bychip=XYZ\n",
            FT + "#PJM -L node=4x4x4 --mpi rank-map-bynode=XXZ\n",
            FT + "#PJM -L node=4 --mpi rank-map-bynode=XY\n",
        ],
        [
            FT + "#PJM -L node=4x4 --mpi shape=2x2\n",
            FT + "#PJM -L node=4x4x4 --mpi rank-map-bychip:ZYX\n",
            FT + "#PJM -L node=4x4 --mpi rank-map-bynode=YX\n",
            FT + "#PJM -L node=4 --mpi rank-map-bynode\n",
            FT + "#PJM -L node=4 --mpi shape=%(SHAPE)s\n",
        ],
    ),
    "PJM065": (
        [
            FT + "#PJM -L node=2 --mpi proc=8\nmpiexec -n 16 ./a\n",
            FT + "#PJM -L node=2 --mpi proc=8\nmpiexec -np 4 ./a\n",
            FT + "#PJM -L node=2 --mpi max-proc-per-node=4\nN=9\ntime mpirun -np $N ./a\n",
            ANY + "#PJM -L rscunit=fx,rscgrp=fx-small,node=2 --mpi proc=4\nmpiexec -n 96 ./a\n",
        ],
        [
            FT + "#PJM -L node=2 --mpi proc=8\nmpiexec -n 8 ./a\n",
            FT + "#PJM -L node=2 --mpi proc=8\nmpiexec -n ${PJM_MPI_PROC} ./a\n",
            FT + "#PJM -L node=2 --mpi proc=8\nfor n in 1 2; do mpiexec -n 4 ./a; done\n",
            FT + "#PJM -L node=2 --mpi proc=8\nmpiexec -n 4 ./a &\nmpiexec -n 4 ./b &\nwait\n",
            FT + "#PJM -L node=2 --mpi proc=8\nmpiexec -n 4 ./a : -n 4 ./b\n",
            FT + "#PJM -L node=2 --mpi proc=8\nmpiexec -n $((2*8)) ./a\n",
            FT + '#PJM -L node=2 --mpi proc=8\necho "mpiexec -n 16 ./a"\n',
        ],
    ),
    "PJM066": (
        [FT + "#PJM -L node=2\nmpiexec -n 2 ./a\n", FT + "#PJM -L node=2\nfapp -C -d x mpirun ./a\n"],
        [
            FT + "#PJM -L node=2 --mpi proc=2\nmpiexec ./a\n",
            FT + "#PJM -L node=2\n# mpiexec ./a\necho mpiexec\n",
            FT + "#PJM -L node=2\ncat <<E\nmpiexec ./a\nE\n",
            FT + "#PJM -L node=2 --mpi proc=${P}\nmpiexec ./a\n",
        ],
    ),
    "PJM067": (
        [FT + "export PARALLEL=8\nexport OMP_NUM_THREADS=12\n"],
        [
            FT + "export PARALLEL=8\nexport OMP_NUM_THREADS=${PARALLEL}\n",
            FT + "export PARALLEL=$N\nexport OMP_NUM_THREADS=8\n",
        ],
    ),
    "PJM068": (
        [
            FT + "for i in 1 2 3 4; do\n  mpiexec -n 4 ./a.out $i &\ndone\nwait\n",
            FT + "mpiexec -n 4 ./a &\nmpiexec -n 4 ./b &\nwait\n",
            FT + "mpiexec -n 4 ./a &\nmpiexec -n 4 ./b\nwait\n",
            FT + "mpiexec -n $N ./a $i &\nmpiexec -n $N ./b &\nwait\n",
            FT + "for i in 1 2; do mpiexec -n 4 $EXE in.txt & done\nwait\n",
            FT + "mpiexec ./a &\nwait\nmpiexec ./b &\nmpiexec ./c &\nwait\n",
            FT + "mpiexec ./a &\nsleep 5\nmpiexec ./b &\nwait\n",
            FT + "(cd a; mpiexec ./a) &\n(cd b; mpiexec ./b) &\nwait\n",
            FT + "{ mpiexec ./a; } &\n{ mpiexec ./b; } &\nwait\n",
            FT + "(mpiexec ./a &)\n(mpiexec ./b &)\nwait\n",
            FT + "mpiexec ./a | tee a.log &\nmpiexec ./b | tee b.log &\nwait\n",
            FT + "for i in 1 2; do (cd $i && mpiexec ./a) & done\nwait\n",
            FT + 'M="mpiexec -n 4"\n$M ./a &\n$M ./b &\nwait\n',
            FT + "part() { mpiexec -n 4 ./a $1; }\npart 1 &\npart 2 &\nwait\n",
            FT + "function part {\nmpiexec ./a $1\n}\nfor i in 1 2; do part $i & done\nwait\n",
            FT + "seq 4 | xargs -P 4 -I{} mpiexec -n 1 ./a {}\n",
            FT + "parallel mpiexec -n 1 ./a ::: 1 2\n",
            FT + 'sh -c "mpiexec ./a" &\nsh -c "mpiexec ./b" &\nwait\n',
            FT + "nohup bash -lc 'cd a; mpiexec ./a' > log 2>&1 &\nmpiexec ./b\nwait\n",
            FT + "time -p mpiexec ./a &\ntime -p mpiexec ./b &\nwait\n",
            FT + "setsid mpiexec ./a &\ntaskset -c 0 mpiexec ./b &\nwait\n",
            FT + "cd a && mpiexec ./a &\ncd b && mpiexec ./b &\nwait\n",
            FT + "eval 'mpiexec ./a &'\neval mpiexec ./b '&'\nwait\n",
            FT + "bash <<END\nmpiexec ./a &\nmpiexec ./b &\nwait\nEND\n",
            FT + "coproc mpiexec ./a\nmpiexec ./b\nwait\n",
            FT + 'A="mpiexec ./a"\nbash -c "$A" &\nmpiexec ./b\nwait\n',
            FT + "(mpiexec ./a; wait) &\nmpiexec ./b\nwait\n",
            FT + "(mpiexec ./a & wait) &\nmpiexec ./b\nwait\n",
            FT + "seq 4 | xargs -P2 -I{} sh -c 'cd {}; mpiexec ./a'\nparallel 'mpiexec ./a {}' ::: 1 2\n",
            ANY + "#PJM -L rscunit=fx\nwhile read x; do mpiexec ./a $x & done < list\nwait\n",
        ],
        [
            FT + "for i in 1 2 3 4; do\n  mpiexec -n 4 --vcoordfile v$i ./a.out &\ndone\nwait\n",
            FT + "mpiexec -n 4 -vcoordfile v1 ./a &\nmpiexec -n 4 -vcoordfile v2 ./b &\nwait\n",
            FT + "mpiexec -n 4 ./a &\nwait\nmpiexec -n 4 ./b\n",
            FT + "seq 4 | xargs -I{} mpiexec -n 1 ./a {}\nseq 4 | xargs -P 1 mpiexec ./a\n",
            FT + "seq 4 | xargs -P 4 -I{} mpiexec -n 1 -vcoordfile v{} ./a\n",
            FT + "for i in 1 2; do mpiexec ./a $i; done\n",
            FT + "for i in 1 2; do mpiexec ./a $i; done &\nwait\n",
            FT + "(mpiexec ./a; mpiexec ./b) &\nwait\n",
            FT + "part() { mpiexec -n 4 ./a $1; }\npart 1 &\nwait\npart 2\n",
            FT + "part() { mpiexec -vcoordfile v$1 ./a; }\npart 1 &\npart 2 &\nwait\n",
            FT + "mpiexec -n 1 --vcoordfile=v1 ./a &\nmpiexec -n 1 --vcoordfile=v2 ./b &\nwait\n",
            FT + "case $1 in\na) mpiexec ./a & ;;\nb) mpiexec ./b & ;;\nesac\nwait\n",
            FT + "if x; then\nmpiexec ./a &\nfi\nwait\n",
            FT + "for i in 1 2; do mpiexec $PLACE -n 4 ./a & done\nwait\n",
            FT + 'for i in 1 2; do mpiexec "${PLACE[@]}" ./a & done\nwait\n',
            FT + "for i in 1 2; do mpiexec ./a $i & wait; done\n",
            FT + "if x; then\nmpiexec ./a &\nelse\nmpiexec ./b &\nfi\nwait\n",
            FT + "mpiexec ./a &\nwhile kill -0 $!; do sleep 1; done\nmpiexec ./b\n",
            FT + "sh -c 'mpiexec ./a; mpiexec ./b' &\nwait\nbash -c 'mpiexec ./c'\n",
            FT + "bash -c 'mpiexec ./a & wait'\nmpiexec ./b\n",
            FT + "[ -e a ] && mpiexec ./a &\n[ -e a ] || mpiexec ./b\nwait\n",
            FT + "sh -c 'mpiexec -vcoordfile v ./a' &\nsh -c 'mpiexec -vcoordfile w ./b' &\nwait\n",
            FT + "seq 4 | xargs -P2 -I{} sh -c 'mpiexec -vcoordfile v{} ./a'\nseq 4 | xargs sh -c 'mpiexec ./a'\n",
        ],
    ),
    "PJM069": (
        [
            FT + "mpiexec -n 16 --vcoordfile v1 ./a.out &\n",
            ANY + "#PJM -S\nmpiexec ./a &\necho started\n",
            FT + "./a.out &\n",
            FT + "for i in 1 2 3; do ./a.out $i & done\n",
            FT + "nohup ./a.out > log 2>&1 &\necho started\n",
            FT + "(cd x; ./a.out) &\n",
            FT + "{ ./a.out; } > log &\n",
            FT + "./a.out & disown\n",
            FT + "for i in 1 2; do ./a.out $i; done &\n",
            FT + 'sh -c "mpiexec ./a" &\n',
            FT + "env A=1 mpiexec ./a &\nnumactl -m 4 ./b &\n",
            FT + "/usr/bin/time -p ./a.out &\n",
            FT + "(mpiexec ./a &)\nwait\n",
            FT + "bash -c 'mpiexec ./a &'\nwait\n",
            FT + "nohup bash -s <<'END' &\nmpiexec ./a\nEND\n",
            FT + "(mpiexec ./a & wait) &\n",
            FT + "./before; mpiexec ./a &\n",
        ],
        [
            FT + "mpiexec ./a &\nwait\n",
            FT + "mpiexec -vcoordfile v ./server &\nmpiexec -vcoordfile w ./client\n",
            FT + "mpiexec ./a &\nwhile kill -0 $!; do sleep 1; done\n",
            FT + "mpiexec ./a\n",
            FT + "wait_all() { wait; }\nmpiexec ./a &\nwait_all\n",
            FT + "trap 'wait' EXIT\nmpiexec ./a &\n",
            FT + "bash -c 'mpiexec ./a & wait'\n(./a & wait) &\nwait\n",
            FT + "numactl --show &\nenv &\n",
            FT + "cat > run.sh <<END\nmpiexec ./a &\nEND\nbash run.sh <<END\n./a &\nEND\n",
            FT + "mpiexec ./a &\n./monitor.sh\n",
            FT + "top -b > top.log &\n./a.out\n",
            FT + "./a.out 1 &\n./a.out 2 &\nwait\n",
            FT + "sleep 9 &\n",
            FT + "(sleep 9; echo late) &\nmpiexec ./a\n",
        ],
    ),
    "PJM070": (
        [
            ANY + "#PJM -L rscunit=fx\nmpiexec -of o ./a\n",
            FT + "mpiexec -stdout out ./a\n",
            FT + "mpirun -n 4 -of o -oferr e ./a\n",
            FT + "mpiexec --std o ./a\n",
        ],
        [
            FT + "mpiexec -stdout-proc out ./a\n",
            FT + "mpiexec ./a -stdout out\n",
            FT + "# mpiexec -stdout out ./a\n",
            ANY + "#PJM -L rscgrp=a-batch\nmpiexec -of o ./a\n",
        ],
    ),
    "PJM071": (
        [FT + "#PJM -L node=500,rscgrp=large --mpi proc=1000\nmpiexec -stdout-proc out/o ./a\n"],
        [
            FT + "#PJM -L node=500,rscgrp=large --mpi proc=1000\nmpiexec -stdout-proc out/%/1000r/o ./a\n",
            FT + "#PJM -L node=500,rscgrp=large --mpi proc=999\nmpiexec -stdout-proc out/o ./a\n",
            FT + "#PJM -L node=500,rscgrp=large --mpi proc=1000\nmpiexec ./a\n",
        ],
    ),
    "PJM072": (
        [
            ANY + "#PJM -S\necho a > /dev/stderr\n",
            FT + "./a 2>/dev/stdout\n",
            FT + "if true; then x >>/dev/stdout; fi\n",
        ],
        [
            FT + "echo a >&2\n",
            FT + "cat /dev/stdin > x\n",
            FT + "echo '> /dev/stdout'\n",
            FT + "echo a # > /dev/stdout\n",
        ],
    ),
    "PJM080": (
        [
            FT + "#PJM --llio localtmp-size=87Gi\n",
            FT + "#PJM --llio localtmp-size=60Gi,sharedtmp-size=30Gi\n",
            FT + "#PJM --llio localtmp-size=1-2\n",
        ],
        [FT + "#PJM --llio localtmp-size=60Gi,sharedtmp-size=20Gi\n", FT + "#PJM --llio localtmp-size=${SIZE}Gi\n"],
    ),
    "PJM081": (
        [FT + 'cp a "$PJM_LOCALTMP"\n', FT + "export TMPDIR=${PJM_LOCALTMP}/x\n", FT + "cd $PJM_SHAREDTMP\n"],
        [
            FT + '#PJM --llio localtmp-size=1Gi\ncp a "$PJM_LOCALTMP"\n',
            FT + "T=${PJM_LOCALTMP:-/tmp}\n",
            FT + "# cp a $PJM_LOCALTMP\n",
        ],
    ),
    "PJM082": (
        [
            FT + "#PJM -L node=64\nmpiexec python3 train.py\n",
            FT + "#PJM -L node=96\nmpiexec -n 4 numactl -l python x.py\n",
        ],
        [
            FT + "#PJM -L node=63\nmpiexec python3 train.py\n",
            FT + "#PJM -L node=64\nllio_transfer a.py\nmpiexec python3 a.py\n",
            FT + "#PJM -L node=64\ntar xf env.tar -C /worktmp\nmpiexec python3 a.py\n",
            FT + "#PJM -L node=64\nmpiexec ./a.out\npython3 plot.py\n",
        ],
    ),
    "PJM083": (
        [
            FT + "./a.out\nllio_transfer ./a.out\n",
            FT + "llio_transfer ./a.out\nmpiexec ./a.out\nrm ./a.out\n",
            FT + "llio_transfer in.txt\necho 1 > in.txt\n",
        ],
        [
            FT + "llio_transfer ./a.out\nmpiexec ./a.out\nllio_transfer --purge ./a.out\n",
            FT + "llio_transfer ./a.out\nmpiexec ./a.out\nllio_transfer --purge ./a.out\nrm ./a.out\n",
            FT + "./b.out\nllio_transfer ./a.out\n",
        ],
    ),
    "PJM084": (
        [
            FT + "#PJM -L node=2 --mpi max-proc-per-node=4\nmpiexec cp a $PJM_LOCALTMP\n",
            FT + "#PJM -L node=2 --mpi max-proc-per-node=4\nmpiexec sh -c 'tar xf a -C $PJM_LOCALTMP'\n",
            FT + "#PJM -L node=2\ncp a $PJM_LOCALTMP/\n",
        ],
        [
            FT + "#PJM -L node=2 --mpi max-proc-per-node=4\n"
            "mpiexec sh -c 'test $PLE_RANK_ON_NODE = 0 && cp a $PJM_LOCALTMP'\n",
            FT + "#PJM -L node=2 --mpi max-proc-per-node=1\nmpiexec cp a $PJM_LOCALTMP\n",
            FT + "#PJM -L node=1\ncp a $PJM_LOCALTMP/\n",
            FT + "#PJM -L node=2\ncp $PJM_LOCALTMP/a .\n",
        ],
    ),
    "PJM085": (
        [FT + "#PJM -L node-mem=28Gi\n", FT + "#PJM -L node-mem=32Gi\n", FT + "#PJM -L node-mem=lots!\n"],
        [FT + "#PJM -L node-mem=23Gi\n", FT + "#PJM -L node-mem=unlimited\n", FT + "#PJM -L node-mem=${MEM}\n"],
    ),
    "PJM086": (
        [
            FT + "illio_transfer ./a.out\n",
            FT + "llio-transfer ./a.out\n",
            FT + "lio_transfer ./a.out\n",
            FT + "dir_tranfser x\n",
            FT + "mpiexce ./a.out\n",
            FT + "mpirum ./a.out\n",
            ANY + "#PJM -L rscgrp=regular-o\nmpiexce ./a.out\n",
            FT + "LLIO_transfer ./a.out\n",
            FT + "/home/system/tool/dir_transfr x\n",
        ],
        [
            FT + "llio_transfer ./a.out\n",
            FT + "./illio_transfer ./a.out\n",
            FT + "mpiexec.hydra ./a\nmpirun ./a\n",
            FT + "illio_transfer() { llio_transfer $1; }\nillio_transfer ./a.out\n",
            FT + "function illio_transfer {\nllio_transfer $1\n}\nillio_transfer ./a.out\n",
            FT + "echo illio_transfer\n",
            ANY + "#PJM -L rscgrp=a-batch\nillio_transfer x\n",
        ],
    ),
    "PJM090": (
        [
            FT + "export LD_PRELOAD=a.so\n",
            FT + "LD_PRELOAD=a.so\nexport LD_PRELOAD\n",
            FT + "#PJM -x LD_PRELOAD=a.so\n",
        ],
        [
            FT + "LD_PRELOAD=a.so mpiexec ./a\n",
            FT + "mpiexec -x LD_PRELOAD=a.so ./a\n",
            FT + "export LD_PRELOAD=\n",
            FT + "env LD_PRELOAD=a.so ./a\n",
            FT + "# export LD_PRELOAD=a.so\n",
        ],
    ),
    "PJM091": (
        [FT + "export XOS_MMM_L_PAGING_POLICY=demand:demand:demand\nLD_PRELOAD=libtcmalloc.so mpiexec ./a\n"],
        [
            FT + "export XOS_MMM_L_HPAGE_TYPE=none\nLD_PRELOAD=libtcmalloc.so mpiexec ./a\n",
            FT + "export XOS_MMM_L_PAGING_POLICY=demand:demand:demand\nLD_PRELOAD=libx.so mpiexec ./a\n",
            FT + "LD_PRELOAD=libtcmalloc.so mpiexec ./a\n",
        ],
    ),
    "PJM092": (
        [
            FT + "export LD_PRELOAD=a.so\nexport LD_PRELOAD=b.so\n",
            FT + "export LD_PRELOAD=a.so\nLD_PRELOAD=b.so mpiexec ./a\n",
        ],
        [
            FT + "export LD_PRELOAD=a.so\nLD_PRELOAD=b.so:$LD_PRELOAD mpiexec ./a\n",
            FT + "LD_PRELOAD=a.so mpiexec ./a\nLD_PRELOAD=b.so mpiexec ./b\n",
            FT + "if x; then\nexport LD_PRELOAD=a.so\nelse\nexport LD_PRELOAD=b.so\nfi\n",
        ],
    ),
    "PJM093": (
        [
            FT + "export XOS_MMM_L_HUGETLB_FALLBACK=1\nexport XOS_MMM_L_ARENA_LOCK_TYPE=0\n",
            FT + "export XOS_MMM_L_HUGETLB_FALLBACK=1 XOS_MMM_L_PAGING_POLICY=prepage:prepage:demand\n",
        ],
        [
            FT + "export XOS_MMM_L_HUGETLB_FALLBACK=1\n",
            FT + "export XOS_MMM_L_HUGETLB_FALLBACK=0\nexport XOS_MMM_L_ARENA_LOCK_TYPE=0\n",
        ],
    ),
    "PJM094": (
        [FT + ". /vol0004/apps/oss/spack/share/spack/setup-env.sh\nspack load x\n", FT + "spack load x\n"],
        [
            FT + "spack load x\nexport LD_LIBRARY_PATH=/lib64:$LD_LIBRARY_PATH\n",
            FT + "spack load x\nexport LD_LIBRARY_PATH=`/home/system/tool/sort_libp`\n",
            FT + "# spack load x\n",
        ],
    ),
    "PJM095": (
        [FT + "export PATH=$VIRTUAL_ENV/bin:$PATH\n", ANY + "#PJM -S\n${CONDA_PREFIX}/bin/python x.py\n"],
        [
            FT + "source env/bin/activate\nexport PATH=$VIRTUAL_ENV/bin:$PATH\n",
            FT + "#PJM -X\nexport PATH=$VIRTUAL_ENV/bin:$PATH\n",
            FT + "VIRTUAL_ENV=/x\nexport PATH=$VIRTUAL_ENV/bin:$PATH\n",
            FT + "echo ${VIRTUAL_ENV:-none}\n",
        ],
    ),
    "PJM096": (
        [ANY + "#PJM -S\npjstat 239[1-5]\n", FT + "pjdel 12[3]\n"],
        [FT + "pjstat '239[1-5]'\n", FT + 'pjdel "12[3]"\n', FT + "ls 239[1-5]\n", FT + "pjstat 239\n"],
    ),
    "PJM097": (
        [FT + "pjrsh n01 hostname\n", FT + "mpirun -mca plm_rsh_agent /bin/pjrsh ./a\n"],
        [FT + "#PJM -L exepjrsh=1\npjrsh n01 hostname\n", FT + "# pjrsh n01\n"],
    ),
    "PJM098": (
        [
            FT + "#PJM -L node=${N}\n",
            FT + "#PJM -L node=@nnodes@,elapse=@elapse@\n",
            FT + "#PJM -L elapse=%(RSCTIME)s\n",
            FT + "#PJM --gname [project name]\n",
            FT + "#PJM -g groupname\n",
            FT + "#PJM -x PJM_LLIO_GFSCACHE=/vol000N\n",
            FT + "#PJM -L node=<--NNODES-->\n",
            FT + "#PJM -L {{key}}={{value}}\n",
            FT + "#PJM -g $(id -ng)\n",
            FT + "#PJM -L node={nodes}\n",
            FT + "#PJM -L node=##NODES##\n",
            FT + "#PJM -L elapse=%WALLTIME%\n",
            FT + "#PJM -L elapse=HH:MM:SS\n",
        ],
        [
            FT + "#PJM -L node=1 # ${N}\n",
            FT + '#PJM --vset "N=4"\n#PJM -L node=${N}\n',
            FT + "#PJM -o %n.%j.out\n",
            FT + "#PJM --mail-list a@b.jp,c@d.jp\n",
            FT + "echo ${N}\n",
        ],
    ),
    "PJM099": (
        [
            FT + "#PJM -L rscgrp=small-s2\n",
            FT + "#PJM -L rscgrp=huge_2307-4\n",
            FT + "#PJM -L rscgrp=eap-llio\n",
            FT + "#PJM -L rscgrp=dvsys-spack2\n",
        ],
        [FT + "#PJM -L rscgrp=small\n", FT + "#PJM -L rscgrp=small-torus\n", FT + "#PJM -L rscgrp=qc-hpc-ibm-a\n"],
    ),
}

# scripts that every pjsub refuses: errors also without --strict
SURE: Dict[str, str] = {
    "PJM004": FT + '#PJM -L "node=1\n',
    "PJM005": FT + "#PJM --L node=1\n",
    "PJM006": FT + "#PJM --stgin 'a b'\n",
    "PJM013": FT + "#PJM -N a/b\n",
    "PJM015": FT + "#PJM --bulk --step --sparam 0-1\n",
    "PJM019": FT + "#PJM -p 999\n",
    "PJM031": FT + "#PJM -L node=4x4:strict\n",
    "PJM034": FT + "#PJM -L vnode=1\n",
    "PJM040": FT + "#PJM -L elapse=1.5h\n",
    "PJM044": FT + "#PJM -L elapse=1-00:00:00\n",
    "PJM050": FT + "#PJM -L freq=1800\n",
    "PJM054": FT + "#PJM -L eco_state=3\n",
    "PJM060": FT + "#PJM -L node=2 --mpi proc=97\n",
    "PJM064": FT + "#PJM -L node=4x4 --mpi shape=16\n",
    "PJM080": FT + "#PJM --llio localtmp-size=1-2\n",
}

# errors of the table that are warnings unless --strict
LOWERED: Dict[str, str] = {
    "PJM001": FT + "cd x\n#PJM -S\n",
    "PJM003": FT + "#PJM \u2013x PJM_LLIO_GFSCACHE=/vol0004\n",
    "PJM005": ANY + "#PJM -L rscgrp=regular-o\n#PJM --ours 4\n",
    "PJM007": FT + "#SBATCH --nodes=2\n",
    "PJM010": FT + "#PJM --spath a.stats\n",
    "PJM012": FT + "#PJM --no-check-directory\n",
    "PJM013": FT + "#PJM -N 13b\n",
    "PJM015": FT + "#PJM --restart\n#PJM --norestart\n",
    "PJM017": FT + "./a.out\r\n",
    "PJM020": FT,
    "PJM021": FT + "#PJM -g fugaku\n",
    "PJM024": FT + "#PJM -L rscgrp=int\n",
    "PJM030": FT + "#PJM -L node=64x64,rscgrp=small\n",
    "PJM031": FT + "#PJM -L node=400:noncont,rscgrp=large\n",
    "PJM040": FT,
    "PJM042": FT + "#PJM -L rscgrp=spot-small,elapse=5:00:00\n",
    "PJM044": FT + "#PJM -L elapse=1-12:00:00\n",
    "PJM050": FT + "#PJM -L freq=2200,eco_state=0\n",
    "PJM072": FT + "echo a > /dev/stderr\n",
    "PJM080": FT + "#PJM --llio localtmp-size=88Gi\n",
}
