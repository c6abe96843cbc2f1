#!/bin/sh
# Make an Arm machine of A64FX processors in a folder, emulated by qemu: env/make_aarch64.sh FOLDER [PART...]
#
#   kernels    qemu, an Arm userland with Python and NumPy, and GCC 12: what trying a compiled kernel takes
#   gcc-14     another compiler for Arm
#   clang-19   and another, with llvm-mca
#   training   PyTorch, MPI and all else that a training run and the tests import
#
# Nothing is installed on this machine and no root is needed: packages are downloaded by an apt of the folder's own and
# unpacked there. What is there already is kept, so that a second run takes no time and a run that was interrupted goes
# on. PYTHON is a Python 3.11 of this machine, whose pip downloads and whose mpirun starts the emulated ranks; PIP_ARGS
# are options of its pip.
#
#   FOLDER/bin/python           the emulated Python (QEMU_CPU chooses the processor; default a64fx)
#   FOLDER/bin/mpirun           this machine's own, whose ranks may be emulated
#   FOLDER/{gcc-12,gcc-14,clang-19}/bin/cc   cross compilers
#   FOLDER/clang-19/bin/llvm-mca
#
# Where a part cannot be had, a line says so and why, the other parts are made, and the exit code is 3.
set -u
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER
scripts=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] || { echo "usage: env/make_aarch64.sh FOLDER [kernels|gcc-14|clang-19|training ...]" >&2; exit 2; }
mkdir -p "$1" || exit 2
root=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- kernels gcc-14 clang-19 training
python=${PYTHON:-python3.11}
packages=$scripts/aarch64-packages.txt log=$root/log.txt
locks=$scripts/aarch64-torch-2.10.lock:$scripts/tests.lock # what runs and tests need, by hashes
skipped=

fail() { # of a part: the reason, with the end of the failed command's output
    echo "=== SKIPPED: emulated Arm machine, $part: $1 ===" >&2
    tail -n 5 "$log" >&2
    : > "$log"
    exit 3
}

# What a folder was made of, to make it anew when that changes: its packages, and the folders whose files it has.
digest() {
    {
        case $1 in
            gcc-*) grep "^cross " "$packages" ;;
            clang-*) grep -E "^(cross|gcc-12) " "$packages" ;;
            wheels | numpy) cat "$scripts/aarch64-torch-2.10.lock" "$scripts/tests.lock" ;;
        esac
        grep "^$1 " "$packages"
        cat "$0"
    } | sha256sum | cut -c 1-16
}
is_made() { [ "$(cat "$root/$1/.made" 2> /dev/null)" = "$(digest "$1")" ]; }

prepare_apt() { # a state of apt's own, which knows packages of both architectures and three suites
    [ -e "$root/apt/.made" ] && return
    command -v apt-get > /dev/null || fail "there is no apt-get here to download Debian packages"
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 2> "$log" | grep '/debian/*$' | head -n 1)
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -n "$mirror" ] && [ -r "$keys" ] || fail "apt here has no mirror of Debian, or no keys of it"
    rm -rf "$root/apt"
    mkdir -p "$root/apt/state/lists/partial" "$root/apt/cache/archives/partial" "$root/apt/etc" "$root/debs"
    : > "$root/apt/status"
    cat > "$root/apt/apt.conf" << END
APT::Architecture "amd64";
APT::Architectures { "amd64"; "arm64"; };
APT::Default-Release "bookworm";
APT::Sandbox::User "";
Dir::State "$root/apt/state";
Dir::State::status "$root/apt/status";
Dir::Cache "$root/apt/cache";
Dir::Etc::sourcelist "$root/apt/sources.list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferencesparts "-";
Acquire::Languages "none";
Acquire::Retries "3";
END
    {
        echo "deb [arch=amd64,arm64 signed-by=$keys] $mirror bookworm main"
        echo "deb [arch=amd64 signed-by=$keys] $mirror bookworm-backports main"
        echo "deb [arch=amd64 signed-by=$keys] $mirror trixie main"
    } > "$root/apt/sources.list"
    APT_CONFIG=$root/apt/apt.conf apt-get --quiet update > "$log" 2>&1 || fail "apt-get update failed"
    touch "$root/apt/.made"
}

unpack() { # the packages of a folder, into it
    is_made "$1" && return
    prepare_apt
    names=$(sed -n "s/^$1 //p" "$packages")
    rm -rf "${root:?}/$1" "$root/debs/$1" "$root/$1.new"
    mkdir -p "$root/debs/$1" "$root/$1.new"
    download "$1" "$names" || {
        # a point release has replaced packages since the lists were fetched
        rm -f "$root/apt/.made" && prepare_apt && download "$1" "$names" || fail "a package of $1 cannot be downloaded"
    }
    for deb in "$root/debs/$1"/*.deb; do
        if [ "$1" = qemu ]; then
            dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$root/$1.new" --wildcards '*/qemu-aarch64' 2> "$log"
        else
            dpkg-deb -x "$deb" "$root/$1.new" 2> "$log"
        fi || fail "$deb cannot be unpacked"
    done
    ls "$root/debs/$1" > "$root/$1.new/.versions"
    rm -rf "$root/debs/$1"
    mv "$root/$1.new" "$root/$1"
}
download() { # FOLDER NAMES
    # shellcheck disable=SC2086  # names are words
    (cd "$root/debs/$1" && APT_CONFIG=$root/apt/apt.conf apt-get --quiet download $2) > "$log" 2>&1
}
made() { digest "$1" > "$root/$1/.made"; }

# A command of a compiler's folder, run with the libraries of the same folder.
wrap() { # FOLDER NAME COMMAND...
    mkdir -p "$root/$1/bin"
    target=$root/$1/bin/$2 libraries=$root/$1/usr/lib/x86_64-linux-gnu:$root/$1/usr/lib/llvm-19/lib:$root/cross/usr/lib/x86_64-linux-gnu
    shift 2
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$libraries" "$*" > "$target"
    chmod +x "$target"
}

make_cross() {
    is_made cross && return
    unpack cross
    # linker scripts there name files of an installed system
    grep -rlI '/usr/aarch64-linux-gnu' "$root/cross/usr/aarch64-linux-gnu/lib" --include='*.so' |
        while read -r script; do sed -i "s#/usr/aarch64-linux-gnu#=/usr/aarch64-linux-gnu#g" "$script"; done
    made cross
}

make_gcc() { # 12 or 14
    is_made "gcc-$1" && return
    make_cross
    unpack "gcc-$1"
    # its driver looks for headers, start files and the assembler beside itself
    cp -r "$root/cross/usr/." "$root/gcc-$1/usr/" || fail "no room for gcc-$1"
    if [ "$1" = 14 ]; then
        interpreter=$root/gcc-14/usr/lib64/ld-linux-x86-64.so.2
        [ -e "$interpreter" ] || interpreter=$root/gcc-14/lib64/ld-linux-x86-64.so.2
        for program in "$root"/gcc-14/usr/bin/aarch64-linux-gnu-* "$root"/gcc-14/usr/libexec/gcc-cross/aarch64-linux-gnu/14/*; do
            if [ -f "$program" ] && [ ! -L "$program" ] && head -c 4 "$program" | grep -q ELF; then
                case $program in *.so*) continue ;; esac
                "$root/gcc-14/usr/bin/patchelf" --set-interpreter "$interpreter" "$program" 2> "$log" || continue
            fi
        done
    fi
    wrap "gcc-$1" cc "$root/gcc-$1/usr/bin/aarch64-linux-gnu-gcc-$1" "--sysroot=$root/gcc-$1"
    try_compiler "gcc-$1"
    made "gcc-$1"
}

make_clang() {
    is_made clang-19 && return
    make_gcc 12
    unpack clang-19
    wrap clang-19 cc "$root/clang-19/usr/lib/llvm-19/bin/clang" --target=aarch64-linux-gnu \
        "--sysroot=$root/gcc-12" "--gcc-toolchain=$root/gcc-12/usr"
    wrap clang-19 llvm-mca "$root/clang-19/usr/lib/llvm-19/bin/llvm-mca"
    try_compiler clang-19
    made clang-19
}

try_compiler() {
    printf '#include <math.h>\nfloat f(float x) { return fmaf(x, x, sqrtf(x)); }\n' > "$root/try.c"
    "$root/$1/bin/cc" -O2 -fPIC -mcpu=a64fx -shared -o "$root/try.so" "$root/try.c" -lm > "$log" 2>&1 ||
        fail "$1 does not compile here"
    rm -f "$root/try.c" "$root/try.so"
}

pip_for_arm() { # OPTION...: wheels of the locks for Arm; which, and what is done with them, is in the environment
    # shellcheck disable=SC2086  # options are words
    "$scripts/install_locked.sh" "$python" "$locks" --quiet ${PIP_ARGS:-} --no-deps \
        --only-binary=:all: --implementation cp --python-version 3.11 --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 \
        "$@" > "$log" 2>&1 || fail "pip cannot get the wheels for Arm"
}

make_python() { # an emulated Python, with the packages of a folder
    printf '#!/bin/sh\nQEMU_CPU="${QEMU_CPU:-a64fx}" exec %s -L %s -0 %s %s "$@"\n' "$root/qemu/usr/bin/qemu-aarch64" \
        "$root/sysroot" "$root/bin/python" "$root/sysroot/usr/bin/python3.11" > "$root/bin/python"
    chmod +x "$root/bin/python"
}

make_kernels() {
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> "$log" ||
        fail "$python is no Python 3.11: its pip downloads wheels, and modules are compiled by it"
    for folder in qemu sysroot; do
        unpack "$folder"
        made "$folder"
    done
    make_gcc 12
    if ! is_made numpy; then
        rm -rf "$root/numpy"
        LOCKED_ONLY=numpy pip_for_arm --no-compile --target "$root/numpy"
        made numpy
    fi
    mkdir -p "$root/bin"
    # sys.executable is this script: what the emulated Python starts again is emulated as well
    make_python
    printf 'home = %s\ninclude-system-site-packages = false\nversion = 3.11.2\n' "$root/sysroot/usr/bin" > "$root/pyvenv.cfg"
    "$root/bin/python" -S -c pass > "$log" 2>&1 || fail "the emulated Python does not start"
}

make_training() {
    make_kernels
    is_made wheels && return
    rm -rf "$root/wheels"
    mkdir -p "$root/wheels"
    # pip leaves the libraries of mpich's wheel out of a --target
    LOCKED_WITHOUT=mpich pip_for_arm --no-compile --target "$root/wheels"
    rm -rf "$root/mpich"
    LOCKED_ONLY=mpich LOCKED_COMMAND=download pip_for_arm --dest "$root/mpich"
    "$python" -m zipfile -e "$root"/mpich/mpich-*.whl "$root/mpich" > "$log" 2>&1 || fail "MPICH's wheel cannot be unpacked"
    mkdir -p "$root/lib"
    cp -r "$root"/mpich/mpich-*.data/data/lib/. "$root/lib/" || fail "MPICH's libraries cannot be copied"
    rm -rf "$root/mpich"
    # modules are compiled here: the emulated Python reads the same code, and would take minutes
    "$python" -m compileall -q -j 0 "$root/wheels" "$root/sysroot/usr/lib/python3.11" > "$log" 2>&1
    mkdir -p "$root/lib/python3.11"
    rm -rf "$root/lib/python3.11/site-packages"
    ln -s "$root/wheels" "$root/lib/python3.11/site-packages"
    programs=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
    for program in mpirun mpiexec mpiexec.hydra hydra_pmi_proxy; do
        [ -x "$programs/$program" ] || fail "MPICH's $program is not beside $python"
        ln -sf "$programs/$program" "$root/bin/$program"
    done
    made wheels
}

for part in "$@"; do
    case $part in
        kernels) step=make_kernels ;;
        gcc-14) step="make_gcc 14" ;;
        clang-19) step=make_clang ;;
        training) step=make_training ;;
        *) echo "$part: no such part; parts are kernels, gcc-14, clang-19, training" >&2; exit 2 ;;
    esac
    echo "emulated Arm machine: $part"
    ($step)
    code=$?
    case $code in
        0) ;;
        3) skipped="$skipped $part" ;;
        *) echo "emulated Arm machine: $part failed: exit code $code" >&2; exit "$code" ;;
    esac
done
cat "$root"/*/.versions 2> /dev/null | sort -u > "$root/versions.txt"
[ -z "$skipped" ] || { echo "emulated Arm machine: made without:$skipped" >&2; exit 3; }
