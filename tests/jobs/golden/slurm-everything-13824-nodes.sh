#!/bin/bash
#SBATCH --job-name="gpt-1.3B-dp13824-tp4-pp1"
#SBATCH --account="hp190122"
#SBATCH --partition="large"
#SBATCH --nodes=13824
#SBATCH --ntasks=55296
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --mem=23G
#SBATCH --tmp=40G
#SBATCH --output=slurm-%j.out
#SBATCH --export=NONE
#SBATCH --signal=B:TERM@60
#SBATCH --no-requeue
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
#   job.scheduler: "slurm"
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
# Note: node.eco_state=0: Slurm has no equivalent; not applied
# Note: node.retention_state=0: Slurm has no equivalent; not applied
# Note: node.throttling_state=0: Slurm has no equivalent; not applied
# Note: node.issue_state=0: Slurm has no equivalent; not applied
# Note: node.ex_pipe_state=0: Slurm has no equivalent; not applied
# Note: job.shape=24x24x24: Slurm has no equivalent; not applied
# Note: job.allocation=torus: Slurm has no equivalent; not applied
# Note: job.strict=strict-io: Slurm has no equivalent; not applied
# Note: job.resource_unit=rscunit_ft01: Slurm has no equivalent; not applied
# Note: job.shared_tmp=20Gi: Slurm has no equivalent; not applied
# Note: job.volumes: Slurm has no layered storage; files are read where they are
# Note: job.llio: Slurm has no layered storage; files are read where they are
# Note: job.transfer: Slurm has no layered storage; files are read where they are
# Note: job.transfer_dirs: Slurm has no layered storage; files are read where they are
# Note: job.statistics=nodes: Slurm keeps its own accounting; see sacct
# Note: node.freq_mhz: --cpu-freq works only where the site allows it; the run says what it saw
# Note: job.rank_map=bychip:XYZ: Slurm has no order of axes; block is used

# shellcheck disable=SC2016,SC2329  # quoted values stay as they are; the traps call the functions
set -u

job_id=${SLURM_JOB_ID:-unknown}
sub_job=$job_id
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
  # srun kills its ranks at once when it is asked to stop; this signals the ranks themselves
  scancel --signal=TERM "${SLURM_JOB_ID:-unknown}" 2> /dev/null || kill -s USR1 "$child" 2> /dev/null || true
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
export TOFU_6D=xya
ulimit -n 65536 || echo "the limit of open files stays at $(ulimit -n)" >&2

# one task of each node unpacks the environment to the node's own disk
local_tmp=$(mktemp -d) || exit
export local_tmp
run srun --export=ALL --nodes=13824 --ntasks=13824 --ntasks-per-node=1 bash -c \
  'mkdir -p "$1" && tar -xf "$2" -C "$1"' unpack "$local_tmp" /vol0004/torch.tar || exit
launch=(srun --export=ALL --kill-on-bad-exit=1 --cpus-per-task=12 --cpu-freq=2000000 --distribution=block)
python="$local_tmp"/torch-1.10/bin/python3
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
srun --export=ALL --nodes=13824 --ntasks=13824 --ntasks-per-node=1 rm -rf "$local_tmp"
exit "$code"
