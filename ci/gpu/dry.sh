#!/usr/bin/env bash
# The run on a GPU, without one: RAPIDS' names and signatures, cuDF's columns on host memory, every script on a stand-in.
#
#   bash ci/gpu/dry.sh [CALL ...]       default: all of benchmarks/gpu/plan.py (about ten minutes on two cores)
#
# Makes .venv-cudf in the checkout (once, 1.5 GB): Python 3.12, the wheels of ci/gpu/wheels-*.txt, and what the GPU
# machine is expected to have. Set PYTHON to a Python 3.12 if python3.12 is none. Nothing here is a figure of a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=$PWD/.venv-cudf
if [ ! -e "$venv/complete" ]; then
    rm -rf "$venv"
    "${PYTHON:-python3.12}" -m venv "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check --no-deps -r ci/gpu/wheels-core.txt
    "$venv/bin/pip" install -q --disable-pip-version-check --no-deps -r ci/gpu/wheels-cudf.txt
    "$venv/bin/pip" install -q --disable-pip-version-check -r ci/gpu/machine.txt
    touch "$venv/complete"
fi
export PYTHONPATH=$PWD
status=0
"$venv/bin/python" -m pytest -q -p no:cacheprovider tests/gpu tests/backends tests/tiers/device/test_coexistence.py || status=$?
"$venv/bin/python" -m tests.gpu.unproven || status=$?
for number in ${*:-0 1 2 3}; do
    "$venv/bin/python" -m benchmarks.gpu --call "$number" --on stand-in --out out/gpu/dry || status=$?
done
exit "$status"
