"""``python -m benchmarks.tpch``: see ``--help``."""

from benchmarks.tpch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
