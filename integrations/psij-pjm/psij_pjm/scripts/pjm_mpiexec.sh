#!/bin/bash
# Started by PSI/J with the arguments that launcher_lib.sh takes, then the number of ranks and the command.
# shellcheck source=/dev/null
source "$(dirname "$0")/launcher_lib.sh"

ranks=$1
shift
pre_launch

# A file for each rank, OUT.MPIEXEC.RANK: the options of mpiexec for a single file are ignored on Fugaku.
folder=$(mktemp -d "$PWD/.ranks.$_PSI_J_JOB_ID.XXXXXX")
options=(-n "$ranks" -stdout-proc "$folder/out" -stderr-proc "$folder/err")
if [ "$_PSI_J_STDIN" != /dev/null ]; then options+=(-stdin "$_PSI_J_STDIN"); fi
set +e
mpiexec "${options[@]}" "$@"
code=$?
in_order_of_ranks() {
  (cd "$folder" && for file in $(find . -name "$1.*" | sort -V); do cat "$file"; done)
}
in_order_of_ranks out > "$_PSI_J_STDOUT"
in_order_of_ranks err > "$_PSI_J_STDERR"
rm -rf "$folder"
set -e
log "mpiexec ended with $code"

post_launch
echo "_PSI_J_LAUNCHER_DONE"
exit "$code"
