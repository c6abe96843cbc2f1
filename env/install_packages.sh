#!/bin/sh
# Install Debian's Slurm and munge, for the tests against a real Slurm (tests/test_slurm.py); nothing is started.
# The exit code is 0 even if they cannot be installed: a message says so, and those tests are skipped with another.
set -eu

skip() {
  echo "=== SKIPPED: no real Slurm for the tests: $1 ===" >&2
  exit 0
}

for program in munged slurmctld slurmd; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$program" > /dev/null || missing=yes
done
[ -n "${missing:-}" ] || exit 0

command -v apt-get > /dev/null || skip "no apt-get here"
[ "$(id -u)" = 0 ] || skip "root installs them: apt-get install slurmctld slurmd slurm-client munge"
echo "installing slurmctld slurmd slurm-client munge"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() { apt-get install --quiet --yes --no-install-recommends slurmctld slurmd slurm-client munge > "$log" 2>&1; }
install || { apt-get --quiet update > "$log" 2>&1 && install; } || { tail -n 20 "$log" >&2; skip "apt-get cannot install them"; }
