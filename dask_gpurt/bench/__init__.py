"""Benchmarks that a user runs: ``dask gpurt bench``. Needs the extra ``bench``; nothing else of the package uses it."""
