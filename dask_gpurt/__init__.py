"""dask-gpurt: placement, memory tiers and shuffles for Dask clusters of GPUs and CPUs."""

from __future__ import annotations

from dask_gpurt import config as config  # registers the defaults of the ``gpurt`` namespace
from dask_gpurt._version import __version__ as __version__
