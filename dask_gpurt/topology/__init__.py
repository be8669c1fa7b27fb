"""What the hardware is like, as measured."""

from __future__ import annotations

from dask_gpurt.topology.links import LinkMatrix, Transfer, merge

__all__ = ["LinkMatrix", "Transfer", "merge"]
