#!/bin/bash
# Runs the test suites of dask and distributed, stock and with the extension active in every cluster, and compares.
# What is run, and how to read the result: docs/upstream.md. Exit: 0 explained, 1 not, 2 could not start.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: ci/upstream.sh [OPTION]...
  --python PY            Python with dask[distributed,dataframe,array], pytest, pytest-timeout and pytest-rerunfailures;
                         nothing is installed for it. Default: a virtual environment .venv-upstream, made if needed.
  --dask-version V       dask and distributed of that environment (default: version of --distributed-src, else the newest allowed)
  --distributed-src DIR  checkout of dask/distributed at the tag of the installed version; adds distributed's own suites
  --only PATTERN         files whose path contains PATTERN (* stands for anything, several with commas)
  --wide                 also the files that are not about what the extension replaces (an hour and a half)
  --runslow              also upstream's slow tests
  --out DIR              results (default out/upstream)
  --extension MODULE     preload module (default dask_gpurt.preload; the control: gpurt_upstream.noop)
  --roles LIST           servers that load it (default scheduler,worker; also nanny, client)
  --skip-stock           reuse the stock results in --out
  --jobs N               files at the same time (default 2)
  --limit SECONDS        time limit of one file
TEXT
}

die() { echo "upstream: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="" version="" src="" out="$root/out/upstream" jobs=2
pass=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --runslow | --skip-stock | --wide) pass+=("$1"); shift; continue ;;
        --python | --dask-version | --distributed-src | --only | --out | --extension | --roles | --jobs | --limit) ;;
        *) usage >&2; die "unknown option $1" ;;
    esac
    [ $# -ge 2 ] || die "$1 needs a value"
    case $1 in
        --python) python=$2 ;;
        --dask-version) version=$2 ;;
        --distributed-src) src=$2 ;;
        --out) out=$2 ;;
        --jobs) jobs=$2 ;;
        *) pass+=("$1" "$2") ;;
    esac
    shift 2
done

if [ -n "$src" ]; then
    [ -f "$src/pyproject.toml" ] || die "--distributed-src $src: no pyproject.toml there; give a checkout of dask/distributed"
    src=$(cd "$src" && pwd)
    pass+=(--distributed-src "$src")
fi

# The interpreter for the new environment: any of the versions that the package supports.
base_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 found; name one with PYTHON=..."
}

if [ -z "$python" ]; then
    venv="$root/.venv-upstream"
    python="$venv/bin/python"
    [ -x "$python" ] || "$(base_python)" -m venv "$venv"
    if [ -z "$version" ] && [ -n "$src" ]; then
        version=$(PYTHONPATH="$root/tests" "$python" -c \
            'import sys, pathlib; from upstream.suites import source_version; print(source_version(pathlib.Path(sys.argv[1])))' "$src")
        echo "upstream: $src is distributed $version; the environment gets that version"
    fi
    if [ -n "$version" ]; then
        pins=("dask==$version" "distributed==$version")
    else
        pins=(--upgrade)
    fi
    "$python" -m pip install --quiet --editable "$root[test]" "dask[array,dataframe,distributed]" pytest-asyncio "${pins[@]}"
    # With crick, distributed opens new digests for every span and never frees them; no suite here needs it.
    if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("crick") is None)'; then
        "$python" -m pip uninstall --quiet --yes crick
    fi
elif [ -n "$version" ]; then
    installed=$("$python" -c 'import distributed; print(distributed.__version__)') || die "--python $python has no distributed"
    [ "$installed" = "$version" ] ||
        die "--python $python has distributed $installed, not $version; leave out --python to get an environment made"
fi

"$python" -c 'import dask, distributed, packaging, pytest, pytest_timeout, pytest_rerunfailures' ||
    die "$python lacks one of dask, distributed, packaging, pytest, pytest-timeout, pytest-rerunfailures"

cd "$root"
# Run as a package of its own; the tests themselves get this folder under another name (tests/upstream/runner.py).
PYTHONPATH="$root/tests" exec "$python" -m upstream.run --out "$out" --jobs "$jobs" "${pass[@]}"
