"""``python -m benchmarks.tpch``: ``dask gpurt bench tpch`` with its files under the checkout's ``out``."""
