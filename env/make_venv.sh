#!/bin/sh
# Create a virtual environment: env/make_venv.sh PYTHON FOLDER
# Debian splits venv from Python; where it is missing, virtualenv serves, and root can install Debian's package.
set -u
python=$1 folder=$2

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
python_version=$(version "$python") || {
    echo "make: $python does not run; choose one with make PYTHON=..." >&2
    exit 2
}
# Unfinished folders, and those with another Python, are created again.
works() { [ -e "$folder/pyvenv.cfg" ] && [ "$(version "$folder/bin/python")" = "$python_version" ] && \
    "$folder/bin/python" -m pip --version >/dev/null 2>&1; }
works && exit 0
# Removes all but the file by which env/make_environment.sh recognises its folders.
clear() { [ ! -d "$folder" ] || find "$folder" -mindepth 1 -maxdepth 1 ! -name .fugaku_gpt -exec rm -rf {} +; }
clear
if "$python" -m venv "$folder" >/dev/null 2>&1 && works; then exit 0; fi
clear
if "$python" -m virtualenv "$folder" >/dev/null 2>&1 && works; then exit 0; fi
clear
package=python$python_version-venv
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing Debian's $package, which makes virtual environments"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null
    if "$python" -m venv "$folder" && works; then exit 0; fi
    clear
fi
echo "make: $python cannot make virtual environments: install $package (as root: apt-get install $package), or virtualenv" >&2
exit 2
