# Sourced, not run:  . ci/venv.sh; make_venv DIR EXTRAS
#
# Makes a virtual environment at DIR with this checkout installed as `.[EXTRAS]` (editable), and sets PYTHON to its
# interpreter. DIR is reused when it is complete: the last thing written is a stamp with a checksum of what decides its
# contents (setup.cfg, the extras, the interpreter), so a half-made or an outdated environment is made again.
#
# The interpreter is $PYTHON if set, else the first of python3.11 ... python3.14, python3 that runs and is >= 3.11.

_venv_interpreter() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    echo "No Python >= 3.11 was found (tried ${PYTHON:+$PYTHON, }python3.11 to python3.14, python3)." \
        "Remedy: install one, or set PYTHON=/path/to/python" >&2
    return 1
}

make_venv() {
    local dir=$1 extras=$2 root interpreter want
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    interpreter=$(_venv_interpreter) || return 1
    want=$({ cat "$root/setup.cfg"; echo "$root $extras"; "$interpreter" -V; } | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$dir/complete" 2>/dev/null)" = "$want" ] && "$dir/bin/python" -c '' 2>/dev/null; then
        PYTHON="$dir/bin/python"
        return 0
    fi
    echo "making $dir with $("$interpreter" -V), .[$extras]; this takes a minute or two" >&2
    rm -rf "$dir"
    if ! "$interpreter" -m venv "$dir"; then
        echo "Making a virtual environment failed. Remedy on Debian and Ubuntu: apt-get install python3-venv" >&2
        return 1
    fi
    (cd "$root" && "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]") || return 1
    echo "$want" >"$dir/complete"
    PYTHON="$dir/bin/python"
}
