#!/usr/bin/env bash
# The site:  bash ci/docs.sh [OUT]   Makes .venv-docs (once), builds docs/ into OUT (out/docs). A warning is an error.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
started=$(pwd)
cd "$root"
. ci/venv.sh
make_venv "$root/.venv-docs" docs
out=$(cd "$started" && realpath -m "${1:-$root/out/docs}")
"$PYTHON" -m sphinx --fail-on-warning --keep-going --fresh-env -b html docs "$out"
echo "Built $out/index.html"
