#!/usr/bin/env bash
# On a GPU machine without a package registry: unpack a part that ci/gpu/pack.py made; parts come in any order.
#
#   bash ci/gpu/unpack.sh PART SITE      SITE goes on PYTHONPATH; python3 must be the interpreter that is used afterwards
set -euo pipefail
[ $# = 2 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
mkdir -p "$2"
for archive in "$1"/*.tar.xz; do
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")' "$archive" "$2" &
done
wait
# .pth files count in a site's folder only: numba-cuda's makes `numba.cuda` its own, RAPIDS' adapts Dask.
echo "import site; site.addsitedir('$2')" >"$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpurt.pth"
