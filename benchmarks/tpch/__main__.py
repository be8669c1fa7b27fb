"""``python -m benchmarks.tpch``: see ``--help``."""

from benchmarks.data import OUT
from dask_gpurt.bench.tpch.cli import main

if __name__ == "__main__":
    raise SystemExit(main(prog="python -m benchmarks.tpch", folder=OUT))
