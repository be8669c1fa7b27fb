#!/usr/bin/env bash
# Shuffles and tiers with older pandas, pyarrow and numpy than `ci/test.sh` installs, and the older of the two releases
# of Dask (15 minutes). Before a release, and after a change to how rows are split and joined.
#
#   bash ci/older.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/venv.sh
make_venv "$(pwd)/.venv-older" test
"$PYTHON" -m pip install --quiet --disable-pip-version-check \
    pandas==2.3.3 pyarrow==19.0.1 'numpy<2.3' dask==2026.7.1 distributed==2026.7.1
if [ $# = 0 ]; then
    set -- tests/shuffle tests/conformance tests/tiers tests/memory
fi
exec "$PYTHON" -m pytest -m 'not slow' "$@"
