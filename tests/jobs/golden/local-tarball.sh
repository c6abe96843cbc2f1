#!/bin/bash
# A job for this machine: `fugaku-gpt job submit` runs it, or `bash job.sh` in its folder.
#
# Made by `fugaku-gpt job render` from these settings; all others are at their defaults.
#   layout.dp: 2
#   training.micro_batch: 4
#   training.global_batch: 16
#   training.lr: 0.002
#   training.min_lr: 0.0002
#   training.warmup_iterations: 30
#   node.eco_state: 2
#   job.scheduler: "local"
#   job.tarball: "torch.tar"
# Note: node.threads_per_rank is not set: 24, by 48 cores and 2 ranks a node
# Note: node.eco_state=2: not applied on this machine

# shellcheck disable=SC2016,SC2329  # quoted values stay as they are; the traps call the functions
set -u

job_id=${FUGAKU_GPT_JOB:-local-$$}
sub_job=${FUGAKU_GPT_SUB_JOB:-$job_id}
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
export OMP_NUM_THREADS=24

local_tmp=$(mktemp -d) || exit
run tar -xf torch.tar -C "$local_tmp" || exit
# `train --ranks` finds this machine's mpirun, and the libraries to preload into the ranks
python="$local_tmp"/torch-1.10/bin/python3
out=.
train=("$python" -m fugaku_gpt train config.yaml --out "$out" --resume auto --ranks 2)

run "${train[@]}"
code=$?
rm -rf "$local_tmp"
exit "$code"
