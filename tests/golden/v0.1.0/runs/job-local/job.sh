#!/bin/bash
# A job for this machine: `fugaku-gpt job submit` runs it, or `bash job.sh` in its folder.
#
# Made by `fugaku-gpt job render` from these settings; all others are at their defaults.
#   model.layers: 2
#   model.hidden: 8
#   model.heads: 2
#   model.seq_len: 16
#   model.vocab_size: 288
#   model.vocab_multiple: 32
#   training.micro_batch: 2
#   training.iterations: 3
#   training.lr: 0.01
#   training.eval_interval: 3
#   training.eval_batches: 1
#   data.paths: ["/home/user/gpt/corpus"]
#   data.split: [80.0, 20.0, 0.0]
#   node.threads_per_rank: 1
#   node.flight_recorder: false
#   job.scheduler: "local"
#   job.elapse: "0:10:00"
#   job.group: "hp000000"
#   job.volumes: ["/vol0004"]
# Note: job.group=hp000000: not applied on this machine
# Note: job.volumes: not applied on this machine

# shellcheck disable=SC2016,SC2329  # quoted values stay as they are; the traps call the functions
set -u

job_id=${FUGAKU_GPT_JOB:-local-$$}
sub_job=${FUGAKU_GPT_SUB_JOB:-$job_id}
started=$(date +%s)
export FUGAKU_GPT_JOB_STARTED=$started # the ranks reckon from it when this job's time is over
told=''   # the signal that told this job to stop, and the code that says so
told_code=0
child=''  # the process that is waited for; `starting` while its number is not known

# What became of this job by its own account, in exit/: written when it is told to stop, and again when it ends.
write_exit_record() {
  mkdir -p exit &&
    printf '{"version": 1, "job_id": "%s", "sub_job": "%s", "exit_code": %d, "signal": "%s", "started": %d, "ended": %d, "host": "%s"}\n' \
      "$job_id" "$sub_job" "$1" "$told" "$started" "$(date +%s)" "${HOSTNAME:-unknown}" > "exit/.$sub_job.tmp" &&
    mv -f "exit/.$sub_job.tmp" "exit/$sub_job.json"
}

told_to_stop() {
  if [[ -n $told ]]; then return; fi # one order may come by several ways
  told=$1
  told_code=$2
  write_exit_record "$2"
  if [[ $child == starting ]]; then return; fi # `run` tells it
  if [[ -z $child ]]; then exit "$2"; fi
  tell_ranks
}

tell_ranks() {
  # launchers hand this signal to every rank, which stops with a checkpoint; at SIGTERM some kill the ranks
  kill -s USR1 "$child" 2> /dev/null || true
}

# In the background, so that a signal is heard at once and not only when the command has ended.
run() {
  local code
  if [[ -n $told ]]; then # while the command before this one ran: nothing begins any more
    echo "told to stop (SIG$told): not begun: $1" >&2
    return "$told_code"
  fi
  child=starting
  "$@" &
  child=$!
  if [[ -n $told ]]; then # meanwhile: it has a moment to become a program that listens
    sleep 1
    tell_ranks
  fi
  wait "$child"
  while kill -0 "$child" 2> /dev/null; do # a signal has cut the wait short
    wait "$child"
  done
  wait "$child"
  code=$?
  child=''
  return "$code"
}

trap 'write_exit_record "$?"' EXIT
trap 'told_to_stop INT 130' INT
trap 'told_to_stop USR1 138' USR1
trap 'told_to_stop TERM 143' TERM
trap 'told_to_stop XCPU 152' XCPU

export OMP_NUM_THREADS=1

# `train --ranks` finds this machine's mpirun, and what is to be preloaded into the ranks
python=/home/user/venv/bin/python
out=.
train=("$python" -m fugaku_gpt train config.yaml --out "$out" --resume auto --ranks 1)

run "${train[@]}"
code=$?
exit "$code"
