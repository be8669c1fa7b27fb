"""Measurements, one claim a file. Nothing here is installed; run from a checkout (``python -m benchmarks.tpch``)."""
