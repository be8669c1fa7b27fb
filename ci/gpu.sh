#!/usr/bin/env bash
# All that needs an NVIDIA GPU, on a machine that has one and RAPIDS: the calls of benchmarks/gpu/plan.py, one after another.
#
#   bash ci/gpu.sh [PYTHON] [CALL ...]       PYTHON: an interpreter with the extras `test` and `cu13` (or `cu12`)
#
# Takes a quarter of an hour; each case is a process with a limit of time, and one that fails does not keep others from running.
# Results, with the hardware and the date in their header, go to out/gpu/. Exit: 0 all found what they must, else the
# worst of the calls (3: there is no GPU). On a machine that reaches no package registry, use ci/gpu/call.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
if [ $# -gt 0 ] && ! [[ $1 =~ ^[0-9]+$ ]]; then
    python=$1
    shift
fi
out=out/gpu/$(date -u +%Y-%m-%dT%H%M%SZ)
status=0
for call in "${@:-0 1 2 3}"; do
    for number in $call; do
        "$python" -m benchmarks.gpu --call "$number" --out "$out" || status=$?
        [ "$status" = 3 ] && exit 3
    done
done
echo "results in $out"
exit "$status"
