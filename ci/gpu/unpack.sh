#!/usr/bin/env bash
# On a GPU machine without a package registry: collect the parts that ci/gpu/pack.py made, then install them.
#
#   bash ci/gpu/unpack.sh collect PART      copy the wheels of a part, which may come in any order
#   bash ci/gpu/unpack.sh install SITE      join what was cut, install all wheels so far into SITE: it goes on PYTHONPATH
#
# Wheels wait in $GPURT_WHEELS (default ~/gpurt-wheels). python3 must be the interpreter that is used afterwards.
set -euo pipefail
store=${GPURT_WHEELS:-$HOME/gpurt-wheels}
case "${1:-} ${2:+with}" in
    "collect with")
        mkdir -p "$store"
        cp "$2"/*.whl* "$store"/
        ;;
    "install with")
        site=$2
        for first in "$store"/*.whl.00; do
            [ -e "$first" ] || continue
            whole=${first%.00}
            cat "$whole".[0-9][0-9] >"$whole"
            rm "$whole".[0-9][0-9]
        done
        # --no-deps: what is missing is found by the imports of the first experiment, in seconds, not by a resolver.
        python3 -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$site" "$store"/*.whl
        # .pth files count in a site's folder only: numba-cuda's makes `numba.cuda` its own, RAPIDS' adapts Dask.
        echo "import site; site.addsitedir('$site')" >"$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpurt.pth"
        rm -rf "$store"
        ;;
    *)
        sed -n '2,7p' "$0" >&2
        exit 2
        ;;
esac
