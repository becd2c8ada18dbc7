#!/usr/bin/env bash
# Prints the first Python of a version that runs, such as `find-python.sh 3.12`; nothing where there is none.
# A command of that name may be a version manager's shim, which runs nothing: then the manager's own versions are tried.
set -eu
named=$(command -v "python$1" || true)
manager=$(dirname "$(dirname "${named:-/none/none}")")
for python in "$named" "$manager/versions/$1".*/bin/"python$1" "$HOME/.pyenv/versions/$1".*/bin/"python$1"; do
    if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
        echo "$python"
        exit
    fi
done
