"""``dask worker ADDRESS --preload plugins/gpurt_worker.py``: installs on a worker before it registers."""

from dask_gpurt.preload import dask_setup  # noqa: F401
