"""``dask scheduler --preload plugins/gpurt_scheduler.py``: dask-gpurt by path, for hosts where a file is easier to hand over."""

from dask_gpurt.preload import dask_setup  # noqa: F401
