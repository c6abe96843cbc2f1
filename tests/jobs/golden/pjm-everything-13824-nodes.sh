#!/bin/bash
#PJM -N "gpt-1.3B-dp13824-tp4-pp1"
#PJM -g "hp190122"
#PJM -L "rscunit=rscunit_ft01"
#PJM -L "rscgrp=large"
#PJM -L "node=24x24x24:torus:strict-io"
#PJM -L "elapse=24:00:00"
#PJM -L "node-mem=23Gi"
#PJM -L "freq=2000"
#PJM -L "eco_state=0"
#PJM -L "retention_state=0"
#PJM -L "throttling_state=0"
#PJM -L "issue_state=0"
#PJM -L "ex_pipe_state=0"
#PJM -L "proc-openfd=65536"
#PJM --mpi "proc=55296"
#PJM --mpi "max-proc-per-node=4"
#PJM --mpi "rank-map-bychip:XYZ"
#PJM --llio "localtmp-size=40Gi"
#PJM --llio "sharedtmp-size=20Gi"
#PJM --llio "async-close=on"
#PJM -x "PJM_LLIO_GFSCACHE=/vol0004:/vol0005"
#PJM -S
#
# Made by `fugaku-gpt job render` from these settings; all others are at their defaults.
#   model.name: "1.3B"
#   model.layers: 24
#   model.hidden: 2048
#   model.heads: 32
#   model.seq_len: 1024
#   model.vocab_size: 50257
#   layout.dp: 13824
#   layout.tp: 4
#   training.global_batch: 13824
#   training.lr: 0.0002
#   training.min_lr: 2e-05
#   node.tcmalloc: true
#   node.preload: ["/vol0004/lib/libmy.so"]
#   node.freq_mhz: 2000
#   node.eco_state: 0
#   node.retention_state: 0
#   node.throttling_state: 0
#   node.issue_state: 0
#   node.ex_pipe_state: 0
#   node.open_files: 65536
#   job.nodes: 13824
#   job.shape: "24x24x24"
#   job.allocation: "torus"
#   job.strict: "strict-io"
#   job.elapse: "24:00:00"
#   job.group: "hp190122"
#   job.resource_group: "large"
#   job.resource_unit: "rscunit_ft01"
#   job.node_memory: "23Gi"
#   job.rank_map: "bychip:XYZ"
#   job.statistics: "nodes"
#   job.volumes: ["/vol0004", "/vol0005"]
#   job.local_tmp: "40Gi"
#   job.shared_tmp: "20Gi"
#   job.llio: ["async-close=on"]
#   job.transfer: ["/vol0004/lib/libmy.so"]
#   job.transfer_dirs: ["/vol0004/lib"]
#   job.tarball: "/vol0004/torch.tar"
#   job.environment: ["TOFU_6D=xya"]
# Note: node.threads_per_rank is not set: 12, by 48 cores and 4 ranks a node

# shellcheck disable=SC2016,SC2329  # quoted values stay as they are; the traps call the functions
set -u

job_id=${PJM_JOBID:-unknown}
sub_job=${PJM_SUBJOBID:-$job_id}
started=$(date +%s)
export FUGAKU_GPT_JOB_STARTED=$started # the ranks compute from it when this job's time is over
stop_signal='' # the signal that asked this job to stop
stop_code=0    # the exit code that reports it
child=''       # the process that is waited for; `starting` while its number is not known

# Records in exit/ how this job ends: written when a signal asks it to stop, and again at its end.
write_exit_record() {
  mkdir -p exit &&
    printf '{"version": 1, "job_id": "%s", "sub_job": "%s", "exit_code": %d, "signal": "%s", "started": %d, "ended": %d, "host": "%s"}\n' \
      "$job_id" "$sub_job" "$1" "$stop_signal" "$started" "$(date +%s)" "${HOSTNAME:-unknown}" > "exit/.$sub_job.tmp" &&
    mv -f "exit/.$sub_job.tmp" "exit/$sub_job.json"
}

on_stop_signal() {
  if [[ -n $stop_signal ]]; then return; fi # one request may arrive in several ways
  stop_signal=$1
  stop_code=$2
  write_exit_record "$2"
  if [[ $child == starting ]]; then return; fi # `run` signals it
  if [[ -z $child ]]; then exit "$2"; fi
  signal_ranks
}

signal_ranks() {
  # launchers forward this signal to every rank, which stops with a checkpoint; at SIGTERM some kill the ranks
  kill -s USR1 "$child" 2> /dev/null || true
}

# Runs a command in the background, so that a signal is handled at once and not only when the command has ended.
run() {
  local code
  if [[ -n $stop_signal ]]; then # the signal came during an earlier command: nothing is started any more
    echo "asked to stop (SIG$stop_signal): not started: $1" >&2
    return "$stop_code"
  fi
  child=starting
  "$@" &
  child=$!
  if [[ -n $stop_signal ]]; then # meanwhile: the child gets time to become a program that handles it
    sleep 1
    signal_ranks
  fi
  wait "$child"
  while kill -0 "$child" 2> /dev/null; do # a signal has interrupted the wait
    wait "$child"
  done
  wait "$child"
  code=$?
  child=''
  return "$code"
}

trap 'write_exit_record "$?"' EXIT
trap 'on_stop_signal INT 130' INT
trap 'on_stop_signal USR1 138' USR1
trap 'on_stop_signal TERM 143' TERM
trap 'on_stop_signal XCPU 152' XCPU

set +u # the site's own functions may use variables that are not set
module load lang/tcsds-1.2.38 || exit
set -u
export OMP_NUM_THREADS=12
export PARALLEL=12
export PLE_MPI_STD_EMPTYFILE=off
export TOFU_6D=xya
ulimit -n 65536 || echo "the limit of open files stays at $(ulimit -n)" >&2

# from here on, all nodes read these files from the first layer
run llio_transfer /vol0004/lib/libmy.so || exit
run /home/system/tool/dir_transfer /vol0004/lib || exit
run llio_transfer /vol0004/torch.tar || exit
# one rank of each node unpacks the environment to the node's own disk
run mpiexec bash -c \
  'if [[ ${PLE_RANK_ON_NODE:-0} == 0 ]]; then tar -xf "$1" -C "$PJM_LOCALTMP"; fi' unpack /vol0004/torch.tar || exit
launch=(mpiexec -n 55296
  -stdout-proc './output.%j/%m/%/1000r/stdout' -stderr-proc './output.%j/%m/%/1000r/stderr')
python="$PJM_LOCALTMP"/torch-1.10/bin/python3
out=.
mkdir -p exit && : > "exit/.$sub_job.began"
train=("$python" -m fugaku_gpt train config.yaml --set node.threads_per_rank=12 --out "$out" --resume auto)
preload=(env LD_PRELOAD=libtcmalloc.so:/vol0004/lib/libmy.so"${LD_PRELOAD:+:$LD_PRELOAD}")

run "${launch[@]}" "${preload[@]}" "${train[@]}"
code=$?
# a launcher may report the code of a rank that it killed while all were leaving: the run's own result decides
if ((code != 0)) && [[ $out/result.json -nt exit/.$sub_job.began ]] && grep -q '"reason": "stopped: ' "$out/result.json"; then
  code=75
fi
exit "$code"
