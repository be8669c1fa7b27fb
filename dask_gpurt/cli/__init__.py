"""``dask gpurt``: ask a cluster, check nodes, look at traces, measure, load the extension for a user."""

from __future__ import annotations

from dask_gpurt.cli import asking as asking  # each module adds its commands
from dask_gpurt.cli import measuring as measuring
from dask_gpurt.cli import operating as operating
from dask_gpurt.cli.base import gpurt as gpurt
