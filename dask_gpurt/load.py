"""``--preload dask_gpurt.load``: `dask_gpurt.preload` without arguments. Settings come from YAML and the environment.

Dask allows one preload with arguments on a command line. dask-gateway and ``dask cuda worker`` bring theirs, so beside
them `dask_gpurt.preload` would be refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt import preload

if TYPE_CHECKING:
    from distributed.core import Server


async def dask_setup(server: Server) -> None:
    """Install on a scheduler or worker that is being started, or keep it from starting."""
    await preload.setup(server)
