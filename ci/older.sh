#!/usr/bin/env bash
# The whole suite with the oldest release of Dask that setup.cfg allows, and with older pandas, pyarrow and numpy than
# `ci/test.sh` installs (15 minutes). Before a release, and after a change to what is used of Dask or how rows are split.
#
#   bash ci/older.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/venv.sh
make_venv "$(pwd)/.venv-older" test
oldest=$(sed -n 's/^ *distributed>=\([0-9.]*\).*/\1/p' setup.cfg)
"$PYTHON" -m pip install --quiet --disable-pip-version-check \
    pandas==2.3.3 pyarrow==19.0.1 'numpy<2.3' "dask==$oldest" "distributed==$oldest"
if [ $# = 0 ]; then
    exec "$PYTHON" ci/suite.py
fi
exec "$PYTHON" -m pytest -m 'not slow' "$@"
