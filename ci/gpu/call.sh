#!/usr/bin/env bash
# Calls of benchmarks/gpu/plan.py on a GPU machine that reaches no package registry and is lent for minutes.
#
#   bash ci/gpu/call.sh "NUMBER ..." [PART [ARGUMENT ...]]    PART: the folder of wheels that this call brings
#                                                             (ci/gpu/pack.py), or ""; the rest: `python -m benchmarks.gpu`
#
# Part 0 serves calls 0 and 1, part 1 besides calls 2 and 3. Results, one file a call, go to $OUT (default out/gpu).
# Python packages go to $GPURT_SITE (default /tmp/gpurt-site). A fresh machine needs part 0 again, whatever is run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
site=${GPURT_SITE:-/tmp/gpurt-site}
out=${OUT:-out/gpu}
mkdir -p "$out"
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1
if [ -n "${2:-}" ]; then
    bash ci/gpu/unpack.sh "$2" "$site"
fi
[ -d "$site/dask" ] || { echo "Dask is not in $site. Remedy: bring part 0 of ci/gpu/pack.py" >&2; exit 2; }
status=0
for number in $1; do
    python3 -m benchmarks.gpu --call "$number" --out "$out" "${@:3}" || status=$?
done
exit "$status"
