#!/bin/sh
# Print the first Python that runs: env/find_python.sh VERSION...   (such as 3.11 3.12); also looks in pyenv.
for version in "$@"; do
    for candidate in "python$version" "$HOME/.pyenv/versions/$version"*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" >/dev/null 2>&1; then
            echo "$candidate"
            exit 0
        fi
    done
done
exit 1
