#!/usr/bin/env bash
# The release, ready to be uploaded:  bash ci/release.sh [OUT]   (OUT: out/dist)
#
# Builds the source distribution, and the wheel from it; checks both with twine; installs the wheel with each of
# python3.11 ... python3.14 that is here, in an environment of its own, and starts a cluster there. $PYTHONS replaces that
# list. Nothing is uploaded.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$(realpath -m "${1:-$root/out/dist}")
cd "$root"
. ci/venv.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$(_venv_interpreter)" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check "build>=1.2" "twine>=6"
rm -rf "$out"
# Outside of the checkout, as setuptools writes beside the sources.
mkdir "$work/source"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work/source"
"$work/tools/bin/python" -m build --outdir "$out" "$work/source" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/tools/bin/twine" check --strict "$out"/*

cat >"$work/smoke.py" <<'SMOKE'
import sys

import dask_gpurt

if __name__ == "__main__":
    assert dask_gpurt.__file__.startswith(sys.prefix), dask_gpurt.__file__
    with dask_gpurt.local_cluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster:
        with cluster.get_client() as client:
            assert client.submit(sum, [1, 2]).result(timeout=60) == 3
            status = dask_gpurt.status(client).to_dict()
    parts = [status["scheduler"]["parts"], *(worker["parts"] for worker in status["workers"].values())]
    assert all(state == "on" for some in parts for state in some.values()), parts
    print("Python %d.%d: dask-gpurt %s, all parts on" % (*sys.version_info[:2], dask_gpurt.__version__))
SMOKE
tried=0
for python in ${PYTHONS:-python3.11 python3.12 python3.13 python3.14}; do
    if ! "$python" -c '' 2>/dev/null; then
        echo "$python: not here, not tried"
        continue
    fi
    "$python" -m venv "$work/venv-$tried"
    "$work/venv-$tried/bin/python" -m pip install --quiet --disable-pip-version-check "$out"/*.whl
    (cd "$work" && "$work/venv-$tried/bin/python" smoke.py && "$work/venv-$tried/bin/dask" gpurt --version)
    tried=$((tried + 1))
done
[ "$tried" -gt 0 ] || { echo "no interpreter was found" >&2; exit 1; }
ls -l "$out"
