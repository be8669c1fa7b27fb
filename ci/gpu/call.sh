#!/usr/bin/env bash
# One call of benchmarks/gpu/plan.py on a GPU machine that reaches no package registry and is lent for minutes.
#
#   bash ci/gpu/call.sh NUMBER [PART [ARGUMENT ...]]    PART: the folder of wheels that this call brings (ci/gpu/pack.py),
#                                                       or ""; arguments are those of `python -m benchmarks.gpu`
#
# Call 0 installs the core, call 7 installs cuDF; calls 1 to 6 bring its parts while they measure. Results, two files a
# call, go to $OUT (default out/gpu). Python packages go to $GPURT_SITE (default /tmp/gpurt-site). Whatever call runs
# first on a fresh machine needs `core` again: `bash ci/gpu/unpack.sh collect PART && bash ci/gpu/unpack.sh install SITE`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
number=$1
site=${GPURT_SITE:-/tmp/gpurt-site}
out=${OUT:-out/gpu}
mkdir -p "$out"
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1
if [ -n "${2:-}" ]; then
    bash ci/gpu/unpack.sh collect "$2"
fi
if [ "$number" = 0 ] || [ "$number" = 7 ]; then
    bash ci/gpu/unpack.sh install "$site"
fi
[ -d "$site/dask" ] || { echo "Dask is not in $site: call 0 has not run on this machine. Remedy: run it first" >&2; exit 2; }
python3 -m benchmarks.gpu --call "$number" --out "$out" "${@:3}" 2>&1 | tee "$out/call-$number.log"
