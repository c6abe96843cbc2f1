#!/bin/bash
#PJM -N "gpt-124M-dp2048-tp1-pp1"
#PJM -g "hp190122"
#PJM -L "rscgrp=large"
#PJM -L "node=512"
#PJM -L "elapse=1:00:00"
#PJM -L "freq=2000"
#PJM -L "eco_state=0"
#PJM -L "retention_state=1"
#PJM -L "throttling_state=0"
#PJM -L "issue_state=0"
#PJM -L "ex_pipe_state=0"
#PJM --mpi "proc=2048"
#PJM --mpi "max-proc-per-node=4"
#PJM -x "PJM_LLIO_GFSCACHE=/vol0004"
#PJM -s
# noqa-file: PJM032
#
# Made by `fugaku-gpt job render` from these settings; all others are at their defaults.
#   model.name: "124M"
#   model.layers: 12
#   model.hidden: 768
#   model.heads: 12
#   model.seq_len: 1024
#   model.vocab_size: 50257
#   layout.dp: 2048
#   training.global_batch: 2048
#   job.nodes: 512
#   job.elapse: "1:00:00"
#   job.group: "hp190122"
#   job.resource_group: "large"
#   job.volumes: ["/vol0004"]
#   job.accept_findings: ["PJM032"]
# Note: node.threads_per_rank is not set: 12, by 48 cores and 4 ranks a node
# Note: freq and eco_state are not set: 2000 MHz with both pipes is written out, 6.14 TFLOP/s a node; Fugaku's default, 2200 MHz with one pipe, has 3.38 TFLOP/s
# Note: not set, Fugaku's defaults are written out: retention_state=1, throttling_state=0, issue_state=0, ex_pipe_state=0
# Note: retention_state=1: idle cores sleep, and take 3 ms to wake; OMP_WAIT_POLICY=active keeps them up
# Note: job.nodes: 512 nodes are used, 528 are billed: a torus consists of units of 2x3x8

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

export OMP_NUM_THREADS=12
export PARALLEL=12
export PLE_MPI_STD_EMPTYFILE=off
export OMP_WAIT_POLICY=active

launch=(mpiexec -n 2048
  -stdout-proc './output.%j/%m/%/1000r/stdout' -stderr-proc './output.%j/%m/%/1000r/stderr')
python=/home/apps/torch-1.10/bin/python3
out=.
mkdir -p exit && : > "exit/.$sub_job.began"
train=("$python" -m fugaku_gpt train config.yaml --set node.threads_per_rank=12 --out "$out" --resume auto)

run "${launch[@]}" "${train[@]}"
code=$?
# a launcher may report the code of a rank that it killed while all were leaving: the run's own result decides
if ((code != 0)) && [[ $out/result.json -nt exit/.$sub_job.began ]] && grep -q '"reason": "stopped: ' "$out/result.json"; then
  code=75
fi
exit "$code"
