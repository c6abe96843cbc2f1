#!/bin/sh
# Install Debian packages for a part of the tests: env/install_packages.sh PURPOSE PROGRAMS PACKAGES
# Nothing is done where all PROGRAMS are there already; nothing that is installed is started.
# The exit code is 0 even if they cannot be installed: a message says so, and the tests are skipped with another.
set -eu
purpose=$1 programs=$2 packages=$3

skip() {
  echo "=== SKIPPED: no $purpose for the tests: $1 ===" >&2
  exit 0
}

for program in $programs; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$program" > /dev/null || missing=yes
done
[ -n "${missing:-}" ] || exit 0

command -v apt-get > /dev/null || skip "no apt-get here"
[ "$(id -u)" = 0 ] || skip "root installs them: apt-get install $packages"
echo "installing $packages"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086  # packages are words
install() { apt-get install --quiet --yes --no-install-recommends $packages > "$log" 2>&1; }
install || { apt-get --quiet update > "$log" 2>&1 && install; } || { tail -n 20 "$log" >&2; skip "apt-get cannot install them"; }
