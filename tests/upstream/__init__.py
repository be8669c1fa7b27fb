"""Runs the test suites of dask and distributed with the extension active and compares them with a stock run.

`run` is the entry point (see ``ci/upstream.sh`` and ``docs/upstream.md``). Only ``test_*.py`` here belong to this
project's own suite; they check the tools. No file of dask or distributed is kept in this repository.
"""
