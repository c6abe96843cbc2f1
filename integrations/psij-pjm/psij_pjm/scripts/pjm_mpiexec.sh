#!/bin/bash
# Started by PSI/J with the arguments that launcher_lib.sh takes, then the number of ranks and the command.
# shellcheck source=/dev/null
source "$(dirname "$0")/launcher_lib.sh"

ranks=$1
shift
pre_launch
: > "$_PSI_J_STDOUT"
: > "$_PSI_J_STDERR"

# A file for each rank, OUT.MPIEXEC.RANK: the options of mpiexec for a single file are ignored on Fugaku.
folder=$(mktemp -d "$PWD/.ranks.$_PSI_J_JOB_ID.XXXXXX")
options=(-n "$ranks" -stdout-proc "$folder/out" -stderr-proc "$folder/err")
if [ "$_PSI_J_STDIN" != /dev/null ]; then options+=(-stdin "$_PSI_J_STDIN"); fi
set +e

declare -A copied # file of a rank → number of its bytes that were passed on

# Append to a file what is new in the ranks' files OUT.* or ERR.*, in the order of ranks.
# Arguments: out or err, the file, and "lines" to leave lines that are not complete yet, or "all".
pass_on() {
  local size file length rest
  while read -r size file; do
    length=$((size - ${copied[$file]:-0}))
    if ((length <= 0)); then continue; fi
    tail -c "+$((${copied[$file]:-0} + 1))" "$folder/$file" | head -c "$length" > "$folder/new"
    rest=0
    if [ "$3" = lines ] && [ -n "$(tail -c 1 "$folder/new")" ]; then rest=$(tail -n 1 "$folder/new" | wc -c); fi
    head -c "$((length - rest))" "$folder/new" >> "$2"
    copied[$file]=$((${copied[$file]:-0} + length - rest))
  done < <(find "$folder" -type f -name "$1.*" -printf '%s %f\n' | sort -V -k 2)
}

# Pass on what ranks print until standard input is closed, and then the rest. Ranks share the node's cores with this:
# it pauses twenty times as long as it works, and a second at least.
follow_ranks() {
  local before code pause=1000
  while true; do
    read -r -t "$((pause / 1000)).$(printf %03d $((pause % 1000)))"
    code=$?
    if ((code <= 128)); then break; fi # above: no more than the time is over
    before=$(date +%s%3N)
    pass_on out "$_PSI_J_STDOUT" lines
    pass_on err "$_PSI_J_STDERR" lines
    pause=$((20 * ($(date +%s%3N) - before)))
    if ((pause < 1000)); then pause=1000; fi
  done
  pass_on out "$_PSI_J_STDOUT" all
  pass_on err "$_PSI_J_STDERR" all
}

coproc follow_ranks
follower=$COPROC_PID input=${COPROC[1]}
mpiexec "${options[@]}" "$@"
code=$?
exec {input}>&-
wait "$follower"
rm -rf "$folder"
set -e
log "mpiexec ended with $code"

post_launch
echo "_PSI_J_LAUNCHER_DONE"
exit "$code"
