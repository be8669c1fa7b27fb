#!/usr/bin/env bash
# TPC-H on this machine with and without dask-gpurt, every answer checked. Needs Linux, Python >= 3.11, no GPU.
#
#   bash ci/quickstart.sh [--scale 1] [--queries 1,3,5] [--runs N] [--engines stock,gpurt] [--out DIR] [--keep-running]
#
# Makes .venv-quickstart in the checkout (once), generates the data under out/tpch (once a scale), runs, prints a table
# and the verdict in words, writes out/tpch/run/report.html with a chart for each query.
# `--help` tells all options. Exit code 1 if an answer differs. Nothing is left running unless --keep-running is given.
set -euo pipefail

started=$(pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/venv.sh
make_venv "$(pwd)/.venv-quickstart" bench

# Paths in the arguments are meant from where the user stands; the package is found from the checkout.
PYTHONPATH="$(pwd)${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
cd "$started"
# exec: signals (Ctrl-C, TERM) go to the one process that stops all it has started.
exec "$PYTHON" -m benchmarks.tpch "$@"
