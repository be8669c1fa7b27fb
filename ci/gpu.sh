#!/usr/bin/env bash
# What needs an NVIDIA GPU: tests/gpu, which fail where there is none, then the GPU benchmarks (14 minutes at most).
#
#   bash ci/gpu.sh [PYTHON] [--no-benchmark]       PYTHON: an interpreter with the extras `test` and `cu13` (or `cu12`)
#
# A test that fails does not keep the benchmarks from running: time on a GPU is rare. Results, with the hardware and the
# date in their header, go to out/gpu/. Exit: 0 all passed, else that of the last part that failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
benchmark=yes
for argument in "$@"; do
    case $argument in
        --no-benchmark) benchmark=no ;;
        -*) echo "unknown option $argument; see the head of $0" >&2; exit 2 ;;
        *) python=$argument ;;
    esac
done
out=out/gpu/$(date -u +%Y-%m-%dT%H%M%SZ)
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv >"$out/hardware.csv" 2>/dev/null ||
    echo "nvidia-smi is not there" >"$out/hardware.csv"
cat "$out/hardware.csv"
export GPURT_REQUIRE_GPU=1
status=0
# Those without the mark need cuDF and no GPU: packing over ordinary memory, names and signatures.
"$python" -m pytest tests/gpu -o faulthandler_timeout=60 --junitxml "$out/tests.xml" 2>&1 | tee "$out/tests.txt" || status=$?
if [ "$benchmark" = yes ]; then
    for name in gpu_shuffle gpu_spill; do
        "$python" -m "benchmarks.$name" --out "$out/$name.json" 2>&1 | tee "$out/$name.txt" || status=$?
    done
fi
echo "results in $out"
exit "$status"
