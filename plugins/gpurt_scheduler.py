"""``dask scheduler --preload plugins/gpurt_scheduler.py``: dask-gpurt by path."""

from dask_gpurt.preload import dask_setup  # noqa: F401
