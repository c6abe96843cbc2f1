#!/bin/bash
#PJM -N "gpt-124M-dp4-tp1-pp1"
#PJM -g "hp190122"
#PJM -L "rscgrp=small"
#PJM -L "node=1"
#PJM -L "elapse=1:00:00"
#PJM -L "freq=2000"
#PJM -L "eco_state=0"
#PJM -L "retention_state=1"
#PJM -L "throttling_state=0"
#PJM -L "issue_state=0"
#PJM -L "ex_pipe_state=0"
#PJM --mpi "proc=4"
#PJM --mpi "max-proc-per-node=4"
#PJM -x "PJM_LLIO_GFSCACHE=/vol0004"
#PJM --step
#PJM -s
#
# Made by `fugaku-gpt job render` from these settings; all others are at their defaults.
#   model.name: "124M"
#   model.layers: 12
#   model.hidden: 768
#   model.heads: 12
#   model.seq_len: 1024
#   model.vocab_size: 50257
#   layout.dp: 4
#   training.global_batch: 1024
#   node.ranks_per_node: 4
#   job.elapse: "1:00:00"
#   job.group: "hp190122"
#   job.resource_group: "small"
#   job.volumes: ["/vol0004"]
#   job.chain: 4
# Note: node.threads_per_rank is not set: 12, by 48 cores and 4 ranks a node
# Note: freq and eco_state are not set: 2000 MHz with both pipes is written out, 6.14 TFLOP/s a node; Fugaku's default, 2200 MHz with one pipe, has 3.38 TFLOP/s
# Note: not set, Fugaku's defaults are written out: retention_state=1, throttling_state=0, issue_state=0, ex_pipe_state=0
# Note: retention_state=1: idle cores sleep, and take 3 ms to wake; OMP_WAIT_POLICY=active keeps them up

# shellcheck disable=SC2016,SC2329  # quoted values stay as they are; the traps call the functions
set -u

job_id=${PJM_JOBID:-unknown}
sub_job=${PJM_SUBJOBID:-$job_id}
step=${PJM_STEPNUM:-0}
after=''
if ((step > 0)); then after=${job_id%_*}_$((step - 1)); fi
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

# A link of a chain runs only if the previous link stopped and can be resumed (exit code 75), or was killed with a node.
nothing_left() {
  echo "job $after $1: there is nothing for this link to do"
  exit 76
}
has_new_checkpoint() { # since the death that was recorded last; checkpoints/latest.json may not have it yet
  local manifest
  for manifest in checkpoints/step-*/manifest.json; do
    [[ $manifest -nt exit/.killed ]] && return 0
  done
  return 1
}
if [[ -n $after && ! -e exit/$after.json && -e exit/.$after.began ]]; then
  # it could not record its end; if this comes twice without a checkpoint in between, something else than a node is at fault
  if [[ result.json -nt exit/.$after.began ]] && grep -q '"status": "out_of_memory"' result.json; then
    nothing_left "was out of memory"
  elif [[ -e exit/.killed ]] && ! has_new_checkpoint; then
    nothing_left "was killed, as one before it, and no checkpoint was written in between"
  fi
  echo "job $after was killed and could record nothing, as where its node has died: this link continues"
  : > exit/.killed
  printf '{"version": 1, "job_id": "%s", "sub_job": "%s", "exit_code": 75, "signal": "KILL", "started": %d, "ended": %d, "host": "unknown"}\n' \
    "${after%_*}" "$after" "$(date -r "exit/.$after.began" +%s)" "$(date +%s)" > "exit/.$after.tmp" &&
    mv -f "exit/.$after.tmp" "exit/$after.json"
elif [[ -n $after ]] && ! grep -q '"exit_code": 75,' "exit/$after.json"; then
  nothing_left "cannot be resumed"
fi
mkdir -p exit && : > "exit/.$sub_job.began"

export OMP_NUM_THREADS=12
export PARALLEL=12
export PLE_MPI_STD_EMPTYFILE=off
export OMP_WAIT_POLICY=active

launch=(mpiexec -n 4
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
# ranks that are killed from outside, as with their node, leave a checkpoint of this link from which the next can continue
if ((code != 0)) && [[ checkpoints/latest.json -nt exit/.$sub_job.began ]] &&
  { [[ ! result.json -nt exit/.$sub_job.began ]] || grep -q 'killed by signal 9 (SIGKILL)' result.json; }; then
  code=75
fi
if ((code == 0 && step < 3)); then # this exit code cancels the links that remain; the record has 0
  write_exit_record 0
  trap - EXIT
  exit 76
fi
exit "$code"
