#!/bin/sh
# Create the environment of a distribution in integrations/, or bring it up to date:
#   env/make_integration.sh PYTHON FOLDER LOCK DISTRIBUTION [PIP_ARGUMENT...]
# All packages of the lock are installed by hashes, then fugaku_gpt (editable) and the distribution; none if DISTRIBUTION
# is empty. Exit code 3 means that the package index cannot be reached, or has not all of them. Used by
# `make test-integrations` and `make test-browser`.
set -u
python=$1 folder=$2 lock=$3 distribution=$4
shift 4
scripts=$(cd "$(dirname "$0")" && pwd) checkout=$(cd "$(dirname "$0")/.." && pwd)
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

"$scripts/make_venv.sh" "$python" "$folder" || exit 2
install_itself() { "$folder/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation "$@"; }
if ! [ "$folder/.installed" -nt "$lock" ]; then
    rm -f "$folder/.installed"
    echo "installing $(grep -c == "$lock") packages into $folder by the hashes of $lock"
    if ! "$scripts/install_locked.sh" "$folder/bin/python" "$lock" "$@" > "$work/log.txt" 2>&1; then
        cat "$work/log.txt" >&2
        ! grep -q "DO NOT MATCH THE HASHES" "$work/log.txt" || exit 2
        grep -Eq "No matching distribution|Could not find a version|NewConnectionError|ReadTimeout" "$work/log.txt" && exit 3
        exit 2
    fi
    install_itself "$@" --editable "$checkout" || exit 2
    touch "$folder/.installed"
fi
[ -n "$distribution" ] || exit 0
# from a copy, so that no leftovers of an earlier build get into it
cp -R "$checkout/integrations/$distribution" "$work/source" && rm -rf "$work/source/build" || exit 2
install_itself "$@" --force-reinstall "$work/source" || exit 2
