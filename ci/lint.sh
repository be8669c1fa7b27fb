#!/usr/bin/env bash
# Lint, format and types:  bash ci/lint.sh [PYTHON]   (an interpreter with the `test` extra installed)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
