#!/usr/bin/env bash
# Recorded runs, replayed on the simulator: fails when the extension has become slower than it was, beside stock Dask.
#   bash ci/replay.sh [TRACE...]     without arguments: the traces in tests/simulate/traces
# Needs no cluster, and some seconds. GATE: makespan of the extension over that of stock, at most (default 1.02).
set -euo pipefail
cd "$(dirname "$0")/.."
traces=("$@")
[ ${#traces[@]} -gt 0 ] || traces=(tests/simulate/traces/*.trace)
for trace in "${traces[@]}"; do
    echo "== $trace"
    "${PYTHON:-python}" -m dask gpurt replay "$trace" --policy stock,gpurt --baseline stock --gate "${GATE:-1.02}"
done
