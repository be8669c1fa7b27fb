"""Paired measurement for the benchmarks of the checkout: `dask_gpurt.bench.paired`."""

from __future__ import annotations

from dask_gpurt.bench.paired import Case, geometric_mean, paired, table, turns

__all__ = ["Case", "geometric_mean", "paired", "table", "turns"]
