#!/bin/bash
#PJM -L "node=4"
#PJM -L "elapse=01:00:00"
#PJM -L "freq=2200,eco_state=0"
#PJM --mpi "max-proc-per-node=4"
#PJM -g hp000000
export LD_PRELOAD=libtcmalloc.so
mpiexec python train.py
#PJM -S
