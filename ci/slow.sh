#!/usr/bin/env bash
# The tests marked `slow`, which `ci/test.sh` leaves out: whole programs that users run, and what takes long to come
# about (10 minutes). Before a release, and after a change to what they show.
#
#   bash ci/slow.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/venv.sh
make_venv "$(pwd)/.venv-test" test
exec "$PYTHON" -m pytest -m slow "$@"
