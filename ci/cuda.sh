#!/usr/bin/env bash
# Who manages device memory beside dask-cuda: its real command, clusters, plugins and mapping with ours (4 minutes).
#
#   bash ci/cuda.sh [arguments for pytest]
#
# Makes .venv-cuda in the checkout (once): the tests' environment, dask-cuda and RMM. Needs Linux x86-64 or aarch64,
# Python >= 3.11 and no GPU: the calls of the driver are replaced (tests/cluster/no_driver). dask-cuda decides which
# version of Dask that is. `ci/gpu.sh` is for a machine with a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/venv.sh
make_venv "$(pwd)/.venv-cuda" test
"$PYTHON" -m pip install --quiet --disable-pip-version-check 'dask-cuda==26.10.*' 'rmm-cu13==26.10.*'
"$PYTHON" -c 'import dask, dask_cuda, rmm; print(f"dask-cuda {dask_cuda.__version__}, dask {dask.__version__}")'
exec "$PYTHON" -m pytest -q tests/backends/test_dask_cuda.py tests/tiers/device tests/cluster/test_dask_cuda.py "$@"
