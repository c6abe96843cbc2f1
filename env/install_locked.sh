#!/bin/sh
# Install lock files into an environment: env/install_locked.sh PYTHON LOCK[:LOCK...] [PIP_ARGUMENT...]
# pip refuses each file that has none of the hashes of its lock, from whatever index it comes, and installs nothing that
# is not in a lock. In the environment of this script:
#   UNCHECKED   packages that are installed without hashes, with all that they need, such as "torch", where another index
#               has other builds of them; or all
#   LOCKED_WITHOUT     packages of the locks that are not installed
#   LOCKED_ONLY        packages of the locks that alone are installed
#   LOCKED_COMMAND     of pip: install, or download
# Used by env/make_environment.sh, env/make_aarch64.sh and the Makefile; `make locks` makes locks.
set -u
python=$1 locks=$2
shift 2
set -f
IFS=: # of the names of locks
unchecked=$(printf '%s' "${UNCHECKED:-}" | tr '[:upper:]' '[:lower:]' | sed 's/[_.]/-/g; s/,/ /g') # as locks write names
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
for file in checked unchecked versions; do : > "$work/$file.txt" || exit 2; done

for lock in $locks; do
    [ -r "$lock" ] || { echo "$lock: cannot be read" >&2; exit 2; }
done
# Installs by hashes; pip's warnings and errors come at its end, so that a file that was refused is explained after them.
install() { "$python" -m pip "${LOCKED_COMMAND:-install}" --disable-pip-version-check "$@"; }
install_checked() { install "$@" --require-hashes --no-deps 2> "$work/errors.txt"; }
failed() {
    cat "$work/errors.txt" >&2
    ! grep -q "DO NOT MATCH THE HASHES" "$work/errors.txt" || echo "pip has refused a file that is not in $1. If you trust \
an index that has other builds of a package, have it installed without a check: with make, UNCHECKED='PACKAGE...'; with \
fugaku-gpt env create, --unchecked PACKAGE" >&2
    exit 2
}

# A build of PyTorch for processors alone is taken where the index has it, as its version is the higher one to pip.
for lock in $locks; do
    cpu=${lock%.lock}-cpu.lock
    [ -r "$cpu" ] && [ -z "${LOCKED_ONLY:-}" ] || continue
    case " $unchecked ${LOCKED_WITHOUT:-} " in *" torch "* | " all "*) continue ;; esac
    if install_checked "$@" -r "$cpu"; then
        LOCKED_WITHOUT="${LOCKED_WITHOUT:-} torch"
    elif ! grep -q "No matching distribution found for torch" "$work/errors.txt"; then
        failed "$cpu"
    fi
done

# shellcheck disable=SC2086  # they are several
awk -v unchecked="$unchecked" -v without="${LOCKED_WITHOUT:-}" -v only="${LOCKED_ONLY:-}" -v work="$work" '
    function is_in(names, name) { return index(" " names " ", " " name " ") > 0 }
    /^#/ || /^$/ { next }
    /^[^ ]/ {
        name = requirement = $0
        sub(/==.*/, "", name)
        sub(/ *\\$/, "", requirement)
        print requirement > (work "/versions.txt")
        is_left_out = is_in(without, name) || (only != "" && !is_in(only, name))
        is_checked = !is_in(unchecked, "all") && !is_in(unchecked, name)
        if (!is_left_out && !is_checked) print requirement > (work "/unchecked.txt")
    }
    !is_left_out && is_checked { print > (work "/checked.txt") }
' $locks || exit 2

if [ -s "$work/checked.txt" ]; then
    install_checked "$@" -r "$work/checked.txt" || failed "$locks"
    cat "$work/errors.txt" >&2
fi
if [ -s "$work/unchecked.txt" ]; then
    echo "=== NOT CHECKED by hash, as UNCHECKED asks: $(tr '\n' ' ' < "$work/unchecked.txt")and what only they need ===" >&2
    install "$@" -c "$work/versions.txt" -r "$work/unchecked.txt" || exit 2
fi
# Whether PyTorch needs CUDA's libraries depends on the index that its build is from.
for lock in $locks; do
    cuda=${lock%.lock}-cuda.lock
    if [ -r "$cuda" ] && "$python" -m pip check 2> /dev/null | grep -q '^torch .*, which is not installed'; then
        echo "installing what this build of PyTorch needs for CUDA"
        "$0" "$python" "$cuda" "$@" || exit
    fi
done
