#!/bin/sh
# Make a virtual environment: env/make_venv.sh PYTHON FOLDER
# Debian splits venv from Python; where it is missing, virtualenv serves, and root can install Debian's package.
set -u
python=$1 folder=$2

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
wanted=$(version "$python") || {
    echo "make: $python does not run; choose one with make PYTHON=..." >&2
    exit 2
}
# Half-made folders, and those of another Python than the one asked for, are made anew.
works() { [ -e "$folder/pyvenv.cfg" ] && [ "$(version "$folder/bin/python")" = "$wanted" ] && \
    "$folder/bin/python" -m pip --version >/dev/null 2>&1; }
works && exit 0
# all but the file by which env/make_environment.sh knows its folders
clear() { [ ! -d "$folder" ] || find "$folder" -mindepth 1 -maxdepth 1 ! -name .fugaku_gpt -exec rm -rf {} +; }
clear
if "$python" -m venv "$folder" >/dev/null 2>&1 && works; then exit 0; fi
clear
if "$python" -m virtualenv "$folder" >/dev/null 2>&1 && works; then exit 0; fi
clear
package=python$wanted-venv
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing Debian's $package, which makes virtual environments"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null
    if "$python" -m venv "$folder" && works; then exit 0; fi
    clear
fi
echo "make: $python cannot make virtual environments: install $package (as root: apt-get install $package), or virtualenv" >&2
exit 2
