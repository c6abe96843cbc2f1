#!/bin/sh
# Create an environment, or continue an unfinished one: env/make_environment.sh PYTHON FOLDER PINS MARK [PIP_ARGUMENT...]
# FOLDER/.installed-MARK is there once it is complete. Where a lock is beside the pins (NAME.lock of NAME.txt), all that
# it lists is installed by hashes, see env/install_locked.sh, and UNCHECKED names packages that are not checked. What was
# once installed without a check is installed again by the next call that checks all: FOLDER/.checked is there where
# nothing was. With MPI=system in the environment, mpi4py is made to fit the MPI on PATH, and the MPI of the pins is left
# out; with MPI4PY=source, too, mpi4py is compiled even where its wheel fits.
# Used by the Makefile and by `fugaku-gpt env create`.
set -u
# Settings of the caller's shell for another Python must not change where packages are found or installed.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER
python=$1 folder=$2 pins=$3 mark=$4
shift 4
scripts=$(cd "$(dirname "$0")" && pwd) checkout=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "$1" >&2
    exit 2
}
pip_failed() {
    fail "the install stopped (pip says why above); what is there is used again next time. Another Python, another \
package index and more: with make, PYTHON=... and PIP_ARGS='--index-url ...'; with fugaku-gpt env create, --python and \
--pip-args"
}

if [ "${MPI:-wheel}" = system ]; then
    command -v mpirun > /dev/null || fail "MPI=system needs mpirun on PATH (Debian: apt-get install openmpi-bin)"
fi
[ -r "$pins" ] || fail "$pins: cannot be read"
# This file marks the folder as one that this script may change and create again; it is written first.
mkdir -p "$folder" && echo "made by env/make_environment.sh" > "$folder/.fugaku_gpt" || fail "$folder: cannot be written"
"$scripts/make_venv.sh" "$python" "$folder" || exit
venv_python=$folder/bin/python
rm -f "$folder"/.installed-* || fail "$folder: its mark cannot be removed" # until it is complete again
is_new=
[ -e "$folder/pins.txt" ] || is_new=yes
# remove the MPI of an earlier installation, if it was another
if [ -e "$folder/pins.txt" ] && [ "$(cat "$folder/.mpi" 2> /dev/null)" != "${MPI:-wheel}" ]; then
    "$venv_python" -m pip uninstall -qq --yes mpich mpi4py
fi
echo "${MPI:-wheel}" > "$folder/.mpi" || fail "$folder/.mpi: cannot be written"
if [ "${MPI:-wheel}" = system ]; then
    sed '/^mpich==/d' "$pins" > "$folder/pins.txt"
else
    cat "$pins" > "$folder/pins.txt"
fi || fail "$folder/pins.txt: the pins of $pins cannot be written"

lock=${pins%.txt}.lock
install_itself() {
    echo "installing fugaku_gpt itself, as it is in $checkout"
    "$venv_python" -m pip install --disable-pip-version-check "$@" --no-deps --editable "$checkout" || pip_failed
}
# Pins that were changed after their lock was made would be ignored.
differing() {
    awk -F '==' '
        NR == FNR { if (/^[^ #]/) { split($2, version, /[ ;\\]/); locked[$1 "==" version[1]] = 1 } next }
        /^[A-Za-z0-9]/ && NF > 1 {
            name = tolower($1); gsub(/[_.]/, "-", name); split($2, version, /[ ;#]/)
            if (!((name "==" version[1]) in locked)) print name "==" version[1]
        }' "$lock" "$folder/pins.txt" | tr '\n' ' '
}
if [ -r "$lock" ]; then
    changed=$(differing)
    [ -z "$changed" ] || fail "$pins has what its lock has not: ${changed% }. Make the lock anew (make locks), or remove \
$lock: nothing is checked then"
    if [ -n "${UNCHECKED:-}" ]; then
        rm -f "$folder/.checked"
    elif [ -n "$is_new" ]; then
        touch "$folder/.checked"
    elif [ ! -e "$folder/.checked" ]; then
        echo "installing again, by hashes, what is there without a check"
        set -- "$@" --force-reinstall
    fi
    echo "installing $(grep -c == "$lock") packages by the hashes of $lock"
    without=
    [ "${MPI:-wheel}" != system ] || without=mpich
    LOCKED_WITHOUT=$without "$scripts/install_locked.sh" "$venv_python" "$lock" "$@" || pip_failed
    [ -n "${UNCHECKED:-}" ] || touch "$folder/.checked"
    install_itself "$@" --no-build-isolation # by the setuptools of the lock
else
    echo "=== NOT CHECKED by hash: there is no $lock ===" >&2
    rm -f "$folder/.checked"
    echo "installing $(grep -c == "$folder/pins.txt") packages"
    "$venv_python" -m pip install --disable-pip-version-check "$@" -r "$folder/pins.txt" || pip_failed
    install_itself "$@"
fi

# pip finds what it has compiled by the Python and the version of mpi4py, not by the MPI: each MPI has its own cache.
compile_mpi4py() {
    echo "compiling mpi4py for the MPI on PATH"
    command -v mpicc > /dev/null ||
        fail "MPI=system needs mpicc for the mpirun on PATH, a C compiler and Python's headers"
    build=$({ mpicc -show && mpirun --version && echo "${CFLAGS:-}"; } 2>&1 | cksum | tr ' ' -)
    if cache=$("$venv_python" -m pip cache dir 2> /dev/null); then set -- "$@" --cache-dir "$cache/mpi4py-$build"; fi
    if [ -r "$lock" ]; then
        "$scripts/install_locked.sh" "$venv_python" "$scripts/build-mpi4py.lock" "$@" || pip_failed
        LOCKED_ONLY=mpi4py "$scripts/install_locked.sh" "$venv_python" "$lock" "$@" --force-reinstall --no-binary mpi4py \
            --no-build-isolation || pip_failed
    else
        "$venv_python" -m pip install --disable-pip-version-check "$@" --force-reinstall --no-deps --no-binary mpi4py \
            "$(grep '^mpi4py==' "$pins")" || pip_failed
    fi
}
# The wheel of mpi4py knows the usual MPI libraries in their usual places; for others it is compiled.
if [ "${MPI:-wheel}" = system ]; then
    meet() { "$venv_python" "$scripts/two_ranks.py"; }
    if [ "${MPI4PY:-wheel}" = source ] || ! meet > /dev/null 2>&1; then
        compile_mpi4py "$@"
        meet || fail "two ranks of the mpirun on PATH do not meet"
    fi
fi
# Nothing needs our own kernels: a machine that cannot compile them gets its environment too, with a message.
"$venv_python" -m fugaku_gpt env kernels > /dev/null ||
    echo "kernels: not usable, see above: PyTorch's own will be used; \`fugaku-gpt env kernels\` in this environment \
compiles and tries them again" >&2
touch "$folder/.installed-$mark"
