"""Where a task runs. Pure decisions; `seam` and `plugin` act."""

from __future__ import annotations

from dask_gpurt.placement.plugin import PlacementPlugin

__all__ = ["PlacementPlugin"]
