#!/usr/bin/env bash
# The test suite on this machine: an environment (made once, under .venv-test), lint, types, tests.
#
#   bash ci/test.sh [arguments for pytest]        e.g.  bash ci/test.sh tests/tiers -k disk
#
# Without arguments: all tests but the slow ones (ci/slow.sh), in three parts side by side (ci/suite.py). With arguments:
# one pytest with them.
# Needs Linux, Python >= 3.11 and no GPU. Tests of GPU code are skipped without one, and fail with GPURT_REQUIRE_GPU=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The suite starts a thousand processes. One that finds no compiled files of the package compiles for 0.7 s.
unset PYTHONDONTWRITEBYTECODE
. ci/venv.sh
make_venv "$(pwd)/.venv-test" test
bash ci/lint.sh "$PYTHON"
if [ $# -eq 0 ]; then
    exec "$PYTHON" ci/suite.py
fi
exec "$PYTHON" -m pytest "$@"
